"""The payloads of a block that somebody may still absorb, one row each.

Rows stand in one matrix for every variable, at slots that are used again; each in the precision of what was
put there, for a part may keep some of its variables in doubles (`Part.exact`). When a wave is the whole block
and nothing older is wanted any more (every lockstep round), its payload itself becomes the pool: no row is
copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.errors import RunError
from asyncfed.network.serials import SerialTable
from asyncfed.room import free_bytes
from asyncfed.runtime.memory import lazy_zeros
from asyncfed.runtime.state import State, copied, of_arrays

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Tensors = dict[str, Tensor]

_DENSE_ROWS = 16  # below this many rows a bag of rows beats a product over the whole pool
_DENSE_SHARE = 0.2  # and below this share of non-zero weights
_ROOM, _ROOM_BYTES = 16, 2**30  # payloads for each node, to begin with, and bytes: with more it is copied


class Mixing:
    """How rows of the pool are summed: by a matrix, or (with slots) as bags of weighted rows.

    Weights are of the run's precision; `in_doubles` makes those for variables that are kept in doubles.
    """

    __slots__ = ("_in_doubles", "offsets", "rows", "slots", "weights")

    def __init__(
        self,
        rows: int,
        weights: Tensor,
        slots: Tensor | None = None,
        offsets: Tensor | None = None,
        in_doubles: Callable[[], Mixing] | None = None,
    ) -> None:
        self.rows, self.weights, self.slots, self.offsets = rows, weights, slots, offsets
        self._in_doubles = in_doubles

    def of(self, dtype: torch.dtype) -> Mixing:
        """The same for variables of that precision."""
        if dtype == self.weights.dtype:
            return self
        assert self._in_doubles is not None, "what is not of the run's precision is in doubles"
        return self._in_doubles()

    def product(self, pool: Tensor, start: Tensor | None, out: Tensor | None) -> Tensor:
        """start + Σ weight · row, in place of `start` (or in `out`) where given."""
        if self.slots is None:
            pool = pool[: self.weights.shape[1]]
            if start is not None:
                return start.addmm_(self.weights, pool)
            if out is None:
                return torch.mm(self.weights, pool)
            return torch.mm(self.weights, pool, out=out)
        total = torch.nn.functional.embedding_bag(
            self.slots,
            pool,
            self.offsets,
            mode="sum",
            per_sample_weights=self.weights,
            include_last_offset=True,
        )
        return total if start is None else start.add_(total)


class Pool:
    """Rows by slot, of a block of k nodes."""

    def __init__(self, k: int, dtype: torch.dtype, device: torch.device) -> None:
        self._k, self._dtype, self._device = k, dtype, device
        self.rows: Tensors = {}
        self._slots = SerialTable("slot", "node")
        self._free: list[int] = []  # slots given back
        self.size = 0  # slots ever used
        self._capacity = 0
        self._adopted: IntArray | None = None  # the payloads that the rows are, in order

    @property
    def alive(self) -> int:
        """Payloads in it."""
        return self._slots.alive

    def adopt(self, payload: Tensors, serials: IntArray, nodes: IntArray) -> Tensors:
        """Take the rows of these nodes as they stand, nothing else being wanted; returns the old rows."""
        old, self.rows = self.rows, dict(payload)
        self.size = self._capacity = len(serials)
        self._free = []
        self._slots.add(serials, slot=np.arange(len(serials)), node=nodes)
        self._adopted = serials
        return old

    def put(self, payload: Mapping[str, Tensor], serials: IntArray, nodes: IntArray) -> None:
        """Copy rows of these nodes to free slots."""
        wanted = len(serials)
        if not wanted:
            return
        row_bytes = sum(value.itemsize * value.shape[1] for value in payload.values())
        slots = np.array(self._claimed(wanted, row_bytes), dtype=np.int64)
        self._adopted = None
        at = torch.from_numpy(slots).to(self._device)
        for name, value in payload.items():
            rows = self.rows.get(name)
            if rows is None or rows.shape[1] != value.shape[1]:
                rows = self.rows[name] = self._zeros(self._capacity, value.shape[1], value.dtype)
            rows.index_copy_(0, at, value)
        self._slots.add(serials, slot=slots, node=nodes)

    def _claimed(self, wanted: int, row_bytes: int) -> list[int]:
        """Free slots: first those given back, then new ones."""
        slots = [self._free.pop() for _ in range(min(wanted, len(self._free)))]
        new = wanted - len(slots)
        # Rows that were adopted may be somebody else's too: read, but not written to.
        if self.size + new > self._capacity or self._adopted is not None:
            plenty = min(_ROOM * self._k, _ROOM_BYTES // max(1, row_bytes))
            self._capacity = max(self._capacity + self._capacity // 2, plenty, self.size + new)
            for name in self.rows:
                self.rows[name] = self._grown(self.rows[name])
        slots.extend(range(self.size, self.size + new))
        self.size += new
        return slots

    def _grown(self, old: Tensor) -> Tensor:
        """The same rows with room for more, as long as there is memory for both."""
        used = old[: self.size]
        free = free_bytes() if self._device.type == "cpu" else math.inf
        if used.nbytes > free:
            raise self._full(used.nbytes, f"{free / 2**20:,.0f} MiB are free")
        try:
            grown = self._zeros(self._capacity, old.shape[1], old.dtype)
            grown[: self.size] = used
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            raise self._full(used.nbytes, str(error) or "there are not so many") from error
        return grown

    def _full(self, wanted: int, why: str) -> RunError:
        row_bytes = sum(value[:1].nbytes for value in self.rows.values())
        return RunError(
            f"memory is full of payloads that are under way: {self.alive:,} of {row_bytes:,} bytes each in "
            f"one block, and {wanted / 2**20:,.0f} MiB are wanted to hold more ({why}). Where links are "
            "offered more than they carry (the warnings of a run name them) there are ever more: give them "
            "more bandwidth, let steps take longer or make fewer, set a horizon, or use a smaller model"
        )

    def release(self, serials: IntArray) -> None:
        if not len(serials):
            return
        if len(serials) == self._slots.alive:  # a whole round: the next payload takes its place
            self._free = list(range(self.size - 1, -1, -1))
            self._slots.clear()
        else:
            self._free.extend(self._slots.get("slot", serials)[::-1].tolist())
            self._slots.forget(serials)

    def release_own(self, serials: IntArray) -> None:
        """Forget those of the payloads that are here; others stand in other blocks."""
        mine = self._adopted
        if mine is not None and 0 < len(mine) == self._slots.alive and len(serials) >= len(mine):
            first, last = serials[0], serials[len(mine) - 1]
            all_of_them = first == mine[0] and last == mine[-1]  # a wave's are numbered without gaps
        else:
            all_of_them = False
        self.release(mine if mine is not None and all_of_them else serials[self._slots.holds(serials)])

    def state(self) -> State:
        """All of it. Where a row stands decides in which order it is added, so slots are part of it, and what
        stands in those that are free."""
        serials, columns = self._slots.entries()
        rows = {f"rows/{name}": value[: self.size] for name, value in self.rows.items()}
        numbers = {"serials": serials, "slots": columns["slot"], "nodes": columns["node"]}
        numbers["free"] = np.array(self._free, np.int64)
        if self._adopted is not None:
            numbers["adopted"] = self._adopted
        return State(copied(rows) | of_arrays(numbers), {"size": self.size})

    def restore(self, state: State) -> None:
        """Be as `state` was taken."""
        self.size = self._capacity = int(state.facts["size"])
        rows, slots, free = state.under("rows").tensors, state.array("slots"), state.array("free")
        used = np.concatenate([slots, free])
        if any(value.dim() != 2 or len(value) != self.size for value in rows.values()):
            raise ValueError(f"a pool of {self.size} rows has others")
        if len(used) and not 0 <= used.min() <= used.max() < self.size:
            raise ValueError(f"a pool of {self.size} rows has none at {used.min()} or {used.max()}")
        self._free = free.tolist()
        self._slots = SerialTable("slot", "node")
        self._slots.refill(state.array("serials"), slot=slots, node=state.array("nodes"))
        self._adopted = state.array("adopted") if "adopted" in state.tensors else None
        self.rows = {name: value.to(self._device, copy=True) for name, value in rows.items()}

    def of_matrix(self, matrix: FloatArray) -> Mixing:
        """Weights over a whole round, in order."""
        rows, exact = len(matrix), torch.from_numpy(matrix)
        return Mixing(
            rows,
            exact.to(self._device, self._dtype),
            in_doubles=lambda: Mixing(rows, exact.to(self._device)),
        )

    def mixing(self, indptr: IntArray, sources: IntArray, weights: FloatArray) -> Mixing:
        """Weights over the payloads given: a matrix where it is well filled, else the lists that make it."""
        rows, to = len(indptr) - 1, self._device
        slots = self._slots.get("slot", sources)
        if rows >= _DENSE_ROWS and len(slots) >= _DENSE_SHARE * rows * self.size:
            row_starts = np.repeat(np.arange(0, rows * self.size, self.size), np.diff(indptr))

            def matrix(dtype: torch.dtype) -> Mixing:
                laid = np.zeros((rows, self.size), dtype=np.float32 if dtype == torch.float32 else np.float64)
                laid.reshape(-1)[row_starts + slots] = weights
                return Mixing(rows, torch.from_numpy(laid).to(to), in_doubles=lambda: matrix(torch.float64))

            return matrix(self._dtype)

        def bags(dtype: torch.dtype) -> Mixing:
            return Mixing(
                rows,
                torch.from_numpy(weights).to(to, dtype),
                torch.from_numpy(slots).to(to),
                torch.from_numpy(indptr).to(to),
                in_doubles=lambda: bags(torch.float64),
            )

        return bags(self._dtype)

    def sum_of(self, names: tuple[str, ...], sources: IntArray, weights: FloatArray) -> Tensors:
        """Σ weight · payload, a single row of each variable."""
        at = self._places(sources)
        if not isinstance(at, slice):  # gathered first, rows would be read twice and written once
            mixing = self.mixing(np.array([0, len(sources)]), sources, weights)
            rows = {name: self.rows[name] for name in names}
            return {name: mixing.of(pool.dtype).product(pool, None, None) for name, pool in rows.items()}
        share = torch.from_numpy(weights).to(self._device)
        some = {name: self.rows[name][at] for name in names}
        return {name: torch.mv(value.T, share.to(value.dtype))[None] for name, value in some.items()}

    def take(self, names: tuple[str, ...], serials: IntArray) -> Tensors:
        """The rows of some payloads, in order; a view where they stand together."""
        at = self._places(serials)
        return {name: self.rows[name][at] for name in names}

    def _places(self, serials: IntArray) -> slice | Tensor:
        """Where payloads stand: a slice where they stand together."""
        if serials is self._adopted:
            return slice(0, len(serials))
        slots = self._slots.get("slot", serials)
        if len(slots) and int(slots[-1] - slots[0]) == len(slots) - 1 and (np.diff(slots) == 1).all():
            return slice(int(slots[0]), int(slots[-1]) + 1)
        return torch.from_numpy(slots).to(self._device)

    def _zeros(self, rows: int, length: int, dtype: torch.dtype) -> Tensor:
        # Unused rows meet zero weights, and the product must be zero.
        if self._device.type == "cpu":
            return lazy_zeros(rows, length, dtype)
        return torch.zeros(rows, length, dtype=dtype, device=self._device)
