"""Messages by sender, time and status, in so many cells that a screen shows no more.

The width of a bin is a power of two. When messages come that are later than all bins, neighbours are put
together and the width doubles: so memory is bounded, however long a run goes, and every count stays exact.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from asyncfed.network.waves import Status

LANES, BINS = 256, 1024
_NARROWEST = -40  # log2 of a bin's width


class Overview:
    """Counts by [status, lane, bin]; a lane is a node, or several neighbours where there are many."""

    def __init__(self, nodes: int) -> None:
        self.nodes, self.lanes = nodes, min(nodes, LANES)
        self.counts: npt.NDArray[np.int32] = np.zeros((len(Status), self.lanes, BINS), np.int32)
        self._log2 = _NARROWEST

    @property
    def width(self) -> float:
        """Of a bin, in virtual time."""
        return math.ldexp(1.0, self._log2)

    def add(self, sender: npt.NDArray[np.int32], status: npt.NDArray[np.int64], time: Floats) -> None:
        """Count messages by when they were sent; times are finite and not negative."""
        if not len(time):
            return
        self._reach(float(time.max()))
        lane = sender.astype(np.int64) * self.lanes // self.nodes
        cell = (status * self.lanes + lane) * BINS + (time / self.width).astype(np.int64)
        self.counts += np.bincount(cell, minlength=self.counts.size).reshape(self.counts.shape).astype("i4")

    def copy(self) -> Overview:
        same = Overview(self.nodes)
        same.counts, same._log2 = self.counts.copy(), self._log2
        return same

    def between(self, begin: float, end: float) -> tuple[int, int]:
        """The bins that a window touches."""
        low, high = (int(min(max(time / self.width, 0), BINS)) for time in (begin, end))
        return min(low, BINS - 1), min(high + 1, BINS)

    def _reach(self, time: float) -> None:
        needed = max(self._log2, math.floor(math.log2(time / BINS)) + 1) if time > 0 else self._log2
        together = min(1 << (needed - self._log2), BINS)
        self._log2 = needed
        if together > 1:
            kept = self.counts.reshape(len(Status), self.lanes, BINS // together, together).sum(axis=3)
            self.counts[:] = 0
            self.counts[:, :, : BINS // together] = kept


Floats = npt.NDArray[np.float64]
