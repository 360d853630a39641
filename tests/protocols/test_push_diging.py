"""Push-DIGing against the paper's lines in NumPy, and against what they promise."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch

from asyncfed import Lockstep, Scenario, ScenarioError, TopologyError, VirtualTime, run
from asyncfed.network import Given, Uniform
from asyncfed.problems import average_minimiser, classification, quadratic
from asyncfed.protocols import SGP, PushDIGing, PushPull, StepDecay
from asyncfed.runtime.block import Observation
from tests.protocols.tracking import Quadratics, gap, run_seen, shares, tracked_at
from topologies import ring, stochastic_directed

UNEVEN = Given(((0.2, 0.5, 0.3), (0.0, 0.6, 0.4), (0.7, 0.1, 0.2)))  # column-stochastic and nothing else


def _links(*edges: tuple[int, int]) -> nx.DiGraph:
    return stochastic_directed(nx.DiGraph(edges), probability=1.0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [0.1, StepDecay(0.1, at=(6,), factor=0.5)])
def test_it_is_the_papers_iteration_step_by_step(
    lr: float | StepDecay, weight_decay: float, tmp_path: Path
) -> None:
    n, steps = 7, 15
    problem = quadratic(clients=n, dimension=3, seed=1)
    protocol = PushDIGing(steps=steps, lr=lr, batch=None, weight_decay=weight_decay)
    scenario = Scenario(
        problem=problem, topology=stochastic_directed(n, seed=2), protocol=protocol, precision="float64"
    )
    result, seen = run_seen(scenario, tmp_path / "run")

    losses = Quadratics.of(problem)

    def gradients(x: np.ndarray) -> np.ndarray:
        return losses.gradients(x) + weight_decay * x

    u, v = seen.stacked("u", 0, n), np.ones((n, 1))
    x, y = u / v, gradients(u / v)
    for t in range(steps):
        np.testing.assert_allclose(seen.stacked("u", t, n), u, rtol=0, atol=1e-10)
        np.testing.assert_allclose(seen.stacked("v", t, n), v, rtol=0, atol=1e-10)
        for client in range(n):
            np.testing.assert_allclose(seen.sent[client, t]["y"], y[client], rtol=0, atol=1e-10)
        C = shares(result, t, n)
        alpha = 0.1 if isinstance(lr, float) or t < 6 else 0.05
        u, v = C @ (u - alpha * y), C @ v
        before, x = x, u / v
        y = C @ y + gradients(x) - gradients(before)
    assert np.abs(v - 1).max() > 0.1  # the weights are not doubly stochastic
    np.testing.assert_allclose(result.final["inner"].numpy(), x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("links", ["directed ring", "random", "uneven weights"])
def test_with_a_constant_step_it_converges_geometrically_where_sgp_stalls(links: str, tmp_path: Path) -> None:
    topology, weights = {
        "directed ring": (ring(6, directed=True), Uniform()),
        "random": (stochastic_directed(6, seed=4), Uniform()),
        "uneven weights": (_links((0, 1), (0, 2), (1, 2), (2, 0), (2, 1)), UNEVEN),
    }[links]
    n = len(topology)
    problem = quadratic(clients=n, dimension=3, seed=5)
    scenario = Scenario(
        problem=problem,
        topology=topology,
        protocol=PushDIGing(steps=600, lr=0.05, batch=None),
        weights=weights,
        precision="float64",
        evaluate_every=600,
    )
    result, seen = run_seen(scenario, tmp_path / "run")
    gaps = [gap(seen.stacked("u", t, n) / seen.stacked("v", t, n), problem) for t in (100, 200, 300, 400)]
    for before, after in pairwise(gaps):
        assert after < before / 20
    assert gap(result.final["inner"].numpy(), problem) < 1e-10

    result, seen = run_seen(replace(scenario, protocol=SGP(steps=600, lr=0.05, batch=None)), tmp_path / "sgp")
    early = seen.stacked("z", 300, n) / seen.stacked("omega", 300, n)
    assert min(gap(early, problem), gap(result.final["inner"].numpy(), problem)) > 0.03


def test_the_trackers_sum_to_the_gradients_at_every_step(tmp_path: Path) -> None:
    n, steps = 6, 40
    problem = quadratic(clients=n, dimension=3, seed=5)
    scenario = Scenario(
        problem=problem,
        topology=stochastic_directed(n, seed=4),
        protocol=PushDIGing(steps=steps, lr=0.05, batch=None),
        precision="float64",
    )
    _, seen = run_seen(scenario, tmp_path / "run")
    losses = Quadratics.of(problem)
    for t in range(steps):
        x = seen.stacked("u", t, n) / seen.stacked("v", t, n)
        tracked = sum(seen.sent[client, t]["y"] for client in range(n))
        np.testing.assert_allclose(tracked, losses.gradients(x).sum(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [PushDIGing, PushPull])
def test_with_minibatches_they_sum_to_the_gradients_that_were_computed(
    method: type[PushDIGing] | type[PushPull], tmp_path: Path
) -> None:
    n, steps = 5, 20
    scenario = Scenario(
        problem=quadratic(clients=n, dimension=3, seed=5, noise=1.0),
        topology=stochastic_directed(n, seed=4),
        protocol=method(steps=steps, lr=0.02, batch=2),
        precision="float64",
    )
    _, seen = run_seen(scenario, tmp_path / "run")
    for t in range(steps):
        tracked = sum(seen.sent[client, t]["y"] for client in range(n))
        computed = sum(seen.remembered[client, t]["gradient"] for client in range(n))
        np.testing.assert_allclose(tracked, computed, rtol=0, atol=1e-12)


def test_in_virtual_time_the_sum_holds_with_the_messages_on_their_way(tmp_path: Path) -> None:
    n = 6
    problem = quadratic(clients=n, dimension=3, seed=5)
    timing = VirtualTime(compute="exponential(1.0)", factors={0: 4.0}, latency="exponential(2.0)")
    scenario = Scenario(
        problem=problem,
        topology=stochastic_directed(n, seed=4),
        protocol=PushDIGing(steps=20, lr=0.02, batch=None),
        timing=timing,
        precision="float64",
    )
    result, seen = run_seen(scenario, tmp_path / "run")
    losses = Quadratics.of(problem)
    flew = 0
    for instant in np.linspace(0.0, float(result.trace.steps().ended_at.max()), 25):
        tracked, flying, last = tracked_at(result, seen, float(instant))
        at = {key: seen.absorbed[key] for key in last.items()}
        wanted = sum(losses.gradient(key[0], own["u"] / own["v"]) for key, own in at.items())
        np.testing.assert_allclose(tracked, wanted, rtol=0, atol=1e-12)
        flew += bool(np.abs(flying).max() > 1e-3)
    assert flew > 10


def test_in_virtual_time_paces_do_not_move_the_point_of_rest(tmp_path: Path) -> None:
    problem = quadratic(clients=6, dimension=3, seed=5)

    def gap_of(protocol: PushDIGing | SGP) -> float:
        timing = VirtualTime(
            compute="uniform(0.7, 1.3)", factors={0: 2.0}, latency="uniform(0.0, 1.0)", horizon=1200.0
        )
        scenario = Scenario(
            problem=problem,
            topology=stochastic_directed(6, seed=4),
            protocol=protocol,
            timing=timing,
            evaluate_every=1200.0,
            precision="float64",
        )
        return gap(run(scenario, out=tmp_path / type(protocol).__name__).final["inner"].numpy(), problem)

    assert gap_of(PushDIGing(steps=10_000, lr=0.05, batch=None)) < 1e-10
    assert gap_of(SGP(steps=10_000, lr=0.05, batch=None)) > 0.03


def test_told_little_by_little_it_comes_to_rest_at_paces_that_blow_it_up_otherwise(tmp_path: Path) -> None:
    factors = (0.37, 0.71, 1.0, 1.9, 6.3)
    timing = VirtualTime(compute="uniform(0.5, 1.5)", factors=factors, latency=0.3, horizon=300.0)
    problem = quadratic(clients=5, dimension=3, seed=2, heterogeneity=3.0)
    scenario = Scenario(
        problem=problem,
        topology=stochastic_directed(5, probability=(0.5, 0.9), seed=4),
        protocol=PushDIGing(5_000, 0.2, batch=None),
        timing=timing,
        precision="float64",
        evaluate_every=300.0,
    )
    damped = replace(scenario, protocol=PushDIGing(5_000, 0.2, batch=None, omega0=1.0))
    final = run(damped, out=tmp_path / "damped").final["inner"]
    assert (final - average_minimiser(problem)).abs().max() < 1e-6
    assert run(scenario, out=tmp_path / "plain").final["inner"].abs().max() > 1e6


def test_told_little_by_little_the_trackers_sum_to_what_they_were_told(tmp_path: Path) -> None:
    """The paper's lines with s = min(1, v/ω₀), written out, and Σ y = Σ g after every step."""
    problem = quadratic(clients=5, dimension=3, seed=2)
    scenario = Scenario(
        problem=problem,
        topology=stochastic_directed(5, probability=(0.5, 0.9), seed=4),
        protocol=PushDIGing(30, 0.1, batch=None, omega0=1.2),
        precision="float64",
    )
    A, b = problem.data.train.tensors
    told = [torch.zeros(5, 3, dtype=torch.float64)]

    def look(o: Observation) -> None:
        u, v, y = (o.absorbed[name] for name in ("u", "v", "y"))
        fresh = torch.einsum("ijk,ik->ij", A, u / v - b)
        news = torch.clamp(v / 1.2, max=1.0) * (fresh - told[-1])
        told.append(told[-1] + news)
        torch.testing.assert_close(o.made.payload["y"], y + news, rtol=0, atol=1e-12)
        torch.testing.assert_close(o.made.payload["y"].sum(0), told[-1].sum(0), rtol=0, atol=1e-10)

    run(scenario, out=tmp_path / "r", tap=look)
    assert len(told) == 31


@pytest.mark.parametrize("timing", [Lockstep(), VirtualTime(compute="exponential(1.0)", latency=0.7)])
def test_strictly_it_is_the_same(timing: Lockstep | VirtualTime, tmp_path: Path) -> None:
    scenario = Scenario(
        problem=classification("digits", clients=5, seed=3),
        topology=stochastic_directed(5, seed=2),
        protocol=PushDIGing(steps=12, lr=0.05, batch=16, weight_decay=0.01),
        timing=timing,
    )
    plain = run(scenario, out=tmp_path / "plain")
    strict = run(scenario, out=tmp_path / "strict", strict=True)
    torch.testing.assert_close(strict.final["inner"], plain.final["inner"], rtol=0, atol=0)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_on_several_machines_it_is_the_same(tmp_path: Path) -> None:
    scenario = Scenario(
        problem=classification("digits", clients=5, seed=3),
        topology=stochastic_directed(5, seed=2),
        protocol=PushDIGing(steps=12, lr=0.05, batch=16),
        precision="float64",
    )
    here = run(scenario, out=tmp_path / "here")
    there = run(scenario, backend="ray", clients_per_actor=2, out=tmp_path / "there")
    torch.testing.assert_close(there.final["inner"], here.final["inner"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("timing", [Lockstep(loss=0.1), VirtualTime(loss=0.1)])
def test_loss_is_refused_for_the_tracker_would_miss_what_is_lost(
    timing: Lockstep | VirtualTime, tmp_path: Path
) -> None:
    scenario = Scenario(
        problem=quadratic(clients=4),
        topology=stochastic_directed(4, seed=0),
        protocol=PushDIGing(steps=1, lr=0.1),
        timing=timing,
    )
    with pytest.raises(TopologyError, match=r"PushDIGing tracks .* 0→1 .* probability 0\.1: set loss to 0"):
        run(scenario, out=tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_of_links_with_their_own_loss_the_first_is_named(tmp_path: Path) -> None:
    topology = ring(4, directed=True)
    topology.edges[2, 3]["loss"] = 0.25
    scenario = Scenario(problem=quadratic(clients=4), topology=topology, protocol=PushDIGing(steps=1, lr=0.1))
    with pytest.raises(TopologyError, match=r"link 2→3 loses a message with probability 0\.25"):
        run(scenario, out=tmp_path / "never")


def test_whom_nobody_hears_is_refused(tmp_path: Path) -> None:
    topology = _links((0, 1), (1, 0), (0, 2))
    scenario = Scenario(problem=quadratic(clients=3), topology=topology, protocol=PushDIGing(steps=1, lr=0.1))
    with pytest.raises(TopologyError, match="not strongly connected: client 2 cannot reach client 0"):
        run(scenario, out=tmp_path / "never")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": -1}, "steps is -1"),
        ({"lr": 0.0}, "learning rate of 0.0"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": 2.5}, "batch is 2.5"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        PushDIGing(**({"steps": 1, "lr": 0.1} | change))
