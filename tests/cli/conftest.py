from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asyncfed.cli import app

OWN = '''"""My own scenario."""
from asyncfed import Scenario, VirtualTime
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from topologies import stochastic_directed


def scenario(clients: int = 4, steps: int = 10, lr: float = 0.1, name: str = "mine"):
    return Scenario(
        name=name,
        problem=quadratic(clients=clients, dimension=3),
        topology=stochastic_directed(clients, probability=(0.4, 0.8), seed=1),
        protocol=SGP(steps=steps, lr=lr),
    )
'''


OWN_STUDY = '''"""My own study."""
import pandas as pd

from asyncfed import Scenario, Study, Summary, SummaryTable
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP, Local
from asyncfed.report import draw_curves
from topologies import edgeless, stochastic_directed


def study(clients: int = 3, steps: int = 10, lr: float = 0.1, wild: float = 0.2, seed: int = 0):
    def scenario(topology, protocol):
        return Scenario(
            problem=quadratic(clients=clients, dimension=2), topology=topology, protocol=protocol, seed=seed
        )

    links = stochastic_directed(clients, seed=1)
    return Study(
        name="compared",
        parts={
            "Local": lambda: scenario(edgeless(clients), Local(steps=steps, lr=lr)),
            "StoD/SGP": lambda: scenario(links, SGP(steps=steps, lr=lr)),
            "StoD/SGP-wild": lambda: scenario(links, SGP(steps=steps, lr=wild)),
        },
        summarise=summarise,
        note="Who agrees?",
    )


def summarise(results):
    ends = {name: result.metrics.iloc[-1] for name, result in results.items()}
    frame = pd.DataFrame({"consensus": {name: end["consensus"] for name, end in ends.items()}})
    curves = {name: (r.metrics["step"], r.metrics["consensus"]) for name, r in results.items()}
    return Summary(
        tables=[SummaryTable("Agreement", frame, ["Smaller is better."])],
        findings=[
            ("talking helps", frame["consensus"].idxmax() == "Local"),
            ("silence helps", False),
            (f"{len(frame)} were compared", None),
        ],
        pictures={"consensus": lambda path: draw_curves(path, curves, xlabel="step", ylabel="consensus")},
    )
'''


@pytest.fixture
def own_study(tmp_path: Path) -> Path:
    """A user's study file."""
    path = tmp_path / "own_study.py"
    path.write_text(OWN_STUDY)
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's scenario file."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a command in this process, with runs going under tmp_path/runs."""
    monkeypatch.setenv("ASYNCFED_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("ASYNCFED_DEBUG", raising=False)

    def invoke(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke
