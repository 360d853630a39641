"""A run that finds no room on its Ray cluster says what is missing, waits, and gives up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncfed import RunError, Scenario, ScenarioError, load, run
from asyncfed.errors import WaitingWarning
from asyncfed.problems import quadratic
from asyncfed.protocols import FedAvg, LocalSteps
from topologies import star

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("own_actors")]

SERVED = Scenario(quadratic(clients=2), star(2), FedAvg(3, LocalSteps(0.1)))


@pytest.fixture
def hog(own_actors: None) -> Iterator[Any]:
    """An actor of somebody else's, that holds both CPUs."""
    import ray

    class Hog:
        def sits(self) -> bool:
            return True

    actor = ray.remote(Hog).options(num_cpus=2).remote()
    assert ray.get(actor.sits.remote())
    yield actor
    ray.kill(actor)


def test_a_run_without_room_says_what_is_missing_and_gives_up(
    hog: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ASYNCFED_WAIT", "4")
    missing = "the 2 actors of this run ask for 2 CPUs; the Ray cluster has 2 CPUs, of which 0 CPUs are free"
    started = time.monotonic()
    with (
        pytest.warns(WaitingWarning, match=f"waiting for room: {missing}; this run gives up after 4 s"),
        pytest.raises(
            RunError, match=rf"{missing}, after 4 s of waiting; .*clients_per_actor.*ASYNCFED_WAIT"
        ),
    ):
        run(SERVED, backend="ray", clients_per_actor=2, out=tmp_path / "run")
    assert time.monotonic() - started < 8
    assert load(tmp_path / "run").status == "failed"


def test_a_waiting_run_goes_on_when_there_is_room(hog: Any, tmp_path: Path) -> None:
    import ray

    threading.Timer(1.5, ray.kill, [hog]).start()
    result = run(SERVED, backend="ray", clients_per_actor=2, out=tmp_path / "run")
    assert result.status == "complete"
    assert result.manifest["wall_seconds"] > 1


def test_a_time_to_wait_that_is_none_is_refused(
    hog: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ASYNCFED_WAIT", "soon")
    with pytest.raises(ScenarioError, match="ASYNCFED_WAIT is 'soon'; it must be a number of seconds"):
        run(SERVED, backend="ray", clients_per_actor=2, out=tmp_path / "run")
