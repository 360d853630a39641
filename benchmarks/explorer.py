"""The explorer: how fast it takes up ten million events, and answers each kind of question about them."""

from __future__ import annotations

import http.client
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

from asyncfed import Scenario, VirtualTime, run
from asyncfed.explorer import ExplorerServer, opened
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from asyncfed.rng import Streams
from benchmarks.table import Row
from topologies import small_world, stochastic_directed

AT_MOST = 0.2  # seconds for an answer
WINDOWS = 9


def explorer(steps: int = 1000) -> list[Row]:
    """A thousand clients in virtual time, ten neighbours each: steps · 10,000 potential messages."""
    scenario = Scenario(
        problem=quadratic(clients=1000, dimension=2),
        topology=stochastic_directed(small_world(1000, 10, 0.1, seed=1), probability=(0.5, 0.9), seed=1),
        protocol=SGP(steps=steps, lr=0.01),
        timing=VirtualTime("uniform(0.8, 1.2)", latency="exponential(0.3)", loss=0.02),
        evaluate_every=steps // 4,
    )
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run"
        run(scenario, out=path, checkpoint_every=None)
        with ExplorerServer(opened([path])) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            started = time.perf_counter()
            while True:
                state = json.loads(_asked(server, "state")[1])["runs"][0]
                if state["found"] and state["taken"] == state["found"]:
                    break
                time.sleep(0.05)
            taken = time.perf_counter() - started
            rows = [
                Row("explorer: events", f"{state['messages'] + state['steps']:,}"),
                Row("explorer: taken up in", f"{taken:.1f} s"),
            ]
            rows += [_timed(server, *question, state["to"]) for question in _QUESTIONS]
            server.shutdown()
    return rows


# What is asked, and which part of the run its windows are, at places of their own; 0 is of the whole run.
_QUESTIONS = (
    ("state", "state", 0.0),
    ("about", "0/about", 0.0),
    ("metrics", "0/metrics", 0.0),
    ("marks", "0/marks", 0.0),
    ("graph", "0/graph", 0.0),
    ("edges, whole run", "0/edges?", 0.0),
    ("edges, half of it", "0/edges?", 0.5),
    ("edges, 1% of it", "0/edges?", 0.01),
    ("nodes, 10% of it", "0/nodes?", 0.1),
    ("space-time, whole run", "0/window?", 0.0),
    ("space-time, 10% of it", "0/window?", 0.1),
    ("space-time, 1% of it", "0/window?", 0.01),
    ("space-time, 0.01% of it", "0/window?", 0.0001),
    ("an edge, whole run", "0/edge?sender=0&receiver=1&at={middle}", 0.0),
    ("an edge, 2% of it", "0/edge?sender=0&receiver=1&at={middle}", 0.02),
)


def _timed(server: ExplorerServer, words: str, path: str, share: float, last: float) -> Row:
    """The median and the longest of some windows, drawn anew, so that most have to be read from disk."""
    draws = Streams(0).uniforms(f"windows {words}", 0, 0, WINDOWS)
    times = []
    for draw in draws.tolist():
        begin = draw * (1 - share) * last
        asked = path.format(middle=draw * last)
        if share:
            asked += f"&from={begin}&to={begin + share * last}"
        seconds, _ = _asked(server, asked)
        times.append(seconds)
    usual, longest = statistics.median(times), max(times)
    value = f"{usual * 1e3:.0f} ms, longest {longest * 1e3:.0f} ms"
    return Row(f"explorer: {words}", value, f"< {AT_MOST * 1e3:.0f} ms", usual < AT_MOST)


def _asked(server: ExplorerServer, path: str) -> tuple[float, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    started = time.perf_counter()
    connection.request("GET", f"/{server.token}/api/{path}")
    answer = connection.getresponse()
    content = answer.read()
    seconds = time.perf_counter() - started
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {content[:200]!r}")
    return seconds, content
