"""The study `churn`: its mass is that of the run, and what it says comes from the runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from asyncfed import run_study
from scenarios.churn import METHODS, PLAIN, SUMS, _key, keys, lost_mass, scenario, study, summarise
from tests.helpers import run_tapped


@pytest.mark.parametrize(
    ("method", "there", "absence"),
    [(PLAIN, math.inf, "pause"), (PLAIN, 5.0, "pause"), (PLAIN, 5.0, "crash"), (SUMS, 5.0, "pause")],
)
def test_lost_mass_is_what_the_run_does_not_hold(
    method: str, there: float, absence: str, tmp_path: Path
) -> None:
    """Against a tap on the run: what clients have in the end, and what is under way. One who has nothing
    stands where all began, at ω = 1.
    """
    made = scenario(method, there, absence, clients=10, horizon=20.0, loss=0.05, seed=2)
    result, steps = run_tapped(made, tmp_path / "run")
    found = lost_mass(result)
    if method == SUMS:
        assert found == pytest.approx(0.0, abs=1e-12)
        return
    messages = result.trace.to_pandas()
    on_its_way = sum(
        row.weight * float(steps.payload[row.sender, row.step]["omega"])
        for row in messages[messages["status"] == "in_flight"].itertuples()
    )
    omega = result.final["omega"]
    held = float(omega.sum()) - (float((omega == 1.0).sum()) if absence == "crash" else 0.0)
    assert 10 * (1 - found) == pytest.approx(held + on_its_way, abs=1e-9)
    assert found > 0.05


def test_it_runs_small_and_says_what_the_runs_say(tmp_path: Path) -> None:
    made = study(seeds=1, clients=10, horizon=5.0)
    only = [name for name in made.parts if _key(name)[1] in (math.inf, 10.0)]
    result = run_study(made, out=tmp_path / "study", only=only)
    assert set(result.results) == set(only)
    frame = result.summary.tables[0].frame
    assert list(frame["method"].unique()) == list(METHODS)
    assert len(frame) == len(only) == 12
    assert len(keys()) == 28
    assert [path.stat().st_size > 5_000 for path in result.pictures] == [True] * 4
    assert summarise({}, 5.0).findings == ()
