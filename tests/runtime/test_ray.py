"""What only actors can show: blocks of unlike sizes, deaths, errors from afar, memory that is short.

That every method does the same on Ray as in one process is among the laws (tests/laws).
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from asyncfed import (
    ActorLostError,
    DivergenceError,
    RecoveredWarning,
    Result,
    Scenario,
    VirtualTime,
    load,
    run,
)
from asyncfed.network import Given
from asyncfed.problems import classification, quadratic
from asyncfed.protocols import SGP, FedAvg, LocalSteps, Scaffold, Server
from asyncfed.protocols.at import At
from asyncfed.protocols.fed_inn import PlainInnerSteps
from asyncfed.protocols.part import Inbox, Judged, Sizes, Step, Tensors
from asyncfed.protocols.rounds import JudgedByServer, Round
from asyncfed.rng import Streams
from tests.helpers import files_of
from topologies import fully_connected, ring, star, stochastic_directed

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

BUSY = VirtualTime(
    compute="lognormal(1.0, 0.4)",
    latency="exponential(0.7)",
    bandwidth=20_000.0,
    loss=0.05,
    factors={1: 4.0},
)
UNLIKE = classification("digits", clients=4, model="mlp:8", partition="dirichlet:0.4", seed=2)
PEERS = Scenario(
    problem=UNLIKE,
    topology=stochastic_directed(4, seed=1),
    protocol=SGP(steps=25, lr=0.02, batch=16, weight_decay=0.01),
    timing=replace(BUSY, horizon=20.0),
    precision="float64",
)
SERVED = Scenario(
    problem=UNLIKE,
    topology=star(4, up=0.8),
    protocol=FedAvg(
        8,
        LocalSteps(0.1, epochs=1, batch=32),
        Server(0.75, weighted=True, quorum=2, deadline=60.0, late="next"),
    ),
    timing=BUSY,
    precision="float64",
)


def agree(local: Result, other: Result, tolerance: float = 1e-10) -> None:
    """The identical trace and the same numbers."""
    assert files_of(other.path / "trace") == files_of(local.path / "trace")
    assert sorted(other.final) == sorted(local.final)
    for key, value in local.final.items():
        torch.testing.assert_close(other.final[key], value, rtol=0, atol=tolerance)
    for column in local.metrics.columns.drop("phase"):
        np.testing.assert_allclose(
            other.metrics[column].astype(float),
            local.metrics[column].astype(float),
            rtol=0,
            atol=tolerance,
            err_msg=column,
        )


@pytest.mark.parametrize("scenario", [PEERS, SERVED], ids=["peers", "server"])
def test_blocks_of_three_and_one_do_the_same_from_given_values_and_twice_the_same_bytes(
    scenario: Scenario, tmp_path: Path
) -> None:
    """A block of a single client has derivative code of its own."""
    rows = 4 if scenario is PEERS else 1
    start = {"inner": torch.linspace(-0.1, 0.1, rows * 610, dtype=torch.float64).view(rows, 610)}
    options: dict[str, Any] = {"save_final": True, "initial": start}
    local = run(scenario, out=tmp_path / "local", **options)
    totals = local.trace.totals()
    assert totals.lost + totals.carried > 0, "some were lost"
    first, second = (
        run(scenario, backend="ray", clients_per_actor=3, out=tmp_path / name, **options) for name in "ab"
    )
    assert first.manifest["placement"]["actors"] == 2
    agree(local, first)
    assert files_of(first.path) == files_of(second.path)
    first.final["inner"].add_(0.0)  # its own memory
    assert not torch.equal(local.final["inner"], run(scenario, out=tmp_path / "c").final["inner"])


def test_single_precision_agrees_to_rounding(tmp_path: Path) -> None:
    scenario = replace(PEERS, precision="float32", protocol=SGP(steps=15, lr=0.1, batch=16))
    local = run(scenario, out=tmp_path / "local")
    packed = run(scenario, backend="ray", clients_per_actor=2, out=tmp_path / "ray")
    # float32 rounds at 6e-8 relative; 15 steps of sums of 4 numbers of order one stay far below this.
    torch.testing.assert_close(packed.final["inner"], local.final["inner"], rtol=0, atol=1e-5)


class JudgedByOwn(JudgedByServer):
    """By the server's model, moved by what the client remembers."""

    def remembered(self, sizes: Sizes) -> dict[str, int]:
        return {"c_i": sizes.inner}

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(inbox["y"] + 0.1 * memory["c_i"], inbox["x"])


class OwnScaffold(Scaffold):
    judging = JudgedByOwn()


@pytest.mark.parametrize(("method", "asked"), [(Scaffold, [1, 3]), (Scaffold, [0, 1]), (OwnScaffold, [1, 3])])
def test_who_was_never_asked_remembers_nothing(
    method: type[Scaffold], asked: list[int], tmp_path: Path
) -> None:
    scenario = Scenario(
        problem=quadratic(clients=4, dimension=3),
        topology=star(4),
        protocol=method(3, LocalSteps(0.1, steps=2), server=Server(asked)),
        precision="float64",
        evaluate_every=1,
    )
    local = run(scenario, out=tmp_path / "local")
    kept = local.final["clients/c_i"].abs().sum(1) > 0
    assert kept.nonzero().flatten().tolist() == asked
    agree(local, run(scenario, backend="ray", clients_per_actor=1, out=tmp_path / "ray"))


def test_a_client_that_keeps_nothing_for_itself_and_messages_one_by_one(tmp_path: Path) -> None:
    class OneByOne(SGP):
        each = ("z",)

        def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
            single, kept = inbox.each("z"), inbox["z"].clone()
            weighed = torch.from_numpy(single.weights)[:, None] * single.values
            total = torch.zeros_like(kept).index_add_(0, torch.from_numpy(single.rows), weighed)
            if at.steps[0] > 0:  # order 4a keeps no residue: the sum is all there is
                torch.testing.assert_close(total, kept, rtol=0, atol=1e-12)
                assert single.senders.tolist() != []
            return super().step(at, inbox, memory)

    weights = Given(((0.0, 0.5, 0.5), (0.5, 0.0, 0.5), (0.5, 0.5, 0.0)))
    scenario = Scenario(
        problem=quadratic(clients=3),
        topology=fully_connected(3),
        protocol=OneByOne(steps=5, lr=0.05, order="4a", batch=None),
        weights=weights,
        precision="float64",
    )
    local = run(scenario, out=tmp_path / "local")
    other = run(scenario, backend="ray", clients_per_actor=2, out=tmp_path / "ray")
    agree(local, other)


@pytest.mark.usefixtures("own_actors")
@pytest.mark.parametrize(
    ("protocol", "topology", "quantity"),
    [
        (SGP(steps=5000, lr=50.0, batch=None), stochastic_directed(4, seed=1), "loss"),
        (FedAvg(2000, LocalSteps(1e6)), star(4), "y"),
    ],
    ids=["peers", "server"],
)
def test_an_error_in_an_actor_reaches_the_user_and_leaves_no_actor_behind(
    protocol: Any, topology: Any, quantity: str, tmp_path: Path
) -> None:
    scenario = Scenario(problem=quadratic(clients=4, dimension=2), topology=topology, protocol=protocol)
    with pytest.raises(DivergenceError) as local:
        run(scenario, out=tmp_path / "local")
    with pytest.raises(DivergenceError, match=rf"{quantity} of client \d became") as error:
        run(scenario, backend="ray", clients_per_actor=2, out=tmp_path / "run")
    assert error.value.step == local.value.step
    assert load(tmp_path / "run").status == "failed"
    assert len(load(tmp_path / "run").trace) > 0
    assert living() == 0


def deadly(whose: str) -> Any:
    """A method in which an actor of these dies in the 41st step; defined here, so that it goes along."""

    class DeadlyPush(SGP):
        def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
            if at.steps[0] == 40 and 2 in at.clients:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(at, inbox, memory)

    class DeadlySteps(PlainInnerSteps):
        def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
            if at.number == 40 and at.server:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(at, inbox, memory)

    class Deadly(FedAvg):
        def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
            return (DeadlySteps(self.local, iteration),)

    if whose == "peers":
        return DeadlyPush(steps=4000, lr=0.01, batch=None)
    return Deadly(4000, LocalSteps(0.01))


@pytest.mark.usefixtures("own_actors")
@pytest.mark.parametrize(
    ("whose", "named"),
    [("peers", "clients 2 to 3"), ("server", "the server")],
)
def test_a_killed_actor_ends_the_run_with_a_readable_partial_run(
    whose: str, named: str, tmp_path: Path
) -> None:
    scenario = Scenario(
        problem=quadratic(clients=4, dimension=2),
        topology=stochastic_directed(4, seed=1) if whose == "peers" else star(4),
        protocol=deadly(whose),
        evaluate_every=5,
    )
    options: dict[str, Any] = {"backend": "ray", "clients_per_actor": 2, "max_recoveries": 1}
    with (
        pytest.raises(ActorLostError, match=f"the actor of {named} died"),
        pytest.warns(RecoveredWarning, match=f"lost: {named}.* goes on from the beginning"),
    ):
        run(scenario, out=tmp_path / "run", **options)
    partial = load(tmp_path / "run")
    assert partial.status == "failed"
    assert "died" in partial.manifest["error"]
    (recovery,) = partial.manifest["recoveries"]
    assert named in recovery["lost"]
    assert f"the actor of {named} died" in recovery["error"]
    assert recovery["steps_repeated"] > 0
    assert partial.metrics["step"].iloc[-1] == 40
    assert len(partial.trace) > 0
    assert living() == 0


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


def living() -> int:
    """Actors of this process's Ray; killed ones take a moment to be gone."""
    for _ in range(100):
        mine = psutil.Process().children(recursive=True)
        found = 0
        for process in mine:
            try:
                found += (process.cmdline() or [""])[0].startswith("ray::Node")
            except psutil.NoSuchProcess:
                continue
        if not found:
            return 0
        time.sleep(0.1)
    return found
