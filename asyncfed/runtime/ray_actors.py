"""What an actor is, and where actors come from: hired for a run, or taken over from the one before.

An actor costs about two seconds of a core to start, nearly all of it imports. Whoever makes many runs on one
Ray keeps them (`actors_kept`): what a run that ended well leaves idle, the next one takes over. An actor
holds nothing of an earlier run, so the numbers are the same.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch

from asyncfed.problems.problem import Problem
from asyncfed.protocols.part import Act, Part, Tensors
from asyncfed.runtime.block import Block, Reports
from asyncfed.runtime.exchange import BlockWave, Sum, Task
from asyncfed.runtime.judging import Measurement
from asyncfed.runtime.state import State

IntArray = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]

_ANSWERS_WITHIN = 10.0  # seconds that an idle actor has to say that it is there


class Node:
    """What an actor holds: a block, on its device; nothing before it has settled, and after it was left."""

    _block: Block

    def alive(self) -> bool:
        return True

    def settle(
        self,
        problem: Problem,
        nodes: IntArray,
        n: int,
        initial: Arrays,
        seed: int,
        dtype: torch.dtype,
        device: str,
        threads: int,
        server: bool,
    ) -> None:
        _settle_in(threads)
        given = {key: torch.tensor(value) for key, value in initial.items()}
        self._fresh = partial(
            Block, problem, nodes, seed=seed, dtype=dtype, device=device, n=n, initial=given, server=server
        )
        self._block = self._fresh()

    def leave(self) -> None:
        del self._block, self._fresh

    def begin(self, part: Part, first_step: int) -> None:
        self._block.begin(part, first_step)

    @ray.method(num_returns=2)
    def run(self, wave: BlockWave, round: Act | None, *parcels: Arrays) -> tuple[Arrays | None, Reports]:
        with torch.no_grad():
            report = self._block.run(wave, _tensors(parcels), round)
            return arrays_of(self._block.payload(wave.emits)) if wave.exports else None, report

    def hand_over(self, wanted: Sum) -> Arrays:
        return arrays_of(self._block.hand_over(wanted))

    def measure(self, task: Task, judging: Act | None, validation: bool, *parcels: Arrays) -> Measurement:
        return self._block.measure(task.wave.incoming, _tensors(parcels), part=judging, validation=validation)

    def finish(self, task: Task, steps: IntArray, *parcels: Arrays) -> None:
        self._block.finish(task.wave.incoming, steps, _tensors(parcels))

    def final(self) -> Arrays:
        return arrays_of(self._block.store)

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        held = self._block.state()
        return arrays_of(held.tensors), held.facts

    def restore(self, arrays: Arrays, facts: dict[str, Any], part: Part | None) -> None:
        tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
        self._block.restore(State(tensors, facts), part)

    def start_again(self) -> None:
        self._block = self._fresh()


def _settle_in(threads: int) -> None:
    """What every actor of ours does first."""
    torch.set_num_threads(threads)
    # What other actors sent is read where it lies in the object store: read-only, and nobody writes to it.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's business


def _tensors(parcels: tuple[Arrays, ...]) -> list[Tensors]:
    return [{key: torch.from_numpy(value) for key, value in parcel.items()} for parcel in parcels]


def arrays_of(tensors: Tensors) -> Arrays:
    """The same, as what Ray carries without a copy."""
    return {key: value.cpu().numpy() for key, value in tensors.items()}


# --- hiring ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Hired:
    """An actor, and the shares of a core and of a GPU that Ray keeps for it."""

    handle: Any
    cpus: float
    gpus: float = 0.0

    def end(self) -> None:
        ray.kill(self.handle, no_restart=True)


_idle: list[Hired] = []
_keep = False


@contextmanager
def actors_kept(keep: bool = True) -> Iterator[None]:
    """Within, the actors of runs that end well are there for the next ones; with `keep=False` none are,
    whatever holds around it. Where none are kept, none are left.
    """
    global _keep
    before, _keep = _keep, keep
    try:
        if not keep:
            end_idle()
        yield
    finally:
        _keep = before
        if not before:
            end_idle()


def hire(cpus: float, gpus: float = 0.0, *, spread: bool = False) -> Hired:
    """A new actor, with shares of a core and of a GPU; spread ones go to one machine after the other."""
    options = {"num_cpus": cpus, "num_gpus": gpus}
    strategy = {"scheduling_strategy": "SPREAD"} if spread else {}
    return Hired(ray.remote(Node).options(**options, **strategy).remote(), cpus, gpus)


def take_over(count: int, cpus: float, gpus: float = 0.0) -> list[Hired]:
    """At most so many idle actors that hold no more of a core than that, and as much of a GPU."""
    waiting = {actor.handle.alive.remote(): actor for actor in _idle}
    signs = list(waiting)
    there = ray.wait(signs, num_returns=len(signs), timeout=_ANSWERS_WITHIN)[0] if signs else []
    taken: list[Hired] = []
    for sign, actor in waiting.items():
        if sign not in there or not _answered(sign):
            _idle.remove(actor)
            actor.end()
        elif len(taken) < count and actor.cpus <= cpus and actor.gpus == gpus:
            _idle.remove(actor)
            taken.append(actor)
    return taken


def dismiss(actors: list[Hired], *, well: bool) -> None:
    """Of a run that is over: kept where somebody keeps them and it ended well, or ended."""
    for actor in actors:
        if well and _keep:
            actor.handle.leave.remote()
            _idle.append(actor)
        else:
            actor.end()


def end_idle() -> None:
    """Make room."""
    while _idle:
        actor = _idle.pop()
        if ray.is_initialized():
            actor.end()


def _answered(sign: Any) -> bool:
    try:
        return bool(ray.get(sign))
    except ray.exceptions.RayError:
        return False
