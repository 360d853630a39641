"""Runs side by side: tables worked out by hand, rows of seeds, and what differs."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from asyncfed import Scenario, ScenarioError, TraceError, UnknownNameError, compare, run
from asyncfed.cli.app import app
from asyncfed.comparison.curves import Staircase
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP, FedAvg, LocalSteps
from topologies import fully_connected, star, stochastic_directed

Evaluations = Sequence[tuple[float, float, int, float]]  # step, virtual time, bytes, loss
Make = Callable[..., Path]

FIRST: Evaluations = [(0, 0.0, 0, 8.0), (2, 1.0, 100, 4.0), (4, 2.0, 200, 2.0)]
SECOND: Evaluations = [(0, 0.0, 0, 6.0), (2, 1.0, 100, 4.0), (4, 2.0, 200, 4.0)]
OTHER: Evaluations = [(0, 0.0, 0, 8.0), (3, 10.0, 50, 1.0)]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six rounds among three, in each of which everybody sends."""
    out = tmp_path_factory.mktemp("real") / "run"
    scenario = Scenario(
        problem=quadratic(clients=3, dimension=2), topology=fully_connected(3), protocol=SGP(steps=6, lr=0.1)
    )
    return run(scenario, out=out).path


@pytest.fixture
def make(real: Path, tmp_path: Path) -> Make:
    """That run again, as if it had another seed, learning rate and evaluations."""

    def made(name: str, rows: Evaluations, seed: int = 0, lr: float = 0.1, status: str = "complete") -> Path:
        path = tmp_path / name
        shutil.copytree(real, path)
        change(path / "scenario.json", lambda data: data["protocol"].update(lr=lr) or data.update(seed=seed))
        change(path / "run.json", lambda data: data.update(seed=seed, status=status))
        names = ("step", "virtual_time", "bytes", "loss")
        lines = [{"phase": "inner", "messages": 0, **dict(zip(names, row, strict=True))} for row in rows]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return made


def change(file: Path, how: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(file.read_text())
    how(data)
    file.write_text(json.dumps(data))


def number(values: pd.DataFrame, run: str, quantity: str, axis: str | None = None) -> tuple[float, float]:
    found = values[(values["run"] == run) & (values["metric"] == "loss") & (values["quantity"] == quantity)]
    found = found if axis is None else found[found["axis"] == axis]
    assert len(found) == 1
    return found["mean"].item(), found["standard_error"].item()


def test_a_table_worked_out_by_hand(make: Make, tmp_path: Path) -> None:
    """Of seeds 0 and 1, and another learning rate; all have come to step 3, time 2, 50 bytes and round 3."""
    found = compare(make("a", FIRST), make("b", SECOND, seed=1), make("c", OTHER, lr=0.5))
    a, c = "protocol.lr=0.1", "protocol.lr=0.5"
    assert [(row.label, row.seeds) for row in found.rows] == [(a, [0, 1]), (c, [0])]
    expected = {
        ("last", None): ((3, 1), 1),  # of 2 and 4: the standard deviation √2, divided by √2
        ("at", "step"): ((4, 0), 1),
        ("at", "virtual_time"): ((3, 1), 8),  # the other was not judged again before time 10
        ("at", "bytes"): ((7, 1), 1),
        ("at", "rounds"): ((4, 0), 1),
        ("area", "step"): ((6, 2 / 3), 8),  # (8·2 + 4) / 3 and (6·2 + 4) / 3
        ("area", "virtual_time"): ((5.5, 0.5), 8),
        ("area", "bytes"): ((7, 1), 8),
        ("area", "rounds"): ((6, 2 / 3), 8),
    }
    for (quantity, axis), (of_a, of_c) in expected.items():
        assert number(found.values, a, quantity, axis) == pytest.approx(of_a, abs=1e-12)
        mean, error = number(found.values, c, quantity, axis)
        assert mean == pytest.approx(of_c, abs=1e-12)
        assert math.isnan(error)
    table = found.table("loss")
    assert list(table) == [
        "run", "seeds", "last", "at step 3", "at virtual time 2", "at 50 bytes", "at 3 rounds",
        "area to step 3",
    ]  # fmt: skip
    assert table.iloc[0].tolist() == [
        a,
        2,
        "3.0 ± 1.0",
        "4 ± 0",
        "3.0 ± 1.0",
        "7.0 ± 1.0",
        "4 ± 0",
        "6.00 ± 0.67",
    ]
    assert table.iloc[1].tolist() == [c, 1, "1", "1", "8", "1", "1", "8"]
    assert found.table("loss", sort=True)["run"].tolist() == [c, a]  # the smaller loss first


def test_points_that_are_given(make: Make) -> None:
    """The last value counts after the end, and there is none before the first."""
    late: Evaluations = [(2, 2.0, 10, 5.0), (4, 4.0, 20, 3.0)]
    values = compare(make("a", FIRST), make("late", late, lr=0.2), at={"step": [1, 9], "bytes": [100]}).values
    at = values[(values["quantity"] == "at") & (values["metric"] == "loss")]
    told = at.set_index(["axis", "point", "run"])["mean"].sort_index()
    assert told["step", 1, "protocol.lr=0.1"] == 8
    assert math.isnan(told["step", 1, "protocol.lr=0.2"])
    assert told["step", 9].tolist() == [2, 3]
    assert told["bytes", 100].tolist() == [4, 3]
    assert len(told) == 6


def test_a_staircase_is_not_interpolated() -> None:
    stairs = Staircase(np.array([0.0, 2.0, 2.0, 5.0]), np.array([1.0, 7.0, 3.0, 4.0]))
    assert stairs.at([1.999, 2.0, 4.9, 99.0]).tolist() == [1, 3, 3, 4]  # of two at one point, the later
    assert stairs.area(0, 6) == pytest.approx((2 * 1 + 3 * 3 + 1 * 4) / 6)
    assert math.isnan(stairs.area(5, 5))


def test_the_same_seed_twice_is_never_averaged(make: Make) -> None:
    found = compare(make("a", FIRST), make("again", SECOND), make("b", SECOND, seed=1))
    assert [(row.label, row.seeds) for row in found.rows] == [("a", [0, 1]), ("again", [0])]
    assert found.differences.empty


def test_what_differs_has_the_names_of_set(real: Path, tmp_path: Path) -> None:
    """Values of one type are looked into, others are shown whole; rounds with a server are the trace's."""
    other = Scenario(
        problem=quadratic(clients=3, dimension=2, noise=0.5),
        topology=star(3),
        protocol=FedAvg(2, LocalSteps(0.1)),
        evaluate_every=1,
    )
    with_server = run(other, out=tmp_path / "server")
    told = compare(real, with_server).differences.set_index("setting")
    assert set(told.index) == {"problem.noise", "topology", "protocol", "evaluate_every"}
    assert told.loc["problem.noise"].tolist() == ["0.0", "0.5"]
    assert told.loc["protocol", "run"].startswith("SGP(steps=6, lr=0.1")
    drawn = []
    for seed in (5, 6):
        drawing = stochastic_directed(3, seed=seed)
        scenario = Scenario(problem=quadratic(3, 2), topology=drawing, protocol=SGP(steps=2, lr=0.1))
        drawn.append(run(scenario, out=tmp_path / f"drawn{seed}"))
    assert compare(*drawn).differences["setting"].tolist() == ["topology.seed"]  # and not all probabilities
    curve = compare(with_server).curves("loss", "rounds")["server"]
    assert curve[0].tolist() == [0, 1, 2] == with_server.metrics["step"].tolist()
    assert curve[1].tolist() == with_server.metrics["loss"].tolist()


def test_refusals_say_what_to_do(make: Make, tmp_path: Path) -> None:
    good = make("good", FIRST)
    with pytest.raises(TraceError, match="no evaluation that could be compared"):
        compare(good, make("empty", [], seed=1))
    back = [(0, 0.0, 0, 1.0), (2, 0.0, 5, 1.0), (1, 0.0, 6, 1.0)]
    with pytest.raises(TraceError, match="step goes back"):
        compare(good, make("back", back, seed=2)).table()
    with pytest.raises(ScenarioError, match="given twice"):
        compare(good, good)
    with pytest.raises(UnknownNameError, match="did you mean 'loss'"):
        compare(good).table("los")
    with pytest.raises(UnknownNameError, match="unknown axis 'time'"):
        compare(good, at={"time": [1]})
    with pytest.raises(ScenarioError, match="nothing to compare"):
        compare()


def test_a_scenario_of_any_shape_is_compared(make: Make) -> None:
    """scenario.json may have been written by anybody."""
    strange = make("strange", FIRST)
    for content in (
        {"problem": [1], "topology": {"about": 3, "from": "x"}, "protocol": None},
        {"topology": {"about": {"recipe": "[" * 9000}}, "protocol": {"type": ["x"], "lr": "\x1b[31m"}},
    ):
        (strange / "scenario.json").write_text(json.dumps(content))
        assert len(compare(make(f"good{len(content)}", FIRST), strange).differences) >= 3


def test_the_command_prints_writes_and_draws(make: Make, tmp_path: Path) -> None:
    paths = [make("a", FIRST), make("b", SECOND, seed=1), make("c", OTHER, lr=0.5, status="interrupted")]
    csv, picture = tmp_path / "table.csv", tmp_path / "picture.png"
    words = ["compare", *map(str, paths), "--csv", str(csv), "--picture", str(picture)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "protocol.lr" in done.stdout
    assert "3.0 ± 1.0" in done.stdout
    assert "c is interrupted" in done.stdout
    assert number(pd.read_csv(csv), "protocol.lr=0.1", "area", "step") == pytest.approx((6, 2 / 3))
    assert imread(picture)[..., :3].std() > 0.05
    for wrong, said in (
        (["--at", "step"], "must look like step=100"),
        (["--picture", str(tmp_path / "x.doc")], "must end in .png"),
    ):
        refused = CliRunner().invoke(app, ["compare", str(paths[0]), *wrong])
        assert (refused.exit_code, said in refused.stderr) == (2, True), refused.stderr
