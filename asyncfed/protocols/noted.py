"""What networks draw and note in the local steps of clients: keys for dropout, statistics for BatchNorm.

Every minibatch has a key of its own. Buffers that stay at their client move from one minibatch to the next
beside the variables; those that are averaged are the last numbers of the inner variable, and after each step
they are what the network made of them, whatever else the step did to v.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.protocols.at import Samples

IntArray = npt.NDArray[np.int64]
Batch = tuple[Tensor, ...]


class Noted:
    """Of the clients at `places`, whose variables are like `v`, in a stretch of steps."""

    def __init__(self, samples: Samples, places: IntArray, v: Tensor) -> None:
        self._at, self._places = samples.at, places
        problem = samples.derivatives.problem
        trains = samples.level == "inner"
        self._draws = problem.draws and trains
        self._tail = problem.averaged_buffers if trains else 0
        self._rows = torch.from_numpy(places).to(v.device)
        self._local = (
            samples.at.buffers[self._rows] if trains and samples.at.home.buffers is not None else None
        )
        self.moved: Tensor | None = None
        if self._tail:
            self.moved = v.new_empty(len(v), self._tail)
        elif self._local is not None:
            self.moved = torch.empty_like(self._local)

    def keyed(self, batches: Batch, first: int, length: int) -> Batch:
        """Minibatches of several steps (steps, clients, B, …), the first of which has that number."""
        if not self._draws:
            return batches
        keys = self._at.keys(self._places, first, length)
        place = len(batches) - (1 if self._local is None else 2)
        return (*batches[:place], keys, *batches[place + 1 :])

    def now(self, batch: Batch) -> Batch:
        """A minibatch, and the buffers as they are now."""
        return batch if self._local is None else (*batch[:-1], self._local)

    def after(self, v: Tensor) -> None:
        """A step was made."""
        if self.moved is None:
            return
        if self._tail:
            v[:, -self._tail :] = self.moved
        else:
            assert self._local is not None
            self._local, self.moved = self.moved, self._local

    def end(self) -> None:
        """The last was made."""
        if self._local is not None:
            self._at.buffers = self._at.buffers.index_copy(0, self._rows, self._local)
