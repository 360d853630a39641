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
