"""Finds the chunks of a trace and opens them; whatever is not one is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncfed.errors import TraceError
from asyncfed.trace.columns import FORMAT, SCHEMAS, VERSION, chunk_path

_CHUNK_NAME = re.compile(r"(messages|steps)-(\d{5,})\.parquet")


def chunk_files(directory: Path, table: str) -> list[Path]:
    """The chunks of `table` in order.

    Chunks appear in order but a directory listing made meanwhile may miss one, so presence is asked file by
    file.
    """
    if not directory.is_dir():
        raise TraceError(f"{directory} is not a directory; give the directory that a run wrote its trace to")
    matches = (_CHUNK_NAME.fullmatch(path.name) for path in directory.iterdir())
    numbers = [int(match[2]) for match in matches if match and match[1] == table]
    paths = [chunk_path(directory, table, number) for number in range(max(numbers, default=-1) + 1)]
    for path in paths:
        if not path.exists():
            raise TraceError(
                f"{path} is missing although later chunks exist; restore it, or remove the chunks after it "
                "to read the trace up to there"
            )
    return paths


def open_chunk(path: Path, table: str, nodes: int | None = None) -> pq.ParquetFile:
    """A chunk whose footer says that it is what its name promises."""
    with reading(path):
        chunk = pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
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
    if marks.get("table") != table or not chunk.schema_arrow.equals(SCHEMAS[table]):
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


def nodes_of(chunk: pq.ParquetFile) -> int:
    return int(chunk.metadata.metadata[b"nodes"])


def server_of(chunk: pq.ParquetFile) -> int | None:
    mark = chunk.metadata.metadata.get(b"server")
    return None if mark is None else int(mark)


def read_chunks(
    paths: Sequence[Path], table: str, nodes: int, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Each chunk as an Arrow table, one at a time."""
    for path in paths:
        with open_chunk(path, table, nodes) as chunk, reading(path):
            rows = chunk.read(columns=columns)
        yield rows


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
