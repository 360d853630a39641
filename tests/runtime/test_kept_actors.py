"""Actors that go from run to run: the same processes, the same bytes, and none left in the end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from asyncfed import Scenario, run
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP, FedAvg, LocalSteps
from asyncfed.runtime.ray_actors import actors_kept
from benchmarks.kills import actors, actors_left
from tests.helpers import files_of
from topologies import ring, star

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("own_actors")]

PROBLEM = quadratic(clients=4, dimension=3, noise=0.5, samples=5)
PEERS = Scenario(PROBLEM, ring(4), SGP(6, 0.02, batch=2))
SERVED = Scenario(PROBLEM, star(4), FedAvg(4, LocalSteps(0.05, batch=2)))
TWO: dict[str, Any] = {"backend": "ray", "clients_per_actor": 2, "save_final": True}


def test_a_run_takes_over_the_actors_of_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    """Three with the server, of which the peers need two; one that died meanwhile is not taken."""
    fresh = run(PEERS, out=tmp_path / "fresh", **TWO)
    assert actors_left() == []
    with actors_kept():
        run(SERVED, out=tmp_path / "served", **TWO)
        before = set(actors())
        again = run(PEERS, out=tmp_path / "again", **TWO)
        assert set(actors()) == before
        assert len(before) == 3
        os.kill(min(before), signal.SIGKILL)
        once_more = run(SERVED, out=tmp_path / "once more", **TWO)
        assert before - set(actors()) == {min(before)}
    assert files_of(again.path) == files_of(fresh.path)
    assert files_of(once_more.path) == files_of(tmp_path / "served")
    assert actors_left() == []
