"""The local backend: one block of all clients in this process."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from asyncfed.network.waves import Absorption, MatrixAbsorption, Snapshot, Wave
from asyncfed.problems.problem import Problem
from asyncfed.problems.threads import WORTH_SHARING
from asyncfed.protocols.phase import Phase, Tensors
from asyncfed.runtime.backend import Placement
from asyncfed.runtime.block import Block, BlockWave, Incoming, Measurement, Tap


def choose_device(device: str, cuda: bool) -> str:
    """ "auto" is the GPU where there is one."""
    if device == "auto":
        return "cuda" if cuda else "cpu"
    return device


def worthwhile_threads(clients: int, batch: int, parameters: int, available: int) -> int:
    """One torch thread where a step's work is so small that sharing it costs more than it saves (and leaves
    the other cores to the trace), all of them otherwise."""
    return 1 if clients * batch * parameters < WORTH_SHARING else available


class LocalBackend:
    """Everybody at home."""

    def __init__(
        self,
        problem: Problem,
        *,
        seed: int,
        dtype: torch.dtype,
        device: str = "auto",
        tap: Tap | None = None,
        initial: Tensors | None = None,
    ) -> None:
        chosen = choose_device(device, torch.cuda.is_available())
        everyone = np.arange(problem.clients, dtype=np.int64)
        self._block = Block(
            problem, everyone, seed=seed, dtype=dtype, device=chosen, tap=tap, initial=initial
        )
        self._problem = problem
        self._threads = torch.get_num_threads()
        self._reports: dict[str, list[npt.NDArray[np.float64]]] = {}
        self.placement = Placement("local", 0, problem.clients, chosen)

    def begin(self, phase: Phase, first_step: int) -> int:
        largest = int(self._problem.data.train.sizes.max())
        batch = largest if phase.batch is None else phase.batch
        parameters = self._block.carried["inner"].shape[1]
        torch.set_num_threads(worthwhile_threads(self._problem.clients, batch, parameters, self._threads))
        return self._block.begin(phase, first_step)

    def run(self, wave: Wave) -> None:
        _, report = self._block.run(
            BlockWave(_incoming(wave.absorption), wave.steps, wave.emits, wave.released)
        )
        for name, values in report.items():
            self._reports.setdefault(name, []).append(values)

    def reports(self) -> dict[str, npt.NDArray[np.float64]]:
        collected = {name: np.concatenate(pieces) for name, pieces in self._reports.items()}
        self._reports = {}
        return collected

    def measure(self, snapshot: Snapshot, *, validation: bool) -> list[Measurement]:
        return [self._block.measure(_incoming(snapshot.absorption), validation=validation)]

    def finish(self, snapshot: Snapshot) -> None:
        self._block.finish(_incoming(snapshot.absorption), snapshot.steps)

    def final(self) -> Tensors:
        return self._block.carried

    def close(self) -> None:
        torch.set_num_threads(self._threads)


def _incoming(absorption: Absorption | MatrixAbsorption) -> Incoming:
    if isinstance(absorption, MatrixAbsorption):
        return Incoming(absorption.clients, _NONE, _NONE, _NO_WEIGHTS, absorption.matrix)
    return Incoming(absorption.clients, absorption.indptr, absorption.sources, absorption.weights)


_NONE, _NO_WEIGHTS = np.zeros(0, dtype=np.int64), np.zeros(0)
