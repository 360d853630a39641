"""Push-Pull against the paper's lines in NumPy, and against what they promise."""

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
from asyncfed.problems import classification, quadratic
from asyncfed.protocols import SGP, PushPull, StepDecay
from tests.protocols.tracking import Quadratics, gap, run_seen, shares, tracked_at
from topologies import ring, stochastic_directed

UNEVEN = Given(((0.2, 0.5, 0.3), (0.0, 0.6, 0.4), (0.7, 0.1, 0.2)))  # column-stochastic and nothing else
BUSY = VirtualTime(compute="exponential(1.0)", factors={0: 4.0}, latency="exponential(2.0)")


def _links(*edges: tuple[int, int]) -> nx.DiGraph:
    return stochastic_directed(nx.DiGraph(edges), probability=1.0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [0.1, StepDecay(0.1, at=(6,), factor=0.5)])
@pytest.mark.parametrize("sparse", [False, True])
def test_it_is_the_papers_iteration_step_by_step(
    sparse: bool, lr: float | StepDecay, weight_decay: float, tmp_path: Path
) -> None:
    n, steps = 9, 15
    base = nx.compose(nx.cycle_graph(n, create_using=nx.DiGraph), nx.DiGraph([(0, 4), (5, 2)]))
    topology = stochastic_directed(base if sparse else n, probability=(0.5, 0.9), seed=2)
    problem = quadratic(clients=n, dimension=3, seed=1)
    protocol = PushPull(steps=steps, lr=lr, batch=None, weight_decay=weight_decay)
    scenario = Scenario(problem=problem, topology=topology, protocol=protocol, precision="float64")
    result, seen = run_seen(scenario, tmp_path / "run")

    losses = Quadratics.of(problem)

    def gradients(x: np.ndarray) -> np.ndarray:
        return losses.gradients(x) + weight_decay * x

    x = seen.stacked("x", 0, n)
    y = gradients(x)
    for t in range(steps):
        np.testing.assert_allclose(seen.stacked("x", t, n), x, rtol=0, atol=1e-10)
        for client in range(n):
            np.testing.assert_allclose(seen.sent[client, t]["y"], y[client], rtol=0, atol=1e-10)
        B = shares(result, t, n)
        A = (B > 0) / (B > 0).sum(1, keepdims=True)
        np.testing.assert_allclose(B[:, 0], (B[:, 0] > 0) / (B[:, 0] > 0).sum(), atol=1e-15)  # by sender
        alpha = 0.1 if isinstance(lr, float) or t < 6 else 0.05
        before, x = x, A @ (x - alpha * y)
        y = B @ y + gradients(x) - gradients(before)
    np.testing.assert_allclose(result.final["inner"].numpy(), x, rtol=0, atol=1e-10)


def test_in_virtual_time_models_are_averaged_and_trackers_summed_message_by_message(tmp_path: Path) -> None:
    """Every absorption, by the trace: of x the mean of what came and its own, of y the weighted sum."""
    n = 5
    scenario = Scenario(
        problem=quadratic(clients=n, dimension=2, seed=5),
        topology=stochastic_directed(n, seed=4),
        protocol=PushPull(steps=15, lr=0.05, batch=None),
        timing=BUSY,
        precision="float64",
    )
    result, seen = run_seen(scenario, tmp_path / "run")
    messages = result.trace.to_pandas()
    sent = messages[messages.status.isin(["delivered", "in_flight"])]
    given = sent.groupby(["sender", "step"]).weight.sum()
    several = 0
    for (client, step), absorbed in seen.absorbed.items():
        if step == 0:
            continue
        came = sent[(sent.status == "delivered") & (sent.receiver == client) & (sent.absorbed_step == step)]
        several += bool(came.sender.duplicated().any())
        own = seen.sent[client, step - 1]
        others = [(row.weight, seen.sent[row.sender, row.step]) for row in came.itertuples()]
        x = np.mean([own["x"], *(values["x"] for _, values in others)], axis=0)
        y = (1 - given.get((client, step - 1), 0.0)) * own["y"] + sum(w * v["y"] for w, v in others)
        np.testing.assert_allclose(absorbed["x"], x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(absorbed["y"], y, rtol=0, atol=1e-12)
    assert several > 3  # steps that found two or more messages of one sender


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
        protocol=PushPull(steps=600, lr=0.05, batch=None),
        weights=weights,
        precision="float64",
        evaluate_every=600,
    )
    result, seen = run_seen(scenario, tmp_path / "run")
    gaps = [gap(seen.stacked("x", t, n), problem) for t in (100, 200, 300, 400)]
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
        protocol=PushPull(steps=steps, lr=0.05, batch=None),
        precision="float64",
    )
    _, seen = run_seen(scenario, tmp_path / "run")
    losses = Quadratics.of(problem)
    for t in range(steps):
        tracked = sum(seen.sent[client, t]["y"] for client in range(n))
        wanted = losses.gradients(seen.stacked("x", t, n)).sum(0)
        np.testing.assert_allclose(tracked, wanted, rtol=0, atol=1e-12)


def test_in_virtual_time_the_sum_holds_with_the_messages_on_their_way(tmp_path: Path) -> None:
    n = 6
    problem = quadratic(clients=n, dimension=3, seed=5)
    scenario = Scenario(
        problem=problem,
        topology=stochastic_directed(n, seed=4),
        protocol=PushPull(steps=20, lr=0.05, batch=None),
        timing=BUSY,
        precision="float64",
    )
    result, seen = run_seen(scenario, tmp_path / "run")
    losses = Quadratics.of(problem)
    flew = 0
    for instant in np.linspace(0.0, float(result.trace.steps().ended_at.max()), 25):
        tracked, flying, last = tracked_at(result, seen, float(instant))
        wanted = sum(losses.gradient(key[0], seen.absorbed[key]["x"]) for key in last.items())
        np.testing.assert_allclose(tracked, wanted, rtol=0, atol=1e-12)
        flew += bool(np.abs(flying).max() > 1e-3)
    assert flew > 10


def test_in_virtual_time_a_straggler_does_not_move_the_point_of_rest(tmp_path: Path) -> None:
    problem = quadratic(clients=6, dimension=3, seed=5)
    timing = VirtualTime(
        compute="exponential(1.0)", factors={0: 4.0}, latency="exponential(0.5)", horizon=1200.0
    )
    scenario = Scenario(
        problem=problem,
        topology=stochastic_directed(6, seed=4),
        protocol=PushPull(steps=10_000, lr=0.1, batch=None),
        timing=timing,
        evaluate_every=1200.0,
        precision="float64",
    )
    assert gap(run(scenario, out=tmp_path / "run").final["inner"].numpy(), problem) < 1e-9


def test_the_trace_has_the_weights_of_the_sender(tmp_path: Path) -> None:
    scenario = Scenario(
        problem=quadratic(clients=3, dimension=2),
        topology=_links((0, 1), (0, 2), (1, 2), (2, 0), (2, 1)),
        protocol=PushPull(steps=2, lr=0.1, batch=None),
        weights=UNEVEN,
        precision="float64",
    )
    messages = run(scenario, out=tmp_path / "run").trace.to_pandas()
    assert {(m.sender, m.receiver): m.weight for m in messages.itertuples()} == {
        (0, 1): 0.5, (0, 2): 0.3, (1, 2): 0.4, (2, 0): 0.7, (2, 1): 0.1
    }  # fmt: skip
    assert set(messages.bytes) == {2 * 2 * 8}


@pytest.mark.parametrize("timing", [Lockstep(), VirtualTime(compute="exponential(1.0)", latency=0.7)])
def test_strictly_it_is_the_same(timing: Lockstep | VirtualTime, tmp_path: Path) -> None:
    scenario = Scenario(
        problem=classification("digits", clients=5, seed=3),
        topology=stochastic_directed(5, seed=2),
        protocol=PushPull(steps=12, lr=0.05, batch=16, weight_decay=0.01),
        timing=timing,
    )
    plain = run(scenario, out=tmp_path / "plain")
    strict = run(scenario, out=tmp_path / "strict", strict=True)
    torch.testing.assert_close(strict.final["inner"], plain.final["inner"], rtol=0, atol=0)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("timing", [Lockstep(), VirtualTime(compute="exponential(1.0)", latency=0.7)])
def test_on_several_machines_it_is_the_same(timing: Lockstep | VirtualTime, tmp_path: Path) -> None:
    scenario = Scenario(
        problem=classification("digits", clients=5, seed=3),
        topology=stochastic_directed(5, seed=2),
        protocol=PushPull(steps=12, lr=0.05, batch=16),
        timing=timing,
        precision="float64",
    )
    here = run(scenario, out=tmp_path / "here")
    there = run(scenario, backend="ray", clients_per_actor=2, out=tmp_path / "there")
    torch.testing.assert_close(there.final["inner"], here.final["inner"], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "timing", [Lockstep(loss=0.1, running_sums=False), VirtualTime(loss=0.1, running_sums=False)]
)
def test_loss_without_running_sums_is_refused_for_the_tracker_would_miss_what_is_lost(
    timing: Lockstep | VirtualTime, tmp_path: Path
) -> None:
    scenario = Scenario(
        problem=quadratic(clients=4),
        topology=stochastic_directed(4, seed=0),
        protocol=PushPull(steps=1, lr=0.1),
        timing=timing,
    )
    said = r"PushPull tracks .* 0→1 .* probability 0\.1: leave running_sums on"
    with pytest.raises(TopologyError, match=said):
        run(scenario, out=tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_whom_nobody_hears_is_refused(tmp_path: Path) -> None:
    topology = _links((0, 1), (1, 0), (0, 2))
    scenario = Scenario(problem=quadratic(clients=3), topology=topology, protocol=PushPull(steps=1, lr=0.1))
    with pytest.raises(TopologyError, match="not strongly connected: client 2 cannot reach client 0"):
        run(scenario, out=tmp_path / "never")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 1.5}, "steps is 1.5"),
        ({"lr": float("nan")}, "PushPull: lr is nan; it must be a finite number above 0, StepDecay"),
        ({"batch": 0}, "batch is 0"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        PushPull(**({"steps": 1, "lr": 0.1} | change))
