"""Minibatches: client i at its step t draws with replacement, from an address of its own.

The draws of a step stand in one row, client after client, so that a whole block is drawn at once and a single
client can be drawn alone with the same outcome. Without a batch size everybody uses all of its samples, and
clients with equally many go together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from asyncfed.data import ClientShards
from asyncfed.rng import Streams

IntArray = npt.NDArray[np.int64]


class Batches:
    """Where a block's clients get their samples from."""

    def __init__(
        self,
        shards: ClientShards,
        clients: IntArray,
        size: int | None,
        streams: Streams,
        device: torch.device,
    ) -> None:
        self._shards, self._clients, self._size = shards, clients, size
        self._streams, self._device = streams, device
        self._contiguous = bool(len(clients) < 2 or (np.diff(clients) == 1).all())

    def chunks(self, rows: IntArray, most: int) -> Iterator[tuple[slice | torch.Tensor, IntArray]]:
        """(places within the wave, rows of the block) that can be computed together, at most `most` at a
        time.
        """
        if self._size is not None or len(np.unique(self._shards.sizes[rows])) == 1:
            for start in range(0, len(rows), most):
                places = slice(start, min(start + most, len(rows)))
                yield places, rows[places]
            return
        sizes = self._shards.sizes[rows]
        for size in np.unique(sizes):
            alike = np.flatnonzero(sizes == size)
            for start in range(0, len(alike), most):
                chosen = alike[start : start + most]
                yield torch.from_numpy(chosen).to(self._device), rows[chosen]

    def draw(self, rows: IntArray, steps: IntArray) -> tuple[torch.Tensor, ...]:
        """The samples of each row at its own step, stacked."""
        sizes = self._shards.sizes[rows]
        if self._size is None:
            index = np.tile(np.arange(sizes[0]), (len(rows), 1))
        else:
            index = (self._uniforms(rows, steps) * sizes[:, None]).astype(np.int64)
        to = self._device
        return self._shards.gather(torch.from_numpy(rows).to(to), torch.from_numpy(index).to(to))

    def _uniforms(self, rows: IntArray, steps: IntArray) -> npt.NDArray[np.float64]:
        size = self._size
        assert size is not None
        clients = self._clients[rows]
        together = self._contiguous and (steps == steps[0]).all() and int(rows[-1] - rows[0]) == len(rows) - 1
        if together:
            start = int(clients[0]) * size
            drawn = self._streams.uniforms("batches", int(steps[0]), start, start + len(rows) * size)
            return drawn.reshape(len(rows), size)
        return np.stack(
            [
                self._streams.uniforms("batches", int(step), int(client) * size, (int(client) + 1) * size)
                for client, step in zip(clients, steps, strict=True)
            ]
        )
