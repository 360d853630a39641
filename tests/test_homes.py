"""Methods and problems of one's own are found again where they are imported, or may be; and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncfed import Scenario, ScenarioError, load, run
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from topologies import ring

OWN = """
from dataclasses import dataclass

from asyncfed.problems import problem_factory, quadratic
from asyncfed.protocols import SGP
from asyncfed.registry import register


@register("method")
@dataclass(frozen=True)
class OwnSGP(SGP):
    pass


@problem_factory
def own_quadratic(clients, seed=0):
    return quadratic(clients=clients, seed=seed)
"""

READER = """
import json, sys
from asyncfed import ScenarioError, load, resume, run

made, again = sys.argv[1:]
for allowed in ((), ["own"], ["own_method"], ["json"]):
    try:
        load(made, imports=allowed).scenario
    except ScenarioError as error:
        print(error)
    assert "own_methods" not in sys.modules
scenario = load(made, imports=["own_methods"]).scenario
assert type(scenario.protocol).__module__ == "own_methods"
assert load(made).scenario.protocol == scenario.protocol  # it is imported now
result = run(scenario, out=again)
print(json.dumps(json.load(open(result.path / "scenario.json"))["homes"]))
print(result.metrics["loss"].tolist())
"""


def rewritten(path: Path, **changes: object) -> None:
    file = path / "scenario.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_thing_of_ones_own_is_imported_only_where_that_is_allowed(tmp_path: Path) -> None:
    scenario = Scenario(quadratic(clients=3), ring(3), SGP(steps=4, lr=0.1, batch=None))
    result = run(scenario, out=tmp_path / "made")
    assert "homes" not in result.scenario_data, "all of it is ours"
    (tmp_path / "own_methods.py").write_text(OWN)
    rewritten(
        result.path,
        protocol=result.scenario_data["protocol"] | {"type": "OwnSGP"},
        problem={"factory": "own_quadratic", "arguments": {"clients": 3}},
        homes={"OwnSGP": "own_methods", "own_quadratic": "own_methods"},
    )
    done = subprocess.run(
        [sys.executable, "-c", READER, str(result.path), str(tmp_path / "again")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])},
    )
    assert done.returncode == 0, done.stderr
    *refused, homes, losses = done.stdout.splitlines()
    assert len(refused) == 4
    assert all("'OwnSGP' is not registered" in line for line in refused)
    assert all("load(run, imports=['own_methods'])" in line for line in refused)
    assert json.loads(homes) == {"OwnSGP": "own_methods", "own_quadratic": "own_methods"}
    assert json.loads(losses) == result.metrics["loss"].tolist()


@pytest.mark.parametrize(
    ("homes", "imports", "said"),
    [
        ({"Gone": "__main__"}, (), "'Gone' is not registered; it was defined in a script or a notebook"),
        ({"Gone": "no_such_module"}, ["no_such_module"], "no_such_module cannot be imported .*sys.path"),
        ({"Gone": "json"}, "json", "json was imported and does not register 'Gone'"),
        ({"Gone": 3}, (), "unknown type in a scenario 'Gone'"),
        (["Gone"], (), "unknown type in a scenario 'Gone'"),
    ],
)
def test_what_cannot_be_found_says_how_it_could(
    homes: object, imports: list[str], said: str, tmp_path: Path
) -> None:
    result = run(
        Scenario(quadratic(clients=3), ring(3), SGP(steps=1, lr=0.1, batch=None)), out=tmp_path / "run"
    )
    rewritten(result.path, protocol={"type": "Gone"}, homes=homes)
    with pytest.raises(ScenarioError, match=said):
        _ = load(result.path, imports=imports).scenario
    with pytest.raises(ScenarioError, match="imports is 3; it must be names of modules"):
        load(result.path, imports=3)  # type: ignore[arg-type]
