"""Small runs of everything do what they did when `golden.json` was written (see `make.py`)."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from asyncfed import Scenario, run
from tests.golden.digests import Digest, differences, digest, table_digest
from tests.golden.make import GOLDEN
from tests.golden.scenarios import Scenarios
from tests.golden.scenarios import scenarios as all_scenarios

EXPECTED: dict[str, Digest] = json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def scenarios() -> Scenarios:
    return all_scenarios()


def _digest(scenario: Scenario, out: Path) -> Digest:
    found: Digest = json.loads(json.dumps(digest(run(scenario, out=out))))
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_is_as_it_was(name: str, scenarios: Scenarios, tmp_path: Path) -> None:
    assert differences(EXPECTED[name], _digest(scenarios[name], tmp_path / "run")) == []


def test_every_scenario_is_frozen(scenarios: Scenarios) -> None:
    assert sorted(scenarios) == sorted(EXPECTED)


@pytest.mark.parametrize(
    "name",
    ["virtual_exponential_overtaking_loss", "pdbo_adam_fresh_vrhgp", "aggitd_quorum_next_slow_clients"],
)
def test_another_seed_is_noticed(name: str, scenarios: Scenarios, tmp_path: Path) -> None:
    scenario = dataclasses.replace(scenarios[name], seed=8)
    found = differences(EXPECTED[name], _digest(scenario, tmp_path / "run"))
    assert any(line.startswith("messages: in ") for line in found)
    assert any(line.startswith("final 'inner': projections differ") for line in found)


def test_the_order_of_rows_and_the_last_bits_do_not_matter() -> None:
    rows = [(0, 0.1 + 0.2, "sent", None), (1, 1 / 3, "lost", 2.0), (1, 0.0, "sent", 0.25)]
    moved = [(step, at * (1 + 1e-15) - 0.0, status, weight) for step, at, status, weight in rows]
    random.Random(1).shuffle(moved)
    names = ("step", "at", "status", "weight")
    before, after = (
        table_digest(dict(zip(names, zip(*some, strict=True), strict=True)), names) for some in (rows, moved)
    )
    assert before == after


def test_differences_say_what_differs() -> None:
    names = ("sender", "weight")
    base = table_digest({"sender": [0, 1], "weight": [0.5, 0.25]}, names)
    swapped = table_digest({"sender": [0, 1], "weight": [0.25, 0.5]}, names)
    longer = table_digest({"sender": [0, 1, 1], "weight": [0.5, 0.25, None]}, names)
    final = {
        "inner": {"shape": [2, 1], "projections": [1.0, 2.0, 3.0]},
        "omega": {"shape": [2, 1], "projections": [0.0, 0.0, 0.0]},
    }
    rest = {"status": {"delivered": 2}, "bytes": 16, "last_metrics": {"messages": 2, "bytes": 16}}
    expected = {"messages": base, "steps": base, "final": final, **rest}
    near = {"inner": {"shape": [2, 1], "projections": [1.0, 2.0, 3.0 + 1e-8]}, "omega": final["omega"]}
    assert differences(expected, {**expected, "final": near}) == []
    far = {"inner": {"shape": [2, 1], "projections": [1.0, 2.0, 3.001]}, "z": final["omega"]}
    found = {**expected, "messages": swapped, "steps": longer, "bytes": 24, "final": far}
    assert differences(expected, found) == [
        "messages: only in which values stand together in a row; expected 2 rows, found 2",
        "steps: in sender, weight; expected 2 rows, found 3",
        "bytes: expected 16, found 24",
        "final 'inner': projections differ by up to 0.001; expected [1.0, 2.0, 3.0], found [1.0, 2.0, 3.001]",
        "final 'omega': missing",
        "final 'z': not expected",
    ]
