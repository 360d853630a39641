"""Methods with a server on every backend: the identical trace and the same numbers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from asyncfed import ActorLostError, DivergenceError, Scenario, VirtualTime, load, run
from asyncfed.problems import bilevel_quadratic, classification, quadratic
from asyncfed.protocols import (
    AggITD,
    FedAvg,
    FedNest,
    LFedNest,
    LFedNestNonAlt,
    LocalSteps,
    Neumann,
    Server,
)
from tests.helpers import files_of
from topologies import star

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

CLIENTS = 4
BUSY = VirtualTime(
    compute="lognormal(1.0, 0.4)", latency="exponential(0.5)", bandwidth=20_000.0, loss=0.1, factors={2: 4.0}
)
WAITING = Server(0.8, quorum=0.5, late="next")
STEP = LocalSteps(0.05, steps=2, batch=4)


def bilevel(protocol: Any) -> Scenario:
    return Scenario(
        problem=bilevel_quadratic(clients=CLIENTS, dimension=3, noise=0.3, samples=8),
        topology=star(CLIENTS, up=0.8, down=0.9),
        protocol=protocol,
        timing=BUSY,
        precision="float64",
    )


SCENARIOS = {
    "FedAvg": Scenario(
        problem=classification("digits", clients=CLIENTS, model="mlp:8", partition="dirichlet:0.4"),
        topology=star(CLIENTS, up=0.8),
        protocol=FedAvg(
            8,
            LocalSteps(0.1, epochs=1, batch=32),
            Server(0.75, weighted=True, quorum=2, deadline=60.0, late="next"),
        ),
        timing=BUSY,
        precision="float64",
    ),
    "FedNest": bilevel(
        FedNest(5, STEP, STEP, inner_rounds=2, neumann=Neumann(3, 0.2), batch=4, server=WAITING)
    ),
    "AggITD": bilevel(AggITD(5, STEP, STEP, inner_rounds=2, scale=0.2, batch=4, server=WAITING)),
    "LFedNest fresh": bilevel(LFedNest(5, STEP, STEP, start="fresh", server=WAITING)),
    "LFedNestNonAlt": bilevel(LFedNestNonAlt(20, STEP, STEP, server=WAITING)),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_packing_gives_the_identical_trace_and_the_same_numbers(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    local = run(scenario, out=tmp_path / "local")
    rounds = local.trace.rounds()
    assert rounds["lost"].sum() > 0
    assert rounds["used_late"].sum() > 0
    ways = {"FedAvg": (1, 2), "FedNest": (3,)}.get(name, (2,))
    for clients_per_actor in ways:
        other = run(
            scenario,
            backend="ray",
            clients_per_actor=clients_per_actor,
            out=tmp_path / f"ray{clients_per_actor}",
        )
        assert other.manifest["placement"]["actors"] == -(-CLIENTS // clients_per_actor)
        for file in sorted((local.path / "trace").iterdir()):
            assert file.read_bytes() == (other.path / "trace" / file.name).read_bytes(), file.name
        assert sorted(other.final) == sorted(local.final)
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
        assert len(other.clients) == CLIENTS


def test_twice_the_same_bytes_and_from_given_values(tmp_path: Path) -> None:
    scenario = SCENARIOS["LFedNest fresh"]
    start = {"inner": torch.ones(1, 3).double(), "outer": torch.ones(1, 2).double()}
    options: dict[str, Any] = {"save_final": True, "initial": start}
    first = run(scenario, backend="ray", clients_per_actor=4, out=tmp_path / "a", **options)
    second = run(scenario, backend="ray", clients_per_actor=4, out=tmp_path / "b", **options)
    assert files_of(first.path) == files_of(second.path)
    first.final["outer"].add_(0.0)  # its own memory
    local = run(scenario, out=tmp_path / "local", **options)
    torch.testing.assert_close(first.final["outer"], local.final["outer"], rtol=0, atol=1e-10)
    assert not torch.equal(local.final["outer"], run(scenario, out=tmp_path / "c").final["outer"])


def test_divergence_in_an_actor_names_client_and_round(tmp_path: Path) -> None:
    scenario = Scenario(
        problem=quadratic(clients=4, dimension=2), topology=star(4), protocol=FedAvg(2000, LocalSteps(1e6))
    )
    with pytest.raises(DivergenceError) as local:
        run(scenario, out=tmp_path / "local")
    with pytest.raises(DivergenceError, match=r"y of client \d became .* at step \d+") as error:
        run(scenario, backend="ray", clients_per_actor=2, out=tmp_path / "ray")
    assert error.value.step == local.value.step
    partial = load(tmp_path / "ray")
    assert partial.status == "failed"
    assert len(partial.trace.rounds()) > error.value.step
    assert living() == 0


@pytest.mark.parametrize(
    ("actor", "whose"), [("_Clients", "clients [02] to [13]"), ("_Server", "the server")]
)
def test_a_killed_actor_ends_the_run_and_is_named(actor: str, whose: str, tmp_path: Path) -> None:
    victims: list[int] = []

    def kill(progress: Any) -> None:
        if not victims and progress.virtual_time >= 40:
            victims.append(processes(actor)[-1])
            os.kill(victims[0], signal.SIGKILL)

    scenario = Scenario(
        problem=quadratic(clients=4, dimension=2),
        topology=star(4),
        protocol=FedAvg(20_000, LocalSteps(0.01)),
        evaluate_every=25,
    )
    with pytest.raises(ActorLostError, match=f"the actor of {whose} died"):
        run(scenario, backend="ray", clients_per_actor=2, out=tmp_path / "run", progress=kill)
    partial = load(tmp_path / "run")
    assert partial.status == "failed"
    assert "died" in partial.manifest["error"]
    assert len(partial.metrics) >= 1
    assert len(partial.trace.rounds()) >= 25
    assert living() == 0


def processes(name: str) -> list[int]:
    """Those of actors of this kind that this process's Ray has started."""
    mine = {child.pid for child in psutil.Process().children(recursive=True)}
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if process.pid in mine and (process.info["cmdline"] or [""])[0].startswith(f"ray::{name}")
    ]


def living() -> int:
    """Killed actors take a moment to be gone."""
    for _ in range(100):
        if not processes("_Clients") + processes("_Server"):
            return 0
        time.sleep(0.1)
    return len(processes("_Clients") + processes("_Server"))
