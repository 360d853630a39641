"""One run, from its first step or a checkpoint to its end, with whatever goes wrong on the way.

An attempt plays the loop on the backend and records what comes: metrics, trace, checkpoints. When an actor is
lost, others take its place, everybody goes back to the last checkpoint, and the next attempt goes on from
there. The trace and the numbers are functions of the scenario, so the outcome is the same, byte for byte.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch

from asyncfed.callbacks import Callback, Callbacks, EvaluationReport, MessageSummary, PhaseStart, RunStart
from asyncfed.errors import ActorLostError, DivergenceError, RecoveredWarning, RunStopped
from asyncfed.goals import Goal
from asyncfed.options import Options
from asyncfed.protocols.part import Scene, Tensors
from asyncfed.recall import Saved
from asyncfed.record import Record
from asyncfed.result import Result
from asyncfed.rng import Streams
from asyncfed.rows import client_rows, metrics_row
from asyncfed.runtime.backend import Backend
from asyncfed.runtime.block import Tap
from asyncfed.runtime.checkpoints import Checkpoints, as_saved, as_state
from asyncfed.runtime.directory import RunDirectory, plain_json
from asyncfed.runtime.evaluation import Evaluation
from asyncfed.runtime.fingerprint import code_fingerprints, fingerprints
from asyncfed.runtime.local import LocalBackend
from asyncfed.runtime.lock import Lock
from asyncfed.runtime.loop import Loop, execute
from asyncfed.runtime.stage import Stage, Tick
from asyncfed.runtime.state import State, joined
from asyncfed.runtime.stopping import Stopping, stopping
from asyncfed.scenario import Scenario
from asyncfed.scenario_data import scenario_to_data
from asyncfed.trace import Totals, TraceWriter, clear

_SHARE = 0.02  # of the time that checkpoints may take


@dataclass(frozen=True)
class Progress:
    """How far a run is, for whoever watches."""

    phase: str
    steps_done: int  # of all clients together
    steps_planned: int
    clients: int
    loss: float | None
    totals: Totals
    elapsed: float
    virtual_time: float
    horizon: float | None = None
    note: str = ""

    @property
    def fraction(self) -> float:
        """How much is done, between 0 and 1: by steps, or by the horizon where that comes first."""
        by_steps = self.steps_done / max(1, self.steps_planned)
        by_time = 0.0 if self.horizon is None else self.virtual_time / self.horizon
        return min(1.0, max(by_steps, by_time))


@dataclass(eq=False)
class Execution:
    """A run in its directory.

    `placement` is where its clients lived before, for a run that is resumed in the same place; `manifest`
    what run.json says beside how the run ended.
    """

    scenario: Scenario
    scene: Scene
    options: Options
    directory: RunDirectory
    lock: Lock
    manifest: dict[str, Any]
    initial: Tensors = field(default_factory=dict)
    placement: Mapping[str, Any] | None = None
    progress: Callable[[Progress], None] | None = None
    tap: Tap | None = None
    strict: bool = False
    callbacks: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        self._listeners = Callbacks(self.callbacks, self.directory.path)
        self._heard, self._phase, self._counted = 0, "", Totals()  # what they were told of already
        self._checkpoints = Checkpoints(self.directory.path)
        self._started = time.perf_counter() - float(self.manifest.get("wall_seconds", 0.0))
        self._steps_done = 0
        self._engine: Backend | None = None
        self._totals, self._steps_recorded = Totals(), 0
        self._taken, self._stopped = 0, 0.0  # checkpoints, and for how long the mathematics waited
        self._fingerprints: dict[str, str] | None = None  # of what is run; made with the first checkpoint

    def play(self, start: State | None = None) -> Result:
        """To the end, from the beginning or from a checkpoint."""
        ended: dict[str, Any] = {"status": "failed"}
        failure: BaseException | None = None
        try:
            with stopping() as stop:
                self._engine = self._open()
                stop.take_over()  # Ray may have been started just now
                self.manifest["placement"] = vars(self._engine.placement)
                self.directory.write_manifest(status="running", **self.manifest)
                self._tell_start(start)
                final = self._to_the_end(self._engine, start, stop)
            ended = {"status": "complete"}
        except KeyboardInterrupt as stopped:
            ended, failure = (
                {"status": "interrupted", "error": str(stopped) or "stopped by the user"},
                stopped,
            )
            raise
        except BaseException as problem:
            ended, failure = ended | {"error": str(problem), "kind": type(problem).__name__}, problem
            raise
        finally:
            try:
                if self._engine is not None:
                    self._engine.close(well=ended["status"] == "complete")
            finally:
                self._say_how_it_ended(ended)
                if failure is not None:
                    self._listeners.tell_error(failure)
                failure = None  # else it and this frame keep each other, and all data
        self._checkpoints.clear()
        result = Result(self.directory, final, self.scenario)
        self._listeners.tell("on_end", lambda: result)
        return result

    def _say_how_it_ended(self, ended: dict[str, Any]) -> None:
        self.manifest |= {
            "wall_seconds": round(time.perf_counter() - self._started, 3),
            "totals": self._totals._asdict(),
            "steps": self._steps_recorded,
            "checkpoints": {"taken": self._taken, "stopped_seconds": round(self._stopped, 3)},
        }
        try:
            self.directory.write_manifest(**ended, **self.manifest)
        except Exception:
            if ended["status"] == "complete":
                raise
            # A disk that takes nothing: what ended the run is being told already.

    def _to_the_end(self, engine: Backend, start: State | None, stop: Stopping) -> Tensors:
        try:
            return self._with_recoveries(engine, start, stop)
        except DivergenceError as error:  # whoever found it knows only numbers
            names = self.scene.network.names
            if not names.given:
                raise
            raise error.called(names.__getitem__) from error

    def _with_recoveries(self, engine: Backend, start: State | None, stop: Stopping) -> Tensors:
        """Attempts, until one comes to its end, or too many have lost somebody."""
        lost: ActorLostError | None = None
        recoveries: list[dict[str, Any]] = self.manifest.setdefault("recoveries", [])
        most = len(recoveries) + self.options.max_recoveries
        while True:
            try:
                if lost is not None:
                    start = self._recovered(engine, lost, recoveries)
                return self._attempt(engine, start, stop)
            except ActorLostError as error:
                if len(recoveries) >= most:
                    raise
                lost = error

    def _recovered(
        self, engine: Backend, lost: ActorLostError, recoveries: list[dict[str, Any]]
    ) -> State | None:
        """Everybody is there again; returns the checkpoint to go on from."""
        after = round(time.perf_counter() - self._started, 3)
        note: dict[str, Any] = {"after_seconds": after, "error": str(lost)}
        recoveries.append(note)
        whose = engine.recover()
        start = self._checkpoints.newest()
        at = 0 if start is None else int(start.facts["steps_done"])
        repeated = max(0, self._steps_done - at)
        note |= {"lost": whose, "steps_repeated": repeated}
        self.directory.write_manifest(status="running", **self.manifest)
        place = "the beginning" if start is None else "the last checkpoint"
        warnings.warn(
            RecoveredWarning(
                f"lost: {whose}; replaced, and everybody goes on from {place} ({repeated} client steps are "
                f"repeated, recovery {len(recoveries)})"
            ),
            stacklevel=2,
        )
        return start

    # --- one attempt ---------------------------------------------------------------------------------

    def _attempt(self, engine: Backend, start: State | None, stop: Stopping) -> Tensors:
        """From the beginning or a checkpoint to the end; returns the final variables."""
        told = _Told() if start is None else _Told(**start.facts["told"])
        self.directory.remove("clients.jsonl", "final.safetensors")
        self.directory.keep_rows("metrics.jsonl", told.evaluations)
        if start is None:
            clear(self.directory.trace)
        continues = None if start is None else as_saved(start.under("trace"))
        network, method = self.scene.network, self.scenario.protocol
        writer = TraceWriter(
            self.directory.trace, nodes=network.n, continues=continues,
            server=None if method.server is None else network.server,
        )  # fmt: skip
        self._counted = self._counted if self._heard > told.evaluations else writer.totals
        record = Record(self.directory, writer, self.lock)
        stage = Stage(
            scene=self.scene,
            streams=Streams(self.scenario.seed),
            backend=engine,
            recorder=writer,
            itemsize=self._dtype.itemsize,
            evaluate_every=self.scenario.evaluate_every,
            enough=lambda item: _enough(item, self.scenario.until),
        )
        try:
            loop = execute(method, stage)
            if start is not None:
                part = loop.restore(as_saved(start.under("loop")))
                engine.restore(start.under("backend"), part)
            stop.gentle = True
            self._play(loop, writer, record, stop, told)
            final = engine.final()
            if self.options.save_final:
                self.directory.write_tensors("final.safetensors", final)
            self.directory.write_rows("clients.jsonl", told.clients)
        finally:
            stop.gentle = False
            self._totals, self._steps_recorded = writer.totals, writer.step_count
            record.close()
        return final

    def _play(self, loop: Loop, writer: TraceWriter, record: Record, stop: Stopping, told: _Told) -> None:
        due = _Due(self.options, self.scene.problem.clients)
        for item in loop:
            record.keep_up()
            if isinstance(item, Evaluation):
                row = metrics_row(item, writer.totals)
                record.metrics(row)
                told.evaluations += 1
                told.loss = row["train_loss"] if row["train_loss"] is not None else told.loss
                if item.final:
                    told.clients = client_rows(item)
                self._tell_evaluation(item, row, told.evaluations - 1, writer.totals)
                continue
            self._steps_done = item.steps_done
            self._tell_phase(item)
            if item.rests and (due.now(item) or (stop.signal is not None and due.ever)):
                began = time.perf_counter()
                self._checkpoint(loop, writer, record, item, told)
                due.taken(item, time.perf_counter() - began)
                self._taken, self._stopped = self._taken + 1, self._stopped + time.perf_counter() - began
            if stop.signal is not None and (item.rests or stop.impatient):
                raise RunStopped(stop.signal)
            self._tell(item, told.loss, writer.totals)

    def _checkpoint(self, loop: Loop, writer: TraceWriter, record: Record, at: Tick, told: _Told) -> None:
        """Take down how everything stands; it is put together and written beside the run."""
        assert self._engine is not None
        values, waiting, place = self._engine.state(), writer.put_down(), as_state(Saved.of(loop))
        of_code = self._of_code
        facts: dict[str, Any] = {"told": plain_json(asdict(told)), "steps_done": at.steps_done}

        def write() -> None:
            try:
                states = {"backend": values(), "trace": as_state(waiting()), "loop": place}
            except ActorLostError:
                return  # whoever is waiting for it will say so
            if self._fingerprints is None:
                self._fingerprints = fingerprints(self.scenario, of_code)
            self._checkpoints.write(joined(states, facts | {"fingerprints": self._fingerprints}))

        record.checkpoint(write)

    @cached_property
    def _of_code(self) -> dict[str, str]:
        return code_fingerprints(self.scenario)

    def _tell_start(self, start: State | None) -> None:
        names, clients = self.scene.network.names, self.scenario.clients
        before = 0 if start is None else int(start.facts["told"]["evaluations"])
        self._heard = before
        self._listeners.tell(
            "on_start",
            lambda: RunStart(
                self.directory.path, self.scenario, scenario_to_data(self.scenario),
                tuple(names[client] for client in range(clients)), int(self.manifest.get("resumed", 0)),
                before,
            ),
        )  # fmt: skip

    def _tell_evaluation(self, item: Evaluation, row: dict[str, Any], number: int, totals: Totals) -> None:
        if not self._listeners or number < self._heard:
            return
        self._heard = number + 1
        names, since = self.scene.network.names, totals.minus(self._counted)
        self._counted = totals

        def report() -> EvaluationReport:
            clients = client_rows(item)
            for one in clients if names.given else ():
                one["client"] = names[one["client"]]
            return EvaluationReport(number, dict(row), clients, item.final)

        self._listeners.tell("on_evaluation", report)
        self._listeners.tell("on_message_summary", lambda: MessageSummary(item.time, totals, since))

    def _tell_phase(self, tick: Tick) -> None:
        if tick.phase != self._phase:
            self._phase = tick.phase
            self._listeners.tell("on_phase", lambda: PhaseStart(tick.phase, tick.steps_done, tick.time))

    def _tell(self, tick: Tick, loss: float | None, totals: Totals) -> None:
        if self.progress is None or self._engine is None:
            return
        self.progress(
            Progress(
                phase=tick.phase,
                steps_done=tick.steps_done,
                steps_planned=tick.steps_planned,
                clients=self.scenario.clients,
                loss=loss,
                totals=totals,
                elapsed=time.perf_counter() - self._started,
                virtual_time=tick.time,
                horizon=getattr(self.scenario.timing, "horizon", None),
                note=self._engine.placement.note,
            )
        )

    # --- the backend ---------------------------------------------------------------------------------

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.scenario.precision == "float64" else torch.float32

    def _open(self) -> Backend:
        """Where it was before, if the run is resumed there: as many actors, with as many threads each."""
        problem, options = self.scenario.problem, self.options
        server = self.scenario.protocol.server is not None
        before = self.placement or {}
        common: dict[str, Any] = {
            "seed": self.scenario.seed, "dtype": self._dtype, "device": options.device,
            "initial": self.initial, "server": server, "threads": before.get("threads"),
        }  # fmt: skip
        if options.backend == "local":
            return LocalBackend(problem, tap=self.tap, strict=self.strict, **common)
        from asyncfed.runtime.ray_backend import RayBackend

        return RayBackend(
            problem, clients_per_actor=options.clients_per_actor, actors=before.get("actors"),
            address=options.address, **common,
        )  # fmt: skip


@dataclass
class _Told:
    """What was told of the run so far."""

    evaluations: int = 0
    loss: float | None = None
    clients: list[dict[str, Any]] = field(default_factory=list)  # of the final evaluation


class _Due:
    """When the next checkpoint is to be taken: by the clock or by steps, and never so often that it takes
    more than its share of the time.
    """

    def __init__(self, options: Options, clients: int) -> None:
        self._seconds, self._steps = options.checkpoint_seconds, options.checkpoint_steps * clients
        self._at = time.perf_counter() + self._seconds
        self._done: float | None = None  # client steps at the last one; known at the first tick

    @property
    def ever(self) -> bool:
        return math.isfinite(self._seconds) or math.isfinite(self._steps)

    def now(self, tick: Tick) -> bool:
        if self._done is None:
            self._done = tick.steps_done
        return time.perf_counter() >= self._at or tick.steps_done - self._done >= self._steps

    def taken(self, tick: Tick, seconds: float) -> None:
        self._at = time.perf_counter() + max(self._seconds, seconds / _SHARE)
        self._done = tick.steps_done


def _enough(item: Evaluation, until: Mapping[str, Goal] | None) -> bool:
    """Whether all the metrics of `until` have come so far."""
    if not until:
        return False
    return all(goal.met(float(item.sums[name].sum() / item.counts.sum())) for name, goal in until.items())
