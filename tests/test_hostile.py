"""Whatever is in a run directory: reading it runs nothing, waits for nothing, and takes little memory."""

from __future__ import annotations

import errno
import inspect
import json
import math
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from asyncfed import Scenario, load, load_study, run, run_study
from asyncfed.cli import app
from asyncfed.data import torchvision_import
from asyncfed.errors import AsyncfedError, DataError, RunExistsError, ScenarioError, StorageError, TraceError
from asyncfed.network.names import Names
from asyncfed.network.presence import PresenceFile
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP, FedAvg, LocalSteps
from asyncfed.runtime.checkpoints import Checkpoints
from asyncfed.runtime.state import State
from asyncfed.study import Study, Summary, SummaryTable
from asyncfed.trace import Trace
from asyncfed.trace.columns import SCHEMAS, schema_for
from tests.trace import naive
from topologies import from_file as load_topology
from topologies import ring, star, with_devices

FILES = (
    "run.json",
    "scenario.json",
    "metrics.jsonl",
    "clients.jsonl",
    "trace/messages/00000.parquet",
    "trace/steps/00000.parquet",
    "final.safetensors",
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with all that a run can have."""
    path = tmp_path_factory.mktemp("hostile") / "run"
    run(Scenario(quadratic(clients=3), ring(3), SGP(steps=6, lr=0.1), seed=1), out=path, save_final=True)
    return path


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


QUESTIONS: dict[str, Callable[[Path], Any]] = {
    "metrics": lambda path: load(path).metrics,
    "best": lambda path: load(path).best,
    "clients": lambda path: load(path).clients,
    "final": lambda path: load(path).final,
    "scenario": lambda path: load(path).scenario,
    "iterations": lambda path: load(path).iterations,
    "repr": lambda path: repr(load(path)),
    "edges": lambda path: load(path).trace.edges(),
    "edge": lambda path: load(path).trace.edge(0, 1),
    "nodes": lambda path: load(path).trace.nodes(),
    "phases": lambda path: load(path).trace.phases(),
    "by_step": lambda path: load(path).trace.by_step(),
    "rounds": lambda path: load(path).trace.rounds(0),
    "steps": lambda path: load(path).trace.steps(),
    "matrix": lambda path: load(path).trace.matrix("delivery_rate"),
    "links_up": lambda path: load(path).trace.links_up(0),
    "to_pandas": lambda path: load(path).trace.to_pandas(),
    "totals": lambda path: load(path).trace.totals(),
}
COMMANDS = (
    ["show"],
    ["trace"],
    ["trace", "--by", "node"],
    ["trace", "--by", "phase"],
    ["trace", "--edge", "0", "1"],
)


def asked(path: Path) -> dict[str, AsyncfedError]:
    """Every question and every command; what they refuse with, which is never anything but our own errors."""
    refused: dict[str, AsyncfedError] = {}
    for name, question in QUESTIONS.items():
        try:
            question(path)
        except AsyncfedError as error:
            refused[name] = error
    for command, *options in COMMANDS:
        done = CliRunner().invoke(app, [command, str(path), *options])
        assert done.exit_code in (0, 4), (command, done.stderr, done.exception)
        assert not [c for c in done.output if c < " " and c not in "\n\t"]
    return refused


def refused_by_show(path: Path) -> str:
    done = CliRunner().invoke(app, ["show", str(path)])
    assert done.exit_code == 4, (done.output, done.exception)
    assert done.stderr.startswith("error: ")
    return str(done.stderr)


def change(path: Path, name: str, /, **values: Any) -> None:
    content = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps({**content, **values}))


@contextmanager
def at_once(seconds: float = 20.0) -> Iterator[None]:
    """Neither long nor with much memory: 2 GB more than there is in use, and an alarm where it hangs."""
    import signal

    def ring_out(*_: object) -> None:
        raise AssertionError(f"it hung for {seconds} s")

    before = signal.signal(signal.SIGALRM, ring_out)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 500_000, "more than 500 MB"


def test_the_run_itself_is_readable(original: Path) -> None:
    assert set(asked(original)) == {"best", "iterations"}  # which it has none of


def in_place_of(path: Path, kind: str) -> None:
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                here = os.open(".", os.O_RDONLY)
                os.chdir(path.parent)  # the name of a socket is short
                try:
                    made.bind(path.name)
                finally:
                    os.fchdir(here)
                    os.close(here)


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "socket"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused_at_once(copy: Path, name: str, kind: str) -> None:
    in_place_of(copy / name, kind)
    with at_once():
        refused = asked(copy)
    wrong = {str(error) for error in refused.values() if Path(name).name in str(error)}
    assert wrong
    named = {"pipe": "a named pipe", "device": "a device", "directory": "a directory", "socket": "a socket"}[
        kind
    ]
    assert all(f"it is {named}, not a regular file" in text for text in wrong), wrong
    assert {type(error) for error in refused.values() if Path(name).name in str(error)} == {TraceError}


def test_a_pipe_as_a_tail_or_a_network_is_refused_at_once(tmp_path: Path) -> None:
    for name in ("messages-00000.tail.parquet", "net.graphml", "net.json", "times.csv"):
        os.mkfifo(tmp_path / name)
    with at_once():
        with pytest.raises(TraceError, match="named pipe"):
            Trace(tmp_path, nodes=3)
        for name in ("net.graphml", "net.json"):
            with pytest.raises(ScenarioError, match="named pipe"):
                load_topology(tmp_path / name)
        with pytest.raises(ScenarioError, match="named pipe"):
            with_devices(ring(3), tmp_path / "times.csv")
        with pytest.raises(ScenarioError, match="named pipe"):
            PresenceFile(str(tmp_path / "times.csv")).attend(Names(range(3)), None)  # refused before it draws


@pytest.mark.parametrize("name", ["messages/99999999999.parquet", "messages/99999999999.tail.parquet"])
def test_an_absurd_number_of_a_chunk_is_a_gap(copy: Path, name: str) -> None:
    (copy / "trace" / name).write_bytes(b"")
    with (
        at_once(),
        pytest.raises(TraceError, match=r"messages/00001\.parquet is missing although later"),
    ):
        _ = load(copy).trace


@pytest.mark.parametrize("nodes", [10**12, 10**7, 2**31, 10**30])
def test_an_absurd_number_of_nodes_takes_no_memory(copy: Path, nodes: int) -> None:
    change(copy, "run.json", nodes=nodes)
    for table in ("messages", "steps"):
        file = copy / "trace" / table / "00000.parquet"
        rows = pq.read_table(file)
        pq.write_table(rows.replace_schema_metadata({**rows.schema.metadata, b"nodes": str(nodes)}), file)
    with at_once():
        refused = asked(copy)
    assert {"edges", "nodes", "matrix"} <= set(refused)
    shutil.rmtree(copy / "trace")
    (copy / "trace").mkdir()
    with at_once():
        assert "matrix" in asked(copy)


def test_a_matrix_of_many_nodes_is_refused_though_they_are_allowed(tmp_path: Path) -> None:
    naive.write(tmp_path, 1_000_000, naive.random_messages(5, 50))
    with at_once():
        trace = Trace(tmp_path)
        assert len(trace.nodes()) == 1_000_000
        for question in (lambda: trace.matrix("sent"), lambda: trace.links_up(0)):
            with pytest.raises(TraceError, match="too large to make"):
                question()


def parquet(path: Path, table: str, rows: int, nodes: int = 3, **columns: Any) -> None:
    """A chunk that any writer could have made."""
    made: dict[str, Any] = {}
    for field in SCHEMAS[table]:
        value = columns.get(field.name, 0)
        if pa.types.is_dictionary(field.type):
            indices = pa.array(np.zeros(rows, np.int32))
            made[field.name] = pa.DictionaryArray.from_arrays(
                indices, pa.array(columns.get(field.name, ["lost"]))
            )
        else:
            made[field.name] = pa.array(np.full(rows, value), field.type)
    content = pa.table(made, schema=schema_for(table, nodes))
    pages: dict[str, Any] = {"data_page_size": 1 << 30}
    if "max_rows_per_page" in inspect.signature(pq.write_table).parameters:
        pages["max_rows_per_page"] = rows
    pq.write_table(content, path, compression="zstd", row_group_size=rows, **pages)


def test_a_small_file_of_many_rows_is_refused_before_they_are_read(tmp_path: Path) -> None:
    parquet(tmp_path / "messages-00000.parquet", "messages", 5_000_000)
    size = (tmp_path / "messages-00000.parquet").stat().st_size
    assert size < 10_000
    with at_once(), pytest.raises(TraceError, match=r"5,000,000 rows, which its .* bytes cannot hold"):
        Trace(tmp_path)


@pytest.mark.parametrize("count", [10**12, 10**9, -5])
def test_a_footer_that_lies_about_its_rows_is_refused(copy: Path, count: int) -> None:
    """The number of rows in the footer's Thrift, a field of its own, set to whatever."""
    file = copy / "trace" / "messages" / "00000.parquet"
    data = file.read_bytes()
    (length,) = struct.unpack("<I", data[-8:-4])
    footer, rows = bytearray(data[-8 - length : -8]), pq.ParquetFile(file).metadata.num_rows
    old, new = varint(rows), varint(count)
    place = footer.rindex(b"\x16" + old + b"\x19")  # num_rows: i64, then the list of row groups
    footer[place + 1 : place + 1 + len(old)] = new
    file.write_bytes(data[: -8 - length] + footer + struct.pack("<I", len(footer)) + b"PAR1")
    with at_once():
        refused = asked(copy)
    assert {"edges", "nodes", "to_pandas"} <= set(refused)
    assert all(isinstance(error, TraceError) for name, error in refused.items() if name in ("edges", "nodes"))


def varint(number: int) -> bytes:
    zigzag = (number << 1) ^ (number >> 63)
    out = bytearray()
    while zigzag > 127:
        out.append(zigzag & 127 | 128)
        zigzag >>= 7
    return bytes([*out, zigzag])


@pytest.mark.parametrize(
    ("table", "columns"),
    [
        ("steps", {"client": 2**31 - 1, "phase": ["x"]}),
        ("steps", {"client": -1, "phase": ["x"]}),
        ("messages", {"sender": 3}),
        ("messages", {"receiver": -2}),
        ("messages", {"step": -1}),
        ("messages", {"phase": ["x", "x"]}),
        ("messages", {"status": ["no such status" * 1000]}),
    ],
)
def test_values_that_are_no_places_are_refused(copy: Path, table: str, columns: dict[str, Any]) -> None:
    parquet(copy / "trace" / table / "00000.parquet", table, 12, **columns)
    with at_once():
        refused = asked(copy)
    assert refused["nodes"].args[0].startswith(str(copy)) or "unknown message status" in str(refused["nodes"])
    assert len(str(refused["nodes"])) < 1000


HALF = b'{"step": 1, "messages": 1, "bytes": 1, "phase": "\\uD800"}'
DEEP = b'{"a": ' * 100_000 + b"1" + b"}" * 100_000
QUITE_DEEP = b'{"name": ' + b"[" * 200 + b"]" * 200 + b"}"


@pytest.mark.parametrize("content", [DEEP, QUITE_DEEP, HALF, b"[" * 50_000, b'{"x": ' + b"9" * 5000 + b"}"])
@pytest.mark.parametrize("name", ["run.json", "scenario.json", "metrics.jsonl", "clients.jsonl"])
def test_deep_json_and_long_numbers_are_refused(copy: Path, name: str, content: bytes) -> None:
    (copy / name).write_bytes(content + b"\n")
    refused = asked(copy)
    assert any(name in str(error) for error in refused.values()), refused


def test_a_file_that_is_too_large_is_refused_before_it_is_read(copy: Path) -> None:
    for name in ("metrics.jsonl", "scenario.json"):
        os.truncate(copy / name, 1 << 40)
    with at_once():
        refused = asked(copy)
    assert "bytes, and at most" in str(refused["metrics"])
    assert "bytes, and at most" in str(refused["scenario"])
    (copy / "scenario.json").write_bytes(b"[" + b"[]," * 5_000_000 + b"[]]")
    with at_once():
        assert "lists and objects" in refused_by_show(copy)


def test_a_table_of_more_columns_than_rows_could_need_is_refused(copy: Path) -> None:
    row = {"step": 0, "messages": 0, "bytes": 0}
    lines = [json.dumps(row | {f"c{number}-{place}": 1 for place in range(5)}) for number in range(20_000)]
    (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with at_once():
        assert "columns or more" in refused_by_show(copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("status", 3),
        ("nodes", "many"),
        ("nodes", 1e400),
        ("nodes", 0),
        ("clients", True),
        ("clients", -1),
        ("totals", [1]),
        ("totals", {"sent": "all"}),
        ("warnings", "none"),
        ("warnings", [1]),
        ("wall_seconds", "long"),
        ("wall_seconds", None),
        ("wall_seconds", math.inf),
        ("placement", "here"),
        ("error", {"a": 1}),
    ],
)
def test_a_manifest_of_other_types_is_refused(copy: Path, key: str, value: Any) -> None:
    change(copy, "run.json", **{key: value})
    assert f"its {key!r} is" in refused_by_show(copy)
    asked(copy)


@pytest.mark.parametrize(
    "key", ["status", "nodes", "clients", "totals", "wall_seconds", "placement", "seed", "format", "version"]
)
def test_a_manifest_that_lacks_something_is_read_or_refused(copy: Path, key: str) -> None:
    content = json.loads((copy / "run.json").read_text())
    del content[key]
    (copy / "run.json").write_text(json.dumps(content))
    refused = asked(copy)
    assert ("metrics" in refused) == (key in ("status", "format", "version"))
    if key == "nodes":  # as many as clients, then
        assert "edges" not in refused
        del content["clients"]
        (copy / "run.json").write_text(json.dumps(content))
        assert "how many nodes" in str(asked(copy)["edges"])


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "3",
        "null",
        '{"step": 1}',
        '{"step": [1]}',
        '{"step": "x", "messages": 1, "bytes": 1}',
        '{"step": 1, "messages": 1, "bytes": 1, "phase": 3}',
        '{"step": 1, "messages": 1, "bytes": 1e',
        '{"step": 1, "messages": 1, "bytes": ' + "9" * 40 + "}",
    ],
)
def test_rows_of_metrics_that_are_none_are_refused(copy: Path, line: str) -> None:
    with (copy / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert "metrics.jsonl is damaged" in refused_by_show(copy)
    asked(copy)


def header(length: int, text: bytes = b"") -> bytes:
    return struct.pack("<Q", length) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 7,
        header(2**63),
        header(10**9, b"{}"),
        header(2, b"{}"),
        header(2, b"[]"),
        header(60, b'{"inner":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}'[:60]),
        header(75, b'{"inner":{"dtype":"F32","shape":[999999999999,9],"data_offsets":[0,4]}}    ' + b"1234"),
        header(75, b'{"inner":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(75) + b"1234"),
        b"\x80\x04\x95" + b"cos\nsystem\n(S'true'\ntR.",
    ],
)
def test_final_variables_that_are_none_are_refused(copy: Path, content: bytes) -> None:
    (copy / "final.safetensors").write_bytes(content)
    with at_once(), pytest.raises(TraceError, match=r"final\.safetensors"):
        _ = load(copy).final


def test_final_variables_that_are_cut_or_foreign_are_refused(copy: Path) -> None:
    whole = (copy / "final.safetensors").read_bytes()
    for cut in (3, 20, len(whole) - 1):
        (copy / "final.safetensors").write_bytes(whole[:cut])
        with pytest.raises(TraceError, match="truncated or damaged"):
            _ = load(copy).final
    save_file({"model.layers.0": torch.zeros(3, 3)}, copy / "final.safetensors")
    with pytest.raises(TraceError, match=r"holds no final variables of a run: \['model\.layers\.0'\]"):
        _ = load(copy).final


def test_a_missing_first_chunk_of_a_complete_run_is_named(copy: Path) -> None:
    (copy / "trace" / "messages" / "00000.parquet").unlink()
    with pytest.raises(
        TraceError, match=r"holds 0 messages \(no chunk at all\), and its run counted 36; restore"
    ):
        _ = load(copy).trace
    done = CliRunner().invoke(app, ["trace", str(copy)])
    assert done.exit_code == 4
    assert "its run counted 36" in done.stderr
    shown = CliRunner().invoke(app, ["show", str(copy)])
    assert shown.exit_code == 0
    assert "its run counted 36" in shown.stdout


def test_missing_steps_of_a_complete_run_are_named(copy: Path) -> None:
    (copy / "trace" / "steps" / "00000.parquet").unlink()
    with pytest.raises(
        TraceError, match=r"holds 0 steps \(no chunk at all\), and its run counted 18; restore"
    ):
        _ = load(copy).trace


def test_a_missing_last_chunk_of_a_complete_run_is_named(copy: Path) -> None:
    messages = naive.random_messages(3, 500)
    (copy / "trace" / "messages" / "00000.parquet").unlink()
    naive.write(copy / "all", 3, messages, chunk_rows=100)
    for file in (copy / "all" / "messages").iterdir():
        shutil.move(file, copy / "trace" / "messages")
    change(copy, "run.json", totals=naive.counts(messages))
    assert len(load(copy).trace) == 500
    last = max((copy / "trace").glob("messages/*"))
    shutil.move(last, copy / "elsewhere")
    with pytest.raises(TraceError, match=r"messages \(00000\.parquet to 0000.*counted 500; restore"):
        _ = load(copy).trace
    shutil.move(copy / "elsewhere", last)
    change(copy, "run.json", totals=naive.counts(messages[:499]))
    with pytest.raises(TraceError, match="counted 499; it is of another run"):
        _ = load(copy).trace


def test_a_killed_run_says_that_its_record_ends_early(copy: Path) -> None:
    change(copy, "run.json", status="running")
    for command in ("show", "trace"):
        done = CliRunner().invoke(app, [command, str(copy)])
        assert done.exit_code == 0
        assert "the record ends early, as the run did (running): 36 messages\n" in done.stdout
    (copy / "trace" / "messages" / "00000.parquet").unlink()
    for command in ("show", "trace"):
        done = CliRunner().invoke(app, [command, str(copy)])
        assert done.exit_code == 0
        assert "0 messages of the 36 that its metrics count" in done.stdout
        assert "nothing was sent" not in done.stdout


OBEYED = "\x7f\x85\x9b\u202e\u2066\u2028\u2029"
NASTY = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\r[red]x[/]\x00\x7f\x85\u2028\u2029"


def test_no_control_character_of_a_file_reaches_the_terminal(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    change(
        copy,
        "run.json",
        error=NASTY,
        warnings=[NASTY],
        status=NASTY,
        placement={"backend": NASTY},
        seed=NASTY,
    )
    change(
        copy,
        "scenario.json",
        name=NASTY,
        protocol={"type": NASTY, NASTY: [NASTY]},
        problem={"factory": NASTY, "arguments": {NASTY: NASTY}},
        topology={"about": {"name": NASTY}},
        versions={NASTY: NASTY},
    )
    row = {"phase": NASTY, "step": 0, "messages": 0, "bytes": 0, NASTY: 1}
    (copy / "metrics.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"phase": "b"}) + "\n")
    parquet(
        copy / "trace" / "messages" / "00000.parquet", "messages", 12, receiver=1, phase=[NASTY], kind=[NASTY]
    )
    outputs = [
        CliRunner().invoke(app, [command, str(copy), *options]).output for command, *options in COMMANDS
    ]
    change(copy, "run.json", format=NASTY)
    place = copy / NASTY.replace("/", "").replace("\x00", "")
    outputs.append(CliRunner().invoke(app, ["show", str(place)]).output)
    for output in outputs:
        left = output.replace("\x1b[1m", "").replace("\x1b[0m", "")  # bold headings are our own
        assert not [c for c in left if c < " " and c != "\n"]
        assert not [c for c in left if c in OBEYED]
    for output in (outputs[0], outputs[-1]):
        assert "\\x1b]0;owned" in output
        assert "\\r[red]x[" in output


ABOUT = b'{"format": "asyncfed-study", "version": 1, '


@pytest.mark.parametrize(
    "content",
    [
        ABOUT + b'"a": 1}',
        ABOUT + b'"status": "complete", "parts": []}',
        ABOUT + b'"status": 3, "parts": {}}',
        ABOUT + b'"status": "x", "parts": {"a": 3}}',
        ABOUT + b'"status": "x", "parts": {"a": {}}}',
        ABOUT + b'"status": "x", "parts": {"../a": {"status": "complete"}}}',
        ABOUT + b'"status": "x", "parts": {"/etc": {"status": "complete"}}}',
        ABOUT + b'"status": "x", "name": 1, "parts": {}}',
        ABOUT + b'"a": ' + b"[" * 100_000,
        DEEP,
    ],
)
def test_a_study_json_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "study.json").write_bytes(content)
    assert "study.json" in refused_by_show(tmp_path)
    assert CliRunner().invoke(app, ["trace", str(tmp_path)]).exit_code == 4


@pytest.mark.parametrize(
    "summary",
    [
        [],
        {"tables": []},
        {"tables": [{}], "findings": []},
        {"tables": [{"title": "a", "columns": ["x"], "rows": [[1, 2]], "notes": []}], "findings": []},
        {"tables": 3, "findings": []},
        {"tables": [], "findings": [1]},
        {"tables": [], "findings": [], "of": 3},
        {"tables": [], "findings": [], "pictures": ["../../x.png"]},
        {"tables": [{"title": "///", "columns": [], "rows": [], "notes": []}], "findings": []},
    ],
)
def test_a_summary_that_is_none_is_refused(tmp_path: Path, summary: Any) -> None:
    about = {"format": "asyncfed-study", "version": 1, "status": "complete", "name": "s", "note": ""}
    (tmp_path / "study.json").write_text(json.dumps({**about, "parts": {}}))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert "summary.json" in refused_by_show(tmp_path)


def test_a_study_shows_what_its_files_say_as_text(tmp_path: Path) -> None:
    about = {"format": "asyncfed-study", "version": 1, "status": NASTY, "name": NASTY, "note": NASTY}
    parts = {"a": {"status": NASTY, "error": NASTY}}
    (tmp_path / "study.json").write_text(json.dumps({**about, "error": NASTY, "parts": parts}))
    table = {
        "title": f"t{NASTY}",
        "columns": [NASTY],
        "rows": [[NASTY], [{"a": [NASTY]}], [1e400]],
        "notes": [NASTY],
    }
    summary = {"tables": [table], "findings": [[NASTY, True]], "of": [], "failed": {}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    done = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert done.exit_code == 0, (done.stderr, done.exception)
    assert not [c for c in done.output if (c < " " and c != "\n") or c in OBEYED]


def test_building_a_scenario_from_a_file_downloads_nothing(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCFED_DATA", str(tmp_path / "empty"))
    arguments = {"dataset": "mnist", "clients": 3, "download": True}
    change(copy, "scenario.json", problem={"factory": "classification", "arguments": arguments})
    fetched: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda *where: fetched.append(where))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **_: fetched.append(where))
    with pytest.raises(DataError, match="nothing is downloaded on behalf of a file"):
        _ = load(copy).scenario
    with pytest.raises(DataError, match="could not be downloaded"):
        torchvision_import.download_into(Path("/dev/null/x"), "mnist", "MNIST", train=True)
    assert not (tmp_path / "empty").exists()
    assert not fetched


@pytest.mark.parametrize(
    "changed",
    [
        {"topology": {"directed": False, "nodes": 10**12, "about": {}, "from": [], "to": [], "marks": {}}},
        {"topology": {"directed": False, "nodes": 3, "about": {}, "from": [0], "to": [7], "marks": {}}},
        {"topology": {}},
        {"topology": []},
        {"problem": []},
        {"problem": {"factory": "quadratic", "arguments": {"clients": 10**10}}},
        {"problem": {"factory": "quadratic", "arguments": {"dimension": 10**12}}},
        {"problem": {"factory": "quadratic", "arguments": {"dimension": 30_000}}},
        {"problem": {"factory": "bilevel_quadratic", "arguments": {"outer_dimension": 2_000_000_000}}},
        {"problem": {"factory": "classification", "arguments": {"clients": 3, "model": "mlp:10000000000"}}},
        {"problem": {"factory": "quadratic", "arguments": {"dimension": "x"}}},
        {"problem": {"factory": "os.system", "arguments": {"command": "true"}}},
        {"problem": {"factory": ["quadratic"], "arguments": {}}},
        {"protocol": {"type": "__import__('os').system('true')"}},
        {"protocol": {"type": ["SGP"]}},
        {"protocol": {"type": "SGP", "steps": [], "lr": {}}},
        {"timing": {"type": "VirtualTime", "latency": "__import__('os').system('true')"}},
    ],
)
def test_a_scenario_that_cannot_be_built_is_refused(copy: Path, changed: dict[str, Any]) -> None:
    change(copy, "scenario.json", **changed)
    with at_once(), pytest.raises(AsyncfedError):
        _ = load(copy).scenario
    asked(copy)


def test_a_colon_in_the_path_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scenario = Scenario(quadratic(clients=3), star(3), FedAvg(4, LocalSteps(0.1)))
    run(scenario, out="plain", save_final=True)
    run(scenario, out="exp:1", save_final=True)
    for file in Path("plain").rglob("*"):
        if file.is_file() and file.name != "run.json":
            assert file.read_bytes() == (Path("exp:1") / file.relative_to("plain")).read_bytes(), file
    result = load("exp:1")
    assert len(result.trace.edge(0, 3)) == 4
    assert result.trace.edges().equals(load("plain").trace.edges())
    assert result.trace.links_up(0).all() == load("plain").trace.links_up(0).all()
    assert result.final["inner"].shape == (1, 5)
    for write, name in ((result.trace.to_csv, "all.csv"), (result.trace.to_parquet, "all.parquet")):
        write(f"exp:1/{name}")
        assert (Path("exp:1") / name).stat().st_size > 500
    assert not list(Path("exp:1").rglob(".*"))


def test_a_checkpoint_that_cannot_be_synced_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    synced, replaced = os.fsync, os.replace

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        Checkpoints(tmp_path).write(State())
    assert list((tmp_path / "checkpoints").iterdir()) == []
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("fsync"), synced(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("rename"), replaced(*paths)))
    Checkpoints(tmp_path).write(State())
    assert order == ["fsync", "rename", "fsync"], "the file, its name, and the names of the directory"


def part_of(kind: str) -> Scenario:
    return Scenario(quadratic(clients=3), ring(3), SGP(steps=3, lr=0.1), name=kind)


def small_study() -> Study:
    return Study(
        name="s",
        parts={"deep/one": part_of("one"), "two": part_of("two")},
        summarise=lambda results: Summary(tables=[SummaryTable("t", load_frame(results))]),
    )


def load_frame(results: Any) -> Any:
    return next(iter(results.values())).metrics


def interrupted(path: Path, *parts: str) -> None:
    for part in parts:
        change(path / part, "run.json", status="interrupted")
        content = json.loads((path / "study.json").read_text())
        content["parts"][part] = {"status": "interrupted"}
        (path / "study.json").write_text(json.dumps(content))


def tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("link", ["parent", "part", "aside", "aside of a file", "inside", "root"])
def test_a_study_that_goes_on_removes_nothing_through_a_link(tmp_path: Path, link: str) -> None:
    study, outside = tmp_path / "study", tmp_path / "outside"
    run_study(small_study(), out=study, pictures=False)
    interrupted(study, "deep/one", "two")
    match link:
        case "parent":
            shutil.move(study / "deep", outside)
            (study / "deep").symlink_to(outside)
        case "part":
            shutil.move(study / "two", outside)
            (study / "two").symlink_to(outside)
        case "aside":
            shutil.copytree(study / "two", outside)
            (study / ".two.discarded").symlink_to(outside)
        case "aside of a file":
            outside.mkdir()
            (outside / "file").write_text("mine")
            (study / ".two.discarded").symlink_to(outside / "file")
        case "inside":
            shutil.copytree(study / "two", outside)
            shutil.rmtree(study / "two" / "trace")
            (study / "two" / "trace").symlink_to(outside / "trace")
            (study / "two" / "more").symlink_to(outside)
        case "root":
            shutil.copytree(study / "two", outside)
            shutil.move(study, tmp_path / "elsewhere")
            study.symlink_to(tmp_path / "elsewhere")
    before = tree(outside)
    assert before
    if link == "parent":
        with pytest.raises(RunExistsError, match=r"study/deep is a link, and nothing is removed through one"):
            run_study(small_study(), out=study, pictures=False)
    else:
        assert run_study(small_study(), out=study, pictures=False).complete
        assert len(load_study(study).results) == 2
        assert not list(study.glob(".*"))
    assert tree(outside) == before


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_bytes_and_values_are_changed_only_our_errors_come(
    original: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("changed") / "run"
    shutil.copytree(original, path)
    name = data.draw(st.sampled_from(FILES))
    content = (path / name).read_bytes()
    if name.endswith(".json") and data.draw(st.booleans()):
        value = json.loads(content)
        keys = list(value)
        inside = value
        key = data.draw(st.sampled_from(keys))
        while isinstance(inside[key], dict) and inside[key] and data.draw(st.booleans()):
            inside = inside[key]
            key = data.draw(st.sampled_from(list(inside)))
        if data.draw(st.booleans()):
            inside[key] = data.draw(JUNK)
        else:
            del inside[key]
        (path / name).write_text(json.dumps(value))
    else:
        place = data.draw(st.integers(0, len(content)))
        count = data.draw(st.sampled_from([0, 1, 4, len(content)]))
        (path / name).write_bytes(
            content[:place] + data.draw(st.binary(max_size=8)) + content[place + count :]
        )
    with at_once():
        asked(path)
    shutil.rmtree(path.parent)


def test_reading_a_run_imports_and_runs_nothing_that_it_names(copy: Path) -> None:
    (copy / "evil.py").write_text("raise SystemExit('it was imported')")
    change(
        copy, "scenario.json", protocol={"type": "evil.Evil"}, problem={"factory": "evil", "arguments": {}},
        homes={"evil.Evil": "evil", "evil": "evil"},
    )  # fmt: skip
    script = (
        "import sys, asyncfed\n"
        f"result = asyncfed.load({str(copy)!r})\n"
        "result.metrics, result.clients, result.trace.edges(), result.final\n"
        "try: result.scenario\n"
        "except asyncfed.AsyncfedError: print('refused', 'evil' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=copy, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert done.stdout.split() == ["refused", "False"], done.stderr
