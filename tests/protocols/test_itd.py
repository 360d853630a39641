"""ITD against autograd through the T steps, written out by hand with the run's own links, weights and
minibatches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from asyncfed import Lockstep, Scenario, ScenarioError, TopologyError, VirtualTime, run
from asyncfed.network import Metropolis, Uniform
from asyncfed.network.links import compile_network
from asyncfed.problems import Derivatives, Problem, bilevel_quadratic
from asyncfed.protocols import (
    DSGD,
    PDBO,
    SGP,
    EstimateHypergradient,
    ITDBackward,
    ITDForward,
    Local,
    PeerFedAvg,
    StepDecay,
)
from asyncfed.rng import Streams
from asyncfed.scenario import check
from asyncfed.truth import InnerMap, dense_hypergradient, expected_matrix, stationary_point
from tests.helpers import Steps
from tests.test_truth import ridge
from topologies import fully_connected, ring, stochastic_directed, stochastic_undirected, with_links

SEED = 3
DECAY = StepDecay(0.2, at=(3, 5), factor=0.5)
KINDS = ("push", "itd-forward")  # of messages that move models


def curved(clients: int = 4) -> Problem:
    return bilevel_quadratic(clients, dimension=3, outer_dimension=2, noise=0.3, samples=5, curved=True)


def lopsided() -> nx.Graph:
    """Clients with one, two and three neighbours: with uniform weights no ω stays 1, and p_ij ≠ p_ji."""
    return with_links(nx.Graph([(0, 1), (1, 2), (2, 3), (1, 3)]), probability=1.0)


STATIC = {"all": fully_connected(4), "ring": ring(4), "lopsided": lopsided()}


def scenario(problem: Problem, topology: nx.Graph, protocol: Any, **options: Any) -> Scenario:
    common: dict[str, Any] = {"precision": "float64", "seed": SEED, **options}
    return Scenario(problem=problem, topology=topology, protocol=protocol, **common)


def somewhere(problem: Problem) -> dict[str, Tensor]:
    """Variables to start from, different for every client."""
    d, g = Derivatives.of(problem), torch.Generator().manual_seed(1)
    return {
        name: torch.randn(problem.clients, layout.d, generator=g, dtype=torch.float64)
        for name, layout in (("inner", d.inner), ("outer", d.outer))
    }


def mixing(messages: pd.DataFrame, step: int, n: int) -> Tensor:
    """What was really added up at the end of a step [receiver, sender]."""
    sent = messages[(messages.step == step) & (messages.status != "link_down")]
    P = np.eye(n)
    for row in sent.itertuples():
        P[row.sender, row.sender] -= row.weight
        if row.status == "delivered":
            P[row.receiver, row.sender] = row.weight
    return torch.from_numpy(P)


def minibatch(problem: Problem, client: int, step: int, size: int | None) -> tuple[Tensor, ...]:
    samples = tuple(part.double() for part in problem.data.train.of(client))
    if size is None:
        return samples
    uniforms = Streams(SEED).uniforms("batches", step, client * size, (client + 1) * size)
    return tuple(part[(uniforms * len(part)).astype(np.int64)] for part in samples)


def objective(problem: Problem, x: Tensor, lam: Tensor) -> Tensor:
    """F̄."""
    d = Derivatives.of(problem)
    split = problem.data.validation if problem.outer_split == "validation" else problem.data.train
    values = [
        problem.outer_loss(
            d.inner.views_one(x[i]), d.outer.views_one(lam[i]), tuple(part.double() for part in split.of(i))
        )
        for i in range(problem.clients)
    ]
    return torch.stack(values).mean()


def unrolled(
    problem: Problem, inner: SGP, start: dict[str, Tensor], messages: pd.DataFrame, first: int = 0
) -> tuple[Tensor, Tensor]:
    """x(T), and the derivative of F̄ there in λ, by autograd through SGP's (4a) or (4b) as they stand."""
    n, d = problem.clients, Derivatives.of(problem)
    messages = messages[messages.kind.isin(KINDS)]
    lam = start["outer"].clone().requires_grad_()
    z, omega = start["inner"], torch.ones(n, 1, dtype=torch.float64)
    for t in range(inner.steps):
        alpha = inner.lr if isinstance(inner.lr, float) else float(inner.lr.rates(np.array([t]))[0])
        x = (z / omega).requires_grad_()
        losses = [
            problem.inner_loss(
                d.inner.views_one(x[i]),
                d.outer.views_one(lam[i]),
                minibatch(problem, i, first + t, inner.batch),
            )
            for i in range(n)
        ]
        (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), x, create_graph=True)
        descent = -alpha * (gradient + inner.weight_decay * x)
        P = mixing(messages, first + t, n)
        z, omega = (P @ (z + descent) if inner.order == "4a" else P @ z + descent), P @ omega
    x = z / omega
    (by_lam,) = torch.autograd.grad(objective(problem, x, lam), lam)
    return x.detach(), by_lam


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize("graph", STATIC)
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_itd_is_the_derivative_of_the_steps_that_were_made(
    mode: str, graph: str, order: Any, batch: int | None, tmp_path: Path
) -> None:
    problem = curved()
    inner = SGP(steps=7, lr=DECAY, order=order, batch=batch, weight_decay=0.1)
    method = ITDBackward() if mode == "backward" else ITDForward(gather=1 if graph == "all" else 100)
    start = somewhere(problem)
    protocol = EstimateHypergradient(inner, method)
    result = run(scenario(problem, STATIC[graph], protocol), out=tmp_path / "run", initial=start)
    x, wanted = unrolled(problem, inner, start, result.trace.to_pandas())
    torch.testing.assert_close(result.final["inner"], x, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.final["hypergradient"], wanted, rtol=0, atol=1e-12)
    assert wanted.abs().min() > 1e-4
    assert (graph == "lopsided") == bool((result.final["omega"] - 1).abs().max() > 0.1)


@pytest.mark.parametrize("loss", [0.0, 0.2])
@pytest.mark.parametrize("order", ["4a", "4b"])
def test_forward_follows_directed_links_that_come_and_go(order: Any, loss: float, tmp_path: Path) -> None:
    """Σ_j U_ij c_j is right before it is gathered, losses or not; where nothing is lost, afterwards too."""
    problem, n = curved(), 4
    inner = SGP(steps=8, lr=DECAY, order=order, batch=2, weight_decay=0.1)
    start = somewhere(problem)
    protocol = EstimateHypergradient(inner, ITDForward(gather=60))
    timing = Lockstep(loss=loss, running_sums=False)
    case = scenario(problem, stochastic_directed(n, seed=1), protocol, timing=timing)
    tap = Steps()
    result = run(case, out=tmp_path / "run", tap=tap, initial=start)
    messages = result.trace.to_pandas()
    assert set(messages[messages.kind == "itd-forward"].status) == {"delivered", "link_down"} | (
        {"lost"} if loss else set()
    )
    x, wanted = unrolled(problem, inner, start, messages)
    torch.testing.assert_close(result.final["inner"], x, rtol=0, atol=1e-12)
    by_lam = _outer_part(problem, x, start["outer"])
    gathered = tap.stacked("z", inner.steps, n).sum(0).view(n, -1) + by_lam
    torch.testing.assert_close(gathered, wanted, rtol=0, atol=1e-12)
    if not loss:
        torch.testing.assert_close(result.final["hypergradient"], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", ["4a", "4b"])
def test_forward_in_virtual_time_is_the_slope_that_finite_differences_see(order: Any, tmp_path: Path) -> None:
    """Who steps when, and which messages meet, does not depend on λ: plain SGP can be nudged."""
    problem, topology, epsilon = curved(3), stochastic_directed(3, seed=1), 1e-5
    inner = SGP(steps=6, lr=DECAY, order=order, batch=2, weight_decay=0.1)
    start = somewhere(problem)
    busy = VirtualTime(compute="exponential(1.0)", latency="exponential(0.5)", factors={1: 1.5})
    protocol = EstimateHypergradient(inner, ITDForward(gather=80))
    tap = Steps()
    case = scenario(problem, topology, protocol, timing=busy)
    result = run(case, out=tmp_path / "run", tap=tap, initial=start)
    assert result.trace.steps().groupby("client").started_at.nth(2).nunique() == 3, "nobody waits for others"

    slope = torch.empty_like(start["outer"])
    for place in np.ndindex(*slope.shape):
        values = []
        for sign in (1, -1):
            lam = start["outer"].clone()
            lam[place] += sign * epsilon
            nudged = run(
                scenario(problem, topology, inner, timing=busy),
                out=tmp_path / f"{place}{sign}",
                initial={**start, "outer": lam},
            )
            values.append(objective(problem, nudged.final["inner"], lam))
        slope[place] = (values[0] - values[1]) / (2 * epsilon)
    by_lam = _outer_part(problem, result.final["inner"], start["outer"])
    gathered = tap.stacked("z", inner.steps, 3).sum(0).view(3, -1) + by_lam
    torch.testing.assert_close(gathered, slope, rtol=0, atol=1e-8)
    torch.testing.assert_close(result.final["hypergradient"], gathered, rtol=0, atol=1e-9)


def _outer_part(problem: Problem, x: Tensor, lam: Tensor) -> Tensor:
    """c^λ."""
    lam = lam.clone().requires_grad_()
    return torch.autograd.grad(objective(problem, x, lam), lam)[0]


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("method", [ITDForward(), ITDBackward()])
def test_named_variables_clients_of_unlike_sizes_and_losses_that_go_one_by_one(
    method: Any, vectorize: bool, tmp_path: Path
) -> None:
    problem = ridge(vectorize)  # F_i is over samples of its own
    inner = SGP(steps=5, lr=0.1, batch=None, order="4a", weight_decay=0.1)
    start = somewhere(problem)
    protocol = EstimateHypergradient(inner, method)
    result = run(scenario(problem, fully_connected(3), protocol), out=tmp_path / "run", initial=start)
    _, wanted = unrolled(problem, inner, start, result.trace.to_pandas())
    torch.testing.assert_close(result.final["hypergradient"], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("inner", "weights", "gather"),
    [
        (DSGD(steps=6, lr=0.1, batch=2), Metropolis(), 100),
        (PeerFedAvg(steps=6, lr=0.1, batch=2), Uniform(), 1),
        (Local(steps=6, lr=0.1, batch=2), Uniform(), 1),
    ],
)
def test_the_special_cases_of_sgp_have_an_itd_too(
    inner: SGP, weights: Any, gather: int, tmp_path: Path
) -> None:
    problem, graph = curved(), fully_connected(4) if isinstance(inner, PeerFedAvg) else lopsided()
    start, found = somewhere(problem), {}
    for method in (ITDForward(gather), ITDBackward()):
        case = scenario(problem, graph, EstimateHypergradient(inner, method), weights=weights)
        result = run(case, out=tmp_path / method.name, initial=start)
        found[method.name] = result.final["hypergradient"]
        if not inner.sends:
            assert len(result.trace) == 0
    _, wanted = unrolled(problem, inner, start, result.trace.to_pandas())
    torch.testing.assert_close(found["itd-backward"], wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(found["itd-forward"], found["itd-backward"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [ITDForward(gather=100), ITDBackward()])
@pytest.mark.parametrize("order", ["4a", "4b"])
def test_over_many_steps_itd_comes_to_the_true_hypergradient(method: Any, order: Any, tmp_path: Path) -> None:
    problem, graph = bilevel_quadratic(clients=4), lopsided()
    network = compile_network(graph)
    p_bar = expected_matrix(network, *Uniform().prepare(network).expected())
    step = InnerMap(0.2, order, weight_decay=0.1)
    truth = dense_hypergradient(problem, p_bar, step, stationary_point(problem, p_bar, step))
    errors = []
    for steps in (5, 25, 125):
        inner = SGP(steps, lr=0.2, order=order, batch=None, weight_decay=0.1)
        result = run(
            scenario(problem, graph, EstimateHypergradient(inner, method)), out=tmp_path / f"{steps}"
        )
        errors.append(float((result.final["hypergradient"] - truth).norm() / truth.norm()))
    assert errors[0] > 0.05
    assert errors[1] < errors[0] / 5
    assert errors[2] < 1e-6


def test_without_steps_the_answer_is_the_direct_part(tmp_path: Path) -> None:
    problem, start = curved(), somewhere(curved())
    wanted = _outer_part(problem, start["inner"], start["outer"])
    for method in (ITDForward(), ITDBackward()):
        for order in ("4a", "4b"):
            protocol = EstimateHypergradient(SGP(0, lr=0.1, order=order), method)  # type: ignore[arg-type]
            out = tmp_path / f"{method.name}{order}"
            final = run(scenario(problem, ring(4), protocol), out=out, initial=start).final
            torch.testing.assert_close(final["hypergradient"], wanted, rtol=0, atol=1e-14)


def test_gathering_gets_better_geometrically(tmp_path: Path) -> None:
    """On a ring of six with weights 1/3 the second eigenvalue of the mixing is 2/3."""
    problem, inner = curved(6), SGP(steps=5, lr=0.1, batch=None)
    exact = run(
        scenario(problem, ring(6), EstimateHypergradient(inner, ITDBackward())), out=tmp_path / "back"
    )
    errors = []
    for gather in (4, 14, 24):
        protocol = EstimateHypergradient(inner, ITDForward(gather))
        result = run(scenario(problem, ring(6), protocol), out=tmp_path / f"{gather}")
        errors.append(float((result.final["hypergradient"] - exact.final["hypergradient"]).norm()))
    assert errors[1] / errors[0] == pytest.approx((2 / 3) ** 10, rel=0.1)
    assert errors[2] / errors[1] == pytest.approx((2 / 3) ** 10, rel=0.01)


def test_the_trace_shows_what_it_costs(tmp_path: Path) -> None:
    n, d, d_lam, T, gather = 4, 3, 2, 5, 3
    problem, inner = curved(n), SGP(steps=T, lr=0.1, order="4a")
    forward, back = (
        run(
            scenario(problem, ring(n), EstimateHypergradient(inner, method)), out=tmp_path / method.name
        ).trace
        for method in (ITDForward(gather), ITDBackward())
    )
    links = 2 * n
    assert _costs(forward) == {
        ("itd-forward", "itd-forward"): (links * T, {8 * (n * d_lam * d + d + 1)}),
        ("itd-gather", "itd-gather"): (links * gather, {8 * (n * d_lam + 1)}),
    }
    assert _costs(back) == {
        ("sgp", "push"): (links * T, {8 * (d + 1)}),
        ("itd-backward", "itd-backward"): (links * T, {8 * d}),
    }


def _costs(trace: Any) -> dict[tuple[str, str], tuple[int, set[int]]]:
    groups = trace.to_pandas().groupby(["phase", "kind"], observed=True)
    return {key: (len(rows), set(rows.bytes)) for key, rows in groups}


@pytest.mark.parametrize(
    ("graph", "timing", "message"),
    [
        (stochastic_directed(4), Lockstep(), r"ITD-backward needs undirected links .* is directed: use HGP"),
        (ring(4), Lockstep(loss=0.1), r"ITD-backward needs undirected links .* loses messages: use HGP"),
        (
            stochastic_undirected(4, seed=1),
            Lockstep(),
            r"do not repeat them \(edge 0→1 is up with probability 0\.\d+\): .* or use HGP",
        ),
        (with_links(ring(4), schedule=[(0, 3)]), Lockstep(), r"\(edge 0→1 is up at some times only\): .* or"),
        (ring(4), VirtualTime(), r"needs timing=Lockstep\(\); in virtual time use HGP"),
    ],
)
def test_going_back_needs_the_links_of_every_step_again(graph: nx.Graph, timing: Any, message: str) -> None:
    case = scenario(curved(), graph, EstimateHypergradient(SGP(5, lr=0.1), ITDBackward()), timing=timing)
    with pytest.raises(ScenarioError if isinstance(timing, VirtualTime) else TopologyError, match=message):
        check(case)


def test_other_refusals() -> None:
    with pytest.raises(ScenarioError, match="ITDForward: gather is 0; it must be a whole number, at least 1"):
        ITDForward(gather=0)
    parts = with_links(nx.Graph([(0, 1), (2, 3)]), probability=1.0)
    for method in (ITDForward(), ITDBackward()):
        with pytest.raises(ScenarioError, match=r"cannot estimate at given variables; .* use HGP or VRHGP"):
            EstimateHypergradient(SGP(5, lr=0.1), method, solve=False).parts()
        apart = scenario(curved(), parts, EstimateHypergradient(SGP(5, lr=0.1), method))
        with pytest.raises(TopologyError, match="not strongly connected"):
            check(apart)


@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize("method", [ITDForward(), ITDBackward()])
def test_inside_pdbo_every_outer_step_goes_along_the_derivative_of_its_own_inner_steps(
    method: Any, order: Any, tmp_path: Path
) -> None:
    problem = curved()
    inner = SGP(steps=5, lr=DECAY, order=order, batch=2, weight_decay=0.1)
    protocol = PDBO(inner, method, outer_steps=2, outer_lr=0.3, optimizer="sgd", start="warm")
    now = somewhere(problem)
    result = run(scenario(problem, fully_connected(4), protocol), out=tmp_path / "run", initial=now)
    messages = result.trace.to_pandas()
    # (4a) going back ends with a step that computes and does not send.
    between = 1 if isinstance(method, ITDForward) else inner.steps + (order == "4a")
    for outer_step in range(2):
        x, slope = unrolled(problem, inner, now, messages, first=outer_step * (inner.steps + between))
        now = {"inner": x, "outer": now["outer"] - 0.3 * slope}
    torch.testing.assert_close(result.final["outer"], now["outer"], rtol=0, atol=1e-12)
    x, _ = unrolled(problem, inner, now, messages, first=2 * (inner.steps + between))
    torch.testing.assert_close(result.final["inner"], x, rtol=0, atol=1e-12)
    kept = {name: tensor.shape[1] for name, tensor in result.final.items()}
    assert kept.get("U", 0) == kept.get("trajectory", 0) == 0, "what only the estimate needed is let go"
