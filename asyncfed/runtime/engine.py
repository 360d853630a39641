"""The loop of a run: phases, their timelines, and a backend that executes what the timelines say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncfed.network.links import Network
from asyncfed.network.timing import Timing
from asyncfed.network.waves import Conversation, Recorder, Snapshot, Wave
from asyncfed.network.weights import Uniform, Weights
from asyncfed.protocols.phase import ProtocolLike
from asyncfed.rng import Streams
from asyncfed.runtime.backend import Backend
from asyncfed.runtime.block import Measurement

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tick:
    """A wave was executed (or, on Ray, put on its way)."""

    phase: str
    steps_done: int  # client steps in all, of all phases
    steps_planned: int
    time: float


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A snapshot, measured."""

    phase: str
    time: float
    steps: npt.NDArray[np.int64]
    reports: dict[str, FloatArray]
    clients: npt.NDArray[np.int64]
    sums: dict[str, FloatArray]
    counts: npt.NDArray[np.int64]
    consensus: float
    final: bool
    waiting: int  # arrived, not yet absorbed, so not yet in the trace
    on_the_way: int
    message_bytes: int


def execute(
    protocol: ProtocolLike,
    network: Network,
    timing: Timing,
    weights: Weights,
    streams: Streams,
    backend: Backend,
    recorder: Recorder,
    evaluate_every: float | None,
) -> Iterator[Tick | Evaluation]:
    """Run all phases; the last thing yielded is the final evaluation."""
    phases = protocol.phases()
    planned, done = network.n * sum(phase.steps for phase in phases), 0
    first_step, now = 0, 0.0
    for number, phase in enumerate(phases):
        heard = network if phase.sends else network.silent()
        shares = (weights if phase.sends else Uniform()).prepare(heard)
        talk = Conversation(phase.name, phase.kind, phase.steps, backend.begin(phase), first_step, now)
        every = (
            evaluate_every if evaluate_every is not None else timing.snapshot_interval(max(1, phase.steps))
        )
        for item in timing.timeline(heard, shares, streams, talk, recorder, every):
            if isinstance(item, Wave):
                backend.run(item)
                done += len(item.steps)
                yield Tick(phase.name, done, planned, item.time)
                continue
            last = item.final and number == len(phases) - 1
            if not item.final or last:
                yield _evaluation(talk, item, backend, final=last)
            if item.final:
                backend.finish(item.absorption)
                first_step, now = first_step + phase.steps, item.time


def _evaluation(talk: Conversation, snapshot: Snapshot, backend: Backend, *, final: bool) -> Evaluation:
    parts = backend.measure(snapshot)
    clients, sums, counts = _in_order(parts)
    return Evaluation(
        phase=talk.phase,
        time=snapshot.time,
        steps=snapshot.steps,
        reports=backend.reports(),
        clients=clients,
        sums=sums,
        counts=counts,
        consensus=_consensus(parts),
        final=final,
        waiting=snapshot.waiting,
        on_the_way=snapshot.on_the_way,
        message_bytes=talk.message_bytes,
    )


def _in_order(
    parts: list[Measurement],
) -> tuple[npt.NDArray[np.int64], dict[str, FloatArray], npt.NDArray[np.int64]]:
    clients = np.concatenate([part.clients for part in parts])
    order = np.argsort(clients)
    sums = {name: np.concatenate([part.sums[name] for part in parts])[order] for name in parts[0].sums}
    return clients[order], sums, np.concatenate([part.counts for part in parts])[order]


def _consensus(parts: list[Measurement]) -> float:
    """Root mean square distance of the clients' models from their mean, put together from the blocks."""
    sizes = np.array([len(part.clients) for part in parts], dtype=np.float64)
    centre = sum(
        (size * part.centre for size, part in zip(sizes, parts, strict=True)), np.zeros_like(parts[0].centre)
    )
    centre = centre / sizes.sum()
    spread = sum(
        part.spread + size * float(np.square(part.centre - centre).sum())
        for size, part in zip(sizes, parts, strict=True)
    )
    return float(np.sqrt(spread / sizes.sum()))
