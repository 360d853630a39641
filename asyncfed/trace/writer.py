"""Writes a trace while the run goes.

An append only stashes references; columns are built for many appends at once when a chunk is due. When that
is depends on the number of rows alone, never on a clock, so the same appends give the same files, byte for
byte. A chunk is written under a temporary name and renamed: a kill at any instant leaves whole chunks only.

So that a kill costs little, `save` may be called by the clock: it writes the rows that wait for their chunk
to a tail, a file beside the chunks that is written anew each time and removed when its chunk is there. What a
run leaves in the end shows nothing of that.

Building and compressing a chunk happens in a thread of its own (pyarrow works outside the interpreter lock),
so that the run goes on meanwhile; chunks are written one after the other, and a run that is faster than its
trace waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from asyncfed.disk import storing, synced, write_whole
from asyncfed.errors import TraceError
from asyncfed.network.waves import Status
from asyncfed.recall import Saved
from asyncfed.trace.columns import (
    DICTIONARY_COLUMNS,
    ENCODINGS,
    MESSAGES,
    STATISTICS,
    STATUS_NAMES,
    STEPS,
    Totals,
    schema_for,
)
from asyncfed.trace.files import Place

Numbers: TypeAlias = npt.NDArray[Any] | float
"""An array with one value per row, or one number for all rows of a call."""

SMALL_FLUSH = 8192
_LONG_CALLS = 64  # rows
_CHUNKS_BEHIND = 3


class TraceWriter:
    """Appends messages and steps to the trace in `directory`.

    A directory that already holds chunks is refused, unless `continues` (what `put_down` of an earlier writer
    handed over) says after which of them to continue; later ones are then removed. `server` is the node
    around which rounds are made, where there is one; it is noted in every chunk.
    """

    def __init__(
        self,
        directory: Path,
        nodes: int,
        chunk_rows: int = 1 << 18,
        continues: Saved | None = None,
        server: int | None = None,
    ) -> None:
        if nodes < 1 or chunk_rows < 1:
            raise ValueError(f"nodes is {nodes} and chunk_rows is {chunk_rows}; both must be at least 1")
        if server is not None and not 0 <= server < nodes:
            raise ValueError(f"server is {server}; it must lie in [0, {nodes})")
        self.directory = Path(directory)
        self.nodes = nodes
        self.server = server
        self.chunk_rows = chunk_rows
        self._messages = _Stash(_MESSAGE_NUMBERS)
        self._steps = _Stash(_STEP_NUMBERS)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="asyncfed-trace")
        self._unwritten: deque[Future[None]] = deque()
        self._unsynced: list[Path] = []  # chunks that a power failure may take
        self._counted = 0
        self._closed = False
        self._places = {table: self._folder(table) for table in (MESSAGES, STEPS)}
        place = None if continues is None else continues.plain
        self._next = {
            table: self._continue_from(table, None if place is None else int(place["chunks"][table]))
            for table in self._places
        }
        self._totals = Totals()
        self.step_count = 0  # of all clients together
        if continues is not None and place is not None:
            self._totals = Totals(*map(int, place["totals"]))
            self.step_count = int(place["steps counted"])
            self._messages.refill(continues, MESSAGES)
            self._steps.refill(continues, STEPS)
            self._counted = len(self._messages.rows)

    def messages(
        self,
        *,
        sender: Numbers,
        receiver: Numbers,
        status: Numbers,
        step: Numbers,
        sent_at: Numbers,
        arrived_at: Numbers,
        absorbed_step: Numbers,
        weight: Numbers,
        bytes: Numbers,
        phase: str,
        kind: str,
        staleness: Numbers = -1,
    ) -> None:
        """Append one row per potential message; the caller leaves the arrays unchanged from here on.

        A null is NaN (`arrived_at`, `weight`) or -1 (`absorbed_step`, `staleness`). What the status rules out
        (see `columns`) becomes null, or 0 bytes, by itself, so one number may stand for delivered and
        undelivered rows alike.
        """
        values = (
            sender, receiver, status, step, sent_at, arrived_at, absorbed_step, weight, bytes, staleness,
        )  # fmt: skip
        self._messages.append(values, (phase, kind))
        self._appended()

    def steps(
        self,
        *,
        client: Numbers,
        step: Numbers,
        started_at: Numbers,
        ended_at: Numbers,
        absorbed: Numbers,
        phase: str,
    ) -> None:
        """Append one row per step of a client; `absorbed` is how many messages it took in at its start."""
        before = self._steps.pending
        self._steps.append((client, step, started_at, ended_at, absorbed), (phase,))
        self.step_count += self._steps.pending - before
        self._appended()

    @property
    def totals(self) -> Totals:
        """Messages and bytes appended so far, written or not."""
        self._count()
        return self._totals

    def put_down(self) -> Callable[[], Saved]:
        """Where a later writer can continue to the same files: how many chunks there are, and the rows that
        wait for the next. What is returned hands it over, in another thread if need be.
        """
        waiting = {MESSAGES: self._messages.copy(), STEPS: self._steps.copy()}
        place = {
            "chunks": dict(self._next), "totals": list(self.totals), "steps counted": self.step_count,
        }  # fmt: skip

        def handed_over() -> Saved:
            arrays: list[npt.NDArray[Any]] = []
            return Saved(place | {table: stash.put_down(arrays) for table, stash in waiting.items()}, arrays)

        return handed_over

    def flush(self, *, force: bool = False) -> None:
        """Write what is pending as a chunk of each table; a small amount waits for more unless `force`, which
        also waits until all chunks are on disk."""
        if force or self._messages.pending + self._steps.pending >= SMALL_FLUSH:
            self._hand_over()
        if force:
            self.wait()

    def save(self, then: Callable[[], object] | None = None) -> None:
        """Put what is pending on disk as it is, and after that call `then`; both in the writing thread."""
        pending = {MESSAGES: self._messages, STEPS: self._steps}
        parts = [
            (table, self._next[table], stash.copy()) for table, stash in pending.items() if stash.pending
        ]
        self._wait(_CHUNKS_BEHIND)
        self._unwritten.append(self._worker.submit(self._save, parts, then))

    def sync(self) -> None:
        """Have the system put all chunks so far on disk; in the writing thread."""
        with storing(self.directory):
            for chunk in self._unsynced:
                synced(chunk)
        self._unsynced = []

    def wait(self) -> None:
        """Until everything that was due, or to be saved, is on disk."""
        self._wait(0)

    def close(self) -> None:
        """Write everything that is pending; the writer takes no more rows."""
        if self._closed:
            return
        self._closed = True
        try:
            self._hand_over()
            self.wait()
        finally:
            self._worker.shutdown()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _appended(self) -> None:
        if self._closed:
            raise ValueError(f"the trace in {self.directory} is closed; append before close()")
        if self._messages.pending + self._steps.pending >= self.chunk_rows:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._messages.pending:
            self._count()
            self._put(MESSAGES, self._messages)
            self._messages = _Stash(_MESSAGE_NUMBERS)
            self._counted = 0
        if self._steps.pending:
            self._put(STEPS, self._steps)
            self._steps = _Stash(_STEP_NUMBERS)

    def _put(self, table: str, stash: _Stash) -> None:
        self._wait(_CHUNKS_BEHIND)
        number = self._next[table]
        self._next[table] += 1
        self._unwritten.append(self._worker.submit(self._write, table, number, stash))

    def _wait(self, most: int) -> None:
        """Until at most so many chunks are unwritten; an error in writing one surfaces here."""
        while len(self._unwritten) > most:
            self._unwritten.popleft().result()

    def _count(self) -> None:
        stash = self._messages
        by_status = np.zeros(len(Status), dtype=np.int64)
        sent_bytes = 0
        for place in range(self._counted, len(stash.rows)):
            status, payload = stash.value(place, "status"), stash.value(place, "bytes")
            if isinstance(status, np.ndarray):
                _check_range("status", status, len(Status))
                counts = np.bincount(status, minlength=len(Status))
            else:
                _check_range("status", np.array([status]), len(Status))
                counts = np.zeros(len(Status), dtype=np.int64)
                counts[int(status)] = stash.rows[place]
            by_status += counts
            if isinstance(payload, np.ndarray):
                sent_bytes += int(payload.sum(where=np.not_equal(status, Status.LINK_DOWN)))
            else:
                sent_bytes += int(payload) * int(counts.sum() - counts[Status.LINK_DOWN])
        self._counted = len(stash.rows)
        self._totals = self._totals.plus(Totals.of(by_status, sent_bytes))

    def _save(self, parts: list[tuple[str, int, _Stash]], then: Callable[[], object] | None) -> None:
        for table, number, stash in parts:
            with storing(self.directory):
                self._write_rows(table, stash, self._places[table].tail(number))
        if then is not None:
            then()

    def _write(self, table: str, number: int, stash: _Stash) -> None:
        chunk = self._places[table].chunk(number)
        with storing(self.directory):
            self._write_rows(table, stash, chunk)
            self._unsynced.append(chunk)
            self._places[table].tail(number).unlink(missing_ok=True)

    def _write_rows(self, table: str, stash: _Stash, target: Path) -> None:
        columns = (
            _message_columns(stash, self.nodes) if table == MESSAGES else _step_columns(stash, self.nodes)
        )
        schema = schema_for(table, self.nodes, self.server)

        def write(part: Path) -> None:
            with part.open("wb") as file:  # a path such as exp:1/… would be taken for an address
                pq.write_table(
                    pa.table([columns[name] for name in schema.names], schema=schema),
                    file,
                    compression="zstd",
                    compression_level=1,
                    use_dictionary=[name for name in DICTIONARY_COLUMNS if name in columns],
                    column_encoding={name: ENCODINGS[name] for name in ENCODINGS if name in columns} or None,
                    row_group_size=len(columns["step"]),
                    write_page_checksum=True,
                    write_statistics=[name for name in STATISTICS if name in columns],
                )

        write_whole(target, write)

    def _folder(self, table: str) -> Place:
        """The folder of a table, made where there is none; what leads elsewhere is refused."""
        folder = self.directory / table
        with storing(self.directory):
            folder.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink():
            raise TraceError(f"{folder} is a link; a trace is written where its run is: remove it")
        return Place(folder)

    def _continue_from(self, table: str, number: int | None) -> int:
        """Remove what comes after the first `number` chunks, newest first so that a kill leaves no gap."""
        present, tails = self._places[table].chunks(), self._places[table].tails()
        if (present or tails) and number is None:
            raise TraceError(
                f"{self.directory} already holds a trace; "
                "choose another directory, or resume from a checkpoint"
            )
        keep = number or 0
        if not 0 <= keep <= len(present):
            raise TraceError(
                f"{self.directory} holds {len(present)} {table} chunks but the checkpoint counts {keep}; "
                "the run cannot be resumed, start it anew"
            )
        with storing(self.directory):
            for path in (*tails, *reversed(present[keep:])):
                path.unlink()
        return keep


def clear(directory: Path) -> None:
    """Remove the trace in a directory, newest chunks first so that a kill leaves no gap; other files stay."""
    if directory.is_dir():
        with storing(directory):
            for place in (Place.of(directory, table) for table in (MESSAGES, STEPS)):
                if not place.folder.is_symlink():  # which leads elsewhere
                    for path in (*place.tails(), *reversed(place.chunks())):
                        path.unlink()


_MESSAGE_NUMBERS = (
    "sender", "receiver", "status", "step", "sent_at", "arrived_at", "absorbed_step", "weight", "bytes",
    "staleness",
)  # fmt: skip
_STEP_NUMBERS = ("client", "step", "started_at", "ended_at", "absorbed")
_WHOLE = ("sender", "receiver", "status", "step", "absorbed_step", "staleness", "client", "absorbed")
_REAL = ("sent_at", "arrived_at", "weight", "started_at", "ended_at")
_KINDS: dict[str, Any] = (
    dict.fromkeys(_WHOLE, np.int32) | dict.fromkeys(_REAL, np.float64) | {"bytes": np.int64}
)


class _Stash:
    """Rows as they were handed over, call by call."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._index = {name: position for position, name in enumerate(names)}
        self.calls: list[tuple[Numbers, ...]] = []
        self.labels: list[tuple[str, ...]] = []
        self.rows: list[int] = []
        self.pending = 0

    def append(self, values: tuple[Numbers, ...], labels: tuple[str, ...]) -> None:
        sizes = {len(value) for value in values if isinstance(value, np.ndarray)}
        if len(sizes) > 1:
            raise ValueError(
                f"arrays of {sorted(sizes)} rows in one append; give equal lengths or single numbers"
            )
        rows = sizes.pop() if sizes else 1
        if rows:
            self.calls.append(values)
            self.labels.append(labels)
            self.rows.append(rows)
            self.pending += rows

    def copy(self) -> _Stash:
        """The rows so far; those of later calls come to this one only."""
        same = _Stash(tuple(self._index))
        same.calls, same.labels, same.rows = self.calls.copy(), self.labels.copy(), self.rows.copy()
        same.pending = self.pending
        return same

    def put_down(self, arrays: list[npt.NDArray[Any]]) -> Any:
        """The rows so far as columns, which go to `arrays`, and the labels with how many rows each is for."""
        runs: list[list[Any]] = []
        for label, rows in zip(self.labels, self.rows, strict=True):
            if runs and tuple(runs[-1][:-1]) == label:
                runs[-1][-1] += rows
            else:
                runs.append([*label, rows])
        first = len(arrays)
        arrays.extend(self.numbers(name) for name in self._index)
        return {"labels": runs, "columns": list(range(first, len(arrays)))}

    def refill(self, saved: Saved, table: str) -> None:
        """Take the rows that another one put down."""
        columns = [saved.arrays[place] for place in saved.plain[table]["columns"]]
        counts = [rows for *_, rows in saved.plain[table]["labels"]]
        if {len(column) for column in columns} != {sum(counts)} or min(counts, default=1) < 1:
            raise ValueError(f"labels of {sum(counts)} rows of {table} stand beside others")
        start = 0
        for *labels, rows in saved.plain[table]["labels"]:
            self.append(tuple(column[start : start + rows] for column in columns), tuple(labels))
            start += rows

    def value(self, call: int, name: str) -> Numbers:
        """What one call gave for a column."""
        return self.calls[call][self._index[name]]

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """A column, numbers repeated for the rows they stand for."""
        position, dtype = self._index[name], _KINDS[name]
        if not self.calls:
            return np.zeros(0, dtype)
        values = [call[position] for call in self.calls]
        if self.pending >= _LONG_CALLS * len(values):
            return self._filled(values, dtype)
        if not any(isinstance(value, np.ndarray) for value in values):
            return np.repeat(np.asarray(values, dtype), self.rows)
        parts = [
            v if isinstance(v, np.ndarray) else np.full(k, v) for v, k in zip(values, self.rows, strict=True)
        ]
        return np.concatenate(parts, dtype=dtype, casting="same_kind")

    def text(self, position: int) -> pa.DictionaryArray:
        """A column of labels; its dictionary is in order of appearance."""
        labels = [call[position] for call in self.labels]
        codes = {label: code for code, label in enumerate(dict.fromkeys(labels))}
        if len(codes) == 1:
            indices = np.zeros(self.pending, np.int32)
        else:
            indices = np.repeat(np.array([codes[label] for label in labels], np.int32), self.rows)
        return pa.DictionaryArray.from_arrays(indices, pa.array(codes, pa.string()))

    def _filled(self, values: list[Numbers], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """For few long calls: one stretch after the other."""
        column = np.empty(self.pending, dtype)
        start = 0
        for value, rows in zip(values, self.rows, strict=True):
            column[start : start + rows] = value
            start += rows
        return column


def _message_columns(stash: _Stash, nodes: int) -> dict[str, Any]:
    status = _within(stash, "status", len(Status))
    sent = status != Status.LINK_DOWN
    absorbed = (status == Status.DELIVERED) | (status == Status.CARRIED)
    arriving = sent & (status != Status.LOST)
    arrived_at = stash.numbers("arrived_at")
    absorbed_step = stash.numbers("absorbed_step")
    weight = stash.numbers("weight")
    payload = stash.numbers("bytes")
    staleness = stash.numbers("staleness")
    return {
        "step": stash.numbers("step"),
        "sender": _within(stash, "sender", nodes),
        "receiver": _within(stash, "receiver", nodes),
        "status": pa.DictionaryArray.from_arrays(status, pa.array(STATUS_NAMES)),
        "sent_at": stash.numbers("sent_at"),
        "arrived_at": _nullable(arrived_at, arriving & ~np.isnan(arrived_at)),
        "absorbed_step": _nullable(absorbed_step, absorbed & (absorbed_step >= 0)),
        "weight": _nullable(weight, sent & ~np.isnan(weight)),
        "bytes": payload * sent,
        "phase": stash.text(0),
        "kind": stash.text(1),
        "staleness": _nullable(staleness, sent & (staleness >= 0)),
    }


def _nullable(values: npt.NDArray[Any], valid: npt.NDArray[np.bool_]) -> pa.Array:
    """An Arrow array over the same memory, null where not valid: much faster than pa.array with a mask."""
    bits = pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [bits, pa.py_buffer(values)])


def _step_columns(stash: _Stash, nodes: int) -> dict[str, Any]:
    return {
        "client": _within(stash, "client", nodes),
        "step": stash.numbers("step"),
        "started_at": stash.numbers("started_at"),
        "ended_at": stash.numbers("ended_at"),
        "absorbed": stash.numbers("absorbed"),
        "phase": stash.text(0),
    }


def _within(stash: _Stash, name: str, limit: int) -> npt.NDArray[Any]:
    values = stash.numbers(name)
    _check_range(name, values, limit)
    return values


def _check_range(name: str, values: npt.NDArray[Any], limit: int) -> None:
    if values.min() < 0 or values.max() >= limit:
        culprit = values[(values < 0) | (values >= limit)][0]
        raise ValueError(f"{name} is {culprit}; it must lie in [0, {limit})")
