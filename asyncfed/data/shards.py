"""All clients' samples in one tensor: packed one client after another.

`ClientShards` holds one split (say, the training samples) of all clients; where a client begins and how many
samples it has is two small integer arrays. So a minibatch for every client of a block is one `index_select`,
and ten thousand clients cost no more Python than ten. `ClientData` is the three splits of a problem.

What a client's loss looks at beside its samples (a key for random draws, the buffers of a network) has one
row for each client, and stands at the end of every batch that is taken: see `ClientShards.beside`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.checks import Words, checked, fitting, shown
from asyncfed.errors import DataError

IntArray = npt.NDArray[np.int64]
Samples = tuple[Tensor, ...]
PerClient = Annotated[
    Sequence[Samples], Words("a list with a tuple of tensors, such as (x, y), for each client")
]


@dataclass(frozen=True, eq=False, repr=False)
class ClientShards:
    """Tensors (total, …) that hold client 0's samples, then client 1's, …; `sizes` says how many each has."""

    tensors: Samples
    sizes: IntArray
    beside: Samples = ()

    def __post_init__(self) -> None:
        tensors = fitting(self.tensors, Samples, "ClientShards: tensors", DataError)
        object.__setattr__(self, "tensors", tensors)
        fitting(self.beside, Samples, "ClientShards: beside", DataError)
        object.__setattr__(self, "sizes", _counts(self.sizes))
        lengths = [len(tensor) if tensor.ndim else None for tensor in self.tensors]
        if any(length != self.total for length in lengths):
            raise DataError(
                f"the clients' sizes add up to {self.total} samples, but the packed tensors have {lengths}; "
                "they must all be equal"
            )

    def __repr__(self) -> str:
        return f"<ClientShards: {self.clients:,} clients, {self.total:,} samples of {self.form}>"

    @property
    def form(self) -> str:
        """What a sample is, in words: "float32 (64,), int64"."""
        kinds = [(str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for t in self.tensors]
        return ", ".join(f"{kind} {shape}" if shape else kind for kind, shape in kinds) or "nothing"

    @property
    def clients(self) -> int:
        return len(self.sizes)

    @cached_property
    def total(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def offsets(self) -> IntArray:
        """Where each client's samples begin."""
        return np.cumsum(self.sizes) - self.sizes

    @cached_property
    def _offsets(self) -> Tensor:
        return torch.from_numpy(self.offsets).to(self.tensors[0].device if self.tensors else "cpu")

    def of(self, client: int) -> Samples:
        """One client's samples, as views."""
        start = int(self.offsets[client])
        return tuple(tensor[start : start + int(self.sizes[client])] for tensor in self.tensors)

    def with_beside(self, *rows: Tensor) -> ClientShards:
        """The same samples, and in every batch of them these rows (one for each client) at its end."""
        if not rows:
            return self
        other = copy.copy(self)
        object.__setattr__(other, "beside", rows)
        return other

    def select(self, clients: Sequence[int] | IntArray) -> ClientShards:
        """The samples of some clients, in the order given (a copy)."""
        chosen = np.asarray(clients, dtype=np.int64)
        sizes = self.sizes[chosen]
        starts = np.cumsum(sizes) - sizes
        rows = torch.from_numpy(np.repeat(self.offsets[chosen] - starts, sizes) + np.arange(sizes.sum()))
        return ClientShards(tuple(t.index_select(0, rows.to(t.device)) for t in self.tensors), sizes)

    def gather(self, clients: Tensor, index: Tensor) -> Samples:
        """Samples number `index` (k, B) of `clients` (k,): one tensor (k, B, …) each, and what stands beside.

        An index counts within its client and must be smaller than that client's size; it is not checked here.
        """
        rows = (self._offsets[clients].unsqueeze(1) + index).reshape(-1)
        samples = tuple(t.index_select(0, rows).view(*index.shape, *t.shape[1:]) for t in self.tensors)
        return (*samples, *(t.index_select(0, clients) for t in self.beside)) if self.beside else samples

    def whole(self, clients: IntArray) -> Samples:
        """All samples of clients that have equally many (k, B, …): a view where they stand together."""
        size = int(self.sizes[clients[0]])
        first = int(clients[0])
        everyone = len(clients) == self.clients
        if int(clients[-1]) - first == len(clients) - 1 and (everyone or (np.diff(clients) == 1).all()):
            start = int(self.offsets[first])
            rows = slice(start, start + size * len(clients))
            samples = tuple(t[rows].view(len(clients), size, *t.shape[1:]) for t in self.tensors)
            return (*samples, *(t[first : first + len(clients)] for t in self.beside))
        device = self.tensors[0].device
        index = torch.arange(size, device=device).expand(len(clients), -1)
        return self.gather(torch.from_numpy(clients).to(device), index)

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> ClientShards:
        """The same on another device, floating-point tensors (and only these) in another precision."""
        return ClientShards(
            tuple(t.to(device=device, dtype=dtype if t.is_floating_point() else None) for t in self.tensors),
            self.sizes,
        )


@checked(error=DataError)
@dataclass(frozen=True, eq=False, repr=False)
class ClientData:
    """The three splits of every client's samples; every client has training samples, the other two may be
    empty.
    """

    train: ClientShards
    validation: ClientShards
    test: ClientShards

    def __post_init__(self) -> None:
        counts = {"train": self.train, "validation": self.validation, "test": self.test}
        clients = {name: shards.clients for name, shards in counts.items()}
        if len(set(clients.values())) != 1:
            raise DataError(
                f"the splits have different numbers of clients: {clients}; "
                "give every split one shard per client"
            )
        empty = np.flatnonzero(self.train.sizes == 0)
        if len(empty):
            raise DataError(
                f"client {empty[0]} has no training samples ({len(empty)} such clients in all); every client "
                "needs at least one: leave the client out or give it some"
            )

    def __repr__(self) -> str:
        counts = f"{self.train.total:,} + {self.validation.total:,} + {self.test.total:,}"
        return f"<ClientData: {self.clients:,} clients, {counts} samples of {self.train.form}>"

    @property
    def clients(self) -> int:
        return self.train.clients

    def select(self, clients: Sequence[int] | IntArray) -> ClientData:
        """The data of some clients, in the order given."""
        return ClientData(*(split.select(clients) for split in (self.train, self.validation, self.test)))

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> ClientData:
        """See `ClientShards.to`."""
        return ClientData(*(split.to(dtype, device) for split in (self.train, self.validation, self.test)))


@checked(error=DataError)
def client_data_from_lists(
    train: PerClient,
    validation: PerClient | None = None,
    test: PerClient | None = None,
) -> ClientData:
    """Client data from one tuple of tensors per client (sample axis first); a split left out is empty."""
    packed = _pack(train, "train")
    nothing = ClientShards(tuple(t[:0] for t in packed.tensors), np.zeros_like(packed.sizes))
    return ClientData(
        packed,
        nothing if validation is None else _pack(validation, "validation"),
        nothing if test is None else _pack(test, "test"),
    )


def _counts(sizes: object) -> IntArray:
    try:
        found = np.asarray(sizes)
    except ValueError:
        found = np.empty((0, 0))  # of lists that are not equally long
    if found.ndim != 1 or (len(found) and (found.dtype.kind not in "iu" or found.min() < 0)):
        raise DataError(
            f"ClientShards: sizes is {shown(sizes)}; it must be a whole number for each client, how many "
            "samples it has"
        )
    return found.astype(np.int64)


def _pack(shards: Sequence[Samples], split: str) -> ClientShards:
    if not shards:
        raise DataError(f"the {split} split has no clients; give one tuple of tensors per client")
    first = [tuple(t.shape[1:]) for t in shards[0]]
    for client, shard in enumerate(shards):
        shapes = [tuple(t.shape) for t in shard]
        if len(shard) != len(first) or not all(shapes) or len({len(t) for t in shard}) != 1:
            raise DataError(
                f"the {split} samples of client {client} have shapes {shapes}; every client needs "
                f"{len(first)} tensors whose first axes are equally long"
            )
        if [shape[1:] for shape in shapes] != first:
            raise DataError(
                f"the {split} samples of client {client} have shapes {shapes}, and those of client 0 "
                f"{[tuple(t.shape) for t in shards[0]]}; a sample must have the same shape everywhere"
            )
    sizes = np.array([len(shard[0]) for shard in shards], dtype=np.int64)
    return ClientShards(tuple(torch.cat(tensors) for tensors in zip(*shards, strict=True)), sizes)
