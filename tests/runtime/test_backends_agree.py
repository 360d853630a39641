"""The same scenario on every backend: the identical trace and the same numbers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from asyncfed import ActorLostError, DivergenceError, Lockstep, Scenario, VirtualTime, load, run
from asyncfed.network import Given
from asyncfed.problems import classification, quadratic
from asyncfed.protocols import SGP
from tests.helpers import files_of
from topologies import fully_connected, ring, stochastic_directed, stochastic_undirected

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

BUSY = VirtualTime(
    compute="lognormal(1.0, 0.4)",
    latency="exponential(0.7)",
    bandwidth=20_000.0,
    loss=0.05,
    factors={1: 4.0},
    horizon=25.0,
)
SCENARIOS = {
    "lockstep, after": Scenario(
        problem=classification("digits", clients=6, seed=2),
        topology=stochastic_directed(6, seed=1),
        protocol=SGP(steps=15, lr=0.1, batch=16),
        precision="float64",
        evaluate_every=5,
    ),
    "lockstep with loss, before, full batch": Scenario(
        problem=classification("digits", clients=6, seed=2),
        topology=stochastic_undirected(6, seed=1),
        protocol=SGP(steps=10, lr=0.1, order="4a", batch=None),
        timing=Lockstep(loss=0.1),
        precision="float64",
    ),
    "virtual time, after": Scenario(
        problem=classification("digits", clients=6, seed=2),
        topology=stochastic_directed(6, seed=1),
        protocol=SGP(steps=60, lr=0.02, batch=16, weight_decay=0.01),
        timing=BUSY,
        precision="float64",
    ),
    "virtual time, before": Scenario(
        problem=classification("digits", clients=6, seed=2),
        topology=stochastic_directed(6, seed=1),
        protocol=SGP(steps=60, lr=0.02, order="4a", batch=16),
        timing=BUSY,
        precision="float64",
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_packing_gives_the_identical_trace_and_the_same_numbers(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    local = run(scenario, out=tmp_path / "local")
    ways = (1, 4) if name == "lockstep, after" else (4,)
    for clients_per_actor in ways:
        other = run(
            scenario,
            backend="ray",
            clients_per_actor=clients_per_actor,
            out=tmp_path / f"ray{clients_per_actor}",
        )
        assert other.manifest["placement"]["actors"] == -(-6 // clients_per_actor)
        for file in sorted((tmp_path / "local" / "trace").iterdir()):
            assert file.read_bytes() == (other.path / "trace" / file.name).read_bytes(), file.name
        for key, value in local.final.items():
            torch.testing.assert_close(other.final[key], value, rtol=0, atol=1e-10)
        for column in local.metrics.columns.drop("phase"):
            np.testing.assert_allclose(
                other.metrics[column].astype(float),
                local.metrics[column].astype(float),
                rtol=0,
                atol=1e-10,
                err_msg=column,
            )


def test_one_client_per_actor_in_virtual_time_and_twice_the_same_bytes(tmp_path: Path) -> None:
    scenario = SCENARIOS["virtual time, after"]
    local = run(scenario, out=tmp_path / "local")
    first = run(scenario, backend="ray", clients_per_actor=1, out=tmp_path / "first", save_final=True)
    second = run(scenario, backend="ray", clients_per_actor=1, out=tmp_path / "second", save_final=True)
    assert files_of(first.path) == files_of(second.path)
    torch.testing.assert_close(first.final["inner"], local.final["inner"], rtol=0, atol=1e-10)
    assert local.trace.to_arrow().equals(first.trace.to_arrow())


def test_single_precision_agrees_to_rounding(tmp_path: Path) -> None:
    scenario = Scenario(
        problem=classification("digits", clients=6, seed=2),
        topology=stochastic_directed(6, seed=1),
        protocol=SGP(steps=15, lr=0.1, batch=16),
    )
    local = run(scenario, out=tmp_path / "local")
    packed = run(scenario, backend="ray", clients_per_actor=3, out=tmp_path / "ray")
    # float32 rounds at 6e-8 relative; 15 steps of sums of 6 numbers of order one stay far below this.
    torch.testing.assert_close(packed.final["inner"], local.final["inner"], rtol=0, atol=1e-5)


def test_a_client_that_keeps_nothing_for_itself(tmp_path: Path) -> None:
    weights = Given(((0.0, 0.5, 0.5), (0.5, 0.0, 0.5), (0.5, 0.5, 0.0)))
    scenario = Scenario(
        problem=quadratic(clients=3),
        topology=fully_connected(3),
        protocol=SGP(steps=5, lr=0.05, order="4a", batch=None),
        weights=weights,
        precision="float64",
    )
    local = run(scenario, out=tmp_path / "local")
    other = run(scenario, backend="ray", clients_per_actor=1, out=tmp_path / "ray")
    torch.testing.assert_close(other.final["inner"], local.final["inner"], rtol=0, atol=1e-10)


def test_an_error_in_an_actor_reaches_the_user_and_leaves_no_actor_behind(tmp_path: Path) -> None:
    scenario = Scenario(
        problem=quadratic(clients=4, dimension=2),
        topology=stochastic_directed(4, seed=1),
        protocol=SGP(steps=5000, lr=50.0, batch=None),
        evaluate_every=5,
    )
    with pytest.raises(DivergenceError, match=r"loss of client \d became"):
        run(scenario, backend="ray", clients_per_actor=2, out=tmp_path / "run")
    assert load(tmp_path / "run").status == "failed"
    assert len(load(tmp_path / "run").trace) > 0
    assert _living_actors() == 0


def test_a_killed_actor_ends_the_run_with_a_readable_partial_run(tmp_path: Path) -> None:
    victim: list[int] = []

    def kill(progress: object) -> None:
        if not victim and progress.steps_done >= 40:  # type: ignore[attr-defined]
            victim.append(_actor_processes()[0])
            os.kill(victim[0], signal.SIGKILL)

    scenario = Scenario(
        problem=quadratic(clients=4, dimension=2),
        topology=stochastic_directed(4, seed=1),
        protocol=SGP(steps=4000, lr=0.01, batch=None),
        evaluate_every=5,
    )
    with pytest.raises(ActorLostError, match="the actor of clients"):
        run(scenario, backend="ray", clients_per_actor=2, out=tmp_path / "run", progress=kill)
    partial = load(tmp_path / "run")
    assert partial.status == "failed"
    assert "died" in partial.manifest["error"]
    assert len(partial.metrics) >= 1
    assert _living_actors() == 0


def test_packing_says_so_when_the_memory_is_short(tmp_path: Path) -> None:
    """A thousand actors do not fit here, so the default packs them, one actor per core, and says why."""
    scenario = Scenario(
        problem=quadratic(clients=1000, dimension=2),
        topology=stochastic_directed(ring(1000), probability=0.5, seed=1),
        protocol=SGP(steps=2, lr=0.01, batch=None),
    )
    placement = run(scenario, backend="ray", out=tmp_path / "run").manifest["placement"]
    assert placement["actors"] == 2
    assert placement["clients_per_actor"] == 500
    assert "1000 actors would need" in placement["note"]


def _actor_processes() -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [""])[0].startswith("ray::_Client")
    ]


def _living_actors() -> int:
    """Killed actors take a moment to be gone."""
    for _ in range(100):
        if not _actor_processes():
            return 0
        time.sleep(0.1)
    return len(_actor_processes())
