"""The dense truth against finite differences, closed forms and literal transcriptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor

from asyncfed.data import client_data_from_lists
from asyncfed.errors import DataError, RunError, ScenarioError, TopologyError
from asyncfed.network import Uniform
from asyncfed.network.links import compile_network
from asyncfed.problems import Derivatives, Problem, average_minimiser, bilevel_quadratic, quadratic
from asyncfed.problems.bilevel_quadratic import consensus_limit
from asyncfed.truth import (
    InnerMap,
    Point,
    affordable,
    dense_hypergradient,
    expected_jacobians,
    expected_matrix,
    finite_difference_hypergradient,
    neumann_hypergradient,
    stationary_omega,
    stationary_point,
)

Order = Literal["4a", "4b"]
ORDERS: list[Order] = ["4a", "4b"]


def directed(n: int, seed: int = 0) -> Tensor:
    """A ring and some other links, each in one direction, with random weights."""
    g = torch.Generator().manual_seed(seed)
    weights = torch.rand(n, n, generator=g, dtype=torch.float64) + 0.1
    linked = torch.rand(n, n, generator=g) < 0.4
    linked |= torch.eye(n, dtype=torch.bool) | torch.eye(n, dtype=torch.bool).roll(1, dims=1)
    weights = weights * linked
    return weights / weights.sum(1, keepdim=True)


def complete(n: int) -> Tensor:
    return torch.full((n, n), 1 / n, dtype=torch.float64)


def some_lam(problem: Problem, seed: int = 0) -> Tensor:
    d_outer = Derivatives.of(problem).outer.d
    g = torch.Generator().manual_seed(seed)
    return 0.5 * torch.randn(problem.clients, d_outer, generator=g, dtype=torch.float64)


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def ridge(vectorize: bool = True) -> Problem:
    """Ridge regression in float32 with named variables, F_i over samples of its own and clients unlike."""
    g = torch.Generator().manual_seed(0)

    def samples(size: int) -> tuple[Tensor, ...]:
        inputs = torch.randn(size, 2, generator=g)
        return inputs, inputs @ torch.tensor([1.0, -2.0]) + 0.3 * torch.randn(size, generator=g)

    def fit(x: dict[str, Tensor], lam: dict[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        inputs, targets = batch
        return (inputs @ x["slope"] + x["offset"] - targets).square().mean()

    def penalised(x: dict[str, Tensor], lam: dict[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return fit(x, lam, batch) + lam["rate"].exp() * x["slope"].square().sum()

    return Problem(
        name="ridge",
        data=client_data_from_lists([samples(5 + i) for i in range(3)], [samples(4) for _ in range(3)]),
        inner_loss=penalised,
        outer_loss=fit,
        init_inner=lambda generator: {"slope": torch.zeros(2), "offset": torch.zeros(())},
        init_outer=lambda generator: {"rate": torch.zeros(())},
        outer_split="validation",
        vectorize=vectorize,
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("curved", [False, True])
def test_the_truth_is_the_slope_that_finite_differences_see(
    order: Order, weight_decay: float, curved: bool
) -> None:
    problem = bilevel_quadratic(clients=3, noise=0.2, samples=4, curved=curved)
    p_bar, inner, lam = directed(3), InnerMap(0.1, order, weight_decay), some_lam(problem)
    point = stationary_point(problem, p_bar, inner, lam)
    assert point.x.std(0).min() > 1e-3  # with a constant step the clients keep apart
    truth = dense_hypergradient(problem, p_bar, inner, point)
    slope = finite_difference_hypergradient(problem, p_bar, inner, lam)
    assert truth.abs().min() > 1e-4
    assert relative(truth, slope) < 1e-6


def test_named_float32_variables_and_an_outer_split_of_its_own() -> None:
    problem, p_bar, inner = ridge(), directed(3, seed=1), InnerMap(0.05)
    point = stationary_point(problem, p_bar, inner)
    assert point.x.dtype == torch.float64
    assert point.lam.tolist() == [[0.0]] * 3
    truth = dense_hypergradient(problem, p_bar, inner, point)
    assert relative(truth, finite_difference_hypergradient(problem, p_bar, inner, point.lam)) < 1e-6
    one_by_one = dense_hypergradient(ridge(vectorize=False), p_bar, inner, point)
    torch.testing.assert_close(one_by_one, truth, rtol=1e-12, atol=0)
    same_split = dataclasses.replace(problem, outer_split="train")
    assert relative(dense_hypergradient(same_split, p_bar, inner, point), truth) > 0.01


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("curved", [False, True])
def test_expected_sgp_comes_to_rest_at_the_stationary_point(order: Order, curved: bool) -> None:
    """A literal transcription of (4), gradients by `Derivatives`: it stays there, and gets there."""
    problem = bilevel_quadratic(clients=4, noise=0.2, samples=3, curved=curved)
    alpha, decay, p_bar, lam = 0.1, 0.05, directed(4), some_lam(problem)
    d, n = Derivatives.of(problem), 4
    batch = problem.data.train.gather(torch.arange(n), torch.arange(3).repeat(n, 1))

    def step(z: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
        x = z / omega
        descent = -alpha * (d.inner_gradient(x, lam, batch)[0] + decay * x)
        received = torch.einsum("ji,jk->ik", p_bar, z + descent if order == "4a" else z)
        return received + (descent if order == "4b" else 0.0), torch.einsum("ji,jk->ik", p_bar, omega)

    point = stationary_point(problem, p_bar, InnerMap(alpha, order, decay), lam)
    z, omega = step(point.omega * point.x, point.omega)
    torch.testing.assert_close(z, point.omega * point.x, rtol=0, atol=1e-12)
    torch.testing.assert_close(omega, point.omega, rtol=0, atol=1e-12)
    z, omega = torch.ones(n, 3, dtype=torch.float64), torch.ones(n, 1, dtype=torch.float64)
    for _ in range(600):
        z, omega = step(z, omega)
    torch.testing.assert_close(z / omega, point.x, rtol=0, atol=1e-9)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_scalar_quadratics_on_a_complete_network_by_hand(order: Order, weight_decay: float) -> None:
    """With p̄ = 1/n (so ω = 1), a' = a + weight_decay and g = ab − rλ, the gradient of f_i with its decay is
    a'_i x − g_i. Write m for the mean of all z.

    (4b) z_i = m − α(a'_i z_i − g_i), so z_i = (m + α g_i) / (1 + α a'_i). Averaged, and because
    1 − 1/(1 + αa') = αa'/(1 + αa'):   m = S/D,  S = mean g/(1 + αa'),  D = mean a'/(1 + αa').
    Hence ∂m/∂λ_i = −r_i / (n (1 + αa'_i) D) and ∂z_k/∂λ_i = (∂m/∂λ_i − 1_ik α r_i) / (1 + αa'_k).

    (4a) z_i = mean_j (z_j − α(a'_j z_j − g_j)), the same for all, so z_i = m with Σ_j (a'_j m − g_j) = 0,
    whatever α is: m = Σg/Σa', ∂m/∂λ_i = −r_i/Σa'.

    In both d_{λ_i} F̄ = (1/n) [Σ_k (z_k − t_k) ∂z_k/∂λ_i + ρ (λ_i − s_i)].
    """
    n, alpha, rho = 4, 0.3, 0.1
    problem = bilevel_quadratic(clients=n, dimension=1, outer_dimension=1)
    lam = some_lam(problem)
    inner = InnerMap(alpha, order, weight_decay)
    point = stationary_point(problem, complete(n), inner, lam)
    a, b, r, t, s = (tensor.reshape(n) for tensor in problem.data.train.tensors)
    a = a + weight_decay
    g = (a - weight_decay) * b - r * lam[:, 0]
    if order == "4b":
        shrunk = 1 / (1 + alpha * a)
        D = (a * shrunk).mean()
        z = ((g * shrunk).mean() / D + alpha * g) * shrunk
        by_lam = (-r * shrunk / (n * D)).repeat(n, 1).T - alpha * torch.diag(r)  # [i, k]
        by_lam = by_lam * shrunk
    else:
        z = (g.sum() / a.sum()).repeat(n)
        by_lam = (-r / a.sum()).repeat(n, 1).T
    torch.testing.assert_close(point.x[:, 0], z, rtol=1e-11, atol=0)
    by_hand = (by_lam @ (z - t) + rho * (lam[:, 0] - s)) / n
    truth = dense_hypergradient(problem, complete(n), inner, point)
    torch.testing.assert_close(truth[:, 0], by_hand, rtol=1e-10, atol=0)


@pytest.mark.parametrize("order", ORDERS)
def test_with_a_vanishing_step_it_is_the_hypergradient_of_the_consensus_problem(order: Order) -> None:
    """min_x Σ_i f_i(x, λ_i) has no network in it, and clients count alike however unlike their ω."""
    problem = bilevel_quadratic(clients=4, noise=0.1, samples=3)
    p_bar, lam = directed(4), some_lam(problem)
    assert stationary_omega(p_bar).std() > 0.1
    x, hypergradient = consensus_limit(problem, lam)
    errors = []
    for alpha in (1e-4, 1e-5):
        inner = InnerMap(alpha, order)
        point = stationary_point(problem, p_bar, inner, lam)
        errors.append(relative(dense_hypergradient(problem, p_bar, inner, point), hypergradient))
        assert relative(point.x, x.expand(4, -1)) < 20 * alpha
    assert errors[1] < 1e-3
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("order", ORDERS)
def test_with_a_vanishing_step_implicit_differentiation_is_the_classical_one(order: Order) -> None:
    """−∂_λ∇_x f_i (Σ_k H_k + n·weight_decay)⁻¹ mean ∇_x F + ∇_λ F_i/n, all by torch.autograd."""
    from torch.autograd.functional import hessian, jacobian

    n, decay = 3, 0.2
    problem = bilevel_quadratic(clients=n, curved=True)
    p_bar, lam, inner = directed(n), some_lam(problem), InnerMap(1e-6, order, decay)
    point = stationary_point(problem, p_bar, inner, lam)
    x, train = point.x.mean(0), problem.data.train

    def f(i: int) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, lam: problem.inner_loss(x, lam, train.of(i))

    H, by_x, classical = n * decay * torch.eye(3, dtype=torch.float64), torch.zeros_like(x), []
    for i in range(n):
        H += hessian(lambda x, i=i: f(i)(x, lam[i]), x)
        by_x += jacobian(lambda x, i=i: problem.outer_loss(x, lam[i], train.of(i)), x) / n
    for i in range(n):
        C = hessian(f(i), (x, lam[i]))[1][0]
        direct = jacobian(lambda lam, i=i: problem.outer_loss(x, lam, train.of(i)), lam[i]) / n
        classical.append(direct - C @ torch.linalg.solve(H, by_x))
    assert relative(dense_hypergradient(problem, p_bar, inner, point), torch.stack(classical)) < 1e-4


@pytest.mark.parametrize("order", ORDERS)
def test_the_neumann_series_converges_to_the_truth(order: Order) -> None:
    problem = bilevel_quadratic(clients=4, curved=True)
    p_bar, inner, lam = directed(4), InnerMap(0.2, order, 0.1), some_lam(problem)
    point = stationary_point(problem, p_bar, inner, lam)
    truth = dense_hypergradient(problem, p_bar, inner, point)
    errors = [
        relative(neumann_hypergradient(problem, p_bar, inner, point, m), truth) for m in (0, 10, 40, 400)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] > 1e-3
    assert errors[-1] < 1e-10


@pytest.mark.parametrize("order", ORDERS)
def test_the_dense_jacobians_say_the_same(order: Order) -> None:
    """At any point: this one is not stationary, in x or in ω."""
    problem = bilevel_quadratic(clients=4, curved=True)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(4, 3, generator=g, dtype=torch.float64)
    omega = torch.tensor([[0.5], [0.7], [1.2], [1.6]], dtype=torch.float64)
    point = Point(x, omega, some_lam(problem))
    p_bar, inner = directed(4), InnerMap(0.1, order)
    jacobians = expected_jacobians(problem, p_bar, inner, point)
    A, B = jacobians.A, jacobians.B
    assert A.shape == (12, 12)
    assert B.shape == (8, 12)
    u = torch.linalg.inv(torch.eye(12, dtype=torch.float64) - A) @ jacobians.c_y
    truth = dense_hypergradient(problem, p_bar, inner, point)
    torch.testing.assert_close((B @ u + jacobians.c_lam).view(4, 2), truth)
    series = jacobians.c_lam + B @ (jacobians.c_y + A @ jacobians.c_y + A @ A @ jacobians.c_y)
    torch.testing.assert_close(
        series.view(4, 2), neumann_hypergradient(problem, p_bar, inner, point, rounds=3)
    )


@pytest.mark.parametrize("order", ORDERS)
def test_the_weights_of_push_sum_never_reach_the_outer_variables(order: Order) -> None:
    """φ and ψ of the whole y = [z; ω] as the paper prints them, differentiated by autograd: v is the same as
    without ω, although u has an ω-part all the way. No solve with I − Ā can give it, for that is singular.
    """
    n, d, alpha, decay, rounds = 4, 3, 0.1, 0.2, 25
    problem = bilevel_quadratic(clients=n, curved=True)
    p_bar, inner, lam = directed(n), InnerMap(alpha, order, decay), some_lam(problem)
    point = stationary_point(problem, p_bar, inner, lam)

    def descent(y: Tensor, lam: Tensor, i: int) -> Tensor:
        x = y[:d] / y[d]
        g = torch.func.grad(problem.inner_loss)(x, lam, problem.data.train.of(i)) + decay * x
        return torch.cat([-alpha * g, torch.zeros(1, dtype=torch.float64)])

    def phi(y: Tensor, lam: Tensor, i: int) -> Tensor:
        return y + descent(y, lam, i) if order == "4a" else y

    def psi(y: Tensor, lam: Tensor, i: int) -> Tensor:
        return torch.zeros_like(y) if order == "4a" else descent(y, lam, i)

    def outer(y: Tensor, lam: Tensor, i: int) -> Tensor:
        return problem.outer_loss(y[:d] / y[d], lam, problem.data.train.of(i)) / n

    A = torch.zeros(n, d + 1, n, d + 1, dtype=torch.float64)
    B = torch.zeros(n, 2, n, d + 1, dtype=torch.float64)
    u, v = torch.zeros(n, d + 1, dtype=torch.float64), torch.zeros(n, 2, dtype=torch.float64)
    for i in range(n):
        y = torch.cat([point.omega[i] * point.x[i], point.omega[i]])
        phi_by = torch.func.jacrev(phi, argnums=(0, 1))(y, lam[i], i)
        psi_by = torch.func.jacrev(psi, argnums=(0, 1))(y, lam[i], i)
        for j in range(n):
            A[i, :, j] = p_bar[i, j] * phi_by[0].T + (i == j) * psi_by[0].T
            B[i, :, j] = p_bar[i, j] * phi_by[1].T + (i == j) * psi_by[1].T
        u[i], v[i] = torch.func.grad(outer, argnums=(0, 1))(y, lam[i], i)
    for _ in range(rounds):
        v = v + torch.einsum("iajb,jb->ia", B, u)
        u = torch.einsum("iajb,jb->ia", A, u)
        assert u[:, d].abs().min() > 1e-6
    torch.testing.assert_close(v, neumann_hypergradient(problem, p_bar, inner, point, rounds))
    whole = torch.eye(n * (d + 1), dtype=torch.float64) - A.reshape(n * (d + 1), n * (d + 1))
    assert torch.linalg.svdvals(whole)[-1] < 1e-12
    z_part = torch.eye(n * d, dtype=torch.float64) - A[:, :d, :, :d].reshape(n * d, n * d)
    assert torch.linalg.svdvals(z_part)[-1] > 1e-3


def test_push_sum_weights_of_a_small_network_by_hand() -> None:
    """Two clients that give away 1/2 and 1/4: twice as much rests with the second."""
    p_bar = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
    assert stationary_omega(p_bar).flatten().tolist() == pytest.approx([2 / 3, 4 / 3])
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert stationary_omega(swap).flatten().tolist() == pytest.approx([1.0, 1.0])


def test_the_expected_matrix_holds_what_each_sends_and_keeps() -> None:
    graph = nx.DiGraph([(0, 1), (0, 2), (1, 2), (2, 0)])
    nx.set_edge_attributes(graph, 1.0, "probability")
    network = compile_network(graph)
    sent, kept = Uniform().prepare(network).of_all(np.ones(network.edges, dtype=np.bool_))
    p_bar = expected_matrix(network, sent, kept)
    third = 1 / 3
    assert p_bar.numpy() == pytest.approx(
        np.array([[third, third, third], [0, 0.5, 0.5], [0.5, 0, 0.5]]), abs=1e-15
    )
    omega = stationary_omega(p_bar)
    torch.testing.assert_close(p_bar.T @ omega, omega)
    assert omega.sum().item() == pytest.approx(3)
    with pytest.raises(ScenarioError, match=r"needs \(4,\) and \(3,\)"):
        expected_matrix(network, sent[:2], kept)


def test_networks_without_one_place_of_rest_are_refused() -> None:
    one_way = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    with pytest.raises(
        TopologyError, match=r"clients 0 and 1 do not reach each other both ways \(3 separate"
    ):
        stationary_omega(one_way)
    with pytest.raises(ScenarioError, match=r"sum to between 0\.9 and 1"):
        stationary_omega(torch.tensor([[0.5, 0.4], [0.5, 0.5]], dtype=torch.float64))
    with pytest.raises(ScenarioError, match=r"smallest weight is -0\.5"):
        stationary_omega(torch.tensor([[1.5, -0.5], [0.5, 0.5]], dtype=torch.float64))
    with pytest.raises(ScenarioError, match=r"shape \(3, 3\); 5 clients need \(5, 5\)"):
        stationary_point(bilevel_quadratic(), complete(3), InnerMap(0.1))


def test_a_problem_without_outer_variables_has_a_stationary_point_too() -> None:
    problem = quadratic(clients=3, noise=0.1)
    inner = InnerMap(0.1, "4a")
    point = stationary_point(problem, complete(3), inner)
    torch.testing.assert_close(point.x, average_minimiser(problem).expand(3, -1))
    assert dense_hypergradient(problem, complete(3), inner, point).shape == (3, 0)
    assert expected_jacobians(problem, complete(3), inner, point).B.shape == (0, 15)


def scalar(loss: Callable[[Tensor], Tensor]) -> Problem:
    return Problem(
        name="scalar",
        data=client_data_from_lists([(torch.zeros(1, 1),)]),
        inner_loss=lambda x, lam, batch: loss(x).sum(),
        init_inner=lambda generator: torch.full((1,), 20.0),
        outer_split="train",
    )


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda x: torch.where(x.abs() < 1, x * x / 2, x.abs() - 0.5), id="I − A is 0 beyond 1"),
        pytest.param(lambda x: (1 + x * x).sqrt(), id="unguarded Newton jumps from x to −x³"),
    ],
)
def test_where_newton_fails_the_iteration_itself_helps(loss: Callable[[Tensor], Tensor]) -> None:
    assert abs(stationary_point(scalar(loss), complete(1), InnerMap(0.5)).x.item()) < 1e-12


def test_where_nothing_comes_to_rest_the_error_says_so() -> None:
    with pytest.raises(RunError, match=r"still changes z by 0\.1; lower the learning rate \(0\.1\)"):
        stationary_point(scalar(lambda x: x), complete(1), InnerMap(0.1))
    flat = scalar(lambda x: x)
    point = Point(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 0))
    with pytest.raises(RunError, match="I − A is singular"):
        dense_hypergradient(flat, complete(1), InnerMap(0.1), point)


def test_what_is_too_large_is_refused_before_it_is_built() -> None:
    problem, inner = bilevel_quadratic(clients=4), InnerMap(0.1)
    assert affordable(problem)
    assert affordable(problem, limit=12)
    assert not affordable(problem, limit=11)
    assert not affordable(bilevel_quadratic(clients=40, dimension=101, samples=1))
    point = stationary_point(problem, complete(4), inner)
    for call in (dense_hypergradient, expected_jacobians):
        with pytest.raises(
            ScenarioError, match="4 clients with 3 numbers each make dense matrices of 12 rows"
        ):
            call(problem, complete(4), inner, point, limit=11)
    with pytest.raises(ScenarioError, match="at most 11 are solved"):
        stationary_point(problem, complete(4), inner, limit=11)
    neumann_hypergradient(problem, complete(4), inner, point, 2, limit=6)
    with pytest.raises(ScenarioError, match=r"are 36 numbers; at most 5² are kept"):
        neumann_hypergradient(problem, complete(4), inner, point, 2, limit=5)
    wide = bilevel_quadratic(clients=4, outer_dimension=4)
    with pytest.raises(ScenarioError, match="B has 16 rows"):
        expected_jacobians(wide, complete(4), inner, stationary_point(wide, complete(4), inner), limit=12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0; it must be a positive number"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": 0.1, "order": "4c"}, "order is '4c'"),
        ({"lr": 0.1, "weight_decay": -1.0}, "weight_decay is -1.0"),
    ],
)
def test_steps_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        InnerMap(**arguments)


def test_points_and_data_that_do_not_fit_are_refused() -> None:
    problem, inner = bilevel_quadratic(clients=2), InnerMap(0.1)
    point = stationary_point(problem, complete(2), inner)
    with pytest.raises(ScenarioError, match=r"lam has shape \(2, 3\); this problem needs \(2, 2\)"):
        dense_hypergradient(problem, complete(2), inner, dataclasses.replace(point, lam=point.x))
    with pytest.raises(ScenarioError, match=r"omega has shape \(1, 1\); this problem needs \(2, 1\)"):
        dense_hypergradient(problem, complete(2), inner, dataclasses.replace(point, omega=point.omega[:1]))
    with pytest.raises(ScenarioError, match="rounds is -1"):
        neumann_hypergradient(problem, complete(2), inner, point, -1)
    without = dataclasses.replace(scalar(lambda x: x * x), outer_split="validation")
    with pytest.raises(DataError, match="client 0 has no validation samples"):
        dense_hypergradient(without, complete(1), inner, stationary_point(without, complete(1), inner))
