"""Who needs what from whom: a wave, cut into blocks, without a single value.

Weights are known before values are. So between two blocks travels the smaller of two things: the rows that
the other wants, or the partial weighted sums that it wants. A server receives one row from every block of
clients, and packed peers exchange no more than they must.

A block's payload of a wave is one *object*, for whoever reads its rows; it is known here by a number. What
such an object is (tensors in this process, a reference in Ray's store) is the backend's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from asyncfed.network.serials import SerialTable
from asyncfed.network.waves import NO_NODES, Absorption, Channel, Common, MatrixSums, Sums, Wave
from asyncfed.runtime.state import State, of_arrays

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CommonFrom:
    """What all rows take as it is: parcel number `parcel`, which is payload `version`."""

    parcel: int
    version: int


@dataclass(frozen=True, eq=False)
class SumsFrom:
    """Sums that another block made: y[rows] += parcel."""

    parcel: int
    rows: IntArray
    senders: IntArray  # of what is in them
    weights: FloatArray


@dataclass(frozen=True, eq=False)
class RowsFrom:
    """Rows of payloads of other blocks: of parcel number `parcel` + p, with a, b = first[p : p + 2],
    y[rows[a:b]] += weights[a:b] · parcel[columns[a:b]].
    """

    parcel: int
    first: IntArray
    rows: IntArray
    columns: IntArray
    weights: FloatArray
    senders: IntArray


Away: TypeAlias = CommonFrom | SumsFrom | RowsFrom


@dataclass(frozen=True, eq=False)
class Taken:
    """A channel as one block sees it: from its own pool, and from elsewhere."""

    names: tuple[str, ...]
    home: Channel | None
    away: tuple[Away, ...] = ()


@dataclass(frozen=True, eq=False)
class Incoming:
    """What some nodes of a block absorb; `rows` are their places in the block."""

    rows: IntArray
    channels: tuple[Taken, ...]
    empty: IntArray = field(default_factory=lambda: NO_NODES)  # places of those who have nothing


@dataclass(frozen=True, eq=False)
class BlockWave:
    """The part of a wave that falls into one block."""

    incoming: Incoming
    steps: IntArray
    emits: IntArray
    released: IntArray
    exports: bool = False  # whether others may read its rows
    elapsed: FloatArray | None = None  # of a wave among peers
    reborn: IntArray = field(default_factory=lambda: NO_NODES)  # rows that forget everything first
    leaving: bool = False  # whether nothing is computed, and everything handed over
    turn: int = 0


@dataclass(frozen=True)
class Object:
    """A parcel that exists: the payload of a block in some wave."""

    number: int


@dataclass(frozen=True, eq=False)
class Sum:
    """A parcel to be made by its owner: partial sums, or (without weights) rows."""

    owner: int
    names: tuple[str, ...]
    indptr: IntArray
    sources: IntArray
    weights: FloatArray | None


Need: TypeAlias = Object | Sum


@dataclass(frozen=True, eq=False)
class Task:
    """What one block does in a wave, and the parcels it needs, in the order of their numbers."""

    place: int
    wave: BlockWave
    needs: list[Need] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Weighted sources: source s goes into row `rows[s]`."""

    rows: IntArray
    sources: IntArray
    weights: FloatArray
    senders: IntArray
    owners: IntArray

    def at(self, places: IntArray) -> _Piece:
        return _Piece(
            self.rows[places],
            self.sources[places],
            self.weights[places],
            self.senders[places],
            self.owners[places],
        )


def _rows_from(parcel: int, first: IntArray, columns: IntArray, piece: _Piece) -> RowsFrom:
    return RowsFrom(parcel, first, piece.rows, columns, piece.weights, piece.senders)


def _better_summed(piece: _Piece) -> list[int]:
    """The owners from whom fewer sums than rows are wanted."""
    most = int(piece.owners.max()) + 1
    if len(piece.sources) == len(np.unique(piece.owners)):
        return []
    _, first = np.unique(piece.sources, return_index=True)
    payloads = np.bincount(piece.owners[first], minlength=most)
    pairs = np.unique(piece.owners * (int(piece.rows.max()) + 1) + piece.rows)
    sums = np.bincount(pairs // (int(piece.rows.max()) + 1), minlength=most)
    found: list[int] = np.flatnonzero(sums < payloads).tolist()
    return found


class Exchange:
    """Blocks of nodes start..stop−1, in order, and where every payload of theirs is."""

    def __init__(self, ranges: tuple[tuple[int, int], ...]) -> None:
        self.ranges = ranges
        self._starts = np.array([start for start, _ in ranges] + [ranges[-1][1]], dtype=np.int64)
        self.reset()

    def reset(self) -> None:
        """Forget all payloads: a part has ended."""
        self._payloads = SerialTable("object", "row", "owner")
        self._living: dict[int, int] = {}  # rows of each object that may still be absorbed
        self._to_release: list[list[int]] = [[] for _ in self.ranges]
        self._next_object = 0

    def state(self) -> State:
        """Where every payload is; what was not told to its owner yet; which objects there are."""
        serials, columns = self._payloads.entries()
        living = np.array([*self._living.items()], dtype=np.int64).reshape(-1, 2)
        release = {f"release/{place}": np.array(own) for place, own in enumerate(self._to_release) if own}
        numbers = {"serials": serials, "living": living} | columns | release
        return State(of_arrays(numbers), {"next_object": self._next_object})

    def restore(self, state: State) -> None:
        """Be as `state` was taken, of blocks with the same nodes."""
        self.reset()
        columns = {name: state.array(name) for name in ("object", "row", "owner")}
        self._payloads.refill(state.array("serials"), **columns)
        self._living = dict(state.array("living").tolist())
        self._next_object = int(state.facts["next_object"])
        for place, told in state.under("release").tensors.items():
            self._to_release[int(place)] = told.tolist()

    @property
    def objects(self) -> list[int]:
        """Those that may still be read."""
        return list(self._living)

    def tasks(self, wave: Wave, *, single: bool = False) -> list[Task]:
        """What each block concerned does; `single` where single messages are wanted, so that no sums go."""
        cuts = np.searchsorted(wave.absorption.nodes, self._starts)
        self._note_released(wave.released)
        tasks = []
        for place in np.flatnonzero(np.diff(cuts)).tolist():
            first, last = int(cuts[place]), int(cuts[place + 1])
            incoming, needs = self.incoming(wave.absorption, place, first, last, single=single)
            released = np.array(self._to_release[place], dtype=np.int64)
            self._to_release[place] = []
            exports = len(self.ranges) > 1 and (wave.readers is None or last - first <= wave.readers)
            part = BlockWave(
                incoming, wave.steps[first:last], wave.emits[first:last], released, exports,
                elapsed=None if wave.elapsed is None else wave.elapsed[first:last],
                reborn=self._at_home(wave.reborn, place), leaving=wave.leaving, turn=wave.turn,
            )  # fmt: skip
            tasks.append(Task(place, part, needs))
        return tasks

    def emitted(self, task: Task) -> int | None:
        """Note the payloads of a task; returns the number of their object, where there is one."""
        rows = len(task.wave.emits)
        number = None
        if task.wave.exports:
            number = self._next_object
            self._next_object += 1
            self._living[number] = rows
        self._payloads.add(
            task.wave.emits, object=-1 if number is None else number, row=np.arange(rows), owner=task.place
        )
        return number

    def forget(self, serials: IntArray) -> list[int]:
        """Payloads that nobody will absorb any more; returns the objects that are thereby over."""
        over: list[int] = []
        if len(serials):
            for number in self._payloads.get("object", serials).tolist():
                if number < 0:
                    continue
                self._living[number] -= 1
                if not self._living[number]:
                    del self._living[number]
                    over.append(number)
            self._payloads.forget(serials)
        return over

    def everything(self, absorption: Absorption, place: int, *, single: bool = False) -> Task:
        """What all nodes of a block would absorb, for a look at them."""
        first, last = np.searchsorted(absorption.nodes, self.ranges[place]).tolist()
        incoming, needs = self.incoming(absorption, place, first, last, single=single)
        nothing = np.zeros(0, dtype=np.int64)
        return Task(place, BlockWave(incoming, nothing, nothing, nothing), needs)

    def incoming(
        self, absorption: Absorption, place: int, first: int, last: int, *, single: bool
    ) -> tuple[Incoming, list[Need]]:
        """The absorption of rows first:last, which belong to the block at `place`."""
        rows = absorption.nodes[first:last] - self.ranges[place][0]
        needs: list[Need] = []
        channels = tuple(
            self._channel(channel, place, first, last, needs, single) for channel in absorption.channels
        )
        return Incoming(rows, channels, self._at_home(absorption.empty, place)), needs

    def _at_home(self, nodes: IntArray, place: int) -> IntArray:
        """Those that the block at `place` holds, by their places in it."""
        start, stop = self.ranges[place]
        return nodes[(nodes >= start) & (nodes < stop)] - start if len(nodes) else nodes

    def _channel(
        self, channel: Channel, place: int, first: int, last: int, needs: list[Need], single: bool
    ) -> Taken:
        if isinstance(channel, Common):
            source = np.array([channel.source])
            if int(self._payloads.get("owner", source)[0]) == place:
                return Taken(channel.names, channel)
            needs.append(Object(int(self._payloads.get("object", source)[0])))
            return Taken(channel.names, None, (CommonFrom(len(needs) - 1, channel.source),))
        if len(self.ranges) == 1:
            return Taken(channel.names, _part(channel, first, last))
        lo, hi = int(channel.indptr[first]), int(channel.indptr[last])
        sources, weights, senders = channel.sources[lo:hi], channel.weights[lo:hi], channel.senders[lo:hi]
        counts = np.diff(channel.indptr[first : last + 1])
        if not len(sources):
            empty = Sums(channel.names, channel.indptr[first : last + 1] - lo, sources, weights, senders)
            return Taken(channel.names, empty)
        row_of = np.repeat(np.arange(last - first), counts)
        owners = self._payloads.get("owner", sources)
        at_home = owners == place
        home = Sums(
            channel.names,
            np.concatenate([[0], np.cumsum(np.bincount(row_of[at_home], minlength=last - first))]),
            sources[at_home],
            weights[at_home],
            senders[at_home],
        )
        elsewhere = np.flatnonzero(~at_home)
        away: list[Away] = []
        if len(elsewhere):
            rest = _Piece(row_of, sources, weights, senders, owners).at(elsewhere)
            for owner in [] if single else _better_summed(rest):
                theirs = rest.at(np.flatnonzero(rest.owners == owner))
                away.append(self._summed(owner, channel.names, theirs, needs))
                rest = rest.at(np.flatnonzero(rest.owners != owner))
            away += self._rows(channel.names, rest, needs)
        return Taken(channel.names, home, tuple(away))

    def _summed(self, owner: int, names: tuple[str, ...], piece: _Piece, needs: list[Need]) -> Away:
        """What another block sums up for us: fewer rows than it would have to send."""
        piece = piece.at(np.argsort(piece.rows, kind="stable"))
        rows = np.unique(piece.rows)
        indptr = np.searchsorted(piece.rows, np.append(rows, np.iinfo(np.int64).max))
        needs.append(Sum(owner, names, indptr, piece.sources, piece.weights))
        return SumsFrom(len(needs) - 1, rows, piece.senders, piece.weights)

    def _rows(self, names: tuple[str, ...], piece: _Piece, needs: list[Need]) -> list[Away]:
        """What others hand over as it is, object by object."""
        objects = self._payloads.get("object", piece.sources)
        columns = self._payloads.get("row", piece.sources)
        away: list[Away] = []
        kept = objects >= 0
        if not kept.all():  # never handed out: their owners are asked
            rest = piece.at(np.flatnonzero(~kept))
            for owner in np.unique(rest.owners).tolist():
                theirs = rest.at(np.flatnonzero(rest.owners == owner))
                count = len(theirs.sources)
                needs.append(Sum(owner, names, np.zeros(0, dtype=np.int64), theirs.sources, None))
                away.append(_rows_from(len(needs) - 1, np.array([0, count]), np.arange(count), theirs))
            here = np.flatnonzero(kept)
            piece, objects, columns = piece.at(here), objects[here], columns[here]
        if not len(objects):
            return away
        if not (np.diff(objects) > 0).all():  # else one row of each, as it is with one client per actor
            order = np.argsort(objects, kind="stable")
            piece, objects, columns = piece.at(order), objects[order], columns[order]
        numbers, first = np.unique(objects, return_index=True)
        away.append(_rows_from(len(needs), np.append(first, len(objects)), columns, piece))
        needs.extend(map(Object, numbers.tolist()))
        return away

    def _note_released(self, serials: IntArray) -> None:
        """Tell the owners with their next call, which may be of this wave: they release after absorbing."""
        if not len(serials):
            return
        if len(self.ranges) == 1:
            self._to_release[0].extend(serials.tolist())
            return
        owners = self._payloads.get("owner", serials).tolist()
        for serial, owner in zip(serials.tolist(), owners, strict=True):
            self._to_release[owner].append(serial)


def _part(channel: Sums | MatrixSums, first: int, last: int) -> Sums | MatrixSums:
    """Rows first:last of a channel."""
    if isinstance(channel, MatrixSums) or (first == 0 and last == len(channel.indptr) - 1):
        return channel
    lo, hi = int(channel.indptr[first]), int(channel.indptr[last])
    return Sums(
        channel.names,
        channel.indptr[first : last + 1] - lo,
        channel.sources[lo:hi],
        channel.weights[lo:hi],
        channel.senders[lo:hi],
    )
