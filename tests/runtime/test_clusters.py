"""Runs on a Ray cluster of three nodes: who lives where, and that it makes no difference.

Also drivers beside each other, and what they leave behind. The nodes stand on one machine, with two CPUs each
on paper (tests/runtime/clusters.py).
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from asyncfed import load, run
from tests.helpers import files_of
from tests.runtime.clusters import Machines, machines, until_empty
from tests.runtime.drivers import SCENARIOS, Driver

pytestmark = pytest.mark.ray

PACKED = {"peers": 2, "server": 3}  # clients per actor: three actors each, with the server's
TOGETHER = 6  # clients in one actor


@pytest.fixture(scope="module")
def cluster() -> Iterator[Machines]:
    with machines(3, cpus=2) as started:
        yield started


@pytest.fixture(scope="module")
def drivers(cluster: Machines) -> Iterator[list[Driver]]:
    """Two of the one cluster."""
    with (
        Driver(cluster.address, cluster.environment) as one,
        Driver(cluster.address, cluster.environment) as two,
    ):
        yield [one, two]


@pytest.fixture(scope="module")
def undisturbed(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What the same packings write on one node, one run after the other."""
    out = tmp_path_factory.mktemp("undisturbed")
    for name, clients in PACKED.items():
        run(SCENARIOS[name], backend="ray", clients_per_actor=clients, save_final=True, out=out / name)
    return {name: files_of(out / name) for name in PACKED}


def test_actors_are_spread_over_the_nodes(cluster: Machines, drivers: list[Driver], tmp_path: Path) -> None:
    """One after the other, each on the next node; the numbers are those of a run in one process."""
    local = run(SCENARIOS["peers"], out=tmp_path / "local")
    drivers[0].begin("peers", tmp_path / "spread", clients_per_actor=1)
    where = Counter(actor.node for actor in cluster.actors())
    drivers[0].go_on()
    assert drivers[0].ended() == "complete"
    assert where == {machine.node: 2 for machine in cluster.all}
    spread = load(tmp_path / "spread")
    assert files_of(spread.path / "trace") == files_of(local.path / "trace")
    # float32 rounds at 6e-8 relative; 12 steps of sums of 6 numbers of order one stay far below this.
    torch.testing.assert_close(spread.final["inner"], local.final["inner"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(spread.metrics["loss"], local.metrics["loss"], rtol=0, atol=1e-5)
    assert cluster.left_over() == []


def test_two_runs_at_a_time_on_three_nodes_write_the_bytes_of_one_node(
    cluster: Machines, drivers: list[Driver], undisturbed: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    both = dict(zip(PACKED, drivers, strict=True))
    for name, driver in both.items():
        driver.begin(name, tmp_path / name, clients_per_actor=PACKED[name])
    actors = cluster.actors()
    for driver in both.values():
        driver.go_on()
    assert [driver.ended() for driver in both.values()] == ["complete", "complete"]
    assert len(actors) == 6
    assert {actor.node for actor in actors} == {machine.node for machine in cluster.all}
    for name, files in undisturbed.items():
        assert files_of(tmp_path / name) == files, name
    assert cluster.left_over() == []


def test_a_node_that_is_lost_costs_some_steps_and_changes_nothing(
    cluster: Machines, drivers: list[Driver], undisturbed: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    """Its actors find a place on the others, though these had given all their cores away; it comes back."""
    drivers[0].begin("peers", tmp_path / "run", clients_per_actor=PACKED["peers"], checkpoint_every=2)
    head = cluster.all[0].node
    away = [actor.node for actor in cluster.actors() if actor.node != head]
    lost = cluster.kill(cluster.number(away[0]))
    drivers[0].go_on()
    assert drivers[0].ended() == "complete"
    assert files_of(tmp_path / "run") == undisturbed["peers"]
    recoveries = load(tmp_path / "run").manifest["recoveries"]
    assert len(recoveries) == 1
    assert "clients" in recoveries[0]["lost"]
    assert cluster.left_over() == []
    cluster.all.remove(lost)
    cluster.add()


def test_an_interrupted_driver_leaves_no_actors_on_a_cluster_that_stays(
    cluster: Machines, drivers: list[Driver], tmp_path: Path
) -> None:
    driver = drivers[1]
    driver.begin("long", tmp_path / "run", clients_per_actor=2)
    assert len(cluster.actors()) == 3
    driver.go_on()
    driver.process.send_signal(signal.SIGINT)
    assert driver.ended() == "RunStopped"
    assert cluster.left_over() == []
    assert load(tmp_path / "run").status == "interrupted"


def test_two_drivers_each_with_a_ray_of_its_own_write_the_same_bytes(
    cluster: Machines, ray_cluster: None, tmp_path: Path
) -> None:
    alone = run(
        SCENARIOS["peers"], backend="ray", clients_per_actor=TOGETHER, save_final=True, out=tmp_path / "alone"
    )
    with Driver(None, cluster.environment) as one, Driver(None, cluster.environment) as two:
        for name, driver in (("one", one), ("two", two)):
            driver.begin("peers", tmp_path / name, clients_per_actor=TOGETHER)
        started = [*children(one), *children(two)]
        assert sum(process.name() == "raylet" for process in started) == 2
        for driver in (one, two):
            driver.go_on()
        assert [one.ended(), two.ended()] == ["complete", "complete"]
        one.begin("long", tmp_path / "stopped", clients_per_actor=TOGETHER)
        one.go_on()
        one.process.send_signal(signal.SIGTERM)  # which Ray would handle, and end the process
        assert one.ended() == "RunStopped"
    assert load(tmp_path / "stopped").status == "interrupted"
    for name in ("one", "two"):
        assert files_of(tmp_path / name) == files_of(alone.path)
    assert until_empty(lambda: [process for process in started if process.is_running()], 10.0) == []


def test_a_run_whose_cluster_loses_its_head_ends_and_says_so(cluster: Machines, tmp_path: Path) -> None:
    """Ray ends the driver on the spot, here after 8 s (60 s unless told); that left the run "running"."""
    with Driver(None, {**cluster.environment, "RAY_gcs_rpc_server_reconnect_timeout_s": "8"}) as driver:
        driver.begin("long", tmp_path / "run", clients_per_actor=TOGETHER)
        (head,) = [child for child in children(driver) if child.name() == "gcs_server"]
        driver.go_on()
        head.kill()
        assert driver.ended() == "RunError"
    failed = load(tmp_path / "run")
    assert failed.status == "failed"
    assert "has not answered for" in failed.manifest["error"]
    assert len(failed.trace) > 0


def children(driver: Driver) -> list[psutil.Process]:
    return psutil.Process(driver.process.pid).children(recursive=True)
