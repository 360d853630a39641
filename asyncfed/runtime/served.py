"""Backends of server-based methods: where clients and board live. This one keeps them in this process."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from asyncfed.problems.problem import Problem
from asyncfed.protocols.rounds import Tensors
from asyncfed.runtime.backend import Placement
from asyncfed.runtime.block import Measurement
from asyncfed.runtime.cohort import Board, Cohort, Task
from asyncfed.runtime.local import choose_device

FloatArray = npt.NDArray[np.float64]
Reports = list[dict[str, FloatArray]]


@runtime_checkable
class ServedBackend(Protocol):
    """Executes one run; `close` is called whatever happens."""

    @property
    def placement(self) -> Placement: ...

    def run(self, task: Task) -> None:
        """Execute a round, or put it on its way."""

    def reset_inner(self) -> None: ...

    def reports(self) -> Reports:
        """What the rounds since the last call reported, in order."""

    def measure(self) -> list[Measurement]: ...

    def final(self) -> Tensors: ...

    def close(self) -> None: ...


class LocalServed:
    """Everybody at home."""

    def __init__(
        self,
        problem: Problem,
        *,
        seed: int,
        dtype: torch.dtype,
        device: str = "auto",
        initial: Tensors | None = None,
    ) -> None:
        chosen = choose_device(device, torch.cuda.is_available())
        everyone = np.arange(problem.clients, dtype=np.int64)
        self._cohort = Cohort(problem, everyone, seed=seed, dtype=dtype, device=chosen)
        self._board = Board(problem, seed=seed, dtype=dtype, device=chosen, initial=initial)
        self._reports: Reports = []
        self.placement = Placement("local", 0, problem.clients, chosen)

    def run(self, task: Task) -> None:
        total, report = self._cohort.answer(task, self._board.values)
        self._board.fold(task.round, [total])
        self._reports.append(report)

    def reset_inner(self) -> None:
        self._board.reset_inner()

    def reports(self) -> Reports:
        collected, self._reports = self._reports, []
        return collected

    def measure(self) -> list[Measurement]:
        return [self._cohort.measure(self._board.values)]

    def final(self) -> Tensors:
        return self._board.final()

    def close(self) -> None:
        return None
