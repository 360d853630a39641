"""Every scenario that comes along can be built, written down, and run for a few steps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncfed import run
from asyncfed.cli.scenarios import known_scenarios, load_scenario
from asyncfed.scenario import check
from asyncfed.scenario_data import scenario_from_data, scenario_to_data

SMALL = {
    "stragglers": ["horizon=20"],
    "pdbo_digits": ["clients=6", "steps=3", "outer_steps=1", "protocol.hypergradient.rounds=2"],
    "fedavg": ["clients=6", "rounds=3", "epochs=1", "participation=0.5"],
    "large": ["clients=300", "steps=3"],
    "sgp_mnist": ["clients=10", "steps=2"],
}
SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.parametrize("name", sorted(known_scenarios()))
def test_it_runs_small(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "sgp_mnist":
        if "ASYNCFED_DATA" not in os.environ:
            monkeypatch.setenv("ASYNCFED_DATA", str(SHARED))
        if not (Path(os.environ["ASYNCFED_DATA"]) / "MNIST").exists():
            pytest.skip("MNIST is not in ASYNCFED_DATA")
    scenario = load_scenario(name, SMALL.get(name, ["steps=3"]))
    assert scenario.name == name
    data = scenario_to_data(scenario)
    assert scenario_to_data(scenario_from_data(data)) == data
    result = run(scenario, out=tmp_path / "r")
    assert result.complete
    assert len(result.metrics) >= 2


@pytest.mark.parametrize("name", sorted(set(known_scenarios()) - {"sgp_mnist", "large"}))
def test_it_can_be_run_as_it_stands(name: str) -> None:
    check(load_scenario(name))


def test_sgp_learns_the_digits(tmp_path: Path) -> None:
    metrics = run(load_scenario("sgp_digits"), out=tmp_path / "r").metrics
    assert metrics["accuracy"].iloc[-1] > 0.93
    assert metrics["accuracy_p10"].iloc[-1] > 0.85
