"""HGP, VR-HGP and exact backpropagation against the dense truth, in float64 on small strongly convex problems
with an outer variable per client.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

from asyncfed import (
    DivergenceError,
    Lockstep,
    Result,
    Scenario,
    ScenarioError,
    TopologyError,
    VirtualTime,
    run,
)
from asyncfed.errors import SeriesDivergesError, UnsoundWarning
from asyncfed.network import Bursts, Uniform, Weights, exact_expectations
from asyncfed.network.weights import Given, Metropolis
from asyncfed.problems import bilevel_quadratic
from asyncfed.protocols import HGP, SGP, VRHGP, EstimateHypergradient, ExactBackprop, Local, StepDecay
from asyncfed.truth import (
    InnerMap,
    Point,
    dense_hypergradient,
    expected_matrix,
    neumann_hypergradient,
    stationary_point,
)
from tests.helpers import Steps
from topologies import fully_connected, ring, stochastic_directed, stochastic_undirected, with_links

LR, DECAY = 0.3, 0.05
N, D, D_OUTER = 4, 2, 2
Method = HGP | VRHGP | ExactBackprop


def problem(**changes: Any) -> Any:
    return bilevel_quadratic(clients=N, dimension=D, outer_dimension=D_OUTER, curved=True, **changes)


def inner(order: str = "4b", **changes: Any) -> SGP:
    return SGP(steps=5, lr=LR, order=order, batch=None, weight_decay=DECAY, **changes)  # type: ignore[arg-type]


def p_bar(graph: nx.Graph, weights: Weights | None = None) -> torch.Tensor:
    network = Lockstep().network(graph)
    return expected_matrix(network, *(weights or Uniform()).prepare(network).expected())


def estimate(
    graph: nx.Graph, method: Method, out: Path, step: SGP, at: Point | None = None, **changes: Any
) -> Result:
    run_options = {key: changes.pop(key) for key in ("backend", "clients_per_actor", "tap") if key in changes}
    scenario = Scenario(
        **{
            "problem": problem(),
            "topology": graph,
            "protocol": EstimateHypergradient(step, method, solve=at is None),
            "precision": "float64",
            **changes,
        }
    )
    initial = None if at is None else {"inner": at.x, "outer": at.lam, "omega": at.omega}
    return run(scenario, out=out, initial=initial, **run_options)


def point_of(result: Result) -> Point:
    final = result.final
    return Point(final["inner"], final["omega"], final["outer"])


# --- no randomness: the truth itself ----------------------------------------------------------------


@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize("sampling", ["alternating", "joint"])
@pytest.mark.parametrize("kind", [HGP, VRHGP, ExactBackprop])
def test_on_a_full_graph_the_estimate_is_the_truth(
    kind: type[Method], sampling: str, order: str, tmp_path: Path
) -> None:
    """At wherever five steps of SGP have led, with p̄ and δ̄ as the clients saw them (exactly, here). The
    slowest mode shrinks by 1 − lr·(0.5 + weight decay) or faster, 0.84^150 = 4e-12.
    """
    graph = fully_connected(N)
    result = estimate(graph, kind(rounds=150, sampling=sampling), tmp_path / "run", inner(order))  # type: ignore[arg-type]
    truth = dense_hypergradient(problem(), p_bar(graph), InnerMap(LR, order, DECAY), point_of(result))  # type: ignore[arg-type]
    torch.testing.assert_close(result.final["hypergradient"], truth, rtol=0, atol=1e-8)


@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize("sampling", ["alternating", "joint"])
def test_after_m_rounds_hgp_is_m_terms_of_the_series(sampling: str, order: str, tmp_path: Path) -> None:
    graph = with_links(ring(N), probability=1.0)
    for rounds in (0, 1, 2, 7):
        step = inner(order)
        result = estimate(graph, HGP(rounds=rounds, sampling=sampling), tmp_path / str(rounds), step)  # type: ignore[arg-type]
        series = neumann_hypergradient(
            problem(),
            p_bar(graph),
            InnerMap(LR, order, DECAY),
            point_of(result),
            rounds,  # type: ignore[arg-type]
        )
        torch.testing.assert_close(result.final["hypergradient"], series, rtol=0, atol=1e-12)
        hypergradient = result.trace.phases().query("kind == 'hypergradient'")
        assert hypergradient.steps.sum() == rounds * (1 if sampling == "joint" else 2)


@pytest.mark.parametrize("weights", [Metropolis(), Given(tuple(map(tuple, np.full((N, N), 1 / N).tolist())))])
def test_other_weights(weights: Weights, tmp_path: Path) -> None:
    graph = fully_connected(N)
    result = estimate(graph, VRHGP(rounds=150), tmp_path / "run", inner(), weights=weights)
    truth = dense_hypergradient(problem(), p_bar(graph, weights), InnerMap(LR, "4b", DECAY), point_of(result))
    torch.testing.assert_close(result.final["hypergradient"], truth, rtol=0, atol=1e-8)


def test_alone_everybody_has_a_hypergradient_of_its_own(tmp_path: Path) -> None:
    """CDBO-Local's: with self-links only, p̄ is the identity, and nothing is sent."""
    step = Local(steps=30, lr=LR, batch=None)
    result = estimate(fully_connected(N), HGP(rounds=200), tmp_path / "run", step)
    truth = dense_hypergradient(
        problem(), torch.eye(N, dtype=torch.float64), InnerMap(LR, "4b", 0.0), point_of(result)
    )
    torch.testing.assert_close(result.final["hypergradient"], truth, rtol=0, atol=1e-8)
    assert result.trace.totals().sent == 0


def test_the_rate_is_the_one_the_inner_steps_begin_with_or_its_own(tmp_path: Path) -> None:
    graph = fully_connected(N)
    step = replace(inner(), lr=StepDecay(LR, at=(3,)))
    for method, lr in ((HGP(rounds=150), LR), (HGP(rounds=300, lr=0.15), 0.15)):
        result = estimate(graph, method, tmp_path / str(lr), step)
        truth = dense_hypergradient(problem(), p_bar(graph), InnerMap(lr, "4b", DECAY), point_of(result))
        torch.testing.assert_close(result.final["hypergradient"], truth, rtol=0, atol=1e-8)


# --- random links and minibatches: right on average ---------------------------------------------------

SEEDS, ROUNDS = 24, 12
STO_U = stochastic_undirected(N, probability=(0.4, 0.8), seed=1)
STO_D = stochastic_directed(N, probability=(0.4, 0.8), seed=1)


@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize(
    ("graph", "method"),
    [
        (STO_U, ExactBackprop(rounds=ROUNDS)),
        (STO_D, HGP(rounds=ROUNDS, expectations="exact")),
        (STO_D, HGP(rounds=ROUNDS, sampling="joint", expectations="exact")),
        (STO_D, VRHGP(rounds=ROUNDS, expectations="exact")),
        (STO_D, VRHGP(rounds=ROUNDS, sampling="joint", expectations="exact")),
    ],
    ids=["exact-u", "hgp-d", "hgp-d-joint", "vr-d", "vr-d-joint"],
)
def test_the_mean_over_seeds_is_the_truth(
    graph: nx.Graph, method: Method, order: str, tmp_path: Path
) -> None:
    """Links and minibatches are random; after M rounds the mean is what the same recursion gives with the
    expected Jacobians (for HGP the series of M terms), which tends to the truth: see the test after the next.
    Within 4 standard errors for every one of the 8 numbers; `joint` too, whose rounds the paper calls
    biased: B of a round only ever multiplies Jacobians of earlier rounds, so it is not.
    """
    noisy = problem(noise=0.3, samples=8)
    step, matrix = InnerMap(LR, order, DECAY), p_bar(graph)  # type: ignore[arg-type]
    at = stationary_point(noisy, matrix, step)
    found = [
        estimate(
            graph,
            method,
            tmp_path / str(seed),
            replace(inner(order), batch=2),
            at,
            problem=noisy,
            seed=seed,
        ).final["hypergradient"]
        for seed in range(SEEDS)
    ]
    values = torch.stack(found)
    expected = expected_recursion(noisy, matrix, step, at, method)
    error = values.std(0) / SEEDS**0.5
    assert ((values.mean(0) - expected).abs() <= 4 * error).all()
    assert (error > 0).all()


def expected_recursion(
    noisy: Any, matrix: torch.Tensor, step: InnerMap, at: Point, method: Method
) -> torch.Tensor:
    """v(M) + c^λ of (VR-)HGP with Ā and B̄ in place of what is drawn."""
    from asyncfed.truth import expected_jacobians

    jacobians = expected_jacobians(noisy, matrix, step, at)
    A, B, c = jacobians.A, jacobians.B, jacobians.c_y
    alpha, beta = (method.alpha, method.beta) if isinstance(method, VRHGP) else (1.0, 0.0)
    u, w, v = c.clone(), c.clone(), torch.zeros(len(B), dtype=torch.float64)
    for _ in range(method.rounds):
        v = alpha * (v + B @ u) + (1 - alpha) * (B @ w)
        u = A @ u
        w = beta * (A @ w + c) + (1 - beta) * (w + u)
    return (v + jacobians.c_lam).view(N, D_OUTER)


def test_vr_hgp_tends_to_the_truth_whatever_alpha_and_beta() -> None:
    matrix, step = p_bar(STO_D), InnerMap(LR, "4b", DECAY)
    at = stationary_point(problem(), matrix, step)
    truth = dense_hypergradient(problem(), matrix, step, at)
    for alpha, beta in ((1, 0), (0, 1), (0.5, 0.5), (0.9, 0.1), (0.1, 0.9)):
        method = VRHGP(rounds=3000, alpha=alpha, beta=beta)
        torch.testing.assert_close(expected_recursion(problem(), matrix, step, at, method), truth)


@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize(
    ("timing", "sampling"),
    [
        (Lockstep(), "alternating"),
        (Lockstep(), "joint"),
        (VirtualTime(compute="exponential(1.0)", latency="exponential(0.3)"), "joint"),
    ],
)
def test_vr_hgp_with_alpha_1_and_beta_0_is_hgp(
    timing: Lockstep | VirtualTime, sampling: str, order: str, tmp_path: Path
) -> None:
    step = replace(inner(order), batch=2)
    finals = [
        estimate(
            STO_D, method, tmp_path / method.name, step, timing=timing, problem=problem(noise=0.2)
        ).final["hypergradient"]
        for method in (
            HGP(rounds=15, sampling=sampling),  # type: ignore[arg-type]
            VRHGP(rounds=15, alpha=1.0, beta=0.0, sampling=sampling),  # type: ignore[arg-type]
        )
    ]
    torch.testing.assert_close(finals[0], finals[1], rtol=1e-12, atol=1e-12)


# --- round by round, by hand --------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize("sampling", ["alternating", "joint"])
def test_every_round_is_the_papers_line_omega_included(sampling: str, order: str, tmp_path: Path) -> None:
    """Eq. 12 by hand along the links that the trace shows, on the whole y = [z; ω] with Jacobians of φ and ψ
    by autograd: what the protocol leaves out (the ω-part of u) changes nothing.
    """
    rounds = 6
    method = HGP(rounds=rounds, sampling=sampling, expectations="exact")  # type: ignore[arg-type]
    result = estimate(STO_D, method, tmp_path / "run", inner(order), seed=3)
    at, case = point_of(result), problem()
    network = Lockstep().network(STO_D)
    expectations = exact_expectations(network, Uniform().prepare(network), np.ones(N))
    jacobians = full_jacobians(case, order, at)
    messages = result.trace.to_pandas().query("kind == 'hypergradient'")
    first = messages.step.min()

    def arrived(turn: int) -> torch.Tensor:
        """Weights of what client i (row) receives in that round: p̄_ij / δ̄_{j→i}, and p̄_ii."""
        weights = torch.diag(torch.from_numpy(expectations.kept))
        for row in messages[(messages.step == first + turn) & (messages.status == "delivered")].itertuples():
            j, i = row.sender, row.receiver
            there = np.flatnonzero((network.senders == j) & (network.receivers == i))[0]
            back = np.flatnonzero((network.senders == i) & (network.receivers == j))[0]
            weights[i, j] = expectations.sent[back] / expectations.received[there]
        return weights

    u, v = jacobians["c_y"].clone(), jacobians["c_lam"].clone()
    for m in range(rounds):
        v_turn, u_turn = (m, m) if sampling == "joint" else (2 * m, 2 * m + 1)
        sums_v, sums_u = arrived(v_turn) @ u, arrived(u_turn) @ u
        v = v + apply(jacobians["lam_phi"], sums_v) + apply(jacobians["lam_psi"], u)
        u = apply(jacobians["y_phi"], sums_u) + apply(jacobians["y_psi"], u)
    torch.testing.assert_close(result.final["hypergradient"], v, rtol=0, atol=1e-12)
    assert jacobians["c_y"][:, D].abs().min() > 0, "the ω-part that is left out is not zero"


def apply(blocks: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    return torch.einsum("nab,nb->na", blocks, vectors)


def full_jacobians(case: Any, order: str, at: Point) -> dict[str, torch.Tensor]:
    """∂_y φ, ∂_y ψ, ∂_λ φ, ∂_λ ψ of every client in the row convention (d_in, d_out), and c."""
    found: dict[str, list[torch.Tensor]] = {
        key: [] for key in ("y_phi", "y_psi", "lam_phi", "lam_psi", "c_y", "c_lam")
    }
    for i in range(N):
        batch = case.data.train.of(i)

        def gradient(x: torch.Tensor, lam: torch.Tensor, batch: Any = batch) -> torch.Tensor:
            return torch.func.grad(case.inner_loss)(x, lam, batch) + DECAY * x

        def phi(y: torch.Tensor, lam: torch.Tensor, gradient: Any = gradient) -> torch.Tensor:
            z, omega = y[:D], y[D:]
            return torch.cat([z - LR * gradient(z / omega, lam) if order == "4a" else z, omega])

        def psi(y: torch.Tensor, lam: torch.Tensor, gradient: Any = gradient) -> torch.Tensor:
            z, omega = y[:D], y[D:]
            moved = -LR * gradient(z / omega, lam) if order == "4b" else 0 * z
            return torch.cat([moved, 0 * omega])

        def outer(y: torch.Tensor, lam: torch.Tensor, batch: Any = batch) -> torch.Tensor:
            return case.outer_loss(y[:D] / y[D:], lam, batch) / N  # type: ignore[no-any-return]

        y, lam = torch.cat([at.x[i] * at.omega[i], at.omega[i]]), at.lam[i]
        for name, function in (("phi", phi), ("psi", psi)):
            by_y, by_lam = torch.func.jacrev(function, (0, 1))(y, lam)
            found[f"y_{name}"].append(by_y.T)
            found[f"lam_{name}"].append(by_lam.T)
        c_y, c_lam = torch.func.grad(outer, (0, 1))(y, lam)
        found["c_y"].append(c_y)
        found["c_lam"].append(c_lam)
    return {key: torch.stack(values) for key, values in found.items()}


# --- what is sent ------------------------------------------------------------------------------------


def test_message_sizes(tmp_path: Path) -> None:
    for method, numbers in ((HGP(rounds=3), D), (VRHGP(rounds=3), 2 * D), (ExactBackprop(rounds=3), D)):
        result = estimate(STO_U, method, tmp_path / method.name, inner())
        messages = result.trace.to_pandas().query("kind == 'hypergradient' and status == 'delivered'")
        assert set(messages.bytes) == {8 * numbers}
        assert set(messages.phase) == {method.name}


def test_estimated_expectations_are_those_of_the_steps_before(tmp_path: Path) -> None:
    """Each weight from what the receiver alone has seen in the trace of the inner steps."""
    result = estimate(STO_D, HGP(rounds=3), tmp_path / "run", replace(inner(), steps=12))
    messages = result.trace.to_pandas()
    push = messages.query("kind == 'push'")
    later = messages.query("kind == 'hypergradient' and status == 'delivered'")
    assert len(later) > 5
    for row in later.itertuples():
        j, i = row.sender, row.receiver
        own_sends = push[(push.sender == i) & (push.receiver == j) & (push.status == "delivered")]
        heard = push[(push.sender == j) & (push.receiver == i) & (push.status == "delivered")]
        assert row.weight == pytest.approx(own_sends.weight.sum() / 12 / (len(heard) / 12), rel=1e-6)


# --- virtual time --------------------------------------------------------------------------------------


BUSY = VirtualTime(compute="lognormal(1.0, 0.3)", factors={0: 2.0}, latency="exponential(1.0)")


@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize("method", [HGP(rounds=10, sampling="joint"), VRHGP(rounds=10, sampling="joint")])
def test_in_virtual_time_nothing_of_an_older_part_is_absorbed(
    method: Method, order: str, tmp_path: Path
) -> None:
    step = replace(inner(order), lr=0.05)
    late = VirtualTime(compute="lognormal(1.0, 0.3)", latency="exponential(4.0)")
    first = estimate(STO_D, method, tmp_path / "first", step, timing=late)
    again = estimate(STO_D, method, tmp_path / "again", step, timing=late)
    messages = first.trace.to_pandas()
    older, newer = messages.query("kind == 'push'"), messages.query("kind == 'hypergradient'")
    assert (older.status == "in_flight").any()
    assert older.absorbed_step.max() <= step.steps
    delivered = newer[newer.status == "delivered"]
    assert delivered.absorbed_step.min() >= step.steps
    assert delivered.sent_at.min() > older.sent_at.max()
    assert torch.equal(first.final["hypergradient"], again.final["hypergradient"])
    assert messages.equals(again.trace.to_pandas())


@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize("method", [HGP, VRHGP])
def test_in_virtual_time_the_estimate_is_the_truth(
    method: type[HGP] | type[VRHGP], order: str, tmp_path: Path
) -> None:
    """Everybody at the same mean pace, links always up, messages late, full batches: the sum of a delayed
    series is the sum of the series, for its limit w = Ā w + c does not know of time. The slowest mode shrinks
    by 1 − 0.1 · (0.5 + weight decay) or faster, 0.945^500 = 5e-13.
    """
    graph = fully_connected(N)
    timing = VirtualTime(compute=1.0, latency=0.3)
    settings = method(rounds=500, sampling="joint", expectations="exact")
    step = replace(inner(order), lr=0.1)
    result = estimate(graph, settings, tmp_path / "run", step, timing=timing)
    truth = dense_hypergradient(problem(), p_bar(graph), InnerMap(0.1, order, DECAY), point_of(result))  # type: ignore[arg-type]
    torch.testing.assert_close(result.final["hypergradient"], truth, rtol=0, atol=1e-8)


def test_alternating_rounds_need_lockstep(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="use sampling='joint'"):
        estimate(STO_D, HGP(rounds=3), tmp_path / "run", inner(), timing=BUSY)
    assert not (tmp_path / "run").exists()


# --- refusals -----------------------------------------------------------------------------------------


def one_way() -> nx.DiGraph:
    graph = nx.DiGraph(fully_connected(N))
    graph.remove_edge(2, 0)
    return with_links(graph, probability=0.5)


@pytest.mark.parametrize("method", [HGP(rounds=3), VRHGP(rounds=3)])
def test_a_link_without_a_link_back_is_refused(method: Method, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="0→2"):
        estimate(one_way(), method, tmp_path / "run", inner())
    assert not (tmp_path / "run").exists()


def test_exact_backpropagation_refuses_directed_links_and_virtual_time(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="HGP"):
        estimate(STO_D, ExactBackprop(rounds=3), tmp_path / "run", inner())
    with pytest.raises(ScenarioError, match="in virtual time use HGP"):
        estimate(STO_U, ExactBackprop(rounds=3), tmp_path / "run", inner(), timing=BUSY)
    lossy = with_links(STO_U, loss=0.1)
    with pytest.raises(TopologyError, match="HGP"):
        estimate(lossy, ExactBackprop(rounds=3), tmp_path / "run", inner())


@pytest.mark.parametrize("method", [HGP(rounds=3), VRHGP(rounds=3), ExactBackprop(rounds=3)])
def test_links_that_depend_on_those_before_are_warned_of(method: Method, tmp_path: Path) -> None:
    name = "exact recurrent backpropagation" if isinstance(method, ExactBackprop) else type(method).__name__
    for marks, reason in (
        ({"bursts": Bursts(4, 2)}, "come in bursts"),
        ({"schedule": [(0, 9)]}, "change with"),
    ):
        with pytest.warns(UnsoundWarning, match=f"{name} is unbiased where .* and here they {reason}"):
            estimate(with_links(STO_U, **marks), method, tmp_path / reason, inner())


def test_where_links_change_with_time_there_is_nothing_exact(tmp_path: Path) -> None:
    graph = with_links(STO_U, schedule=[(0, 9)])
    with pytest.raises(ScenarioError, match=r"no exact expectations .* use expectations='estimated'"):
        estimate(graph, HGP(rounds=3, expectations="exact"), tmp_path / "run", inner())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"alpha": 1.1}, r"VRHGP: alpha is 1"),
        ({"beta": -0.1}, r"VRHGP: beta is -0"),
        ({"rounds": -1}, "rounds is -1"),
        ({"sampling": "both"}, "sampling is 'both'"),
        ({"expectations": "known"}, "expectations is 'known'"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": "outer"}, "batch is 'outer'"),
    ],
)
def test_bad_settings(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        VRHGP(**{"rounds": 5, **settings})


def test_an_outer_variable_that_nothing_depends_on_is_refused(tmp_path: Path) -> None:
    case = problem()
    idle = replace(
        case,
        inner_loss=lambda x, lam, batch: case.inner_loss(x, lam["used"], batch),
        outer_loss=lambda x, lam, batch: case.outer_loss(x, lam["used"], batch),
        init_outer=lambda g: {"used": torch.zeros(D_OUTER), "idle": torch.zeros(3)},
        metrics={},
        recipe=None,
    )
    with pytest.raises(ScenarioError, match=r"neither loss of .* depends on 'idle'"):
        estimate(STO_D, HGP(rounds=3), tmp_path / "run", inner(), problem=idle)
    from asyncfed.problems import quadratic

    with pytest.raises(ScenarioError, match="has no outer variable"):
        estimate(STO_D, HGP(rounds=3), tmp_path / "run", inner(), problem=quadratic(clients=N))


def test_an_estimate_needs_something_to_estimate_from(tmp_path: Path) -> None:
    at = Point(torch.zeros(N, D), torch.ones(N, 1), torch.zeros(N, D_OUTER))
    with pytest.raises(ScenarioError, match="expectations='exact'"):
        estimate(STO_D, HGP(rounds=3), tmp_path / "run", inner(), at)


@pytest.mark.parametrize("method", [HGP(rounds=60, lr=1.5), VRHGP(rounds=60, lr=1.5)])
def test_a_series_that_diverges_is_stopped(method: Method, tmp_path: Path) -> None:
    with pytest.raises((SeriesDivergesError, DivergenceError), match="lower the"):
        estimate(fully_connected(N), method, tmp_path / "run", inner())
    assert run_status(tmp_path / "run") == "failed"


def run_status(path: Path) -> str:
    from asyncfed import load

    return load(path).status


def test_a_tap_sees_what_is_sent_and_what_is_kept(tmp_path: Path) -> None:
    tap = Steps()
    estimate(fully_connected(N), HGP(rounds=4, sampling="joint"), tmp_path / "run", inner(), tap=tap)
    assert tap.payload[0, 7]["u"].shape == (D,)
    assert tap.residue[0, 7]["u"].shape == (D,)
