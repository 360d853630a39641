"""What a kill leaves behind is readable; what is not a trace is refused by name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import asyncfed.trace
from asyncfed.errors import TraceError
from asyncfed.trace import Trace, TraceWriter
from tests.trace import naive

MESSAGES = naive.random_messages(4, 1000)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return naive.write(tmp_path, 4, MESSAGES, chunk_rows=200)


def remark(path: Path, **marks: str) -> None:
    table = pq.read_table(path)
    changed = {key.encode(): value for key, value in marks.items()}
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, **changed}), path)


def flip_a_byte_of_data(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-100]), "truncated or damaged"),
    "empty": (lambda p: p.write_bytes(b""), "truncated or damaged"),
    "text": (lambda p: p.write_text("step,sender,receiver\n" * 50), "truncated or damaged"),
    "flipped": (flip_a_byte_of_data, "truncated or damaged"),
    "foreign": (lambda p: pq.write_table(pa.table({"a": [1]}), p), "not part of an asyncfed trace"),
    "version": (lambda p: remark(p, version="2"), "has trace version '2'; this asyncfed reads version '1'"),
    "table": (lambda p: remark(p, table="steps"), "does not hold the columns of the table 'messages'"),
    "nodes": (lambda p: remark(p, nodes="7"), "was written for 7 nodes, expected 4"),
    "server": (lambda p: remark(p, server="4"), "names '4' as its server, which is not one of its 4 nodes"),
    "columns": (
        lambda p: pq.write_table(pq.read_table(p).drop_columns(["kind"]), p),
        "does not hold the columns",
    ),
    "gone": (lambda p: p.unlink(), "disappeared"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_chunk_is_named_with_what_is_wrong(directory: Path, damage: str) -> None:
    trace = Trace(directory)
    chunk = directory / "messages" / "00002.parquet"
    spoil, complaint = DAMAGES[damage]
    spoil(chunk)
    with pytest.raises(TraceError, match=rf"messages/00002\.parquet.*{complaint}"):
        trace.edges()
    with pytest.raises(TraceError):
        trace.edge(MESSAGES[0].sender, MESSAGES[0].receiver)


def test_a_missing_chunk_is_an_error(directory: Path) -> None:
    (directory / "messages" / "00001.parquet").unlink()
    with pytest.raises(TraceError, match=r"messages/00001\.parquet is missing although later chunks exist"):
        Trace(directory)


def test_a_missing_or_empty_directory_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is not a directory"):
        Trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="holds no trace yet; give nodes="):
        Trace(tmp_path)
    assert len(Trace(tmp_path, nodes=3)) == 0


def test_a_number_of_nodes_that_contradicts_the_files_is_refused(directory: Path) -> None:
    assert Trace(directory).node_count == Trace(directory, nodes=4).node_count == 4
    with pytest.raises(TraceError, match="was written for 4 nodes, expected 5"):
        Trace(directory, nodes=5)


def test_leftovers_of_a_kill_are_ignored(directory: Path) -> None:
    (directory / "messages" / ".00099.parquet.tmp").write_bytes(b"PAR1 half a chunk")
    (directory / "notes.parquet").write_text("mine")
    assert len(Trace(directory)) == len(MESSAGES)


def test_a_trace_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, 4, chunk_rows=200)
    naive.append(writer, MESSAGES[:450])
    writer.wait()
    early = Trace(tmp_path)
    seen = len(early)
    assert 400 <= seen <= 450
    naive.append(writer, MESSAGES[450:])
    writer.close()
    assert len(early) == seen, "a trace is what was there when it was opened"
    expected = naive.counts(MESSAGES[:seen])
    assert {name: early.edges()[name].sum() for name in expected} == expected
    assert len(Trace(tmp_path)) == len(MESSAGES)


ENDLESS = """
import sys
from pathlib import Path
from asyncfed.trace import TraceWriter
from tests.trace import naive
messages = naive.random_messages(4, 1000)
writer = TraceWriter(Path(sys.argv[1]), 4, chunk_rows=1)
while True:
    naive.append(writer, messages)
    print(flush=True)
"""


def test_a_killed_writer_leaves_whole_chunks(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    trace = Trace(tmp_path)
    rows = trace.to_pandas()
    assert len(rows) == len(trace) > 0.9 * len(MESSAGES), "all but the few chunks on their way to the disk"
    whole, rest = divmod(len(rows), len(MESSAGES))
    appended = naive.canonical(MESSAGES * whole + MESSAGES[:rest])
    assert rows["sent_at"].tolist() == [message.sent_at for message in appended]


def test_importing_the_trace_leaves_pandas_alone() -> None:
    command = "import sys, asyncfed.trace; sys.exit('pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", command], check=True)


def test_public_names() -> None:
    assert asyncfed.trace.__all__ == ["STATUS_NAMES", "Status", "Totals", "Trace", "TraceWriter", "clear"]


def test_a_folder_is_a_table_for_whatever_reads_parquet(directory: Path) -> None:
    with TraceWriter(directory / "with steps", 4, chunk_rows=4) as writer:
        for step in range(3):
            clients = np.arange(4)
            writer.steps(client=clients, step=step, started_at=0.0, ended_at=1.0, absorbed=0, phase="sgp")
    messages, steps = Trace(directory), Trace(directory / "with steps")
    for trace, table, rows in (
        (messages, "messages", messages.to_pandas()),
        (steps, "steps", steps.steps()),
    ):
        folder = trace.directory / table
        assert len(list(folder.glob("*.parquet"))) > 1
        found = pd.read_parquet(folder)
        assert found.columns.tolist() == rows.columns.tolist()
        assert len(found) == len(rows)
        assert pl.read_parquet(folder).shape == rows.shape
        (counted,) = duckdb.sql(f"select count(*) from '{folder}/*.parquet'").fetchall()
        assert counted == (len(rows),)


def test_a_trace_from_before_tables_had_folders_is_read(directory: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for chunk in (directory / "messages").iterdir():
        shutil.copy(chunk, old / f"messages-{chunk.name}")
    assert Trace(old).to_arrow().equals(Trace(directory).to_arrow())
