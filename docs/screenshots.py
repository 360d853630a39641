"""Makes the pictures of docs/explorer.md: `python docs/screenshots.py`. Needs chromium and playwright."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from asyncfed import Scenario, VirtualTime, run
from asyncfed.explorer import ExplorerServer, opened
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from scenarios import churn, pdbo_digits
from topologies import random_geometric

PICTURES = Path(__file__).parent.resolve() / "pictures"
SIZE = {"width": 1200, "height": 740}
SETTLED = 1200  # milliseconds


def scenarios() -> dict[str, Scenario]:
    """A network on a plane; a server that does not wait, one that does; a bilevel method of phases."""
    kinds = {"FedBuff": churn.FEDBUFF, "FedAvg": churn.FEDAVG}
    served = {
        name: churn.scenario(kind, 30.0, "crash", clients=20, horizon=60.0, loss=0.01, seed=0)
        for name, kind in kinds.items()
    }
    plane = random_geometric(150, 0.14, seed=3, latency=(0.1, 2.0), probability=(0.3, 0.95))
    paces = VirtualTime("uniform(0.8, 1.2)", horizon=40.0, loss=0.02)
    meadow = Scenario(quadratic(clients=150, dimension=4), plane, SGP(steps=60, lr=0.02), timing=paces)
    return {"meadow": meadow, **served, "PDBO": pdbo_digits.scenario()}


def take(browser: Any, runs: list[Path], name: str, act: Callable[[Any], None], dark: bool = False) -> None:
    """One picture, in few colours: small."""
    with ExplorerServer(opened(runs)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page(viewport=SIZE, color_scheme="dark" if dark else "light")
        page.goto(server.url)
        page.locator("#tabs button").first.wait_for()
        page.wait_for_timeout(SETTLED)
        act(page)
        page.wait_for_timeout(SETTLED)
        picture = Image.open(io.BytesIO(page.screenshot()))
        few = picture.convert("RGB").quantize(
            256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
        few.save(PICTURES / f"{name}.png", optimize=True)
        page.close()
        server.shutdown()


def pick_node(page: Any) -> None:
    page.mouse.click(431, 275)


def closer(page: Any) -> None:
    page.keyboard.press("2")
    page.wait_for_timeout(SETTLED)
    for _ in range(2):
        page.keyboard.press("+")
    page.wait_for_timeout(SETTLED)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        os.chdir(folder)
        runs = {name: run(scenario, out=Path("runs") / name).path for name, scenario in scenarios().items()}
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        take(browser, [runs["meadow"]], "network", pick_node)
        take(browser, [runs["FedBuff"]], "space-time", closer, dark=True)
        take(browser, [runs["FedBuff"], runs["FedAvg"]], "learning", lambda page: page.keyboard.press("4"))
        take(browser, [runs["PDBO"]], "matrix", lambda page: page.keyboard.press("3"))
        browser.close()


if __name__ == "__main__":
    main()
