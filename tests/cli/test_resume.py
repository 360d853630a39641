"""`asyncfed resume`, and how `asyncfed show` and `asyncfed run` point to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asyncfed import Progress, RunStopped, Scenario, load, run
from asyncfed.cli.scenarios import load_scenario
from tests.helpers import files_of

ROOT = Path(__file__).parents[2]


class Interrupting:
    """Asks this process to stop, after so many ticks."""

    def __init__(self, ticks: int) -> None:
        self._left = ticks

    def __call__(self, now: Progress) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGTERM)


def interrupted(own: Path, out: Path) -> Path:
    made = load_scenario(str(own), (), None)
    assert isinstance(made, Scenario)
    with pytest.raises(RunStopped):
        run(made, out=out, progress=Interrupting(4))
    return out


def words(text: str) -> str:
    """However a terminal breaks it."""
    return " ".join(text.split())


def test_resume_goes_on_to_the_same_bytes_and_prints_as_run_does(cli: Any, own: Path, tmp_path: Path) -> None:
    undisturbed = cli("run", own, "--out", tmp_path / "whole")
    out = interrupted(own, tmp_path / "run")
    done = cli("resume", out)
    assert done.exit_code == 0, (done.stderr, done.exception)
    assert f"going on with the run in {out}" in words(done.stderr)
    assert files_of(out) == files_of(tmp_path / "whole")
    assert load(out).manifest["resumed"] == 1
    table = undisturbed.stdout.split("wall time")[0]
    assert table
    assert done.stdout.split("wall time")[0] == table


def test_run_into_an_interrupted_run_says_that_resume_exists(cli: Any, own: Path, tmp_path: Path) -> None:
    out = interrupted(own, tmp_path / "run")
    done = cli("run", own, "--out", out)
    assert done.exit_code == 2
    assert "already holds a run" in done.stderr
    assert f"It is not complete: `asyncfed resume {out}` goes on with it" in words(done.stderr)
    assert load(out).status == "interrupted"


def test_what_cannot_be_resumed_is_refused(cli: Any, own: Path, own_study: Path, tmp_path: Path) -> None:
    cli("run", own, "--out", tmp_path / "whole")
    complete = cli("resume", tmp_path / "whole")
    assert (complete.exit_code, "is complete; there is nothing to go on with" in complete.stderr) == (2, True)
    nothing = cli("resume", tmp_path / "nothing")
    assert (nothing.exit_code, "there is no run at" in nothing.stderr) == (4, True)
    assert "what was recorded" not in complete.stderr + nothing.stderr
    cli("run", own_study, "--out", tmp_path / "study")
    study = cli("resume", tmp_path / "study")
    assert study.exit_code == 2
    assert f"`asyncfed run compared … --out {tmp_path / 'study'}`" in words(study.stderr)
    seed = cli("resume", interrupted(own, tmp_path / "run"), "--seed", 3)
    assert (seed.exit_code, "for a scenario that is given" in seed.stderr) == (2, True)
    often = cli("resume", tmp_path / "run", "--checkpoint-every", "often")
    assert (often.exit_code, "checkpoint_every is 'often'" in often.stderr) == (2, True)
    assert load(tmp_path / "run").status == "interrupted"


def test_show_says_how_to_go_on_with_an_interrupted_run(cli: Any, own: Path, tmp_path: Path) -> None:
    out = interrupted(own, tmp_path / "run")
    shown = words(cli("show", out).stdout)
    assert "interrupted: a partial run" in shown
    assert "stopped by SIGTERM" in shown
    assert f"asyncfed resume {out}" in shown
    assert cli("resume", out).exit_code == 0
    assert "asyncfed resume" not in cli("show", out).stdout


def test_show_says_how_to_go_on_with_a_run_whose_path_has_spaces(cli: Any, own: Path, tmp_path: Path) -> None:
    out = interrupted(own, tmp_path / "a run")
    assert f"asyncfed resume '{out}'" in words(cli("show", out).stdout)


def test_show_tells_a_running_run_from_a_killed_one(cli: Any, own: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "asyncfed", "run", str(own), "--set", "steps=1000000", "--out", str(out)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not (out / "metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.02)
        shown = words(cli("show", out).stdout)
        os.kill(process.pid, signal.SIGKILL)
    assert json.loads((out / "run.json").read_text())["status"] == "running"
    assert "running: a partial run" in shown
    assert "asyncfed resume" not in shown
    shown = words(cli("show", out).stdout)
    assert "killed before it could say so" in shown
    assert f"asyncfed resume {out}" in shown
