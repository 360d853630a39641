"""Finds the chunks of a trace and opens them; whatever is not one is refused by name.

A tail counts only as long as its chunk is not there. It is read into memory when it is found: while a run
goes, it is replaced by a longer one, and by its chunk in the end, which begins with the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from asyncfed.errors import TraceError
from asyncfed.trace.columns import FORMAT, SCHEMAS, STALENESS, VERSION, chunk_path, tail_path

_CHUNK_NAME = re.compile(r"(messages|steps)-(\d{5,})(\.tail)?\.parquet")


@dataclass(frozen=True)
class Tail:
    """The last rows of a run that was killed, or goes on."""

    path: Path
    content: bytes = field(repr=False)


Chunk: TypeAlias = Path | Tail


def trace_files(directory: Path, table: str) -> list[Chunk]:
    """All of `table` that is on disk: its chunks in order, and the tail after them where there is one."""
    while True:
        chunks = chunk_files(directory, table)
        try:
            tail = tail_path(directory, table, len(chunks))
            return [*chunks, Tail(tail, tail.read_bytes())]
        except FileNotFoundError:
            if not chunk_path(directory, table, len(chunks)).exists():  # or it became whole meanwhile
                return list(chunks)


def tail_files(directory: Path, table: str) -> list[Path]:
    """Every tail, also one that a kill left beside its chunk."""
    return [path for path in directory.glob(f"{table}-*.tail.parquet") if _CHUNK_NAME.fullmatch(path.name)]


def chunk_files(directory: Path, table: str) -> list[Path]:
    """The chunks of `table` in order.

    Chunks appear in order but a directory listing made meanwhile may miss one, so presence is asked file by
    file.
    """
    if not directory.is_dir():
        raise TraceError(f"{directory} is not a directory; give the directory that a run wrote its trace to")
    matches = (_CHUNK_NAME.fullmatch(path.name) for path in directory.iterdir())
    counts = [int(match[2]) + (not match[3]) for match in matches if match and match[1] == table]
    paths = [chunk_path(directory, table, number) for number in range(max(counts, default=0))]
    for path in paths:
        if not path.exists():
            raise TraceError(
                f"{path} is missing although later chunks exist; restore it, or remove the chunks after it "
                "to read the trace up to there"
            )
    return paths


def open_chunk(file: Chunk, table: str, nodes: int | None = None) -> pq.ParquetFile:
    """A chunk whose footer says that it is what its name promises."""
    path = path_of(file)
    with reading(path):
        chunk = pq.ParquetFile(source_of(file), memory_map=True, page_checksum_verification=True)
    marks = {
        key.decode(): value.decode("utf8", "replace")
        for key, value in (chunk.metadata.metadata or {}).items()
    }
    if marks.get("format") != FORMAT:
        raise TraceError(
            f"{path} is a Parquet file but not part of an asyncfed trace; move it out of the directory"
        )
    if marks.get("version") != VERSION:
        raise TraceError(
            f"{path} has trace version {marks.get('version')!r}; this asyncfed reads version {VERSION!r}: "
            "read it with the asyncfed that wrote it"
        )
    if marks.get("table") != table or not _like(SCHEMAS[table], chunk.schema_arrow):
        raise TraceError(
            f"{path} does not hold the columns of the table {table!r} but {chunk.schema_arrow.names} "
            f"(table {marks.get('table')!r}); it was renamed or changed, restore the original"
        )
    count = marks.get("nodes", "")
    if not count.isdecimal() or int(count) < 1 or (nodes is not None and int(count) != nodes):
        raise TraceError(
            f"{path} was written for {count or 'unknown'} nodes, expected {nodes or 'at least 1'}; "
            "chunks of different runs must not share a directory"
        )
    server = marks.get("server")
    if server is not None and not (server.isdecimal() and int(server) < int(count)):
        raise TraceError(
            f"{path} names {server!r} as its server, which is not one of its {count} nodes; "
            "it was changed, restore the original"
        )
    return chunk


def path_of(file: Chunk) -> Path:
    return file.path if isinstance(file, Tail) else file


def source_of(file: Chunk) -> Path | pa.BufferReader:
    """What Arrow reads."""
    return pa.BufferReader(file.content) if isinstance(file, Tail) else file


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
            rows = chunk.read(columns=columns)
        yield completed(rows, SCHEMAS[table].names if columns is None else columns)


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
    except (pa.ArrowException, OSError) as error:
        raise TraceError(
            f"{path} cannot be read as Parquet ({str(error).splitlines()[0]}); it is truncated or damaged: "
            "restore it, or remove it and the chunks after it to read the trace up to there"
        ) from error
