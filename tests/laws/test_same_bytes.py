"""What a run leaves is a function of its scenario: again, written down and read again, or on copies."""

from __future__ import annotations

import json
from pathlib import Path

from asyncfed import load, run
from asyncfed.scenario_data import scenario_to_data
from tests.laws.examples import Case
from tests.laws.runs import Runs, every_case


@every_case
def test_a_run_again_leaves_the_same_bytes(case: Case, told: Runs, tmp_path: Path) -> None:
    """The first was looked at step by step, and the second was not."""
    told(case).same_as(run(case.scenario, out=tmp_path / "again"), "the same run again")


@every_case
def test_a_scenario_read_again_leaves_the_same_bytes(case: Case, told: Runs, tmp_path: Path) -> None:
    first = told(case)
    scenario = load(first.result.path).scenario
    assert type(scenario.protocol) is type(first.scenario.protocol), case.name
    assert scenario.protocol == first.scenario.protocol, f"{case.name} is read as {scenario.protocol}"
    written = (json.dumps(scenario_to_data(one)) for one in (scenario, first.scenario))
    assert len(set(written)) == 1, f"{case.name} is another scenario when it is read again"
    first.same_as(run(scenario, out=tmp_path / "again"), "the scenario read again")


@every_case
def test_state_is_returned_and_not_changed_in_place(case: Case, told: Runs, tmp_path: Path) -> None:
    """Steps on copies that are spoilt when they are over make the same run."""
    told(case).same_as(run(case.scenario, out=tmp_path / "strict", strict=True), "a run on copies")
