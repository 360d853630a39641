"""The whole table of messages in one canonical order, as a stream or in one file.

The order is by sent_at, sender, receiver, step; equal rows stay as they were written. Chunks come nearly in
order of time, so sorting them as a stream needs little more than a chunk of memory: whatever was sent before
every message of the chunks still to come is final.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from asyncfed.network.names import Names
from asyncfed.trace.columns import MESSAGES, SCHEMAS, schema_for
from asyncfed.trace.files import Chunk, open_chunk, path_of, read_chunks, reading

_NODES = ("sender", "receiver")


def in_order(messages: pa.Table) -> pa.Table:
    keys = [messages[name].to_numpy() for name in ("step", "receiver", "sender", "sent_at")]
    return messages.take(np.lexsort(keys))


def sorted_chunks(files: Sequence[Chunk], nodes: int) -> Iterator[pa.Table]:
    """All messages in canonical order, piece by piece."""
    first_sent = [_first_sent(file, nodes) for file in files]
    later = np.minimum.accumulate([*first_sent, np.inf][::-1])[::-1][1:]
    held = SCHEMAS[MESSAGES].empty_table()
    for chunk, horizon in zip(read_chunks(files, MESSAGES, nodes), later, strict=True):
        held = in_order(pa.concat_tables([held, chunk.replace_schema_metadata()]).unify_dictionaries())
        final = int(np.searchsorted(held["sent_at"].to_numpy(), horizon))
        yield held.slice(0, final)
        held = held.slice(final)


def all_messages(files: Sequence[Chunk], nodes: int, server: int | None) -> pa.Table:
    """All messages in canonical order, in memory."""
    schema = schema_for(MESSAGES, nodes, server)
    tables = [schema.remove_metadata().empty_table(), *sorted_chunks(files, nodes)]
    return pa.concat_tables(tables).unify_dictionaries().replace_schema_metadata(schema.metadata)


def write_csv(files: Sequence[Chunk], nodes: int, target: Path, names: Names) -> None:
    plain = pa.schema([(field.name, _plain_type(field.type)) for field in SCHEMAS[MESSAGES]])
    called = pa.array([names[node] for node in range(nodes)]) if names.given else None
    if called is not None:
        for name in _NODES:
            plain = plain.set(plain.get_field_index(name), pa.field(name, called.type))

    def column(piece: pa.Table, field: pa.Field) -> pa.ChunkedArray:
        if called is not None and field.name in _NODES:
            return called.take(piece[field.name].combine_chunks())
        return piece[field.name].cast(field.type)

    def pieces() -> Iterator[pa.Table]:
        for piece in sorted_chunks(files, nodes):
            yield pa.table([column(piece, field) for field in plain], schema=plain)

    _write(target, lambda file: pa.csv.CSVWriter(file, plain), pieces())


def write_parquet(files: Sequence[Chunk], nodes: int, server: int | None, target: Path) -> None:
    schema = schema_for(MESSAGES, nodes, server)
    pieces = (piece.replace_schema_metadata(schema.metadata) for piece in sorted_chunks(files, nodes))
    _write(target, lambda file: pq.ParquetWriter(file, schema, compression="zstd"), pieces)


def _write(
    target: Path, opened: Callable[[BinaryIO], AbstractContextManager[Any]], pieces: Iterator[pa.Table]
) -> None:
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        with temporary.open("wb") as file, opened(file) as sink:  # a path could be taken for an address
            for piece in pieces:
                sink.write_table(piece)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _first_sent(file: Chunk, nodes: int) -> float:
    """The earliest time in a chunk: from its footer, or where that does not say, from its rows."""
    column = SCHEMAS[MESSAGES].get_field_index("sent_at")
    with open_chunk(file, MESSAGES, nodes) as chunk, reading(path_of(file)):
        groups = (chunk.metadata.row_group(number) for number in range(chunk.num_row_groups))
        statistics = [group.column(column).statistics for group in groups]
        if all(found is not None and found.has_min_max for found in statistics):
            return min((float(found.min) for found in statistics), default=np.inf)
        times = chunk.read(columns=["sent_at"])["sent_at"].to_numpy()
        return float(times.min(initial=np.inf))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
