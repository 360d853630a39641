"""Which samples a client looks at: every draw from an address of its own, (purpose, step, client).

    with replacement      a minibatch whose samples are drawn independently; those of all clients of a step
                          stand in one row of the stream, so that a block is drawn at once and a client alone
                          with the same outcome
    without replacement   a minibatch of different samples
    in order              the samples of an epoch, shuffled anew for each

Draws for different purposes, steps or clients are independent, and none moves another.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from asyncfed.rng import Streams

IntArray = npt.NDArray[np.int64]


class Sampler:
    """Indices into the samples of clients of given sizes; `clients` are their numbers in the run."""

    def __init__(self, streams: Streams, sizes: IntArray, clients: IntArray) -> None:
        self._streams, self._sizes, self._clients = streams, sizes, clients
        self._contiguous = bool(len(clients) < 2 or (np.diff(clients) == 1).all())

    def with_replacement(
        self, rows: IntArray, steps: IntArray, size: int, purpose: str = "batches"
    ) -> IntArray:
        """(k, size): of each of the clients at `rows`, at its own step."""
        uniforms = self._uniforms(rows, steps, size, purpose)
        return (uniforms * self._sizes[rows][:, None]).astype(np.int64)

    def without_replacement(self, row: int, step: int, size: int, purpose: str) -> IntArray:
        """(size,): of one client, in ascending order; all of its samples where it has no more."""
        count = int(self._sizes[row])
        if size >= count:
            return np.arange(count, dtype=np.int64)
        drawn = self._streams.uniforms(purpose, step, 0, count, lane=int(self._clients[row]))
        return np.sort(np.argsort(drawn, kind="stable")[:size]).astype(np.int64)

    def in_order(self, row: int, step: int, epoch: int, purpose: str) -> IntArray:
        """All samples of one client, shuffled for an epoch."""
        count = int(self._sizes[row])
        drawn = self._streams.uniforms(
            purpose, step, epoch * count, (epoch + 1) * count, lane=int(self._clients[row])
        )
        return np.asarray(np.argsort(drawn, kind="stable"), dtype=np.int64)

    def _uniforms(self, rows: IntArray, steps: IntArray, size: int, purpose: str) -> npt.NDArray[np.float64]:
        clients = self._clients[rows]
        together = self._contiguous and (steps == steps[0]).all() and int(rows[-1] - rows[0]) == len(rows) - 1
        if together:
            start = int(clients[0]) * size
            drawn = self._streams.uniforms(purpose, int(steps[0]), start, start + len(rows) * size)
            return drawn.reshape(len(rows), size)
        return np.stack(
            [
                self._streams.uniforms(purpose, int(step), int(client) * size, (int(client) + 1) * size)
                for client, step in zip(clients, steps, strict=True)
            ]
        )
