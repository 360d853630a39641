"""A method with a server from the command line: settings, tables and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from asyncfed import load
from asyncfed.cli import app
from asyncfed.protocols import LocalSteps, Server


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def fedavg(out: Path, *changes: str) -> Any:
    settings = ["clients=6", "rounds=3", *changes]
    return invoke("run", "fedavg", "--out", out, *(word for s in settings for word in ("--set", s)))


@pytest.mark.parametrize(
    ("setting", "server"),
    [
        ("participation=0.5", Server(0.5, weighted=True)),
        ("participation=[0, 3]", Server((0, 3), weighted=True)),
        ("participation=[[0], [1, 2]]", Server(((0,), (1, 2)), weighted=True)),
        ("quorum=1", Server(0.25, weighted=True, quorum=1)),
        ("late=next", Server(0.25, weighted=True, late="next")),
    ],
)
def test_what_the_server_does_can_be_set(setting: str, server: Server, tmp_path: Path) -> None:
    done = fedavg(tmp_path / "r", f"protocol.server.{setting}")
    assert done.exit_code == 0, done.stderr
    assert load(tmp_path / "r").scenario.protocol.server == server


def test_whole_parts_and_until_can_be_set(tmp_path: Path) -> None:
    changes = (
        "protocol.server=Server(0.5)",
        "protocol.local=LocalSteps(0.1, steps=2)",
        "until={'loss': AtMost(99)}",
    )
    done = fedavg(tmp_path / "r", *changes)
    assert done.exit_code == 0, done.stderr
    result = load(tmp_path / "r")
    assert (result.scenario.protocol.server, result.scenario.protocol.local) == (
        Server(0.5),
        LocalSteps(0.1, steps=2),
    )
    assert len(result.metrics) == 1


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("protocol.server.participation=half", "participation"),
        ("protocol.server.participation=1.5", "fraction in (0, 1]"),
        ("protocol.server.quorum=7", "cannot be met"),
        ("protocol.server.deadline=2.0", "needs virtual time"),
        ("protocol.server.quorom=7", "quorum"),
        ("until=0.9", "it must be a mapping that says which way"),
        ("until={'accuracy': 0.9}", "until['accuracy'] is 0.9; it must be AtLeast(…)"),
        ("until={'accuracy': AtLest(0.9)}", "AtLeast"),
        ("until={'accuracy': AtLeast(0.9), 'loss'}", "it must be a mapping that says which way"),
    ],
)
def test_what_makes_no_sense_is_refused(setting: str, words: str, tmp_path: Path) -> None:
    done = fedavg(tmp_path / "r", setting)
    assert done.exit_code != 0
    assert words in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("timing", ["Lockstep()", "VirtualTime('exponential(1.0)', loss=0.1)"])
def test_show_trace_and_pictures(timing: str, tmp_path: Path) -> None:
    run = tmp_path / "r"
    settings = ("--set", "clients=6", "--set", "rounds=3", "--set", f"timing={timing}")
    done = invoke("run", "fedavg", "--out", run, "--pictures", *settings)
    assert done.exit_code == 0, done.stderr
    for name in ("learning", "network", "clients"):
        assert imread(run / "pictures" / f"{name}.png").shape[1] > 400
    shown = invoke("show", run)
    assert shown.exit_code == 0
    for words in ("FedAvg(outer_steps=3", "Server(participation=0.25", "star, 6 clients", "complete"):
        assert words in shown.stdout
    for by, what in (("round", "3 rounds"), ("edge", "edges"), ("node", "7 nodes"), ("phase", "phases")):
        traced = invoke("trace", run, "--by", by, "--top", "100")
        assert traced.exit_code == 0, traced.stderr
        assert what in traced.stdout
