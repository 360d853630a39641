"""Messages and steps as tables of text, and all messages as one Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv

from asyncfed.trace.columns import SCHEMAS, STEPS
from asyncfed.trace.files import read_chunks, trace_files

if TYPE_CHECKING:
    from asyncfed.result import Result


def write_messages(result: Result, path: Path) -> None:
    result.trace.to_csv(path)


def write_parquet(result: Result, path: Path) -> None:
    result.trace.to_parquet(path)


def write_steps(result: Result, path: Path) -> None:
    """One row per step of a client, in the order in which they were written."""
    trace = result.trace
    given = trace.names.given
    called = pa.array([str(trace.names[node]) for node in range(trace.node_count)]) if given else None
    phase = SCHEMAS[STEPS].get_field_index("phase")
    schema = SCHEMAS[STEPS].set(phase, pa.field("phase", pa.string()))
    if called is not None:
        schema = schema.set(schema.get_field_index("client"), pa.field("client", pa.string()))
    files = trace_files(trace.directory, STEPS)
    with path.open("wb") as file, pa.csv.CSVWriter(file, schema) as sink:  # a path could be an address
        for chunk in read_chunks(files, STEPS, trace.node_count):
            if called is not None:
                place = chunk.schema.get_field_index("client")
                chunk = chunk.set_column(place, "client", called.take(chunk["client"].combine_chunks()))
            sink.write_table(chunk.cast(schema))
