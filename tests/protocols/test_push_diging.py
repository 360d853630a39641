"""Push-DIGing against the paper's lines in NumPy, and against what they promise."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch

from asyncfed import Lockstep, Scenario, VirtualTime, run
from asyncfed.network import Given, Uniform
from asyncfed.problems import average_minimiser, quadratic
from asyncfed.protocols import SGP, PushDIGing, PushPull, StepDecay
from tests.protocols.tracking import Quadratics, gap, run_seen, shares
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


@pytest.mark.parametrize(
    "method", [PushDIGing(1500, 0.1, batch=None, omega0=1.0), PushPull(1500, 0.1, batch=None)]
)
@pytest.mark.parametrize(
    "timing",
    [Lockstep(loss=0.3), VirtualTime("exponential(1)", latency="exponential(0.2)", loss=0.3, horizon=1000)],
    ids=["lockstep", "virtual"],
)
def test_with_running_sums_trackers_bear_loss_and_end_where_the_mean_loss_is_lowest(
    method: PushDIGing | PushPull, timing: Lockstep | VirtualTime, tmp_path: Path
) -> None:
    """Exactly: what is lost is late, and being late moves no point of rest."""
    problem = quadratic(clients=5, dimension=3, seed=2)
    if isinstance(timing, Lockstep):
        method = replace(method, steps=500)
    scenario = Scenario(
        problem=problem, topology=stochastic_directed(5, seed=2), protocol=method, timing=timing,
        precision="float64", seed=1,
    )  # fmt: skip
    result = run(scenario, out=tmp_path / "run")
    assert result.trace.totals().carried > 100
    expected = average_minimiser(problem).expand(5, -1)
    torch.testing.assert_close(result.final["inner"], expected, rtol=0, atol=1e-8)
