"""What an explorer keeps of a trace, so that it can answer about any window of it at once.

Of every chunk of messages: its sums by edge, and when its messages were sent. A window is the sums of the
chunks that lie in it, and the rows of the few that lie across its ends, which are read again. So an answer
costs two or three chunks, however long the run was, and is the same as the trace's own queries give.

`follow` takes up the chunks that came since; a tail is taken up anew each time. Memory is bounded: where sums
of many chunks become too large, those of neighbours are put together.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asyncfed.errors import TraceError
from asyncfed.explorer.overview import Overview
from asyncfed.trace.columns import MESSAGES, STEPS
from asyncfed.trace.files import Chunk, Tail, open_chunk, path_of, read_chunks, server_of, trace_files
from asyncfed.trace.queries import (
    SUMMED_COLUMNS,
    ClientSums,
    Sums,
    dictionary_codes,
    edge_columns,
    edge_group,
    node_columns,
    status_codes,
)

Floats = npt.NDArray[np.float64]
Columns = dict[str, npt.NDArray[Any]]
Window = tuple[float, float]
EVER: Window = (-np.inf, np.inf)

_MOST_BYTES = 256 << 20  # of sums that are kept for one run
_MOST_CACHED = 3 << 20  # rows that are kept as they were read last, of all runs together
_MOST_PHASES = 2000
_SUMMED = ("sender", "receiver", *SUMMED_COLUMNS)
_MOST_MOVES = 1 << 20


S = TypeVar("S", Sums, ClientSums)


@dataclass(frozen=True)
class Piece(Generic[S]):
    """Some chunks in a row, and what is kept of them."""

    files: tuple[Chunk, ...]
    rows: int
    first: float  # time in it: sent_at of messages, started_at of steps
    last: float  # sent_at, or ended_at
    until: float  # when the last of it has arrived, or ended
    sums: S

    def touches(self, window: Window) -> bool:
        return self.first < window[1] and self.until >= window[0]


@dataclass
class Part(Generic[S]):
    """A table of the trace, as far as it was taken up."""

    table: str
    pieces: list[Piece[S]] = field(default_factory=list)
    known: list[object] = field(default_factory=list)  # the chunks that were, by what tells them apart
    tail: Piece[S] | None = None
    tail_key: object = None

    @property
    def all(self) -> list[Piece[S]]:
        found = list(self.pieces)
        if self.tail is not None:
            found.append(self.tail)
        return found


class ChunkCache:
    """The chunks that were read last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[object, pa.Table] = OrderedDict()

    def read(self, file: Chunk, table: str, nodes: int, columns: Sequence[str] | None = None) -> pa.Table:
        """All columns, or at least some."""
        whole = (table, path_of(file), _identity(file), None)
        wanted = (*whole[:3], None if columns is None else tuple(columns))
        with self._lock:
            for key in (whole, wanted):
                if key in self._tables:
                    self._tables.move_to_end(key)
                    return self._tables[key]
        (rows,) = read_chunks([file], table, nodes, columns)
        with self._lock:
            self._tables[wanted] = rows
            while sum(map(len, self._tables.values())) > _MOST_CACHED and len(self._tables) > 1:
                self._tables.popitem(last=False)
        return rows


class TraceIndex:
    """The index of the trace in a directory; what it answers is of what `follow` has taken up so far."""

    def __init__(
        self,
        directory: Path,
        nodes: int,
        server: int | None,
        cache: ChunkCache,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self.directory, self.nodes, self.server = directory, nodes, server
        self._cache, self._most_bytes = cache, most_bytes
        self._lock = threading.RLock()
        self._forget()

    def _forget(self) -> None:
        self.messages: Part[Sums] = Part(MESSAGES)
        self.steps: Part[ClientSums] = Part(STEPS)
        self.overview = Overview(self.nodes)
        self.phases: list[tuple[str, float, float]] = []
        self.moves: list[Floats] = []
        self._whole = Sums()  # of all pieces but the tail
        self.changes = 0  # how often there was something new
        self.found = 0  # chunks that there are, taken up or not

    # --- following ------------------------------------------------------------------------------------

    def follow(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Take up what is there and was not; `enough` is asked between chunks."""
        files = {part.table: trace_files(self.directory, part.table) for part in (self.messages, self.steps)}
        keys = {table: [_identity(file) for file in some] for table, some in files.items()}
        begun = [(some[0], table) for table, some in files.items() if some]
        if begun and not self.found and self.server is None:
            with open_chunk(*begun[0], self.nodes) as chunk:
                self.server = server_of(chunk)
        with self._lock:
            if any(keys[part.table][: len(part.known)] != part.known for part in (self.messages, self.steps)):
                self._forget()  # the run was resumed from an earlier place, or begun anew
            self.found = sum(map(len, files.values()))
            for part in (self.messages, self.steps):
                if part.tail_key not in keys[part.table]:  # its chunk is there, or a longer one
                    part.tail = part.tail_key = None
        for file, key in _new(self.steps, files[STEPS], keys[STEPS]):
            self._take(self.steps, file, key, self._steps_piece)
            if enough():
                return
        for file, key in _new(self.messages, files[MESSAGES], keys[MESSAGES]):
            self._take(self.messages, file, key, self._messages_piece)
            if enough():
                return

    def _take(
        self, part: Part[S], file: Chunk, key: object, made: Callable[[Chunk, pa.Table], Piece[S]]
    ) -> None:
        (rows,) = read_chunks([file], part.table, self.nodes)
        piece = made(file, rows)
        with self._lock:
            self.changes += 1
            if isinstance(file, Tail):
                part.tail, part.tail_key = piece, key
                return
            part.pieces.append(piece)
            part.known.append(key)
            self._note(part.table, rows)
            if isinstance(piece.sums, Sums):
                self._whole.plus(piece.sums)
            if sum(one.sums.nbytes for one in part.pieces) > self._most_bytes:
                part.pieces = _put_together(part.pieces)

    def _messages_piece(self, file: Chunk, rows: pa.Table) -> Piece[Sums]:
        sent, arrived = rows["sent_at"].to_numpy(), rows["arrived_at"].to_numpy()
        first, last = _span(file, "sent_at", sent)
        until = float(np.fmax.reduce(arrived, initial=last))
        sums = Sums()
        sums.add(rows, edge_group(self.nodes)(rows))
        return Piece((file,), len(rows), first, last, until, sums.compact())

    def _steps_piece(self, file: Chunk, rows: pa.Table) -> Piece[ClientSums]:
        first, _ = _span(file, "started_at", rows["started_at"].to_numpy())
        _, last = _span(file, "ended_at", rows["ended_at"].to_numpy())
        sums = ClientSums(self.nodes)
        sums.add(rows)
        return Piece((file,), len(rows), first, last, last, sums)

    def _note(self, table: str, rows: pa.Table) -> None:
        """What is kept of whole chunks beside their sums: cells of the overview, phases, moves."""
        if table == MESSAGES:
            _count(self.overview, rows)
            return
        self.phases = joined([*self.phases, *_phases(rows)])[:_MOST_PHASES]
        if self.server is not None and sum(map(len, self.moves)) < _MOST_MOVES:
            self.moves.append(_moves(rows, self.server))

    # --- answers --------------------------------------------------------------------------------------

    @property
    def taken(self) -> int:
        """Chunks that were taken up."""
        parts: tuple[Part[Any], ...] = (self.messages, self.steps)
        return sum(len(part.known) + (part.tail is not None) for part in parts)

    def pieces(self, window: Window = EVER) -> list[Piece[Sums]]:
        """Of messages, those under way in a window."""
        with self._lock:
            return [piece for piece in self.messages.all if piece.touches(window)]

    def step_pieces(self, window: Window = EVER) -> list[Piece[ClientSums]]:
        """Of steps, those that a window touches."""
        with self._lock:
            return [piece for piece in self.steps.all if piece.touches(window)]

    def count(self) -> tuple[int, int]:
        """Messages and steps."""
        return sum(piece.rows for piece in self.pieces()), sum(piece.rows for piece in self.step_pieces())

    def span(self) -> Window:
        """From the first to the last time that was recorded."""
        pieces: list[Piece[Any]] = [*self.pieces(), *self.step_pieces()]
        first = min((piece.first for piece in pieces), default=0.0)
        return first, max((piece.last for piece in pieces), default=first)

    def rows(
        self, piece: Piece[Any], table: str = MESSAGES, columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        """What a piece was made of, read again: all columns, or at least some."""
        return (self._cache.read(file, table, self.nodes, columns) for file in piece.files)

    def edge_sums(self, window: Window = EVER) -> Sums:
        """Of the messages sent in [from, to), by edge."""
        begin, end = window
        total, group = Sums(), edge_group(self.nodes)
        with self._lock:
            pieces = self.messages.all
            if all(begin <= piece.first and piece.last < end for piece in self.messages.pieces):
                total.plus(self._whole)
                pieces = pieces[len(self.messages.pieces) :]
        for piece in pieces:
            if begin <= piece.first and piece.last < end:
                total.plus(piece.sums)
            elif piece.first < end and piece.last >= begin:
                for rows in self.rows(piece, columns=_SUMMED):
                    chosen = within(rows, "sent_at", window)
                    if len(chosen):
                        total.add(chosen, group(chosen))
        return total

    def edges(self, window: Window = EVER) -> Columns:
        """The columns of `Trace.edges`, of the messages sent in [from, to)."""
        return edge_columns(self.edge_sums(window).frame(), self.nodes)

    def node_table(self, window: Window = EVER) -> Columns:
        """The columns of `Trace.nodes`, of messages sent and steps ended in [from, to)."""
        begin, end = window
        total = ClientSums(self.nodes)
        for piece in self.step_pieces():
            if begin <= piece.first and piece.last < end:
                total.plus(piece.sums)
            elif piece.first < end and piece.last >= begin:
                for rows in self.rows(piece, STEPS):
                    total.add(within(rows, "ended_at", window))
        return node_columns(self.edge_sums(window).frame(), self.nodes) | total.columns()

    def edge_by_piece(self, sender: int, receiver: int) -> list[tuple[Piece[Sums], dict[str, float]]]:
        """What became of the messages of one edge, chunk by chunk."""
        group = sender * self.nodes + receiver
        found = []
        for piece in self.pieces():
            place = int(np.searchsorted(piece.sums.groups, group))
            if place < len(piece.sums.groups) and piece.sums.groups[place] == group:
                found.append((piece, piece.sums.of_group(place)))
        return found

    def overview_now(self) -> Overview:
        """Of all messages, those of the tail too."""
        with self._lock:
            overview, tail = self.overview.copy(), self.messages.tail
        for rows in self.rows(tail) if tail else ():
            _count(overview, rows)
        return overview

    def phases_now(self) -> list[tuple[str, float, float]]:
        """Which phase there was from when to when, in order, those of the tail too."""
        with self._lock:
            phases, tail = list(self.phases), self.steps.tail
        for rows in self.rows(tail, STEPS) if tail else ():
            phases += _phases(rows)
        return joined(phases)[:_MOST_PHASES]

    def moves_now(self) -> Floats:
        """When the server moved."""
        with self._lock:
            moves, tail = list(self.moves), self.steps.tail
        if self.server is not None:
            for rows in self.rows(tail, STEPS) if tail else ():
                moves.append(_moves(rows, self.server))
        return np.concatenate([np.zeros(0), *moves])


def _new(part: Part[Any], files: list[Chunk], keys: list[object]) -> Iterator[tuple[Chunk, object]]:
    """The chunks that were not taken up yet; a tail only where it is another one."""
    known = len(part.known)
    return (
        (file, key) for file, key in zip(files[known:], keys[known:], strict=True) if key != part.tail_key
    )


def _put_together(pieces: list[Piece[S]]) -> list[Piece[S]]:
    """Of every two neighbours make one."""
    result = []
    for place in range(0, len(pieces), 2):
        some = pieces[place : place + 2]
        sums = some[0].sums.copy()
        for piece in some[1:]:
            sums.plus(piece.sums)
        files = tuple(file for piece in some for file in piece.files)
        until = max(piece.until for piece in some)
        first, last = min(piece.first for piece in some), max(piece.last for piece in some)
        rows = sum(piece.rows for piece in some)
        result.append(Piece(files, rows, first, last, until, sums.compact()))
    return result


def within(rows: pa.Table, name: str, window: Window) -> pa.Table:
    """The rows whose time lies in [from, to)."""
    time = rows[name].to_numpy()
    return rows.filter(pa.array((time >= window[0]) & (time < window[1])))


def _count(overview: Overview, rows: pa.Table) -> None:
    sender, sent = rows["sender"].to_numpy(), rows["sent_at"].to_numpy()
    overview.add(sender, status_codes(rows["status"]), sent)


def joined(phases: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """One for each stretch of time in which the phase stays the same."""
    result: list[tuple[str, float, float]] = []
    for label, begin, end in phases:
        if result and result[-1][0] == label:
            result[-1] = (label, min(result[-1][1], begin), max(result[-1][2], end))
        else:
            result.append((label, begin, end))
    return result


def _phases(rows: pa.Table) -> list[tuple[str, float, float]]:
    """Stretches of rows of one phase, at most so many as are kept."""
    codes, labels = dictionary_codes(rows["phase"])
    starts = np.flatnonzero(np.diff(codes, prepend=-1))[:_MOST_PHASES]
    if not len(starts):
        return []
    begin = np.minimum.reduceat(rows["started_at"].to_numpy(), starts)
    end = np.maximum.reduceat(rows["ended_at"].to_numpy(), starts)
    of = [str(labels[code])[:80] for code in codes[starts]]
    return list(zip(of, begin.tolist(), end.tolist(), strict=True))


def _moves(rows: pa.Table, server: int) -> Floats:
    ended: Floats = rows["ended_at"].to_numpy()[rows["client"].to_numpy() == server]
    return ended


def _identity(file: Chunk) -> object:
    """What changes when the rows of a chunk do."""
    if isinstance(file, Tail):
        return (str(file.path), len(file.content), hash(file.content))
    try:
        about = file.stat()
    except OSError as error:
        raise TraceError(f"{file} disappeared; the run was resumed or removed") from error
    return (str(file), about.st_ino, about.st_mtime_ns, about.st_size)


def _span(file: Chunk, name: str, times: Floats) -> Window:
    """The first and the last time; those that no run has are refused."""
    if not len(times):
        return 0.0, 0.0
    first, last = float(times.min()), float(times.max())
    if not (first >= 0 and np.isfinite(last)):
        raise TraceError(
            f"{path_of(file)} is damaged: its {name} goes from {first:g} to {last:g}, and times are finite "
            "and not negative; restore the original"
        )
    return first, last
