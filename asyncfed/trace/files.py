"""Finds the chunks of a trace and opens them; whatever is not one is refused by name.

A tail counts only as long as its chunk is not there. It is read into memory when it is found: while a run
goes, it is replaced by a longer one, and by its chunk in the end, which begins with the same rows.

Files may come from anybody. Before a chunk is read, its footer must bear out that it is one of ours and that
its rows are no more than its bytes can hold; after, every value that is used as a place must be one.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from asyncfed.checks import shown
from asyncfed.errors import TraceError
from asyncfed.reading import open_regular, read_whole
from asyncfed.trace.columns import FORMAT, SCHEMAS, STALENESS, VERSION

MOST_NODES = 1 << 22
_MOST_TAIL = 1 << 30  # bytes
_FEW_ROWS = 1 << 20
_MOST_ROWS = 1 << 26  # of a chunk: some 5 GB in memory
_ROWS_PER_BYTE = 500  # of ours, those of a large and dense network in lockstep come nearest

_PLACES = ("step", "sender", "receiver", "client")

_CHUNK_NAME = re.compile(r"([0-9]{5,})(\.tail)?\.parquet")


@dataclass(frozen=True)
class Place:
    """Where the chunks of a table are, and how their names begin."""

    folder: Path
    prefix: str = ""

    @classmethod
    def of(cls, directory: Path, table: str) -> Place:
        """In a folder of the table's own; of older runs, in one with the other table."""
        folder = directory / table
        if not folder.is_dir() and any(directory.glob(f"{table}-*.parquet")):
            return cls(directory, f"{table}-")
        return cls(folder)

    def chunk(self, number: int) -> Path:
        return self.folder / f"{self.prefix}{number:05d}.parquet"

    def tail(self, number: int) -> Path:
        """The rows so far of a chunk that is not due yet."""
        return self.folder / f"{self.prefix}{number:05d}.tail.parquet"

    def names(self) -> Iterator[re.Match[str]]:
        """Of all chunks and tails that there are: number, and whether it is a tail."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name.startswith(self.prefix):
                match = _CHUNK_NAME.fullmatch(path.name[len(self.prefix) :])
                if match:
                    yield match

    def chunks(self) -> list[Path]:
        """The chunks in order.

        They appear in order but a directory listing made meanwhile may miss one, so presence is asked file
        by file.
        """
        counts = [int(match[1]) + (not match[2]) for match in self.names()]
        paths: list[Path] = []
        while len(paths) < max(counts, default=0):  # the largest may be absurd; the first gap ends it
            path = self.chunk(len(paths))
            if not path.exists():
                raise TraceError(
                    f"{path} is missing although later chunks exist; restore it, or remove the chunks after "
                    "it to read the trace up to there"
                )
            paths.append(path)
        return paths

    def tails(self) -> list[Path]:
        """Every tail, also one that a kill left beside its chunk."""
        return [self.folder / f"{self.prefix}{match[0]}" for match in self.names() if match[2]]


@dataclass(frozen=True)
class Tail:
    """The last rows of a run that was killed, or goes on."""

    path: Path
    content: bytes = field(repr=False)


Chunk: TypeAlias = Path | Tail


def trace_files(directory: Path, table: str) -> list[Chunk]:
    """All of `table` that is on disk: its chunks in order, and the tail after them where there is one."""
    place = Place.of(directory, table)
    while True:
        chunks = place.chunks()
        try:
            tail = place.tail(len(chunks))
            return [*chunks, Tail(tail, read_whole(tail, _MOST_TAIL))]
        except FileNotFoundError:
            if not place.chunk(len(chunks)).exists():  # or it became whole meanwhile
                return list(chunks)
        except OSError as error:
            raise _unreadable(tail, error) from error


def open_chunk(file: Chunk, table: str, nodes: int | None = None) -> pq.ParquetFile:
    """A chunk whose footer says that it is what its name promises."""
    path = path_of(file)
    with reading(path):
        source = source_of(file)
        size = source.size()
        chunk = pq.ParquetFile(source, page_checksum_verification=True)
        schema = chunk.schema_arrow
    marks = {
        key.decode("utf8", "replace"): value.decode("utf8", "replace")
        for key, value in (chunk.metadata.metadata or {}).items()
    }
    if marks.get("format") != FORMAT:
        raise TraceError(
            f"{path} is a Parquet file but not part of an asyncfed trace; move it out of the directory"
        )
    if marks.get("version") != VERSION:
        raise TraceError(
            f"{path} has trace version {shown(marks.get('version'))}; "
            f"this asyncfed reads version {VERSION!r}: read it with the asyncfed that wrote it"
        )
    if marks.get("table") != table or not _like(SCHEMAS[table], schema):
        raise TraceError(
            f"{path} does not hold the columns of the table {table!r} but {shown(schema.names, 400)} "
            f"(table {shown(marks.get('table'))}); it was renamed or changed, restore the original"
        )
    count = _number(marks.get("nodes", ""))
    if not 1 <= count <= MOST_NODES or (nodes is not None and count != nodes):
        raise TraceError(
            f"{path} was written for {marks.get('nodes', 'unknown')!s:.40} nodes, "
            f"expected {nodes or f'1 to {MOST_NODES:,}'}; chunks of different runs must not share a directory"
        )
    server = marks.get("server")
    if server is not None and not 0 <= _number(server) < count:
        raise TraceError(
            f"{path} names {shown(server)} as its server, which is not one of its {count} nodes; "
            "it was changed, restore the original"
        )
    _check_rows(chunk, path, size)
    return chunk


def _number(text: str) -> int:
    """-1 for what is none, or has too many digits to be one of ours."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1


def _check_rows(chunk: pq.ParquetFile, path: Path, size: int) -> None:
    """Refuse a small file that says it has so many rows that they would fill the memory."""
    rows = chunk.metadata.num_rows
    groups = [chunk.metadata.row_group(number).num_rows for number in range(chunk.num_row_groups)]
    most = min(_MOST_ROWS, max(_FEW_ROWS, _ROWS_PER_BYTE * size))
    if min(groups, default=0) < 0 or sum(groups) != rows or rows > most:
        raise TraceError(
            f"{path} says that it has {rows:,} rows, which its {size:,} bytes cannot hold; "
            "it was changed, restore the original"
        )


def path_of(file: Chunk) -> Path:
    return file.path if isinstance(file, Tail) else file


def source_of(file: Chunk) -> pa.BufferReader:
    """What Arrow reads: never a path, which it could take for an address."""
    if isinstance(file, Tail):
        return pa.BufferReader(file.content)
    with open_regular(file) as opened:
        if not os.fstat(opened.fileno()).st_size:
            return pa.BufferReader(b"")
        return pa.BufferReader(pa.py_buffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)))


def nodes_of(chunk: pq.ParquetFile) -> int:
    return int(chunk.metadata.metadata[b"nodes"])


def server_of(chunk: pq.ParquetFile) -> int | None:
    mark = chunk.metadata.metadata.get(b"server")
    return None if mark is None else int(mark)


def read_chunks(
    files: Sequence[Chunk], table: str, nodes: int, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Each chunk as an Arrow table, one at a time."""
    for file in files:
        with open_chunk(file, table, nodes) as chunk, reading(path_of(file)):
            rows = checked(chunk.read(columns=columns), nodes)
        yield completed(rows, SCHEMAS[table].names if columns is None else columns)


def checked(rows: pa.Table, nodes: int) -> pa.Table:
    """The rows, where every number that is used as a place is one; an ArrowInvalid where not."""
    rows.validate(full=True)
    for name in rows.column_names:
        column = rows[name]
        if name in _PLACES and len(column):
            least, most = pc.min_max(column).as_py().values()
            if least < 0 or (name != "step" and most >= nodes):
                raise pa.ArrowInvalid(f"its {name} goes from {least} to {most}, of {nodes} nodes")
        if pa.types.is_dictionary(column.type):
            for piece in column.chunks:
                labels = piece.dictionary
                if labels.null_count or len(labels.unique()) < len(labels):
                    raise pa.ArrowInvalid(f"a label of its {name} is missing or there twice")
    return rows.replace_schema_metadata()


def completed(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Rows of a trace from before there was a staleness, where that is wanted: with nulls."""
    if STALENESS not in columns or STALENESS in rows.column_names:
        return rows
    return rows.append_column(STALENESS, pa.nulls(len(rows), pa.int32()))


def _like(schema: pa.Schema, found: pa.Schema) -> bool:
    """Whether columns are as they should be; staleness is younger than the others and may be missing."""
    if STALENESS in schema.names and STALENESS not in found.names:
        schema = schema.remove(schema.get_field_index(STALENESS))
    return bool(found.equals(schema))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What Arrow cannot read becomes a TraceError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise TraceError(
            f"{path} disappeared; the run was resumed or removed, open the trace again"
        ) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> TraceError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return TraceError(
        f"{path} cannot be read as Parquet ({' '.join(reason.splitlines()[:1]):.300}); "
        "it is truncated or damaged: "
        "restore it, or remove it and the chunks after it to read the trace up to there"
    )
