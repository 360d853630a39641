"""Counter-based randomness: a draw is a pure function of (seed, stream, row, lane, index).

Nothing here has a state that advances. Philox encrypts a counter under a key, so any draw can be had at any
time, in any order and in any process, and drawing more in one place moves nothing elsewhere. A *stream* names
what the draw is for ("links", "compute", …), a *row* is usually a step, a *lane* something else that must not
collide, and the index is usually an edge, or a client's place in a row. Uniforms come from the raw 64-bit
words (whose values numpy guarantees), one word each, and every other distribution from uniforms by its
inverse distribution function.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
_WORDS_PER_BLOCK = 4  # Philox4x64 yields four words per counter value
_WHOLE_ROW = 2**16  # words: of rows no longer than that all are drawn at once, and kept for a while
_KEPT_BYTES = 2**25  # of such rows


@cache
def _key_word(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def chances(probability: FloatArray) -> npt.NDArray[np.uint64]:
    """The largest word whose uniform lies below each probability in (0, 1], for `Streams.below`."""
    steps = np.ceil(probability * 2.0**53).astype(np.uint64)  # uniforms are multiples of 2⁻⁵³
    return (steps - np.uint64(1) << np.uint64(11)) | np.uint64(2**11 - 1)


class Streams:
    """All the randomness of one run, addressed and never consumed."""

    def __init__(self, seed: int) -> None:
        self.seed = int(seed)
        self._philox: dict[str, tuple[np.random.Philox, Any, npt.NDArray[np.uint64]]] = {}
        self._rows: OrderedDict[tuple[str, int], npt.NDArray[np.uint64]] = OrderedDict()
        self._kept_bytes = 0

    def words(self, stream: str, row: int, start: int, stop: int, lane: int = 0) -> npt.NDArray[np.uint64]:
        """Words number `start` to `stop` (exclusive) of the given row."""
        philox, state, counter = self._generator(stream)
        first_block, skip = divmod(start, _WORDS_PER_BLOCK)
        # numpy increments the counter before it encrypts, so a row's block b comes from counter b + 1. Only
        # the first of the four counter words moves, which keeps every row and lane apart.
        counter[:] = (first_block, row, lane, 0)
        philox.state = state
        words: npt.NDArray[np.uint64] = philox.random_raw(stop - start + skip)
        return words[skip:]

    def uniforms(self, stream: str, row: int, start: int, stop: int, lane: int = 0) -> FloatArray:
        """Uniforms on [0, 1) with 53 random bits, number `start` to `stop` (exclusive) of the given row."""
        uniforms = (self.words(stream, row, start, stop, lane) >> np.uint64(11)).astype(np.float64)
        uniforms *= 2.0**-53
        return uniforms

    def below(
        self, stream: str, row: int, start: int, limits: npt.NDArray[np.uint64], lane: int = 0
    ) -> npt.NDArray[np.bool_]:
        """Which uniforms, from number `start` on, lie below the probabilities whose `chances` are given: the
        same as comparing `uniforms`, without making them.
        """
        return self.words(stream, row, start, start + len(limits), lane) <= limits

    def words_at(
        self, stream: str, rows: npt.NDArray[np.int64], indices: npt.NDArray[np.int64], width: int
    ) -> npt.NDArray[np.uint64]:
        """Word `indices[m]` of row `rows[m]` (rows have `width` words), for many at once. It is cheap where a
        row is wanted again and again, or where indices follow each other.
        """
        found = np.empty(len(rows), dtype=np.uint64)
        if not len(rows):
            return found
        order = np.argsort(rows, kind="stable")
        in_order = rows[order]
        first = np.flatnonzero(np.diff(in_order, prepend=in_order[0] - 1))
        for lo, hi in zip(first.tolist(), [*first[1:].tolist(), len(rows)], strict=True):
            here, row = order[lo:hi], int(in_order[lo])
            some = indices[here]
            if width <= _WHOLE_ROW:
                found[here] = self._whole_row(stream, row, width)[some]
                continue
            cuts = np.flatnonzero(np.diff(some) != 1) + 1  # runs of neighbours are drawn together
            for run in np.split(np.arange(len(some)), cuts):
                start = int(some[run[0]])
                found[here[run]] = self.words(stream, row, start, start + len(run))
        return found

    def uniforms_at(
        self, stream: str, rows: npt.NDArray[np.int64], indices: npt.NDArray[np.int64], width: int
    ) -> FloatArray:
        """The same uniforms as those of `uniforms`, for many addresses at once."""
        uniforms = (self.words_at(stream, rows, indices, width) >> np.uint64(11)).astype(np.float64)
        uniforms *= 2.0**-53
        return uniforms

    def seed_for(self, stream: str, row: int = 0, lane: int = 0) -> int:
        """A 63-bit seed for a library that wants to keep its own generator."""
        return int(self.words(stream, row, 0, 1, lane)[0] >> np.uint64(1))

    def generator(self, stream: str, row: int = 0, lane: int = 0) -> np.random.Generator:
        """A numpy generator of its own, for set-up work such as partitions."""
        return np.random.Generator(np.random.Philox(self.seed_for(stream, row, lane)))

    def _whole_row(self, stream: str, row: int, width: int) -> npt.NDArray[np.uint64]:
        key = (stream, row)
        kept = self._rows.get(key)
        if kept is not None and len(kept) == width:
            self._rows.move_to_end(key)
            return kept
        words = self._rows[key] = self.words(stream, row, 0, width)
        self._kept_bytes += words.nbytes - (0 if kept is None else kept.nbytes)
        while self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= self._rows.popitem(last=False)[1].nbytes
        return words

    def _generator(self, stream: str) -> tuple[np.random.Philox, Any, npt.NDArray[np.uint64]]:
        if stream not in self._philox:
            key = np.array([_key_word(f"seed {self.seed}"), _key_word(f"stream {stream}")], dtype=np.uint64)
            counter = np.zeros(4, dtype=np.uint64)
            state = {
                "bit_generator": "Philox",
                "state": {"counter": counter, "key": key},
                "buffer": np.zeros(4, dtype=np.uint64),
                "buffer_pos": 4,
                "has_uint32": 0,
                "uinteger": 0,
            }
            self._philox[stream] = (np.random.Philox(), state, counter)
        return self._philox[stream]
