"""Integers kept per payload while the payload is of interest.

Payloads are numbered about in the order of emission, so a table over them is an array with a moving front: it
grows at the end, and what lies before the oldest payload still of interest is forgotten. Now and then one
comes that is older still, of a step that took long: then the front moves back. Look-ups are vectorised.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from asyncfed.recall import recalled

IntArray = npt.NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)


@recalled()
class SerialTable:
    """Named integer columns indexed by payload serial."""

    def __init__(self, *columns: str) -> None:
        self._base = 0
        self._alive: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.alive = 0  # payloads in the table
        self._columns: dict[str, IntArray] = {name: np.zeros(0, dtype=np.int64) for name in columns}

    def add(self, serials: IntArray, **values: IntArray | int) -> None:
        at = self._room_for(serials)
        self._alive[at] = True
        self.alive += len(serials)
        for name, value in values.items():
            self._columns[name][at] = value

    def get(self, column: str, serials: IntArray) -> IntArray:
        return self._columns[column][serials - self._base]

    def set(self, column: str, serials: IntArray, values: IntArray | int) -> None:
        self._columns[column][serials - self._base] = values

    def holds(self, serials: IntArray) -> npt.NDArray[np.bool_]:
        """Which of the payloads are in the table."""
        at = serials - self._base
        there = (at >= 0) & (at < len(self._alive))
        there[there] = self._alive[at[there]]
        return there

    def entries(self) -> tuple[IntArray, dict[str, IntArray]]:
        """All payloads in the table, in order, and their columns; `add` puts them into another."""
        at = np.flatnonzero(self._alive)
        return self._base + at, {name: column[at] for name, column in self._columns.items()}

    def refill(self, serials: IntArray, **values: IntArray) -> None:
        """Put into an empty table what `entries` of another told, or a file that says so: what would take far
        more memory than so many payloads do is refused.
        """
        columns = [serials, *values.values()]
        if any(column.dtype != np.int64 or column.shape != (len(serials),) for column in columns):
            raise ValueError("payloads are not numbered by columns of whole numbers")
        if not len(serials):
            return
        first, last = int(serials[0]), int(serials[-1])
        if first < 0 or not (np.diff(serials) > 0).all() or last - first > _spread(len(serials)):
            raise ValueError(f"{len(serials):,} payloads are numbered from {first} to {last}")
        self.add(serials, **values)

    def forget(self, serials: IntArray) -> None:
        self._alive[serials - self._base] = False
        self.alive -= len(serials)

    def clear(self) -> None:
        self._alive[:] = False
        self.alive = 0

    def _room_for(self, serials: IntArray) -> IntArray:
        first, last = int(serials.min()), int(serials.max())
        if first < self._base or last - self._base >= len(self._alive):
            living = np.flatnonzero(self._alive)
            kept = slice(int(living[0]), int(living[-1]) + 1) if len(living) else slice(0, 0)
            if len(living):
                first, last = min(first, self._base + kept.start), max(last, self._base + kept.stop - 1)
            at, size = self._base + kept.start - first, max(16_384, 2 * (last - first + 1))
            self._base = first
            self._alive = _moved(self._alive, kept, at, size)
            for name, column in self._columns.items():
                self._columns[name] = _moved(column, kept, at, size)
        return serials - self._base


def _spread(payloads: int) -> int:
    """How far apart the oldest and the youngest of so many may be: some clients are slow, and links too."""
    return max(1 << 22, payloads << 16)


def _moved(old: npt.NDArray[_Scalar], kept: slice, at: int, size: int) -> npt.NDArray[_Scalar]:
    """A larger array with what is kept of the old one from a place on."""
    new = np.zeros(size, dtype=old.dtype)
    new[at : at + kept.stop - kept.start] = old[kept]
    return new
