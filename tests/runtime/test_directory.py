"""A run on disk: refused where one is, numbered where none is named, readable however it ended."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from asyncfed.errors import RunExistsError, ScenarioError, TraceError
from asyncfed.runtime.directory import FORMAT, VERSION, RunDirectory


def made(path: Path) -> RunDirectory:
    directory = RunDirectory.create(path, "quickstart")
    directory.write_manifest(status="running")
    return directory


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    directory = made(tmp_path / "deep" / "down")
    directory.write("scenario.json", {"seed": 3, "name": "Erdős–Rényi", "nested": {"a": [1, (2.5, "x")]}})
    opened = RunDirectory.open(tmp_path / "deep" / "down")
    assert opened.manifest() == {"format": FORMAT, "version": VERSION, "status": "running"}
    assert opened.scenario() == {"seed": 3, "name": "Erdős–Rényi", "nested": {"a": [1, [2.5, "x"]]}}
    assert opened.trace == tmp_path / "deep" / "down" / "trace"
    assert RunDirectory.open(str(tmp_path / "deep" / "down")).manifest()["status"] == "running"


def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "run")
    with pytest.raises(
        RunExistsError, match=re.escape(f"{tmp_path / 'run'} already holds a run; give another")
    ):
        RunDirectory.create(tmp_path / "run", "x")
    (tmp_path / "torn" / "trace").mkdir(parents=True)
    with pytest.raises(RunExistsError, match="already holds a run"):
        RunDirectory.create(tmp_path / "torn", "x")
    assert RunDirectory.open(tmp_path / "run").manifest()["status"] == "running"


def test_an_empty_directory_or_one_with_other_things_is_welcome(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    made(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ScenarioError, match="is a file; give a directory"):
        RunDirectory.create(tmp_path / "file", "x")
    with pytest.raises(TraceError, match=r"cannot be read as a run's run\.json"):
        RunDirectory.open(tmp_path / "file")


def test_runs_without_a_directory_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCFED_RUNS", str(tmp_path / "all"))
    paths = [RunDirectory.create(None, "my scenario/é").path for _ in range(3)]
    assert paths == [tmp_path / "all" / f"my-scenario-é-000{k}" for k in (1, 2, 3)]
    assert RunDirectory.create(None, "other").path.name == "other-0001"
    monkeypatch.delenv("ASYNCFED_RUNS")
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.create(None, "other").path == Path("runs/other-0001")


def test_a_rewritten_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = made(tmp_path)
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("killed before the file was replaced"))
    with pytest.raises(pytest.fail.Exception):
        directory.write_manifest(status="complete", long="x" * 10_000)
    assert RunDirectory.open(tmp_path).manifest()["status"] == "running"
    monkeypatch.undo()
    directory.write_manifest(status="complete")
    assert RunDirectory.open(tmp_path).manifest()["status"] == "complete"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json"]


def test_a_content_that_is_no_json_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    directory = made(tmp_path)
    with pytest.raises(TypeError):
        directory.write_manifest(status=object())
    assert directory.manifest()["status"] == "running"


def test_rows_are_appended_and_values_that_are_not_there_are_null(tmp_path: Path) -> None:
    directory = made(tmp_path)
    assert directory.rows("metrics.jsonl") == []
    directory.append("metrics.jsonl", {"loss": 0.5}, {"loss": math.nan, "each": [math.inf, 1]})
    directory.append("metrics.jsonl")
    directory.append("metrics.jsonl", {"name": "δ"})
    assert directory.rows("metrics.jsonl") == [
        {"loss": 0.5},
        {"loss": None, "each": [None, 1]},
        {"name": "δ"},
    ]


def test_a_torn_last_line_is_ignored_wherever_it_tore(tmp_path: Path) -> None:
    directory = made(tmp_path)
    whole = [{"step": 0, "name": "δ→é"}, {"step": 1, "name": "Erdős–Rényi"}]
    directory.append("metrics.jsonl", *whole)
    path = tmp_path / "metrics.jsonl"
    everything = path.read_bytes()
    first = everything.index(b"\n") + 1
    for cut in range(len(everything) + 1):
        path.write_bytes(everything[:cut])
        assert directory.rows("metrics.jsonl") == whole[: (cut >= first) + (cut == len(everything))]


@pytest.mark.parametrize("line", [b"{broken\n", b"\n", b'{"a": "\xff"}\n', b'{"step": 1}{"step": 2}\n'])
def test_a_damaged_line_is_an_error(tmp_path: Path, line: bytes) -> None:
    directory = made(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + line + b'{"step": 2}\n')
    with pytest.raises(
        TraceError, match=r"metrics\.jsonl is damaged .* the trace beside it may still be whole"
    ):
        directory.rows("metrics.jsonl")


def test_a_run_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        TraceError, match=re.escape(f"there is no run at {tmp_path / 'nowhere'}; give the directory")
    ):
        RunDirectory.open(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=re.escape(f"{tmp_path} is not a run: it has no run.json")):
        RunDirectory.open(tmp_path)
    with pytest.raises(TraceError, match=r"is not a run: it has no scenario\.json"):
        made(tmp_path).scenario()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "cannot be read as a run's run.json"),
        (b'{"format": "asyncfed-run", "ver', "cannot be read as a run's run.json"),
        (b"\xff\xfe", "cannot be read as a run's run.json"),
        (b"[1, 2]", "is not a run's run.json"),
        (b"{}", "is not the run.json of an asyncfed run"),
        (b'{"format": "other", "version": 1}', "is not the run.json of an asyncfed run"),
    ],
)
def test_a_foreign_or_truncated_manifest_is_an_error(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(TraceError, match=re.escape(named)):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_another_version_is_named(tmp_path: Path, version: Any) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"format": FORMAT, "version": version}))
    with pytest.raises(
        TraceError, match=f"in version {version} of the run format; this asyncfed reads version 1"
    ):
        RunDirectory.open(tmp_path)
