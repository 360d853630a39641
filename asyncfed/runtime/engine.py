"""The loop of a run: phases, their timelines, and a backend that executes what the timelines say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncfed.network.expectations import Expectations, Tally
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
    steps: npt.NDArray[np.int64]  # of each client
    reports: dict[str, FloatArray]
    clients: npt.NDArray[np.int64]
    sums: dict[str, FloatArray]
    counts: npt.NDArray[np.int64]
    validation: dict[str, FloatArray]  # sums over validation samples, where the protocol selects by them
    validation_counts: npt.NDArray[np.int64]
    consensus: float | None  # None where there is one model only
    final: bool
    outer_step: int | None  # how often the outer variable was stepped, where the protocol does that
    waiting: int  # arrived, not yet absorbed, so not yet in the trace
    on_the_way: int
    message_bytes: int
    rounds: int | None = None  # of the server, where there is one


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
    """Run all phases; what is judged last is the final evaluation."""
    phases = protocol.phases()
    planned, done = network.n * sum(phase.steps for phase in phases), 0
    first_step, now = 0, 0.0
    learned: Expectations | None = None
    last_judged = max((k for k, phase in enumerate(phases) if phase.judged), default=len(phases) - 1)
    bilevel = any(phase.ends_outer_step for phase in phases)
    outer_step = 0 if bilevel else None
    for number, phase in enumerate(phases):
        heard = network if phase.sends else network.silent()
        shares = phase.shares(weights if phase.sends else Uniform(), heard, timing, learned)
        message_bytes = backend.begin(phase, first_step)
        talk = Conversation(phase.name, phase.kind, phase.steps, message_bytes, first_step, now)
        every = (
            evaluate_every if evaluate_every is not None else timing.snapshot_interval(max(1, phase.steps))
        )
        # Only the inner steps show p: where hypergradients travel, messages have other weights.
        wanted = phase.sends and phase.judged and any(later.estimates for later in phases[number + 1 :])
        tally = Tally(heard) if wanted else None
        reports: list[dict[str, FloatArray]] = []
        for item in timing.timeline(heard, shares, streams, talk, recorder, every, tally):
            if isinstance(item, Wave):
                backend.run(item)
                done += len(item.steps)
                yield Tick(phase.name, done, planned, item.time)
                continue
            last = item.final and number == last_judged
            between = not item.final and (evaluate_every is not None or not bilevel)
            if last or (phase.judged and (between or (item.final and bilevel))):
                yield _evaluation(talk, item, backend, outer_step, final=last)
            if not phase.judged:
                reports.append(backend.reports())
                phase.watch(reports, network.n)
            if item.final:
                backend.finish(item)
                first_step, now = first_step + phase.steps + phase.closing, item.time
        if tally is not None:
            learned = tally.expectations()
        if phase.ends_outer_step and outer_step is not None:
            outer_step += 1


def _evaluation(
    talk: Conversation, snapshot: Snapshot, backend: Backend, outer_step: int | None, *, final: bool
) -> Evaluation:
    parts = backend.measure(snapshot, validation=outer_step is not None)
    return Evaluation(
        phase=talk.phase,
        time=snapshot.time,
        steps=snapshot.steps,
        reports=backend.reports(),
        **gathered(parts),
        consensus=_consensus(parts),
        final=final,
        outer_step=outer_step,
        waiting=snapshot.waiting,
        on_the_way=snapshot.on_the_way,
        message_bytes=talk.message_bytes,
    )


def gathered(parts: list[Measurement]) -> dict[str, Any]:
    """What the blocks measured, put together in the order of the clients."""
    order = np.argsort(np.concatenate([part.clients for part in parts]))

    def of(pieces: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.concatenate(pieces)[order]

    return {
        "clients": of([part.clients for part in parts]),
        "sums": {name: of([part.sums[name] for part in parts]) for name in parts[0].sums},
        "counts": of([part.counts for part in parts]),
        "validation": {name: of([part.validation[name] for part in parts]) for name in parts[0].validation},
        "validation_counts": of([part.validation_counts for part in parts]),
    }


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
