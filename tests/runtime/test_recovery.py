"""Actors that die are replaced, everybody goes back to the last checkpoint, and the outcome is the same."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from asyncfed import (
    ActorLostError,
    RecoveredWarning,
    Scenario,
    VirtualTime,
    load,
    resume,
    run,
)
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP, FedAvg, LocalSteps
from asyncfed.runtime.ray_actors import actors_kept
from benchmarks.kills import ActorKiller, actors_left
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


@pytest.mark.parametrize("kind", ["lockstep", "virtual", "server"])
def test_a_run_whose_actors_are_killed_goes_on_by_itself_to_the_same_bytes(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": "ray", "clients_per_actor": 2, "save_final": True}
    whole = run(scenario(kind), out=tmp_path / "whole", checkpoint_every=None, **options)
    killer = ActorKiller([8, 30], random.Random(kind))
    with actors_kept(False), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = run(scenario(kind), out=tmp_path / "run", checkpoint_every=5, progress=killer, **options)
        assert not actors_left()
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


def test_without_recoveries_a_dead_actor_ends_the_run_and_resume_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": "ray", "clients_per_actor": 2}
    whole = run(scenario("virtual"), out=tmp_path / "whole", **options)
    with actors_kept(False), pytest.raises(ActorLostError, match="asyncfed resume"):
        run(
            scenario("virtual"), out=tmp_path / "run", checkpoint_every=5, max_recoveries=0,
            progress=ActorKiller([20], random.Random(1)), **options,
        )  # fmt: skip
    assert load(tmp_path / "run").status == "failed"
    assert files_of(resume(tmp_path / "run").path) == files_of(whole.path)
