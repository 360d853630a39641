"""The page, in a real browser on real runs: it draws, does what clicks and keys say, and tells what is so."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from asyncfed import Result, load
from asyncfed.trace import TraceWriter
from tests.explorer.conftest import CLIENTS, serving
from tests.trace import naive

pytestmark = pytest.mark.browser

VIEWS = ("network", "spacetime", "matrix", "learning", "clients")
SETTLED, PATIENCE = 250, 15_000  # milliseconds


@contextmanager
def watched(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page that must stay without errors, and ask nobody else."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    own = url.rpartition("/")[0]
    page.on(
        "request",
        lambda request: request.url.startswith((own, "data:", "blob:")) or wrong.append(request.url),
    )
    page.goto(url)
    yield page
    context.close()
    assert wrong == []


@contextmanager
def explored(browser: Any, paths: Sequence[Path], **options: Any) -> Iterator[Any]:
    with serving(paths) as server, watched(browser, server.url, **options) as page:
        page.locator("#tabs button").first.wait_for()
        for path in paths:
            messages = len(load(path).trace)
            page.locator(".chip", has_text=f"{messages:,} messages").first.wait_for()
        yield page


def go(page: Any, view: str) -> None:
    page.keyboard.press(str(VIEWS.index(view) + 1))
    page.locator(f"#stage[data-view={view}]").wait_for()
    page.wait_for_timeout(SETTLED)


def shows(page: Any, selector: str, text: str) -> None:
    """Wait until an element says so."""
    from playwright.sync_api import expect

    expect(page.locator(selector).first).to_have_text(text, timeout=PATIENCE)


def counts(page: Any, selector: str, number: int) -> None:
    """Wait until there are so many of an element."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_have_count(number, timeout=PATIENCE)


def blank(page: Any, selector: str) -> bool:
    """Whether an element goes on to show one colour only, or nearly so."""
    for _ in range(PATIENCE // SETTLED):
        picture = imread(io.BytesIO(page.locator(selector).first.screenshot()))[..., :3]
        if len(np.unique((picture * 31).astype(int).reshape(-1, 3), axis=0)) >= 4:
            return False
        page.wait_for_timeout(SETTLED)
    return True


def facts(page: Any) -> dict[str, str]:
    page.locator("#details dl.facts").wait_for()
    page.wait_for_timeout(SETTLED)
    found = page.locator("#details [data-fact]")
    return {item.get_attribute("data-fact"): item.inner_text() for item in found.all()}


def percent(value: float) -> str:
    return f"{float(f'{100 * value:.3g}'):g}%"


def network_place(page: Any, node: int) -> tuple[float, float]:
    """Where a node of the circle is on the screen."""
    box = page.locator(".panel canvas").first.bounding_box()
    size = min(box["width"], box["height"]) / 2 - 34
    angle = 2 * math.pi * node / CLIENTS
    return (
        box["x"] + box["width"] / 2 + math.sin(angle) * size,
        box["y"] + box["height"] / 2 - math.cos(angle) * size,
    )


def edge_place(page: Any, sender: int, receiver: int) -> tuple[float, float]:
    """The middle of a link, which bends to the right of its way."""
    (ax, ay), (bx, by) = network_place(page, sender), network_place(page, receiver)
    return (ax + bx) / 2 - (by - ay) * 0.06, (ay + by) / 2 + (bx - ax) * 0.06


def test_every_view_draws_every_kind_of_run(browser: Any, peers: Path, others: Path, served: Path) -> None:
    with explored(browser, [peers, others, served]) as page:
        page.locator(".chip").nth(2).click()  # two are shown at first
        for view in VIEWS:
            go(page, view)
            drawn = (
                ".panel canvas"
                if view in VIEWS[:3]
                else ".chart svg"
                if view == "learning"
                else ".spread svg"
            )
            page.locator(drawn).first.wait_for()
            for place in range(page.locator(drawn).count()):
                assert not blank(page, f":nth-match({drawn}, {place + 1})"), (view, place)
            assert not blank(page, "#time canvas")
            if view in VIEWS[:3]:
                label = page.locator(".panel canvas").first.get_attribute("aria-label")
                assert f"{CLIENTS}" in label
        counts(page, ".worst", 3)


def test_a_click_on_a_link_tells_what_the_trace_says(browser: Any, peers: Path) -> None:
    result = load(peers)
    edges = result.trace.edges().set_index(["sender", "receiver"])
    with explored(browser, [peers]) as page:
        page.wait_for_timeout(SETTLED)
        for sender, receiver in ((0, 2), (2, 0)):
            page.mouse.click(*edge_place(page, sender, receiver))
            page.locator("#details h2", has_text=f"{sender} → {receiver}").wait_for()
            told, row = facts(page), edges.loc[(sender, receiver)]
            assert told["attempts"] == f"{int(row.attempts)}"
            assert told["delivered"] == f"{int(row.delivered)} ({percent(row.delivery_rate)})"
            assert told["link_down"] == f"{int(row.link_down)}"
            declared = result.scenario.topology.edges[sender, receiver]["probability"]
            assert told["declared"] == percent(declared)
            assert told["gap"].startswith(("+", "−"))
            listed = page.locator("#details table tbody tr")
            assert listed.count() == int(row.attempts)
            statuses = [
                text.replace("link down", "link_down")
                for text in listed.locator("td:nth-child(2)").all_inner_texts()
            ]
            assert statuses == result.trace.edge(sender, receiver)["status"].tolist()
        page.mouse.click(*network_place(page, 3))
        page.locator("#details h2", has_text="Node 3").wait_for()
        told, row = facts(page), result.trace.nodes().loc[3]
        assert told["steps"] == f"{int(row.steps)}"
        assert told["received"].startswith(f"{int(row.received)} messages")
        assert told["final_accuracy"] == percent(result.clients["accuracy"][3])
        page.locator("#details .counts svg").wait_for()
        page.keyboard.press("Escape")
        page.locator("#details", has_text="Click a link").wait_for()


def test_zooming_shows_the_messages_of_the_window(browser: Any, others: Path) -> None:
    trace = load(others).trace
    messages = trace.to_pandas()
    end = max(float(messages["sent_at"].max()), float(trace.steps()["ended_at"].max()))
    with explored(browser, [others]) as page:
        go(page, "spacetime")
        shows(page, ".legend-extra", f"{len(messages)} messages")
        page.keyboard.press("+")
        page.keyboard.press("+")
        begin, stop = end * 3 / 8, end * 5 / 8
        under_way = (messages["sent_at"] < stop) & (messages[["sent_at", "arrived_at"]].max(axis=1) >= begin)
        shows(page, ".legend-extra", f"{int(under_way.sum())} messages")

        go(page, "matrix")  # one window for all views
        sent = messages[(messages["sent_at"] >= begin) & (messages["sent_at"] < stop)]
        select_cell(page, 4, 1)
        mine = sent[(sent["sender"] == 4) & (sent["receiver"] == 1)]
        shows(page, '[data-fact="attempts"]', f"{len(mine)}")
        page.keyboard.press("0")
        whole = messages[(messages["sender"] == 4) & (messages["receiver"] == 1)]
        shows(page, '[data-fact="attempts"]', f"{len(whole)}")

        go(page, "spacetime")
        box = page.locator(".panel canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 200)
        for _ in range(6):
            page.mouse.wheel(0, -200)
        page.wait_for_timeout(2 * SETTLED)
        closer = int(page.locator(".legend-extra").inner_text().split()[0])
        assert 0 < closer < len(messages) / 2


def select_cell(page: Any, sender: int, receiver: int, panel: int = 0) -> None:
    page.mouse.click(*cell_place(page, sender, receiver, panel))
    page.locator("#details h2", has_text=f"{sender} → {receiver}").wait_for()


def cell_place(page: Any, sender: int, receiver: int, panel: int = 0) -> tuple[float, float]:
    box = page.locator(".panel canvas").nth(panel).bounding_box()
    side = min(box["width"] - 58, box["height"] - 46)
    left = box["x"] + 50 + max(0, (box["width"] - 58 - side) / 2)
    return left + (receiver + 0.5) * side / CLIENTS, box["y"] + 38 + (sender + 0.5) * side / CLIENTS


def test_two_runs_stand_side_by_side_and_their_difference_beside_them(
    browser: Any, peers: Path, others: Path
) -> None:
    rates = [load(path).trace.matrix("delivery_rate") for path in (peers, others)]
    with explored(browser, [peers, others]) as page:
        go(page, "matrix")
        counts(page, ".panel", 3)
        for panel, expected in enumerate((rates[0], rates[1], rates[1] - rates[0])):
            page.mouse.move(*cell_place(page, 3, 5, panel))
            tip = page.locator(".tip:visible")
            tip.wait_for()
            assert f": {percent(expected[3, 5])}" in tip.inner_text(), (panel, tip.inner_text())
        page.get_by_label("sort by").select_option("rate")
        page.wait_for_timeout(SETTLED)
        worst = int(np.nanargmin(delivered_share(load(peers))))
        page.mouse.click(*cell_place(page, 0, 1))
        page.locator("#details h2", has_text=f"{worst} → ").wait_for()
        page.locator(".chip").nth(1).click()
        counts(page, ".panel", 1)


def delivered_share(result: Result) -> Any:
    sums = result.trace.edges().groupby("sender")[["delivered", "attempts"]].sum()
    return (sums["delivered"] / sums["attempts"]).to_numpy()


def test_curves_and_clients_are_the_results_own(browser: Any, peers: Path, others: Path) -> None:
    results = [load(peers), load(others)]
    with explored(browser, [peers, others]) as page:
        go(page, "learning")
        rows = page.locator(".last tbody tr")
        for place, result in enumerate(results):
            last = result.metrics.iloc[-1]
            cells = rows.nth(place).locator("td").all_inner_texts()
            assert float(cells[1]) == last["step"]
            assert float(cells[2]) == pytest.approx(last["virtual_time"], rel=1e-3)
            heads = page.locator(".last thead th").all_inner_texts()
            assert float(cells[heads.index("test loss")]) == pytest.approx(last["loss"], rel=1e-3)
        chart = page.locator('[data-metric="loss"]')
        assert chart.locator("path.curve").count() == 2
        box = chart.locator("svg").bounding_box()
        page.mouse.click(box["x"] + box["width"] * 0.55, box["y"] + box["height"] / 2)
        page.mouse.move(5, 5)
        counts(page, '[data-metric="loss"] .mark', 2)  # where both were at the cursor
        assert "t = " in page.locator(".clock").inner_text()
        page.locator("label", has_text="against").locator("select").select_option("bytes")
        page.locator(".chart .tick", has_text="kB").first.wait_for()

        go(page, "clients")
        worst = results[0].clients.sort_values(["accuracy", "client"])
        cells = page.locator('.worst[data-run="0"] tbody tr td:first-child').all_inner_texts()
        assert cells == [str(client) for client in worst["client"]][:10]
        page.locator('.worst[data-run="0"] tbody tr').first.click()
        page.locator("#details h2", has_text=f"Node {worst['client'].iloc[0]}").wait_for()


def test_names_that_would_be_markup_are_text(browser: Any, served: Path) -> None:
    with explored(browser, [served]) as page:
        page.locator("#details dd", has_text="<script>alert('name')</script>").first.wait_for()
        for view in VIEWS:
            go(page, view)
        go(page, "spacetime")
        box = page.locator(".panel canvas").bounding_box()
        lane = (box["height"] - 45 - 8) / 5
        page.mouse.click(box["x"] + 30, box["y"] + 45 + 3.5 * lane)  # the server is on top
        page.locator("#details h2", has_text="Node <img src=x onerror=alert(2)>").wait_for()
        assert page.locator("#stage img, #details img, #top img").count() == 0
        assert page.locator("script").count() == 1


def test_a_run_that_goes_on_is_followed(browser: Any, others: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(others, tmp_path / "going"))
    manifest = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(manifest | {"status": "running"}))
    shutil.rmtree(path / "trace")
    messages = naive.random_messages(CLIENTS, 6000)
    with TraceWriter(path / "trace", CLIENTS) as writer:
        naive.append(writer, messages[:200])
        writer.save()
        writer.wait()
        with explored(browser, [path]) as page:
            page.locator(".chip", has_text="200 messages").wait_for()
            assert "killed" in page.locator(".chip").inner_text()  # nobody is at work on it
            naive.append(writer, messages[200:])
            writer.save()
            writer.wait()
            page.locator(".chip", has_text="6,000 messages").wait_for()
            go(page, "spacetime")
            page.locator(".legend-extra", has_text="6,000 messages to draw one by one: zoom in").wait_for()
            assert not blank(page, ".panel canvas")


def test_it_plays_and_obeys_keys_and_tells_a_screen_reader(browser: Any, others: Path) -> None:
    with explored(browser, [others]) as page:
        page.keyboard.press("Space")
        page.wait_for_timeout(600)
        first = page.locator(".clock").inner_text()
        page.wait_for_timeout(400)
        page.keyboard.press("Space")
        assert page.locator(".clock").inner_text() != first
        assert page.locator(".play").get_attribute("aria-label") == "Play"
        before = page.locator(".clock").inner_text()
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(SETTLED)
        assert page.locator(".clock").inner_text() != before
        page.locator("#tab-network").focus()
        page.keyboard.press("ArrowRight")
        page.locator('#tab-spacetime[aria-selected="true"]').wait_for()
        go(page, "matrix")
        select_cell(page, 1, 2)
        shows(page, "#said", "link from 1 to 2 selected")
        page.keyboard.press("?")
        assert page.locator("dialog dt").count() == 7
        page.keyboard.press("Escape")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(browser: Any, peers: Path, scheme: str) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": scheme, "has_touch": True}
    with explored(browser, [peers], **phone) as page:
        for view in VIEWS:
            page.locator(f"#tab-{view}").tap()
            page.wait_for_timeout(SETTLED)
            wide = page.evaluate("() => document.documentElement.scrollWidth")
            assert wide <= 390, view
        ground = imread(io.BytesIO(page.screenshot()))[2, 2, :3].mean()
        assert ground < 0.3 if scheme == "dark" else ground > 0.9


def test_a_report_opens_from_disk_and_draws_itself(
    browser: Any, peers: Path, served: Path, tmp_path: Path
) -> None:
    from asyncfed.report import report

    result = load(peers)
    file = report([peers, served], tmp_path / "report.html")
    assert file.stat().st_size < 5_000_000
    with watched(browser, file.as_uri()) as page:
        page.locator("html[data-ready]").wait_for()
        page.wait_for_timeout(2 * SETTLED)
        for canvas in ("#network canvas", "#matrix canvas", "#spacetime canvas"):
            assert not blank(page, canvas), canvas
        assert page.locator("#learning path.curve").count() >= 3
        words = page.locator("main").inner_text()
        assert "<script>alert('name')</script>" in words
        assert "asyncfed.run(asyncfed.load(" in words
        accuracy = page.locator("#learning .last tbody tr").first.locator("td").nth(4)
        assert float(accuracy.inner_text()) == pytest.approx(result.metrics["accuracy"].iloc[-1], rel=1e-3)
        canvas = page.locator("#matrix canvas").first
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        side = min(box["width"] - 58, box["height"] - 46)
        left = box["x"] + 50 + max(0, (box["width"] - 58 - side) / 2)
        page.mouse.click(left + 2.5 * side / CLIENTS, box["y"] + 38 + 4.5 * side / CLIENTS)
        page.locator("#details h2", has_text="4 → 2").wait_for()
        edges: pd.DataFrame = result.trace.edges().set_index(["sender", "receiver"])
        assert facts(page)["attempts"] == f"{int(edges.loc[(4, 2)].attempts)}"
