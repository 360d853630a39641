"""Server-based methods on Ray: the board in an actor of its own, every cohort of clients in another.

A round is one call per actor concerned, and one call of the server's actor: the references of the variables
that a round reads go to the clients' actors, those of their sums to the server's, which returns what changes
on the board. The driver sees none of these bytes, and stays a few rounds ahead of the slowest report.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import ray
import torch

from asyncfed.errors import ActorLostError
from asyncfed.problems.problem import Problem
from asyncfed.protocols.rounds import Round, Tensors
from asyncfed.runtime.block import Measurement
from asyncfed.runtime.cohort import Board, Cohort, Task
from asyncfed.runtime.ray_backend import Arrays, connect, named, provision, received, settle_in
from asyncfed.runtime.served import Reports

Names = tuple[tuple[str, ...], ...]

_ROUNDS_AHEAD = 2


class _Clients:
    """What an actor holds: a cohort, on its device."""

    def __init__(
        self,
        problem: Problem,
        clients: npt.NDArray[np.int64],
        seed: int,
        dtype: torch.dtype,
        device: str,
        threads: int,
    ) -> None:
        settle_in(threads)
        self._device = device
        self._cohort = Cohort(problem, clients, seed=seed, dtype=dtype, device=device)

    @ray.method(num_returns=2)
    def answer(
        self, task: Task, names: Names, *pieces: Arrays
    ) -> tuple[Arrays, dict[str, npt.NDArray[np.float64]]]:
        total, report = self._cohort.answer(task, _board(names, pieces, self._device))
        return _arrays(total), report

    def measure(self, names: Names, *pieces: Arrays) -> Measurement:
        return self._cohort.measure(_board(names, pieces, self._device))


class _Server:
    """The actor with the board."""

    def __init__(
        self, problem: Problem, seed: int, dtype: torch.dtype, initial: Arrays, threads: int
    ) -> None:
        settle_in(threads)
        given = {name: torch.tensor(value) for name, value in initial.items()}
        self._board = Board(problem, seed=seed, dtype=dtype, initial=given)

    def alive(self) -> bool:
        return True

    def begin(self) -> Arrays:
        return _arrays(self._board.values)

    def fold(self, round: Round, *parts: Arrays) -> Arrays:
        return _arrays(self._board.fold(round, [_tensors(part) for part in parts]))

    def reset_inner(self) -> Arrays:
        return _arrays(self._board.reset_inner())

    def final(self) -> Arrays:
        return _arrays(self._board.final())


class RayServed:
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
        plan = provision(problem, dtype, device, clients_per_actor, others=1)
        self.placement = plan.placement
        self._ranges = plan.ranges
        self._actors: list[Any] = []
        self._server: Any = None
        self._outstanding: deque[tuple[str, Any]] = deque()
        self._reports: Reports = []
        empty = replace(problem, data=problem.data.select(np.zeros(0, dtype=np.int64)))
        given = {name: value.cpu().numpy() for name, value in (initial or {}).items()}
        try:
            server_class = ray.remote(_Server).options(num_cpus=plan.cpus)
            self._server = server_class.remote(empty, seed, dtype, given, 1)
            actor_class = ray.remote(_Clients).options(**plan.options)
            for start, stop in plan.ranges:
                clients = np.arange(start, stop, dtype=np.int64)
                mine = replace(problem, data=problem.data.select(clients))
                self._actors.append(actor_class.remote(mine, clients, seed, dtype, plan.device, plan.threads))
            begun = self._server.begin.remote()
        except BaseException:
            self.close()
            raise
        self._board: dict[str, Any] = {"x": begun, "y": begun}  # where each variable's newest value is

    def run(self, task: Task) -> None:
        names, pieces = self._pieces(task.round.reads)
        sums, asked = [], 0
        for actor, (start, stop) in zip(self._actors, self._ranges, strict=True):
            part = task.part(start, stop)
            if part is None:
                continue
            total, report = actor.answer.remote(part, names, *pieces)
            asked += 1
            self._outstanding.append((named(start, stop), report))
            if len(part.clients) or part.older:
                sums.append(total)
        changed = self._server.fold.remote(task.round, *sums)
        for name in task.round.writes:
            self._board[name] = changed
        while len(self._outstanding) > _ROUNDS_AHEAD * max(1, asked):
            self._collect()

    def reset_inner(self) -> None:
        self._board["y"] = self._server.reset_inner.remote()

    def reports(self) -> Reports:
        while self._outstanding:
            self._collect()
        collected, self._reports = self._reports, []
        return collected

    def measure(self) -> list[Measurement]:
        names, pieces = self._pieces(("x", "y"))
        references = [actor.measure.remote(names, *pieces) for actor in self._actors]
        return [
            self._received(named(*place), reference)
            for place, reference in zip(self._ranges, references, strict=True)
        ]

    def final(self) -> Tensors:
        final: Arrays = received("the server", self._server.final.remote())
        return {name: torch.tensor(value) for name, value in final.items()}  # what Ray holds is read-only

    def close(self) -> None:
        self._outstanding = deque()
        if ray.is_initialized():
            for actor in (*self._actors, *([] if self._server is None else [self._server])):
                ray.kill(actor, no_restart=True)
        self._actors, self._server = [], None

    def _pieces(self, reads: tuple[str, ...]) -> tuple[Names, list[Any]]:
        """The objects that hold these variables, each once, and what to take from each."""
        names: dict[Any, tuple[str, ...]] = {}
        for name in reads:
            names[self._board[name]] = (*names.get(self._board[name], ()), name)
        return tuple(names.values()), list(names)

    def _collect(self) -> None:
        whose, reference = self._outstanding.popleft()
        self._reports.append(self._received(whose, reference))

    def _received(self, whose: str, reference: Any) -> Any:
        try:
            return received(whose, reference)
        except ActorLostError:  # or was it the server, from whom they had nothing to work on?
            received("the server", self._server.alive.remote())
            raise


def _arrays(tensors: Tensors) -> Arrays:
    return {name: value.cpu().numpy() for name, value in tensors.items()}


def _tensors(arrays: Arrays) -> Tensors:
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


def _board(names: Names, pieces: tuple[Arrays, ...], device: str) -> Tensors:
    """The variables of these names, one tuple of names from each piece."""
    return {
        name: torch.from_numpy(piece[name]).to(device)
        for wanted, piece in zip(names, pieces, strict=True)
        for name in wanted
    }
