"""The loop of a method with a server: one round after another, on a schedule that lasts for the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncfed.network.schedules.asked import Ask
from asyncfed.network.timing import ServerSchedule, VirtualTime
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.part import Part
from asyncfed.protocols.rounds import Round, WithServer
from asyncfed.recall import Saved, recalled
from asyncfed.runtime.evaluation import Evaluation, gathered, require_finite
from asyncfed.runtime.stage import Stage, Tick

IntArray = npt.NDArray[np.int64]


@recalled(given=("_method", "_stage"))
class ServerLoop:
    """Where a run with a server is: all iterations, or until an evaluation is good enough."""

    def __init__(self, method: Any, stage: Stage) -> None:
        self._method, self._stage = method, stage
        scene = stage.scene
        self._schedule = scene.timing.with_server(scene.network, stage.streams, stage.recorder, method.server)
        self._asking = _Asking(method, stage, self._schedule)
        self._opened = False
        self._iteration = 0
        self._place = 0  # in it: rounds that were made

    def __iter__(self) -> Iterator[Tick | Evaluation]:
        method, stage, schedule = self._method, self._stage, self._schedule
        every = int(stage.evaluate_every or max(1, method.planned // 20))
        limit: int | None = method.max_rounds
        planned = method.planned
        if not self._opened:
            stage.backend.run(schedule.alone(0, method.opening.writes), method.opening)
            self._opened = True
        iterations = islice(method.iterations(stage.streams), self._iteration, None)
        while True:
            parts: tuple[Round, ...] = next(iterations, ()) if self._iteration < planned else ()
            rounds = sum(part.asks for part in parts)
            if not self._place:
                over = not parts or (limit is not None and schedule.round + rounds > limit)
                if over or self._iteration % every == 0:
                    evaluation = self._evaluation(final=over)
                    if not over and stage.enough(evaluation):
                        over, evaluation = True, replace(evaluation, final=True)
                    yield evaluation
                if over:
                    schedule.finish()
                    return
                self._asking.new_iteration(self._iteration)
            most = planned
            if limit is not None:
                most = min(planned, self._iteration + (limit - schedule.round) // max(1, rounds))
            for part in parts[self._place :]:
                self._asking.run(part)
                self._place += 1
                done, all_of_them = schedule.n * self._iteration, schedule.n * most
                yield Tick(part.phase, done, all_of_them, schedule.now, rests=True)
            self._iteration, self._place = self._iteration + 1, 0

    def restore(self, saved: Saved) -> Part | None:
        saved.into(self)
        self._asking.restore(self._method)
        return None

    def _evaluation(self, *, final: bool) -> Evaluation:
        backend = self._stage.backend
        reports = backend.reports()  # first, for what went wrong in a round is told by whose it was
        snapshot = self._schedule.snapshot(final=final)
        parts = backend.measure(snapshot, judging=self._method.judging)
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
            outer_step=self._iteration,
            unrecorded=snapshot.unrecorded,
            computed=self._asking.computed(snapshot.counts),
        )


@recalled(holds=("_numbers", "_turns", "_iteration", "_cohorts"))
class _Asking:
    """Turns rounds into what the schedule asks, and its waves into what the backend runs."""

    def __init__(self, method: WithServer, stage: Stage, schedule: ServerSchedule) -> None:
        problem, self._sizes = stage.scene.problem, stage.scene.sizes
        self._samples = problem.sample_sizes
        self._keeps_buffers = problem.local_buffers is not None
        n = schedule.n
        weighted = method.server.weighted
        self._importance = self._samples["inner"].astype(float) if weighted else np.ones(n)
        self._server, self._stage, self._schedule = method.server.on(stage.scene.network), stage, schedule
        self._parts: dict[int, Round] = {}
        self._numbers = 0
        self._turns = 0
        self._iteration = 0
        self._cohorts: dict[int, IntArray] = {}
        self._known = self._costs_known(next(method.iterations(stage.streams), ()))

    def _costs_known(self, rounds: tuple[Round, ...]) -> bool:
        """Whether the rounds of an iteration say what their clients compute."""
        everyone = np.arange(self._schedule.n, dtype=np.int64)
        return all(part.cost(self._samples, everyone) is not None for part in rounds if part.asks)

    def computed(self, counts: dict[str, IntArray]) -> dict[str, IntArray]:
        """What clients have computed so far, from what the schedule has counted; nothing where that is not
        known.
        """
        return Cost().of(self._schedule.n) | counts if self._known else {}

    def new_iteration(self, iteration: int) -> None:
        self._iteration, self._cohorts = iteration, {}

    def run(self, part: Round) -> None:
        self._numbers += 1
        number = self._numbers  # in the order of all rounds; the opening is 0
        if not part.asks:
            self._stage.backend.run(self._schedule.alone(number, part.writes), part)
            return
        self._parts[number] = part
        for wave in self._schedule.one_round(self._ask(number, part)):
            self._stage.backend.run(wave, self._parts[wave.part])
        for old in self._parts.keys() - self._schedule.parts_wanted():
            del self._parts[old]

    def restore(self, method: WithServer) -> None:
        """Find the rounds again whose works are not all handed out: they are numbered in their order."""
        wanted = self._schedule.parts_wanted()
        rounds = chain.from_iterable(method.iterations(self._stage.streams))
        self._parts = {
            number: part
            for number, part in enumerate(islice(rounds, max(wanted, default=0)), 1)
            if number in wanted
        }

    def _ask(self, number: int, part: Round) -> Ask:
        clients = self._asked(part)
        itemsize = self._stage.itemsize
        timing = self._stage.scene.timing
        per_sample = isinstance(timing, VirtualTime) and timing.per == "sample"
        work = part.samples if per_sample else part.work
        samples = {level: self._of(of, clients) for level, of in self._samples.items()}
        cost = part.cost(samples, clients)
        return Ask(
            part=number,
            phase=part.phase,
            kind=part.kind,
            clients=clients,
            reads={name: part.length(name, self._sizes) * itemsize for name in part.reads},
            answers=part.answers,
            answer_bytes=sum(part.carries(self._sizes).values()) * itemsize,
            writes=part.writes,
            work=work(samples, clients),
            importance=self._importance[clients],
            series=part.series,
            remembers=bool(part.remembered(self._sizes)) or self._keeps_buffers,
            normalised=part.normalised,
            samples=samples["inner"],
            adds={} if cost is None else cost.of(len(clients)),
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
