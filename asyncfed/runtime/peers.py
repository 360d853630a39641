"""The loop of a method among peers: one part after another, each with a schedule of its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from asyncfed.network.expectations import Expectations, Tally
from asyncfed.network.waves import Conversation, Schedule, Snapshot, Wave
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.part import Method, Part, Reports
from asyncfed.recall import Saved, recalled
from asyncfed.runtime.evaluation import Evaluation, consensus, gathered, require_finite
from asyncfed.runtime.stage import Stage, Tick

_NEVER = 1e300

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@recalled(given=("_stage", "_parts", "_planned"))
class PeersLoop:
    """Where a run among peers is: in which part, since when, and what is known from the parts before."""

    def __init__(self, method: Method, stage: Stage) -> None:
        self._stage = stage
        self._parts: list[Part] = [
            part for iteration in method.iterations(stage.streams) for part in iteration
        ]
        n = stage.scene.network.n
        self._planned, self._done = n * sum(part.steps for part in self._parts), 0
        self._number = 0
        self._first_step = 0
        self._now: float | FloatArray = 0.0
        if not stage.scene.timing.barrier and len(self._parts) > 1:  # everybody begins a part when it is
            self._now = np.zeros(n)  # through itself
        self._learned: Expectations | None = None
        self._outer_step = 0 if self._bilevel else None
        self._schedule: Schedule | None = None
        self._tally: Tally | None = None
        known = all(part.cost(stage.scene, np.zeros(n, dtype=np.int64)) is not None for part in self._parts)
        self._computed = Cost().of(n) if known else {}  # in the parts before
        self._reports: Reports = []  # of the open part
        self._evaluated = 0  # how many of them

    def __iter__(self) -> Iterator[Tick | Evaluation]:
        backend = self._stage.backend
        while self._number < len(self._parts):
            part = self._parts[self._number]
            if self._schedule is None:
                self._open(part)
                backend.begin(part, self._first_step)
            assert self._schedule is not None
            for item in self._schedule:
                if isinstance(item, Wave):
                    backend.run(item)
                    self._done += len(item.steps)
                    yield Tick(part.name, self._done, self._planned, item.time, self._schedule.rests)
                    continue
                yield from self._look(part, item)
                if item.final:
                    backend.finish(item)
                    self._close(part, item)

    def restore(self, saved: Saved) -> Part | None:
        saved.into(self, only=("_number", "_first_step", "_now", "_learned"))
        part = self._parts[self._number]
        self._open(part)
        saved.into(self)
        return part

    def _open(self, part: Part) -> None:
        """Lay out its schedule; the blocks are told apart."""
        stage = self._stage
        recovers = stage.scene.timing.running_sums
        talk = Conversation(
            part.name, part.kind, part.steps, part.message_bytes(stage.scene.sizes, stage.itemsize),
            self._first_step, self._now, part=self._number, conserves=part.conserves,
            recovers=part.conserves if recovers is None else recovers,
            samples=part.samples_per_step(stage.scene.problem),
            back=0 if part.draws_from is None else self._first_step - part.draws_from,
        )  # fmt: skip
        # Only the inner steps show p: where hypergradients travel, messages have other weights.
        later = self._parts[self._number + 1 :]
        wanted = part.sends and part.judged and any(after.estimates for after in later)
        self._tally = Tally(stage.scene.network) if wanted else None
        self._schedule = _schedule(part, talk, stage, self._learned, self._tally)
        self._reports, self._evaluated = [], 0

    def _look(self, part: Part, snapshot: Snapshot) -> Iterator[Evaluation]:
        last = snapshot.final and self._number == self._last_judged
        between = not snapshot.final and (self._stage.evaluate_every is not None or not self._bilevel)
        self._reports.append(self._stage.backend.reports())
        part.watch(self._reports, self._stage.scene.network.n)
        if last or (part.judged and (between or (snapshot.final and self._bilevel))):
            since = _together(self._reports[self._evaluated :]) if part.judged else {}
            self._evaluated = len(self._reports)
            if type(part).watch is Part.watch:  # nobody asks for them again
                self._reports, self._evaluated = [], 0
            yield self._evaluation(part, snapshot, since, final=last)

    def _close(self, part: Part, end: Snapshot) -> None:
        self._computed = self._computed_by(part, end.steps + part.closing)
        self._first_step += part.steps + part.closing
        self._now = end.time if end.ends is None else end.ends
        if self._tally is not None:
            self._learned = self._tally.expectations()
        if part.ends_outer_step and self._outer_step is not None:
            self._outer_step += 1
        self._number, self._schedule = self._number + 1, None

    def _evaluation(
        self, part: Part, snapshot: Snapshot, reports: dict[str, FloatArray], *, final: bool
    ) -> Evaluation:
        parts = self._stage.backend.measure(snapshot, validation=self._outer_step is not None)
        require_finite(parts, snapshot.steps)
        return Evaluation(
            phase=part.name,
            time=snapshot.time,
            steps=snapshot.steps,
            reports=reports,
            **gathered(parts),
            consensus=consensus(parts),
            final=final,
            outer_step=self._outer_step,
            unrecorded=snapshot.unrecorded,
            computed=self._computed_by(part, snapshot.steps),
        )

    def _computed_by(self, part: Part, steps: IntArray) -> dict[str, IntArray]:
        """What each client has computed when it is at that step of the open part, where that is known."""
        cost = part.cost(self._stage.scene, steps - self._first_step)
        if cost is None:
            return {}
        added = cost.of(len(steps))
        return {name: before + added[name] for name, before in self._computed.items()}

    @property
    def _bilevel(self) -> bool:
        return any(part.ends_outer_step for part in self._parts)

    @property
    def _last_judged(self) -> int:
        judged = [number for number, part in enumerate(self._parts) if part.judged]
        return judged[-1] if judged else len(self._parts) - 1


def _together(reports: Reports) -> dict[str, FloatArray]:
    names = dict.fromkeys(name for report in reports for name in report)
    return {name: np.concatenate([report[name] for report in reports if name in report]) for name in names}


def _schedule(
    part: Part, talk: Conversation, stage: Stage, learned: Expectations | None, tally: Tally | None
) -> Schedule:
    scene = stage.scene if part.sends else stage.scene.silent()
    timing = scene.timing
    every = stage.evaluate_every
    if np.ndim(talk.started_at):  # clients are at different parts at one time: judged when all are through
        every = _NEVER
    if every is None:
        every = timing.snapshot_interval(max(1, part.steps), scene.network, talk.samples)
    mixing = part.mixing(scene, learned)
    return timing.among_peers(scene.network, mixing, stage.streams, talk, stage.recorder, every, tally)
