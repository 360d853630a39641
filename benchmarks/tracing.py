"""The trace: how fast it is written, how small it is, how fast it answers."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from asyncfed.network.links import compile_network
from asyncfed.network.timing import Lockstep
from asyncfed.network.waves import Conversation
from asyncfed.network.weights import Uniform
from asyncfed.rng import Streams
from asyncfed.trace import Trace, TraceWriter
from benchmarks.table import Row
from topologies import stochastic_directed


class _Keep:
    """Collects what a schedule records, so that writing can be timed alone."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, object]]] = []

    def messages(self, **row: object) -> None:
        self.calls.append(("messages", row))

    def steps(self, **row: object) -> None:
        self.calls.append(("steps", row))


def trace(steps: int = 1100) -> list[Row]:
    """The reference network: 9,900 potential messages per step, about ten million in all."""
    network = compile_network(stochastic_directed(100, probability=(0.4, 0.8), seed=1))
    kept = _Keep()
    talk = Conversation("sgp", "push", 100, 636_044)
    mixing = ((("z", "omega"), Uniform().prepare(network)),)
    for _ in Lockstep().among_peers(network, mixing, Streams(0), talk, kept, 10**9):
        pass
    with tempfile.TemporaryDirectory() as directory:
        rates = []
        for attempt in range(3):
            target = Path(directory) / str(attempt)
            started = time.perf_counter()
            with TraceWriter(target, nodes=100) as writer:
                for repeat in range(steps // 100):
                    for kind, row in kept.calls:
                        shifted = row | {"step": int(str(row["step"])) + 100 * repeat}
                        getattr(writer, kind)(**shifted)
            rates.append(writer.totals.sent / (time.perf_counter() - started))
            events = writer.totals.sent + writer.totals.link_down
        rate = statistics.median(rates) * events / writer.totals.sent
        size = sum(file.stat().st_size for file in target.iterdir())
        queries = []
        for _ in range(3):
            started = time.perf_counter()
            edges = Trace(target).edges()
            queries.append(time.perf_counter() - started)
        assert len(edges) == 9900
        assert int(edges.attempts.sum()) == events
    query = statistics.median(queries)
    return [
        Row("trace: events", f"{events:,}"),
        Row("trace: written", f"{rate / 1e6:.1f} million events/s", "≥ 2 million/s", rate >= 2e6),
        Row("trace: on disk", f"{size / events:.2f} bytes/event", "≤ 3", size / events <= 3),
        Row("trace: edges() over all", f"{query:.2f} s", "< 2 s", query < 2),
    ]
