"""The loop of a run: a method's parts, the schedules that say who steps when, and a backend that executes it.

among peers     a part is opened on all blocks, its schedule played to the end, and closed
with a server   a part is a round (or something that the server does alone): the waves of one schedule,
                which lasts for the whole run
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncfed.errors import DivergenceError
from asyncfed.network.expectations import Expectations, Tally
from asyncfed.network.schedules.asked import Ask
from asyncfed.network.timing import ServerSchedule, VirtualTime
from asyncfed.network.waves import Conversation, Recorder, Snapshot, Unrecorded, Wave
from asyncfed.protocols.at import Level
from asyncfed.protocols.part import Method, Part, Reports, Scene
from asyncfed.protocols.rounds import Round, WithServer
from asyncfed.rng import Streams
from asyncfed.runtime.backend import Backend
from asyncfed.runtime.judging import Measurement

_NEVER = 1e300

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tick:
    """A wave was executed (or, on Ray, put on its way), or a round."""

    phase: str
    steps_done: int  # client steps in all, of all parts
    steps_planned: int
    time: float


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A snapshot, measured."""

    phase: str
    time: float
    steps: IntArray  # of each client
    reports: dict[str, FloatArray]
    clients: IntArray
    sums: dict[str, FloatArray]
    counts: IntArray
    validation: dict[str, FloatArray]  # sums over validation samples, where the protocol selects by them
    validation_counts: IntArray
    consensus: float | None  # None where there is one model only
    final: bool
    outer_step: int | None  # how often the outer variable was stepped, where the protocol does that
    unrecorded: Unrecorded
    rounds: int | None = None  # of the server, where there is one


@dataclass(frozen=True, eq=False)
class Stage:
    """What a run is made on."""

    scene: Scene
    streams: Streams
    backend: Backend
    recorder: Recorder
    itemsize: int
    evaluate_every: float | None
    enough: Callable[[Evaluation], bool]


def execute(method: Method, stage: Stage) -> Iterator[Tick | Evaluation]:
    """Run a method; what is judged last is the final evaluation."""
    if method.server is None:
        return _among_peers(method, stage)
    return _with_server(method, stage)


# --- among peers -------------------------------------------------------------------------------------


def _among_peers(method: Method, stage: Stage) -> Iterator[Tick | Evaluation]:
    parts = [part for iteration in method.iterations(stage.streams) for part in iteration]
    n = stage.scene.network.n
    planned, done = n * sum(part.steps for part in parts), 0
    first_step = 0
    now: float | FloatArray = 0.0
    if not stage.scene.timing.barrier and len(parts) > 1:  # everybody begins a part when it is through itself
        now = np.zeros(n)
    learned: Expectations | None = None
    last_judged = max((k for k, part in enumerate(parts) if part.judged), default=len(parts) - 1)
    bilevel = any(part.ends_outer_step for part in parts)
    outer_step = 0 if bilevel else None
    for number, part in enumerate(parts):
        recovers = stage.scene.timing.running_sums
        talk = Conversation(
            part.name, part.kind, part.steps, part.message_bytes(stage.scene.sizes, stage.itemsize),
            first_step, now, part=number, conserves=part.conserves,
            recovers=part.conserves if recovers is None else recovers,
            samples=part.samples_per_step(stage.scene.problem),
        )  # fmt: skip
        # Only the inner steps show p: where hypergradients travel, messages have other weights.
        wanted = part.sends and part.judged and any(later.estimates for later in parts[number + 1 :])
        tally = Tally(stage.scene.network) if wanted else None
        stage.backend.begin(part, first_step)
        reports: Reports = []
        evaluated = 0  # how many of them
        for item in _schedule(part, talk, stage, learned, tally):
            if isinstance(item, Wave):
                stage.backend.run(item)
                done += len(item.steps)
                yield Tick(part.name, done, planned, item.time)
                continue
            last = item.final and number == last_judged
            between = not item.final and (stage.evaluate_every is not None or not bilevel)
            reports.append(stage.backend.reports())
            part.watch(reports, n)
            if last or (part.judged and (between or (item.final and bilevel))):
                since = _together(reports[evaluated:]) if part.judged else {}
                evaluated = len(reports)
                yield _peers_evaluation(part, item, stage, outer_step, since, final=last)
            if item.final:
                stage.backend.finish(item)
                first_step += part.steps + part.closing
                now = item.time if item.ends is None else item.ends
        if tally is not None:
            learned = tally.expectations()
        if part.ends_outer_step and outer_step is not None:
            outer_step += 1


def _together(reports: Reports) -> dict[str, FloatArray]:
    names = dict.fromkeys(name for report in reports for name in report)
    return {name: np.concatenate([report[name] for report in reports if name in report]) for name in names}


def _schedule(
    part: Part, talk: Conversation, stage: Stage, learned: Expectations | None, tally: Tally | None
) -> Iterator[Wave | Snapshot]:
    scene = stage.scene if part.sends else stage.scene.silent()
    timing = scene.timing
    every = stage.evaluate_every
    if np.ndim(talk.started_at):  # clients are at different parts at one time: judged when all are through
        every = _NEVER
    if every is None:
        every = timing.snapshot_interval(max(1, part.steps), scene.network, talk.samples)
    mixing = part.mixing(scene, learned)
    return iter(timing.among_peers(scene.network, mixing, stage.streams, talk, stage.recorder, every, tally))


def _peers_evaluation(
    part: Part,
    snapshot: Snapshot,
    stage: Stage,
    outer_step: int | None,
    reports: dict[str, FloatArray],
    *,
    final: bool,
) -> Evaluation:
    parts = stage.backend.measure(snapshot, validation=outer_step is not None)
    require_finite(parts, snapshot.steps)
    return Evaluation(
        phase=part.name,
        time=snapshot.time,
        steps=snapshot.steps,
        reports=reports,
        **gathered(parts),
        consensus=_consensus(parts),
        final=final,
        outer_step=outer_step,
        unrecorded=snapshot.unrecorded,
    )


# --- with a server -----------------------------------------------------------------------------------


def _with_server(method: Any, stage: Stage) -> Iterator[Tick | Evaluation]:
    """All iterations, or until an evaluation is good enough."""
    scene, backend = stage.scene, stage.backend
    schedule = scene.timing.with_server(scene.network, stage.streams, stage.recorder, method.server)
    asking = _Asking(method, stage, schedule)
    every = int(stage.evaluate_every or max(1, method.planned // 20))
    limit: int | None = method.max_rounds
    n, planned = schedule.n, method.planned
    backend.run(schedule.alone(0, method.opening.writes), method.opening)
    iterations = method.iterations(stage.streams)
    for iteration in range(planned + 1):
        parts: tuple[Round, ...] = next(iterations, ()) if iteration < planned else ()
        rounds = sum(part.asks for part in parts)
        over = not parts or (limit is not None and schedule.round + rounds > limit)
        if over or iteration % every == 0:
            evaluation = _server_evaluation(method, stage, schedule, iteration, final=over)
            if not over and stage.enough(evaluation):
                over, evaluation = True, replace(evaluation, final=True)
            yield evaluation
        if over:
            schedule.finish()
            return
        if limit is not None:
            planned_now = min(planned, iteration + (limit - schedule.round) // max(1, rounds))
        else:
            planned_now = planned
        asking.new_iteration(iteration)
        for part in parts:
            asking.run(part)
            yield Tick(part.phase, n * iteration, n * planned_now, schedule.now)


class _Asking:
    """Turns rounds into what the schedule asks, and its waves into what the backend runs."""

    def __init__(self, method: WithServer, stage: Stage, schedule: ServerSchedule) -> None:
        problem, self._sizes = stage.scene.problem, stage.scene.sizes
        outer = problem.data.validation if problem.outer_split == "validation" else problem.data.train
        self._samples: dict[Level, IntArray] = {"inner": problem.data.train.sizes, "outer": outer.sizes}
        n = schedule.n
        weighted = method.server.weighted
        self._importance = self._samples["inner"].astype(float) if weighted else np.ones(n)
        self._server, self._stage, self._schedule = method.server, stage, schedule
        self._parts: dict[int, Round] = {}
        self._numbers = 0
        self._turns = 0
        self._iteration = 0
        self._cohorts: dict[int, IntArray] = {}

    def new_iteration(self, iteration: int) -> None:
        self._iteration, self._cohorts = iteration, {}

    def run(self, part: Round) -> None:
        self._numbers += 1
        number = self._numbers
        if not part.asks:
            self._stage.backend.run(self._schedule.alone(number, part.writes), part)
            return
        self._parts[number] = part
        for wave in self._schedule.one_round(self._ask(number, part)):
            self._stage.backend.run(wave, self._parts[wave.part])
        for old in self._parts.keys() - self._schedule.parts_wanted():
            del self._parts[old]

    def _ask(self, number: int, part: Round) -> Ask:
        clients = self._asked(part)
        itemsize = self._stage.itemsize
        timing = self._stage.scene.timing
        per_sample = isinstance(timing, VirtualTime) and timing.per == "sample"
        work = part.samples if per_sample else part.work
        return Ask(
            part=number,
            phase=part.phase,
            kind=part.kind,
            clients=clients,
            reads={name: part.length(name, self._sizes) * itemsize for name in part.reads},
            answers=part.answers,
            answer_bytes=sum(part.carries(self._sizes).values()) * itemsize,
            writes=part.writes,
            work=work({level: self._of(of, clients) for level, of in self._samples.items()}, clients),
            importance=self._importance[clients],
            series=part.series,
            remembers=bool(part.remembered(self._sizes)),
            normalised=part.normalised,
            samples=self._of(self._samples["inner"], clients),
        )

    def _of(self, values: IntArray, clients: IntArray) -> IntArray:
        return values if len(clients) == len(values) else values[clients]

    def _asked(self, part: Round) -> IntArray:
        if part.cohort not in self._cohorts:
            n = self._schedule.n
            there = self._schedule.wait_for(self._server.may_ask(n, self._turns))
            self._cohorts[part.cohort] = self._server.draw(
                self._stage.streams, self._iteration, part.cohort, n, self._turns, there
            )
            self._turns += 1
            return self._cohorts[part.cohort]
        cohort = self._cohorts[part.cohort]  # of an earlier round: some of them may have gone
        there = self._schedule.wait_for(cohort)[cohort]
        return cohort if there.all() else cohort[there]


def _server_evaluation(
    method: WithServer, stage: Stage, schedule: ServerSchedule, iteration: int, *, final: bool
) -> Evaluation:
    reports = stage.backend.reports()  # first, for what went wrong in a round is told by whose it was
    snapshot = schedule.snapshot(final=final)
    parts = stage.backend.measure(snapshot, judging=method.judging)
    require_finite(parts, snapshot.steps)
    return Evaluation(
        phase="server",
        time=snapshot.time,
        steps=snapshot.steps,
        rounds=snapshot.rounds,
        reports=reports,
        **gathered(parts),
        consensus=None,
        final=final,
        outer_step=iteration,
        unrecorded=snapshot.unrecorded,
    )


# --- what the blocks measured ------------------------------------------------------------------------


def gathered(parts: list[Measurement]) -> dict[str, Any]:
    """Put together in the order of the clients."""
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


def require_finite(parts: list[Measurement], steps: IntArray) -> None:
    """That what was measured is finite: the data are, so a model of which it is not has diverged, be its own
    numbers finite or not.
    """
    for part in parts:
        if (wrong := part.not_finite()) is not None:
            client = int(part.clients[wrong.place])
            quantity = f"{wrong.quantity}, as judged,"
            raise DivergenceError(client, int(steps[client]), quantity, wrong.value, cause=part.cause)


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
