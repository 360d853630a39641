"""The Ray backend: every block of nodes in an actor, by default one client each, and the server in its own.

The driver knows the schedule and never sees a payload. For each wave it sends every actor concerned its part
of the wave, with references to the parcels it absorbs; Ray starts the step when these exist and moves their
bytes from actor to actor. An actor's payload of a wave is one object in the store, put there once, whoever
reads it; where fewer sums than rows are wanted, the owner is asked for the sums. The driver keeps a reference
for as long as the schedule says that somebody may still absorb it, and stays a few waves ahead of the slowest
report, no more, which bounds the memory.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from asyncfed.errors import ActorLostError, AsyncfedError, RunError
from asyncfed.network.waves import Snapshot, Wave
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.problem import Problem
from asyncfed.protocols.part import Act, Part, Tensors
from asyncfed.runtime.backend import Placement
from asyncfed.runtime.block import Reports
from asyncfed.runtime.exchange import Exchange, Need, Object
from asyncfed.runtime.judging import Measurement
from asyncfed.runtime.local import final_of, without_data
from asyncfed.runtime.packing import cpus_per_actor, gpus_per_actor, pack, threads_per_actor
from asyncfed.runtime.ray_actors import Arrays, Hired, arrays_of, dismiss, end_idle, hire, take_over
from asyncfed.runtime.ray_cluster import (
    LOOK_EVERY,
    Head,
    await_room,
    await_start,
    check_shippable,
    leave,
    left,
)
from asyncfed.runtime.repacking import repacked
from asyncfed.runtime.state import State, joined, of_arrays

_WAVES_AHEAD = 2
_GONE = (RayActorError, ObjectLostError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)


class RayBackend:
    """Actors on a Ray cluster, on this machine or elsewhere."""

    def __init__(
        self,
        problem: Problem,
        *,
        seed: int,
        dtype: torch.dtype,
        device: str,
        clients_per_actor: int | Literal["auto"],
        address: str | None,
        initial: Tensors | None = None,
        server: bool = False,
        threads: int | None = None,
        actors: int | None = None,
    ) -> None:
        _connect(address)
        self._head = Head()
        plan = _provision(problem, dtype, device, clients_per_actor, actors, threads, others=int(server))
        self._problem, self._plan = problem, plan
        check_shippable(without_data(problem))
        n = problem.clients
        self.placement = plan.placement
        self._crew: list[Hired] = []
        self._actors: list[Any] = []  # their handles
        self._server = server
        self._exchange = Exchange((*plan.ranges, (n, n + 1)) if server else plan.ranges)
        self._blocks = range(len(plan.ranges))  # those of clients
        self._objects: dict[int, Any] = {}  # references to payloads, by number
        self._outstanding: deque[tuple[int, Any]] = deque()
        self._reports: list[Reports] = []
        self._open: Part | None = None
        self._standing: Reports = {}  # what the server reported last
        self._given = {key: value.cpu().numpy() for key, value in (initial or {}).items()}
        self._numbers = seed, dtype
        try:
            self._hire_all()
        except BaseException:
            self.close()
            raise

    def _hire_all(self) -> None:
        """An actor for every block: taken over where some are idle, hired where there is room."""
        plan, places = self._plan, range(len(self._exchange.ranges))
        kept = take_over(len(self._blocks), plan.cpus, plan.gpus)
        if self._server:
            kept += take_over(1, plan.cpus)
        missing = len(places) - len(kept)
        if missing:
            end_idle()
            gpus = plan.gpus * (len(self._blocks) - sum(actor.gpus > 0 for actor in kept))
            await_room(missing, cpus=plan.cpus, gpus=gpus)
        for place in places:
            gpus = plan.gpus if place in self._blocks else 0.0
            fitting = (actor for actor in kept if actor.gpus == gpus)
            actor = next(fitting, None) or hire(plan.cpus, gpus, spread=place in self._blocks)
            if actor in kept:
                kept.remove(actor)
            self._crew.append(actor)
        with contextlib.suppress(ActorLostError):  # who is lost already is missed, and replaced, later
            self._settle(places)

    def _settle(self, places: Iterable[int]) -> None:
        """Wait until the actors at these places are there, and give them their blocks."""
        self._actors = [actor.handle for actor in self._crew]
        await_start([self._actors[place].alive.remote() for place in places], self._head)
        calls = [(place, self._settled(place)) for place in places]
        for place, call in calls:
            self._get(place, call)

    def _settled(self, place: int) -> Any:
        plan, n, given, (seed, dtype) = self._plan, self._problem.clients, self._given, self._numbers
        start, stop = self._exchange.ranges[place]
        nodes, settle = np.arange(start, stop, dtype=np.int64), self._actors[place].settle
        if place not in self._blocks:
            return settle.remote(without_data(self._problem), nodes, n, given, seed, dtype, "cpu", 1, True)
        mine = replace(self._problem, data=self._problem.data.select(nodes))
        rows = {} if self._server else {key: value[start:stop] for key, value in given.items()}
        return settle.remote(mine, nodes, n, rows, seed, dtype, plan.device, plan.threads, False)

    def begin(self, part: Part, first_step: int) -> None:
        self._drain()
        self._exchange.reset()
        self._objects = {}
        self._open = part
        self._all(lambda actor, _: actor.begin.remote(part, first_step))

    def run(self, wave: Wave, round: Act | None = None) -> None:
        exchange = self._exchange
        tasks = exchange.tasks(wave, single=self._single(round))
        # Sums are asked for before anybody steps: an actor takes its calls in order, and forgets in a step.
        parcels = [self._parcels(task.needs) for task in tasks]
        payloads = []
        for task, own in zip(tasks, parcels, strict=True):
            payload, report = self._actors[task.place].run.remote(task.wave, round, *own)
            payloads.append(payload)
            self._outstanding.append((task.place, report))
        for number in exchange.forget(wave.released):
            del self._objects[number]
        for task, payload in zip(tasks, payloads, strict=True):
            emitted = exchange.emitted(task)
            if emitted is not None:
                self._objects[emitted] = payload
        while len(self._outstanding) > _WAVES_AHEAD * len(self._crew):
            self._collect()

    def reports(self) -> Reports:
        self._drain()
        collected = _by_name(self._reports)
        self._reports = []
        return {name: np.concatenate(pieces) for name, pieces in collected.items()} | self._standing

    def measure(
        self, snapshot: Snapshot, *, judging: Act | None = None, validation: bool = False
    ) -> list[Measurement]:
        self._drain()

        def call(actor: Any, place: int) -> Any:
            task = self._exchange.everything(snapshot.absorption, place, single=self._single(judging))
            return actor.measure.remote(task, judging, validation, *self._parcels(task.needs))

        return self._all(call)

    def finish(self, snapshot: Snapshot) -> None:
        self._drain()

        def call(actor: Any, place: int) -> Any:
            task = self._exchange.everything(snapshot.absorption, place, single=self._single(None))
            steps = snapshot.steps[slice(*self._exchange.ranges[place])]
            return actor.finish.remote(task, steps, *self._parcels(task.needs))

        self._all(call)

    def final(self) -> Tensors:
        parts: list[Arrays] = self._all(lambda actor, _: actor.final.remote())
        names = dict.fromkeys(name for part in parts for name in part)
        clients = {name: torch.from_numpy(_stacked(parts, name)) for name in names}
        if not self._server:
            return clients
        board: Arrays = self._get(len(self._crew) - 1, self._actors[-1].final.remote())
        return final_of({name: torch.tensor(value) for name, value in board.items()}, clients)

    def state(self) -> Callable[[], State]:
        self._drain()  # what was reported is part of it
        blocks = [actor.state.remote() for actor in self._actors]  # after all that they were told before
        objects = {number: self._objects[number] for number in self._exchange.objects}
        told = {name: np.concatenate(pieces) for name, pieces in _by_name(self._reports).items()}
        parts = {
            "exchange": self._exchange.state(),
            "reports": State(of_arrays(told)),
            "standing": State(of_arrays(self._standing)),
        }

        def handed_over() -> State:
            for place, reference in enumerate(blocks):
                arrays, facts = self._received(self._whose(place), reference)
                parts[f"block {place}"] = State(of_arrays(arrays), facts)
            whole = {f"{number}/{name}": value for number, reference in objects.items()
                     for name, value in self._received("somebody", reference).items()}  # fmt: skip
            return joined(parts | {"objects": State(of_arrays(whole))})

        return handed_over

    def restore(self, state: State, part: Part | None) -> None:
        state = repacked(state, self._plan.ranges, clients=self._problem.clients, server=self._server)
        self._outstanding, self._open = deque(), part
        self._exchange.restore(state.under("exchange"))
        told, standing = state.under("reports"), state.under("standing")
        self._reports = [{name: told.array(name) for name in told.tensors}]
        self._standing = {name: standing.array(name) for name in standing.tensors}
        objects: dict[int, Arrays] = {}
        for key, value in state.under("objects").tensors.items():
            number, _, name = key.partition("/")
            objects.setdefault(int(number), {})[name] = value.numpy()
        self._objects = {number: ray.put(arrays) for number, arrays in objects.items()}
        calls = []
        for place, actor in enumerate(self._actors):
            own = state.under(f"block {place}")
            calls.append(actor.restore.remote(arrays_of(own.tensors), own.facts, part))
        for place, call in enumerate(calls):
            self._get(place, call)

    def recover(self) -> str:
        self._objects, self._outstanding, self._reports, self._standing = {}, deque(), [], {}
        self._exchange.reset()
        gone = self._gone()
        for place in gone:
            self._crew[place].end()  # or what may be left of it
            # They ask for no share of a core: where a node is gone, those who are left have all of them.
            gpus = self._plan.gpus if place in self._blocks else 0.0
            self._crew[place] = hire(0.0, gpus, spread=place in self._blocks)
        self._settle(gone)
        again = [actor.start_again.remote() for actor in self._actors]
        for place, call in enumerate(again):
            self._get(place, call)
        return ", ".join(map(self._whose, gone)) or "nobody: what was on its way was lost"

    def _gone(self) -> list[int]:
        """The places whose actors do not answer any more."""
        gone = []
        for place, call in enumerate([actor.alive.remote() for actor in self._actors]):
            try:
                self._received(self._whose(place), call)
            except ActorLostError:
                gone.append(place)
        return gone

    def close(self, *, well: bool = False) -> None:
        self._objects, self._outstanding = {}, deque()
        if ray.is_initialized():
            if self._head.lost:
                leave()  # without a head and an owner, actors end by themselves
            else:
                dismiss(self._crew, well=well)
        self._crew, self._actors = [], []

    def _single(self, round: Act | None) -> bool:
        """Whether single messages are wanted, so that nobody is to send sums."""
        act = self._open if round is None else round
        return act is not None and bool(act.each)

    def _parcels(self, needs: list[Need]) -> list[Any]:
        return [
            self._objects[need.number]
            if isinstance(need, Object)
            else self._actors[need.owner].hand_over.remote(need)
            for need in needs
        ]

    # --- waiting -----------------------------------------------------------------------------------

    def _all(self, call: Callable[[Any, int], Any]) -> list[Any]:
        """The same of every actor with clients."""
        references = [call(self._actors[place], place) for place in self._blocks]
        return [self._get(place, reference) for place, reference in enumerate(references)]

    def _collect(self) -> None:
        place, reference = self._outstanding.popleft()
        report: Reports = self._get(place, reference)
        if place in self._blocks:
            self._reports.append(report)
        else:
            self._standing |= report

    def _drain(self) -> None:
        while self._outstanding:
            self._collect()

    def _get(self, place: int, reference: Any) -> Any:
        try:
            return self._received(self._whose(place), reference)
        except ActorLostError:
            # Or was it the server, from whom a client had nothing to work on?
            if self._server:
                self._received("the server", self._actors[-1].alive.remote())
            raise

    def _received(self, whose: str, reference: Any) -> Any:
        """What a call returned, waiting for it while the cluster has a head."""
        while True:
            self._head.look()
            try:
                return _received(whose, reference, seconds=LOOK_EVERY)
            except GetTimeoutError:
                continue

    def _whose(self, place: int) -> str:
        if self._server and place == len(self._crew) - 1:
            return "the server"
        start, stop = self._exchange.ranges[place]
        return f"client {start}" if stop == start + 1 else f"clients {start} to {stop - 1}"


def _received(whose: str, reference: Any, seconds: float) -> Any:
    """What a call of somebody's actor returned; what went wrong in it, as an error of ours."""
    try:
        return ray.get(reference, timeout=seconds)
    except GetTimeoutError:
        raise
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, AsyncfedError):
            raise cause from None
        if isinstance(cause, _GONE):
            raise _lost(whose, cause) from None
        raise RunError(f"a step failed in the actor of {whose}:\n{error}") from None
    except _GONE as error:
        raise _lost(whose, error) from None
    except RayError as error:
        raise RunError(f"Ray failed while {whose} was at work: {error}") from None


def _lost(whose: str, error: RayError) -> ActorLostError:
    said = " ".join(str(error).split())
    return ActorLostError(
        f"the actor of {whose} died; what was recorded so far is kept; "
        "go on with `asyncfed resume`, or run again with more clients per actor if memory was short. "
        f"Ray says: {said if len(said) < 600 else said[:200] + ' … ' + said[-400:]}"
    )


def _connect(address: str | None) -> None:
    """Use the Ray this process is connected to, connect to the given cluster, or start Ray here."""
    left()
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # what a dead actor owes is told once, by us
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is not None:
        try:
            ray.init(address=address, **options)
        except (ConnectionError, RuntimeError) as error:
            raise RunError(
                f"cannot reach a Ray cluster at {address!r}: {error}; start one with `ray start --head`"
            ) from None
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(address="local", include_dashboard=False, num_cpus=os.cpu_count(), **options)


@dataclass(frozen=True)
class _Provision:
    """How clients are divided among actors, and what each of these gets."""

    ranges: tuple[tuple[int, int], ...]
    placement: Placement
    cpus: float
    gpus: float

    @property
    def device(self) -> str:
        return self.placement.device

    @property
    def threads(self) -> int:
        return self.placement.threads


def _provision(
    problem: Problem,
    dtype: torch.dtype,
    device: str,
    clients_per_actor: int | Literal["auto"],
    actors: int | None,
    threads: int | None,
    others: int = 0,
) -> _Provision:
    """For the cluster we are connected to, with so many actors beside those of clients; in so many actors,
    with so many torch threads in each, where that is known from before.
    """
    resources = ray.cluster_resources()
    cores, gpus = float(resources.get("CPU", 1)), float(resources.get("GPU", 0))
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    packing = pack(
        problem.clients,
        clients_per_actor,
        memory=resources.get("memory", 0.0) + resources.get("object_store_memory", 0.0),
        client_bytes=_client_bytes(problem, dtype),
        cores=int(cores),
        actors=actors,
    )
    share = gpus_per_actor(device, gpus, packing.actors)
    return _Provision(
        packing.ranges,
        Placement(
            "ray",
            packing.actors,
            packing.clients_per_actor,
            "cuda" if share else "cpu",
            packing.note,
            threads_per_actor(cores, packing.actors) if threads is None else threads,
        ),
        cpus_per_actor(
            [machine.get("CPU", 0.0) for machine in machines],
            packing.actors,
            rooms=[machine.get("GPU", 0.0) // share for machine in machines] if share else None,
            others=others,
        ),
        share,
    )


def _client_bytes(problem: Problem, dtype: torch.dtype) -> float:
    """What a client holds beside the interpreter: its data, and four copies of its variables."""
    data = sum(
        t.nbytes
        for split in (problem.data.train, problem.data.validation, problem.data.test)
        for t in split.tensors
    )
    derivatives = Derivatives.of(problem)
    return data / problem.clients + 4 * dtype.itemsize * (derivatives.inner.d + derivatives.outer.d)


def _by_name(reports: list[Reports]) -> dict[str, list[npt.NDArray[np.float64]]]:
    collected: dict[str, list[npt.NDArray[np.float64]]] = {}
    for report in reports:
        for name, values in report.items():
            collected.setdefault(name, []).append(values)
    return collected


def _stacked(parts: list[Arrays], name: str) -> npt.NDArray[Any]:
    """A variable of all clients. Blocks of which nobody was ever asked remember nothing: that is zero."""
    like = next(part[name] for part in parts if name in part)
    nothing = [np.zeros((len(part["inner"]), *like.shape[1:]), like.dtype) for part in parts]
    return np.concatenate([part.get(name, zero) for part, zero in zip(parts, nothing, strict=True)])
