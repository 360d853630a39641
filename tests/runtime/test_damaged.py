"""Checkpoints that are damaged, or not ours: an older one is taken, or words say what to do; nothing is run,
and nothing large is made.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from asyncfed import AsyncfedError, Scenario, TraceError, resume, run
from asyncfed.problems import quadratic
from asyncfed.protocols import FedAvg, LocalSteps
from tests.helpers import files_of
from tests.runtime.test_resume import ended, scenario
from topologies import star

Facts = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Change = Callable[[Facts, Tensors], object]
KINDS = ("peers", "server")


def made(kind: str) -> Scenario:
    if kind == "peers":
        return scenario()
    problem = quadratic(clients=4, dimension=3, noise=0.5, samples=5)
    return Scenario(problem, star(4, up=0.9), FedAvg(60, LocalSteps(0.05, batch=2)), evaluate_every=7)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("whole")
    return {kind: files_of(run(made(kind), out=folder / kind).path) for kind in KINDS}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stopped")
    return {kind: ended(folder / kind, made(kind), 50) for kind in KINDS}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def out(kind: str, stopped: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped[kind], tmp_path / "run"))


def checkpoints(out: Path) -> list[Path]:
    return sorted((out / "checkpoints").iterdir())


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    save_file({"inner": torch.zeros(4, 3)}, path)


def later_version(path: Path) -> None:
    save_file({"inner": torch.zeros(4, 3)}, path, {"format": "asyncfed-checkpoint", "version": "2"})


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [truncated, emptied, foreign, later_version, pipe])
def test_the_older_checkpoint_is_taken_where_the_newest_cannot_be_read(
    damage: Callable[[Path], None], kind: str, out: Path, whole: dict[str, dict[str, bytes]]
) -> None:
    assert len(checkpoints(out)) == 2
    damage(checkpoints(out)[1])
    assert files_of(resume(out).path) == whole[kind]


@pytest.mark.parametrize("damage", [truncated, emptied, foreign, later_version, pipe, folder])
def test_without_a_readable_checkpoint_it_is_said_which(damage: Callable[[Path], None], out: Path) -> None:
    for path in checkpoints(out):
        damage(path)
    newest = checkpoints(out)[-1]
    with pytest.raises(TraceError, match=f"{newest.name}.* (not a checkpoint|cannot be read)"):
        resume(out)


def rewritten(path: Path, change: Change) -> None:
    with safe_open(path, framework="pt") as file:
        marks = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    facts = json.loads(marks["facts"])
    change(facts, tensors)
    save_file(tensors, path, marks | {"facts": json.dumps(facts)})


def put(*place: str, value: Any) -> Change:
    """Another value at a place in the facts."""

    def change(facts: Facts, tensors: Tensors) -> None:
        for key in place[:-1]:
            facts = facts[key]
        facts[place[-1]] = value

    return change


def array(name: str, *values: int, dtype: torch.dtype = torch.int64) -> Change:
    """Another tensor."""

    def change(facts: Facts, tensors: Tensors) -> None:
        tensors[name] = torch.tensor(values, dtype=dtype)

    return change


def both(*changes: Change) -> Change:
    return lambda facts, tensors: [change(facts, tensors) for change in changes]


POOL = ("backend", "clients", "pool")
CHANGES: dict[str, Change] = {
    "a huge pool": put(*POOL, "size", value=10**15),
    "a negative pool": put(*POOL, "size", value=-3),
    "a pool of words": put(*POOL, "size", value="many"),
    "payloads far apart": both(
        array("backend/clients/pool/serials", 0, 10**15), array("backend/clients/pool/slots", 0, 1)
    ),
    "payloads out of order": both(
        array("backend/clients/pool/serials", 9, 3), array("backend/clients/pool/slots", 0, 1)
    ),
    "payloads before the first": both(
        array("backend/clients/pool/serials", -(10**15), 3), array("backend/clients/pool/slots", 0, 1)
    ),
    "payloads nowhere": both(
        array("backend/clients/pool/serials", 0, 1), array("backend/clients/pool/slots", 0, 10**12)
    ),
    "fewer slots than payloads": both(
        array("backend/clients/pool/serials", 0, 1, 2), array("backend/clients/pool/slots", 0)
    ),
    "free slots nowhere": array("backend/clients/pool/free", 10**14),
    "payloads in fractions": array("backend/clients/pool/serials", 1, dtype=torch.float64),
    "payloads that numpy lacks": array("backend/clients/pool/serials", 1, dtype=torch.bfloat16),
    "no facts of clients": put("backend", value=[]),
    "no chunks": put("backend", "clients", "chunk", value=0),
    "words for kept": put("backend", "clients", "kept", value=7),
    "another class": put("loop", "plain", "object", value="os.system"),
    "another of ours": put("loop", "plain", "object", value="network.serials.SerialTable"),
    "no class": put("loop", "plain", value={"holds": {}}),
    "no loop": put("loop", value=None),
    "a list of loops": put("loop", "plain", value=[1, 2]),
    "what it does not hold": put("loop", "plain", "holds", "__class__", value=3),
    "its stage": put("loop", "plain", "holds", "_stage", value={"object": "builtins.eval"}),
    "the schedule of others": put("loop", "plain", "holds", "_schedule", value={"object": "os.system"}),
    "arrays that are not there": put("loop", "plain", "holds", "_schedule", value={"array": 10**9}),
    "a schedule of words": put("loop", "plain", "holds", "_schedule", value="soon"),
    "a mapping of nothing": put("loop", "plain", "holds", "_schedule", value={"dict": [3]}),
    "no number": put("loop", "plain", "holds", "_schedule", value={"float": "much"}),
    "rows that are not there": put("told", "evaluations", value=10**15),
    "fewer rows than none": put("told", "evaluations", value=-4),
    "rows in words": put("told", "evaluations", value="all"),
    "told more": put("told", "secret", value=1),
    "nothing told": put("told", value=None),
    "chunks that are not there": put("trace", "plain", "chunks", "messages", value=10**15),
    "fewer chunks than none": put("trace", "plain", "chunks", "messages", value=-1),
    "totals of words": put("trace", "plain", "totals", value=["many"] * 6),
    "rows of a trace": put("trace", "plain", "messages", "labels", value=[["a", "b", 10**15]]),
    "labels of a trace": put("trace", "plain", "messages", "labels", value=[[["a"], {}, 3]]),
    "columns of a trace": put("trace", "plain", "messages", "columns", value=[10**9]),
    "no fingerprints": put("fingerprints", value=[]),
    "fingerprints of others": put("fingerprints", "the problem's code", value="0"),
    "deep": put("loop", "plain", "holds", "_now", value=json.loads("[" * 60 + "]" * 60)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_checkpoint_that_says_nonsense_is_refused(
    what: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> int:
        raise SystemExit("something was run")

    monkeypatch.setattr(os, "system", never)
    older, newest = checkpoints(out)
    older.unlink()
    rewritten(newest, CHANGES[what])
    began = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(AsyncfedError):
            resume(out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200 * 2**20
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "values",
    [
        {"resumed": "often"},
        {"recoveries": 3},
        {"placement": {"threads": 10**9}},
        {"placement": {"threads": 0}},
        {"options": {"backend": "local", "checkpoint_every": 0}},
        {"options": {"shell": "rm"}},
        {"options": None},
    ],
)
def test_a_run_json_that_says_nonsense_is_refused(values: dict[str, Any], out: Path) -> None:
    path = out / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(AsyncfedError):
        resume(out)
