"""The Ray backend: every block of clients in an actor, by default one client each.

The driver knows the timeline and never sees a payload. For each wave it sends every actor concerned its part
of the wave, with references to the payloads it absorbs; Ray starts the step when these exist and moves their
bytes from actor to actor. An actor's payload of a wave is one object in the store, put there once, whoever
reads it. The driver keeps a reference for as long as the timeline says that somebody may still absorb it, and
stays a few waves ahead of the slowest report, no more, which bounds the memory.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError

from asyncfed.errors import ActorLostError, AsyncfedError, RunError
from asyncfed.network.serials import SerialTable
from asyncfed.network.waves import Absorption, MatrixAbsorption, Snapshot, Wave
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.problem import Problem
from asyncfed.protocols.phase import Phase, Tensors
from asyncfed.runtime.backend import Placement
from asyncfed.runtime.block import Block, BlockWave, Incoming, Measurement
from asyncfed.runtime.packing import cpus_per_actor, gpus_per_actor, pack, threads_per_actor

IntArray = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]
T = TypeVar("T")

_WAVES_AHEAD = 2


class _Client:
    """What an actor holds: a block, on its device."""

    def __init__(
        self,
        problem: Problem,
        clients: IntArray,
        n: int,
        initial: Arrays,
        seed: int,
        dtype: torch.dtype,
        device: str,
        threads: int,
    ) -> None:
        settle_in(threads)
        given = {key: torch.tensor(value) for key, value in initial.items()}
        self._block = Block(problem, clients, seed=seed, dtype=dtype, device=device, n=n, initial=given)

    def begin(self, phase: Phase, first_step: int) -> int:
        return self._block.begin(phase, first_step)

    @ray.method(num_returns=2)
    def run(self, wave: BlockWave, *remote: Arrays) -> tuple[Arrays, dict[str, npt.NDArray[np.float64]]]:
        payload, report = self._block.run(wave, _tensors(remote))
        return {key: value.cpu().numpy() for key, value in payload.items()}, report

    def measure(self, validation: bool, incoming: Incoming, *remote: Arrays) -> Measurement:
        return self._block.measure(incoming, _tensors(remote), validation=validation)

    def finish(self, steps: IntArray, incoming: Incoming, *remote: Arrays) -> None:
        self._block.finish(incoming, steps, _tensors(remote))

    def final(self) -> Arrays:
        return {key: value.cpu().numpy() for key, value in self._block.carried.items()}


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
    ) -> None:
        connect(address)
        plan = provision(problem, dtype, device, clients_per_actor)
        self.placement = plan.placement
        self._actors: list[Any] = []
        self._ranges = plan.ranges
        self._starts = np.array([start for start, _ in plan.ranges] + [problem.clients], dtype=np.int64)
        self._payloads = SerialTable("object", "row", "owner")
        self._objects: dict[int, Any] = {}  # references to payloads, by number
        self._living: dict[int, int] = {}  # payload rows of each object that may still be absorbed
        self._next_object = 0
        self._to_release: list[list[int]] = []
        self._outstanding: deque[tuple[int, Any]] = deque()
        self._reports: list[dict[str, npt.NDArray[np.float64]]] = []
        try:
            actor_class = ray.remote(_Client).options(**plan.options)
            for start, stop in plan.ranges:
                clients = np.arange(start, stop, dtype=np.int64)
                mine = replace(problem, data=problem.data.select(clients))
                given = {key: value[start:stop].cpu().numpy() for key, value in (initial or {}).items()}
                self._actors.append(
                    actor_class.remote(
                        mine, clients, problem.clients, given, seed, dtype, plan.device, plan.threads
                    )
                )
        except BaseException:
            self.close()
            raise

    def begin(self, phase: Phase, first_step: int) -> int:
        self._drain()
        self._payloads = SerialTable("object", "row", "owner")
        self._objects, self._living = {}, {}
        self._to_release = [[] for _ in self._actors]
        return int(self._all(lambda actor, _: actor.begin.remote(phase, first_step))[0])

    def run(self, wave: Wave) -> None:
        absorption = wave.absorption
        cuts = np.searchsorted(absorption.clients, self._starts)
        self._note_released(wave.released)
        submitted: list[tuple[int, int, int, int]] = []
        for place in np.flatnonzero(np.diff(cuts)).tolist():
            first, last = int(cuts[place]), int(cuts[place + 1])
            incoming, references = self._incoming(absorption, place, first, last)
            released = np.array(self._to_release[place], dtype=np.int64)
            self._to_release[place] = []
            part = BlockWave(incoming, wave.steps[first:last], wave.emits[first:last], released)
            payload, report = self._actors[place].run.remote(part, *references)
            number = self._next_object
            self._next_object += 1
            self._objects[number], self._living[number] = payload, last - first
            submitted.append((number, place, first, last))
            self._outstanding.append((place, report))
        self._forget(wave.released)
        for number, place, first, last in submitted:
            rows = np.arange(last - first)
            self._payloads.add(wave.emits[first:last], object=number, row=rows, owner=place)
        while len(self._outstanding) > _WAVES_AHEAD * len(self._actors):
            self._collect()

    def reports(self) -> dict[str, npt.NDArray[np.float64]]:
        self._drain()
        collected: dict[str, list[npt.NDArray[np.float64]]] = {}
        for report in self._reports:
            for name, values in report.items():
                collected.setdefault(name, []).append(values)
        self._reports = []
        return {name: np.concatenate(pieces) for name, pieces in collected.items()}

    def measure(self, snapshot: Snapshot, *, validation: bool) -> list[Measurement]:
        self._drain()
        return self._all(
            lambda actor, place: actor.measure.remote(
                validation, *self._everything(snapshot.absorption, place)
            )
        )

    def finish(self, snapshot: Snapshot) -> None:
        self._drain()
        self._all(
            lambda actor, place: actor.finish.remote(
                snapshot.steps[slice(*self._ranges[place])], *self._everything(snapshot.absorption, place)
            )
        )

    def final(self) -> Tensors:
        parts: list[Arrays] = self._all(lambda actor, _: actor.final.remote())
        return {key: torch.from_numpy(np.concatenate([part[key] for part in parts])) for key in parts[0]}

    def close(self) -> None:
        self._objects, self._outstanding = {}, deque()
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
        self._actors = []

    # --- plans -------------------------------------------------------------------------------------

    def _everything(self, absorption: Absorption | MatrixAbsorption, place: int) -> tuple[Any, ...]:
        incoming, references = self._incoming(absorption, place, *self._ranges[place])
        return incoming, *references

    def _incoming(
        self, absorption: Absorption | MatrixAbsorption, place: int, first: int, last: int
    ) -> tuple[Incoming, list[Any]]:
        """The absorption of rows first:last, which belong to the actor at `place`, and the payloads it needs
        from others.
        """
        lo, hi = int(absorption.indptr[first]), int(absorption.indptr[last])
        rows = absorption.clients[first:last] - self._ranges[place][0]
        sources, weights = absorption.sources[lo:hi], absorption.weights[lo:hi]
        counts = np.diff(absorption.indptr[first : last + 1])
        row_of = np.repeat(np.arange(last - first), counts)
        if not len(sources):
            return Incoming(rows, absorption.indptr[first : last + 1] - lo, sources, weights), []
        objects = self._payloads.get("object", sources)
        away = np.flatnonzero(self._payloads.get("owner", sources) != place)
        if len(away) == len(objects):
            home_sources, home_weights, home_counts = sources[:0], weights[:0], np.zeros_like(counts)
        else:
            home = np.ones(len(sources), dtype=np.bool_)
            home[away] = False
            home_sources, home_weights = sources[home], weights[home]
            home_counts = np.bincount(row_of[home], minlength=last - first)
        wanted = objects[away]
        if (np.diff(wanted) > 0).all():  # one row of each, as it is with one client per actor
            starts = np.arange(len(wanted) + 1)
        else:
            away = away[np.argsort(wanted, kind="stable")]
            wanted, per_object = np.unique(objects[away], return_counts=True)
            starts = np.concatenate([[0], np.cumsum(per_object)])
        incoming = Incoming(
            rows,
            np.concatenate([[0], np.cumsum(home_counts)]),
            home_sources,
            home_weights,
            remote_first=starts,
            remote_rows=row_of[away],
            remote_columns=self._payloads.get("row", sources[away]),
            remote_weights=weights[away],
        )
        return incoming, [self._objects[number] for number in wanted.tolist()]

    def _note_released(self, serials: IntArray) -> None:
        """Tell the owners with their next call, which may be of this wave: they release after absorbing."""
        if len(serials):
            owners = self._payloads.get("owner", serials).tolist()
            for serial, owner in zip(serials.tolist(), owners, strict=True):
                self._to_release[owner].append(serial)

    def _forget(self, serials: IntArray) -> None:
        """Let go of payloads that nobody will absorb any more; the tasks under way hold what they need."""
        if not len(serials):
            return
        for number in self._payloads.get("object", serials).tolist():
            self._living[number] -= 1
            if not self._living[number]:
                del self._objects[number], self._living[number]
        self._payloads.forget(serials)

    # --- waiting -----------------------------------------------------------------------------------

    def _all(self, call: Callable[[Any, int], Any]) -> list[Any]:
        references = [call(actor, place) for place, actor in enumerate(self._actors)]
        return [self._get(place, reference) for place, reference in enumerate(references)]

    def _collect(self) -> None:
        place, reference = self._outstanding.popleft()
        self._reports.append(self._get(place, reference))

    def _drain(self) -> None:
        while self._outstanding:
            self._collect()

    def _get(self, place: int, reference: Any) -> Any:
        return received(named(*self._ranges[place]), reference)


def named(start: int, stop: int) -> str:
    """Whose actor it is, of clients start..stop−1."""
    return f"client {start}" if stop == start + 1 else f"clients {start} to {stop - 1}"


def received(whose: str, reference: Any) -> Any:
    """What a call of somebody's actor returned; what went wrong in it, as an error of ours."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, AsyncfedError):
            raise cause from None
        if isinstance(cause, RayActorError):
            raise _lost(whose, cause) from None
        raise RunError(f"a step failed in the actor of {whose}:\n{error}") from None
    except RayActorError as error:
        raise _lost(whose, error) from None
    except RayError as error:
        raise RunError(f"Ray failed while {whose} was at work: {error}") from None


def _lost(whose: str, error: RayActorError) -> ActorLostError:
    said = " ".join(str(error).split())
    return ActorLostError(
        f"the actor of {whose} died; what was recorded so far is kept; "
        "run again, with more clients per actor if memory was short. "
        f"Ray says: {said if len(said) < 600 else said[:200] + ' … ' + said[-400:]}"
    )


def connect(address: str | None) -> None:
    """Use the Ray this process is connected to, connect to the given cluster, or start Ray here."""
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
class Provision:
    """How clients are divided among actors, and what each of these gets."""

    ranges: tuple[tuple[int, int], ...]
    placement: Placement
    threads: int
    cpus: float
    gpus: float

    @property
    def device(self) -> str:
        return self.placement.device

    @property
    def options(self) -> dict[str, Any]:
        """Of the actors, as Ray takes them."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "scheduling_strategy": "SPREAD"}


def provision(
    problem: Problem,
    dtype: torch.dtype,
    device: str,
    clients_per_actor: int | Literal["auto"],
    others: int = 0,
) -> Provision:
    """For the cluster we are connected to, with so many actors beside those of clients."""
    resources = ray.cluster_resources()
    cores, gpus = float(resources.get("CPU", 1)), float(resources.get("GPU", 0))
    packing = pack(
        problem.clients,
        clients_per_actor,
        memory=resources.get("memory", 0.0) + resources.get("object_store_memory", 0.0),
        client_bytes=_client_bytes(problem, dtype),
        cores=int(cores),
    )
    share = gpus_per_actor(device, gpus, packing.actors)
    return Provision(
        packing.ranges,
        Placement("ray", packing.actors, packing.clients_per_actor, "cuda" if share else "cpu", packing.note),
        threads_per_actor(cores, packing.actors),
        cpus_per_actor(cores, packing.actors + others),
        share,
    )


def settle_in(threads: int) -> None:
    """What every actor of ours does first."""
    torch.set_num_threads(threads)
    # What other actors sent is read where it lies in the object store: read-only, and nobody writes to it.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's business


def _client_bytes(problem: Problem, dtype: torch.dtype) -> float:
    """What a client holds beside the interpreter: its data, and four copies of its variables."""
    data = sum(
        t.nbytes
        for split in (problem.data.train, problem.data.validation, problem.data.test)
        for t in split.tensors
    )
    derivatives = Derivatives.of(problem)
    return data / problem.clients + 4 * dtype.itemsize * (derivatives.inner.d + derivatives.outer.d)


def _tensors(remote: tuple[Arrays, ...]) -> list[Tensors]:
    return [{key: torch.from_numpy(value) for key, value in payload.items()} for payload in remote]
