"""Steps that are decided, and the waves they are handed out in.

A step stands one deeper than the deepest step it absorbs from, among those that are handed out together; a
wave is the steps of one depth (those that only hand over what they hold apart). A payload is released with
the last wave that absorbs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncfed.network.links import FloatArray, IntArray
from asyncfed.network.schedules.paces import Steps, joined_steps, no_steps
from asyncfed.network.serials import SerialTable
from asyncfed.network.waves import NO_NODES, Absorption, Sums, Wave
from asyncfed.recall import recalled


@recalled()
@dataclass(frozen=True, eq=False)
class Absorbed:
    """What some nodes take in: row r has the entries indptr[r]:indptr[r + 1]."""

    indptr: IntArray
    sources: IntArray
    senders: IntArray
    weights: FloatArray  # (entries, channels)

    @property
    def row_of(self) -> IntArray:
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))

    def at(self, rows: IntArray) -> Absorbed:
        counts = np.diff(self.indptr)[rows]
        ends = np.cumsum(counts)
        entries = np.arange(int(counts.sum())) + np.repeat(self.indptr[rows] - (ends - counts), counts)
        indptr = np.concatenate([[0], ends]).astype(np.int64)
        return Absorbed(indptr, self.sources[entries], self.senders[entries], self.weights[entries])

    def between(self, first: int, last: int) -> Absorbed:
        """Rows first:last."""
        lo, hi = int(self.indptr[first]), int(self.indptr[last])
        indptr = self.indptr[first : last + 1] - lo
        return Absorbed(indptr, self.sources[lo:hi], self.senders[lo:hi], self.weights[lo:hi])

    def absorption(self, nodes: IntArray, names: tuple[tuple[str, ...], ...]) -> Absorption:
        channels = tuple(
            Sums(own, self.indptr, self.sources, np.ascontiguousarray(self.weights[:, place]), self.senders)
            for place, own in enumerate(names)
        )
        return Absorption(nodes, channels)


def in_rows(rows: int, row: IntArray, sources: IntArray, senders: IntArray, weights: FloatArray) -> Absorbed:
    """Entries of so many rows, which keep their order within each."""
    order = np.argsort(row, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))]).astype(np.int64)
    return Absorbed(indptr, sources[order], senders[order], weights[order])


@recalled()
@dataclass(frozen=True, eq=False)
class Decided:
    """Steps with what they absorb, in messages and in all, and the payload each emits."""

    steps: Steps
    emits: IntArray
    messages: IntArray
    absorbed: Absorbed

    def at(self, places: IntArray) -> Decided:
        return Decided(
            self.steps.at(places), self.emits[places], self.messages[places], self.absorbed.at(places)
        )

    def depths(self) -> IntArray:
        """How many of these steps, one after the other, each needs before it."""
        depth = np.zeros(len(self.emits), dtype=np.int64)
        order = np.argsort(self.emits)
        place = np.searchsorted(self.emits, self.absorbed.sources, sorter=order)
        place[place == len(order)] = 0
        source = order[place]
        inside = self.emits[source] == self.absorbed.sources
        row, source = self.absorbed.row_of[inside], source[inside]
        if not len(row):
            return depth
        first = np.flatnonzero(np.diff(row, prepend=-1))
        needy = row[first]
        while True:
            deeper = np.maximum.reduceat(depth[source] + 1, first)
            if (deeper == depth[needy]).all():
                return depth
            depth[needy] = deeper


def _joined(one: Decided, two: Decided) -> Decided:
    if not len(one.emits):
        return two
    a, b = one.absorbed, two.absorbed
    absorbed = Absorbed(
        np.concatenate([a.indptr, b.indptr[1:] + a.indptr[-1]]),
        np.concatenate([a.sources, b.sources]),
        np.concatenate([a.senders, b.senders]),
        np.concatenate([a.weights, b.weights]),
    )
    return Decided(
        joined_steps([one.steps, two.steps]),
        np.concatenate([one.emits, two.emits]),
        np.concatenate([one.messages, two.messages]),
        absorbed,
    )


@recalled(given=("_part", "_names"))
class HandingOut:
    """The payloads of a part, by number, and the steps that have not been handed out."""

    def __init__(self, first_serial: int, part: int, names: tuple[tuple[str, ...], ...]) -> None:
        self._next, self._part, self._names = first_serial, part, names
        self._payloads = SerialTable("uses")  # absorptions to come, the sender's own among them
        nothing = np.zeros(0, dtype=np.int64)
        absorbed = Absorbed(np.zeros(1, np.int64), nothing, nothing, np.zeros((0, len(names))))
        self.waiting = Decided(no_steps(), nothing, nothing, absorbed)
        self._forgotten: list[int] = []  # payloads that nobody will absorb any more

    @property
    def payloads(self) -> int:
        """That somebody is still to absorb."""
        return self._payloads.alive

    def number(self, count: int) -> IntArray:
        """New payloads, each to be absorbed by its own sender."""
        serials = np.arange(self._next, self._next + count)
        self._next += count
        if count:
            self._payloads.add(serials, uses=1)
        return serials

    def sent(self, serials: IntArray, receivers: IntArray) -> None:
        """Each is to be absorbed by so many others as well."""
        self._payloads.set("uses", serials, 1 + receivers)

    def lost(self, serials: IntArray) -> None:
        """Somebody (a payload may be named repeatedly) will not absorb these after all."""
        self._forgotten += self._used(serials)[0].tolist()

    def decide(self, decided: Decided) -> None:
        self.waiting = _joined(self.waiting, decided)

    def flush(self, until: float) -> tuple[Decided, list[Wave]]:
        """The steps that have ended by then, as they were decided, and as waves; the others wait."""
        ready = self.waiting.steps.ended <= until
        out = self.waiting if ready.all() else self.waiting.at(np.flatnonzero(ready))
        if not len(out.emits):
            return out, []
        self.waiting = self.waiting.at(np.flatnonzero(~ready))
        depth = 2 * out.depths() + out.steps.leaving  # who leaves goes apart
        order = np.lexsort((out.steps.client, depth))
        ordered, depth = out.at(order), depth[order]
        over, last = self._used(ordered.absorbed.sources, depth[ordered.absorbed.row_of])
        bounds = np.flatnonzero(np.diff(depth, prepend=-1))
        waves = []
        for first, end in zip(bounds.tolist(), [*bounds[1:].tolist(), len(depth)], strict=True):
            released = over[last == depth[first]]
            if end == len(depth) and self._forgotten:
                released = np.sort(np.concatenate([released, np.array(self._forgotten, dtype=np.int64)]))
                self._forgotten = []
            waves.append(self._wave(ordered, first, end, released))
        return out, waves

    def _used(self, serials: IntArray, depth: IntArray | None = None) -> tuple[IntArray, IntArray]:
        """Payloads are absorbed, at some depths: those that nobody wants any more, and where last."""
        found, inverse, counts = np.unique(serials, return_inverse=True, return_counts=True)
        uses = self._payloads.get("uses", found) - counts
        self._payloads.set("uses", found, uses)
        last = np.zeros(len(found), dtype=np.int64)
        if depth is not None:
            np.maximum.at(last, inverse, depth)
        over = uses == 0
        self._payloads.forget(found[over])
        return found[over], last[over]

    def _wave(self, decided: Decided, first: int, end: int, released: IntArray) -> Wave:
        steps = decided.steps.at(slice(first, end))
        return Wave(
            decided.absorbed.between(first, end).absorption(steps.client, self._names),
            steps.step,
            decided.emits[first:end],
            released,
            float(steps.started.max()),
            self._part,
            elapsed=steps.elapsed,
            reborn=steps.client[steps.reborn] if steps.reborn.any() else NO_NODES,
            leaving=bool(steps.leaving[0]),
        )
