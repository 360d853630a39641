"""Sweeps: all combinations in a stable order, each as if it were run alone; kept, resumed, failing."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from asyncfed import Scenario, ScenarioError, compare, load, load_study, run, sweep
from asyncfed.cli.app import app
from asyncfed.problems import Problem, quadratic
from asyncfed.protocols import SGP
from asyncfed.runtime.checkpoints import has_checkpoint
from asyncfed.sweeping.grid import combinations, parse_sweeps
from tests.helpers import files_of
from topologies import stochastic_directed

FILE = '''"""A scenario of one's own, with a method and functions that only this file has."""
import os
import time
from dataclasses import dataclass

import torch

from asyncfed import Scenario
from asyncfed.problems import Problem, quadratic
from asyncfed.protocols import SGP
from asyncfed.registry import register
from topologies import stochastic_directed


HOLD = __file__ + ".hold"  # while it is there, steps are slow


@register("method")
@dataclass(frozen=True)
class Mine(SGP):
    """A method of one's own."""


def scenario(steps: int = 6, slow: float = 0.0) -> Scenario:
    made = quadratic(clients=3, dimension=2)

    def loss(inner, outer, batch):
        time.sleep(slow if os.path.exists(HOLD) else 0.0)
        return made.inner_loss(inner, outer, batch)

    own = Problem(name="own", data=made.data, init_inner=made.init_inner, inner_loss=loss)
    return Scenario(
        problem=own if slow else made,
        topology=stochastic_directed(3, seed=1),
        protocol=Mine(steps=steps, lr=0.1),
    )
'''


def scenario(**changes: Any) -> Scenario:
    usual = {
        "problem": quadratic(clients=3, dimension=2),
        "topology": stochastic_directed(3, seed=1),
        "protocol": SGP(steps=6, lr=0.1),
        "name": "small",
    }
    return Scenario(**usual | changes)  # type: ignore[arg-type]


def test_the_grid_is_in_a_stable_order_with_readable_names() -> None:
    grid = {"protocol.lr": [0.1, 0.3], "protocol.order": ["4a", "4b"], "seed": [0, 1]}
    names = list(combinations(grid))
    assert names[:3] == ["lr=0.1,order=4a,seed=0", "lr=0.1,order=4a,seed=1", "lr=0.1,order=4b,seed=0"]
    assert names[-1] == "lr=0.3,order=4b,seed=1"
    assert list(combinations({"problem.seed": [1], "topology.seed": [2]})) == [
        "problem.seed=1,topology.seed=2"
    ]
    same = list(combinations({"timing": ["Lockstep()", "lockstep[]"]}))
    assert same == ["timing=Lockstep", "timing=lockstep+2"]  # which some file systems hold for one
    assert parse_sweeps(["protocol=SGP(3, 0.1),FedAvg(2, LocalSteps(0.1))", "a.b='x,y',1"]) == {
        "protocol": ["SGP(3, 0.1)", "FedAvg(2, LocalSteps(0.1))"],
        "a.b": ["x,y", 1],
    }


def test_a_sweep_in_one_process_and_its_table(tmp_path: Path) -> None:
    """Sorted by loss; what is complete is not run again, and values may be added."""
    out = tmp_path / "sweep"
    done = sweep(scenario(), {"protocol.lr": [0.01, 0.3], "seed": range(2)}, out=out, workers=1)
    assert list(done.parts) == ["lr=0.01,seed=0", "lr=0.01,seed=1", "lr=0.3,seed=0", "lr=0.3,seed=1"]
    table = done.table()
    assert table["run"].tolist() == ["protocol.lr=0.3", "protocol.lr=0.01"]
    assert table["seeds"].tolist() == [2, 2]
    last = [load(out / f"lr=0.3,seed={seed}").metrics["loss"].iloc[-1] for seed in (0, 1)]
    mean, error = sum(last) / 2, abs(last[0] - last[1]) / 2
    values = compare(out).values
    row = values[(values["run"] == "protocol.lr=0.3") & (values["metric"] == "loss")].iloc[0]
    assert (row["quantity"], row["mean"], row["standard_error"]) == (
        "last",
        pytest.approx(mean),
        pytest.approx(error),
    )
    about = json.loads((out / "sweep.json").read_text())
    assert about["settings"] == {"protocol.lr": [0.01, 0.3], "seed": [0, 1]}
    assert about["runs"]["lr=0.3,seed=1"] == {"protocol.lr": 0.3, "seed": 1}
    alone = run(scenario(protocol=SGP(steps=6, lr=0.3), seed=1), out=tmp_path / "alone")
    assert files_of(alone.path) == files_of(out / "lr=0.3,seed=1")

    made = {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/run.json")}
    told: list[Any] = []
    more = {"protocol.lr": [0.01, 0.1, 0.3], "seed": range(2)}
    again = sweep(scenario(), more, out=out, workers=1, progress=told.append)
    assert {part: (out / part / "run.json").stat().st_mtime_ns for part in made} == made
    assert [each.part for each in told if each.status == "complete"] == ["lr=0.1,seed=0", "lr=0.1,seed=1"]
    assert again.complete
    assert len(again.table()) == 3


def test_runs_side_by_side_write_the_same_bytes_as_alone(tmp_path: Path) -> None:
    """In processes of their own; of functions that no other process could import; one fails, and is told."""
    made = quadratic(clients=3, dimension=2)

    def loss(inner: Any, outer: Any, batch: Any) -> torch.Tensor:
        return made.inner_loss(inner, outer, batch)

    own = Problem(name="own", data=made.data, init_inner=made.init_inner, inner_loss=loss)
    base, out = scenario(problem=own), tmp_path / "sweep"
    done = sweep(base, {"protocol.lr": [0.1, 1e30], "seed": [0, 1]}, out=out, workers=2)
    failed = [part for part, state in done.parts.items() if state["status"] == "failed"]
    assert failed == ["lr=1e+30,seed=0", "lr=1e+30,seed=1"]
    assert done.table()["seeds"].tolist() == [2]
    for seed in (0, 1):
        alone = run(dataclasses.replace(base, seed=seed), out=tmp_path / f"alone{seed}")
        assert files_of(alone.path) == files_of(out / f"lr=0.1,seed={seed}")
    assert load_study(out).status == "complete"  # who diverged would diverge again


def test_an_interrupted_sweep_is_readable_and_goes_on(tmp_path: Path) -> None:
    """Its command is stopped with SIGINT while two runs go; then they go on from where they were."""
    (tmp_path / "mine.py").write_text(FILE)
    hold, out = tmp_path / "mine.py.hold", tmp_path / "sweep"
    hold.touch()
    words = ["run", str(tmp_path / "mine.py"), "--set", "steps=80", "--sweep", "slow=0.2", "--seeds", "2"]
    words += ["--checkpoint-every", "1", "--out", str(out), "--workers"]
    parts = [out / f"slow=0.2,seed={seed}" for seed in (0, 1)]
    command = [sys.executable, "-m", "asyncfed", *words, "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not all(map(has_checkpoint, parts)):
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "go on with: asyncfed run" in said
    assert [load(part).status for part in parts] == ["interrupted", "interrupted"]
    assert load_study(out).status == "interrupted"
    assert all(0 < len(load(part).metrics) < 81 for part in parts)
    hold.unlink()
    done = CliRunner().invoke(app, [*words, "1"])
    assert done.exit_code == 0, done.output
    assert [load(part).manifest["resumed"] for part in parts] == [1, 1]
    assert load(parts[0]).scenario_data["protocol"]["type"] == "Mine"


def test_the_command_tells_of_failures_and_refuses(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    file, out = str(tmp_path / "mine.py"), tmp_path / "sweep"
    done = CliRunner().invoke(
        app, ["run", file, "--sweep", "protocol.lr=0.1,1e30", "--workers", "1", "--out", str(out)]
    )
    assert done.exit_code == 3, done.stderr
    assert "1 of 2 runs failed (lr=1e+30)" in done.stderr
    assert "loss by protocol.lr" in done.stdout
    for wrong, words in (
        (["--sweep", "protocol.lr"], "must look like path=value,value"),
        (["--sweep", "protocol.rl=1,2"], "did you mean 'protocol.lr'"),
        (["--sweep", "seed=1,2", "--seeds", "3"], "both say which seeds"),
        (["--workers", "2"], "is for sweeps and studies"),
        (["--seeds", "2", "--workers", "2", "--backend", "ray"], "needs backend='local'"),
    ):
        refused = CliRunner().invoke(app, ["run", file, *wrong, "--out", str(tmp_path / "none")])
        assert (refused.exit_code, words in refused.stderr) == (2, True), refused.stderr
        assert not (tmp_path / "none").exists()
    with pytest.raises(ScenarioError, match="give its values in a list"):
        sweep(scenario(), {"protocol.lr": 0.1})
    with pytest.raises(ScenarioError, match="more than 10,000 runs"):
        sweep(scenario(), {"protocol.lr": range(200), "seed": range(100)})
