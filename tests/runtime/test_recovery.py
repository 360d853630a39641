"""Actors that die are replaced, everybody goes back to the last checkpoint, and the outcome is the same."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncfed import (
    ActorLostError,
    Progress,
    RecoveredWarning,
    Scenario,
    VirtualTime,
    load,
    resume,
    run,
)
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP, FedAvg, LocalSteps
from tests.helpers import files_of
from topologies import star, stochastic_directed

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

_UNEVEN = VirtualTime("uniform(0.8, 1.2)", latency="exponential(0.3)", loss=0.05)


def scenario(kind: str) -> Scenario:
    problem = quadratic(clients=4, dimension=3, noise=0.5, samples=5)
    if kind == "server":
        return Scenario(problem, star(4, up=0.9), FedAvg(60, LocalSteps(0.05, batch=2)), evaluate_every=7)
    timing = {"timing": _UNEVEN} if kind == "virtual" else {}
    return Scenario(
        problem, stochastic_directed(4, seed=1), SGP(60, 0.02, batch=2), evaluate_every=7, **timing
    )


class Killer:
    """Kills one of this process's actors now and then."""

    def __init__(self, at: list[int], seed: str) -> None:
        self._at, self._chance, self._ticks = at, random.Random(seed), 0
        self.killed = 0

    def __call__(self, now: Progress) -> None:
        self._ticks += 1
        if self._at and self._ticks >= self._at[0]:
            self._at.pop(0)
            victims = sorted(actors())
            os.kill(self._chance.choice(victims), signal.SIGKILL)
            self.killed += 1


def actors() -> list[int]:
    """The processes of this process's actors."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if (process.cmdline() or [""])[0].startswith("ray::_Node"):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize("kind", ["lockstep", "virtual", "server"])
def test_a_run_whose_actors_are_killed_goes_on_by_itself_to_the_same_bytes(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": "ray", "clients_per_actor": 2, "save_final": True}
    whole = run(scenario(kind), out=tmp_path / "whole", checkpoint_every=None, **options)
    killer = Killer([8, 30], kind)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = run(scenario(kind), out=tmp_path / "run", checkpoint_every=5, progress=killer, **options)
    assert killer.killed == 2
    assert result.complete
    assert files_of(result.path) == files_of(whole.path)
    recoveries = result.manifest["recoveries"]
    assert 1 <= len(recoveries) <= 2, "two that die together are replaced together"
    assert all(
        one["steps_repeated"] < 4 * 60 and "client" in one["lost"] + one["error"] for one in recoveries
    )
    told = [str(one.message) for one in said if issubclass(one.category, RecoveredWarning)]
    assert len(told) == len(recoveries)
    assert "goes on from" in told[0]
    assert not left()


def left() -> list[int]:
    """Actors that are still there; killed ones take a moment to be gone."""
    for _ in range(100):
        if not (found := actors()):
            return []
        time.sleep(0.1)
    return found


def test_without_recoveries_a_dead_actor_ends_the_run_and_resume_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": "ray", "clients_per_actor": 2}
    whole = run(scenario("virtual"), out=tmp_path / "whole", **options)
    with pytest.raises(ActorLostError, match="asyncfed resume"):
        run(
            scenario("virtual"), out=tmp_path / "run", checkpoint_every=5, max_recoveries=0,
            progress=Killer([20], "once"), **options,
        )  # fmt: skip
    assert load(tmp_path / "run").status == "failed"
    assert files_of(resume(tmp_path / "run").path) == files_of(whole.path)
