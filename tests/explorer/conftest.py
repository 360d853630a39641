"""Real runs to look at, and one browser for all that need one."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import networkx as nx
import pytest

from asyncfed import Scenario, VirtualTime, run
from asyncfed.explorer import ExplorerServer, opened
from asyncfed.network import DrawnPresence
from asyncfed.problems import classification, quadratic
from asyncfed.protocols import SGP, Buffered, FedBuff, LocalSteps
from topologies import star, stochastic_directed

CLIENTS = 6


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lockstep on links that come and go."""
    path = tmp_path_factory.mktemp("explored") / "peers"
    scenario = Scenario(
        classification("digits", CLIENTS, "logistic", "dirichlet:0.4"),
        stochastic_directed(CLIENTS, probability=(0.4, 0.8), seed=1),
        SGP(steps=40, lr=0.1),
        evaluate_every=8,
    )
    run(scenario, out=path)
    return path


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network, in virtual time, with losses."""
    path = tmp_path_factory.mktemp("explored") / "others"
    scenario = Scenario(
        quadratic(clients=CLIENTS, dimension=3),
        stochastic_directed(CLIENTS, probability=(0.4, 0.8), seed=1),
        SGP(steps=30, lr=0.1),
        timing=VirtualTime("exponential(1.0)", latency="exponential(0.3)", loss=0.1),
        evaluate_every=10,
    )
    run(scenario, out=path)
    return path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server that does not wait, and clients that come and go; its nodes have names, of which some would
    like to be markup."""
    path = tmp_path_factory.mktemp("explored") / "served"
    names = {
        node: f"<img src=x onerror=alert({node})>" if node == 2 else f"phone {node}" for node in range(5)
    }
    graph = nx.relabel_nodes(star(4), lambda node: names.get(node, node))
    graph.graph["server"] = names[4]
    scenario = Scenario(
        quadratic(clients=4, dimension=3),
        graph,
        FedBuff(12, LocalSteps(0.1, steps=2), server=Buffered(2, at_work=1.0)),
        timing=VirtualTime(
            "exponential(1.0)", latency="exponential(0.2)", loss=0.1,
            presence=DrawnPresence("exponential(6.0)", "exponential(2.0)"),
        ),
        evaluate_every=3,
        name="<script>alert('name')</script>",
    )  # fmt: skip
    run(scenario, out=path)
    return path


@contextmanager
def serving(paths: Sequence[Path]) -> Iterator[ExplorerServer]:
    """An explorer of some runs, in threads of this process."""
    with ExplorerServer(opened(paths)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def chromium() -> str:
    """Where the browser is; the test is skipped where none is."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium on this machine; Debian's package `chromium` is enough")
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    place = chromium()
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened_browser = started.chromium.launch(executable_path=place, args=arguments)
        yield opened_browser
        opened_browser.close()
