"""Bilevel quadratics against their formulas, and what their options promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncfed.errors import DataError, ScenarioError
from asyncfed.problems import (
    Derivatives,
    Problem,
    bilevel_quadratic,
    local_hypergradient_solution,
    problem_from_recipe,
    quadratic,
    shared_hypergradient,
    shared_solution,
)
from asyncfed.problems.bilevel_quadratic import consensus_limit
from asyncfed.problems.whole import whole_inner_jacobians


def whole(problem: Problem) -> tuple[Tensor, ...]:
    n, size = problem.clients, int(problem.data.train.sizes[0])
    return problem.data.train.gather(torch.arange(n), torch.arange(size).repeat(n, 1))


def somewhere(problem: Problem, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    d, g = Derivatives.of(problem), torch.Generator().manual_seed(seed)
    sizes = (d.inner.d, d.outer.d, d.inner.d)
    x, lam, u = (torch.randn(problem.clients, k, generator=g, dtype=torch.float64) for k in sizes)
    return x, lam, u


@pytest.mark.parametrize("curved", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_derivatives_are_those_of_the_formulas(noise: float, curved: bool) -> None:
    n, k = 4, 5
    problem = bilevel_quadratic(clients=n, dimension=k, noise=noise, samples=6, curved=curved)
    assert problem.data.train.sizes.tolist() == [6 if noise else 1] * n
    d, batch = Derivatives.of(problem), whole(problem)
    x, lam, u = somewhere(problem)
    gradient, loss = d.inner_gradient(x, lam, batch)
    hessian = d.inner_hessian_vector(x, lam, batch, u)
    cross = d.inner_cross_vector(x, lam, batch, u)
    by_x, by_lam, outer = d.outer_gradients(x, lam, batch)
    of = torch.arange(k) % 2  # which of the two outer numbers bends which coordinate
    for i in range(n):
        A, b, R, t, s = problem.data.train.of(i)
        rates, root = lam[i].exp()[of], (1 + x[i] ** 2).sqrt()
        bend = 0.1 * float(curved)
        away = x[i] - b  # one row per sample
        tilted = (away.unsqueeze(1) @ A @ away.unsqueeze(2)).mean() / 2 + x[i] @ R.mean(0) @ lam[i]
        torch.testing.assert_close(loss[i], tilted + bend * (0.5 * rates * x[i] ** 2 + root).sum())
        straight = (A @ away.unsqueeze(2)).mean(0)[:, 0] + R.mean(0) @ lam[i]
        torch.testing.assert_close(gradient[i], straight + bend * (rates * x[i] + x[i] / root))
        torch.testing.assert_close(hessian[i], A.mean(0) @ u[i] + bend * (rates + root**-3) * u[i])
        by_rate = torch.zeros(2, dtype=torch.float64).index_add(0, of, bend * rates * x[i] * u[i])
        torch.testing.assert_close(cross[i], R.mean(0).T @ u[i] + by_rate)
        torch.testing.assert_close(by_x[i], x[i] - t[0])
        torch.testing.assert_close(by_lam[i], 0.1 * (lam[i] - s[0]))
        value = (x[i] - t[0]).square().sum() / 2 + 0.05 * (lam[i] - s[0]).square().sum()
        torch.testing.assert_close(outer[i], value)


def test_every_sample_is_strongly_convex_and_clients_differ() -> None:
    problem = bilevel_quadratic(clients=3, curvature=(0.4, 0.9))
    A, b, R, t, s = problem.data.train.tensors
    eigenvalues = torch.linalg.eigvalsh(A)
    assert eigenvalues.min() >= 0.4 - 1e-9
    assert eigenvalues.max() <= 0.9 + 1e-9
    for tensor in (A, b, R, t, s):
        assert (tensor[0] - tensor[1]).abs().min() > 0
    noisy = bilevel_quadratic(clients=3, noise=1.5, samples=50)
    assert torch.linalg.eigvalsh(noisy.data.train.tensors[0]).min() > 0


def test_noise_makes_samples_of_a_client_differ_in_all_that_the_inner_loss_reads() -> None:
    A, b, R, t, s = bilevel_quadratic(clients=2, noise=0.1, samples=400).data.train.of(1)
    assert b.std(0).tolist() == pytest.approx([0.1] * 3, rel=0.2)
    assert R.std(0).flatten().tolist() == pytest.approx([0.1] * 6, rel=0.2)
    assert (A[:, 0, 0] / A[0, 0, 0]).log().std().item() == pytest.approx(0.1, rel=0.2)
    assert t.std(0).max() == 0
    assert s.std(0).max() == 0


def test_the_same_seed_makes_the_same_problem_and_a_recipe_says_how() -> None:
    first = bilevel_quadratic(seed=1, noise=0.1, curved=True)
    assert first.recipe is not None
    again = problem_from_recipe(first.recipe.as_dict())
    other = bilevel_quadratic(seed=2, noise=0.1)
    for a, b, c in zip(*(problem.data.train.tensors for problem in (first, again, other)), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    x, lam, _ = somewhere(first)
    batch = first.data.train.of(0)
    assert torch.equal(again.inner_loss(x[0], lam[0], batch), first.inner_loss(x[0], lam[0], batch))


def test_metrics_are_the_two_losses_sample_by_sample() -> None:
    problem = bilevel_quadratic(noise=0.2, samples=5, curved=True)
    x, lam, _ = somewhere(problem)
    batch = problem.data.test.of(2)
    for name, loss in (("loss", problem.inner_loss), ("outer_loss", problem.outer_loss)):
        each = problem.metrics[name](x[2], lam[2], batch)
        assert each.shape == (5,)
        torch.testing.assert_close(each.mean(), loss(x[2], lam[2], batch))


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_the_consensus_limit_minimises_the_sum_and_its_hypergradient_is_its_slope(noise: float) -> None:
    problem = bilevel_quadratic(clients=3, noise=noise, samples=4)
    d, batch = Derivatives.of(problem), whole(problem)
    _, lam, _ = somewhere(problem)

    def mean_outer(lam: Tensor) -> Tensor:
        x = consensus_limit(problem, lam)[0].repeat(3, 1)
        assert d.inner_gradient(x, lam, batch)[0].mean(0).abs().max() < 1e-12
        return d.outer_gradients(x, lam, batch)[2].mean()

    hypergradient = consensus_limit(problem, lam)[1]
    for i in range(3):
        for k in range(2):
            nudge = torch.zeros_like(lam)
            nudge[i, k] = 1e-3  # F̄ is a quadratic in λ, so central differences are exact
            slope = (mean_outer(lam + nudge) - mean_outer(lam - nudge)) / 2e-3
            torch.testing.assert_close(hypergradient[i, k], slope, rtol=1e-8, atol=1e-11)


def test_the_consensus_limit_of_other_problems_is_refused() -> None:
    with pytest.raises(ScenarioError, match="curved=False"):
        consensus_limit(bilevel_quadratic(curved=True), torch.zeros(5, 2))
    with pytest.raises(ScenarioError, match="'quadratic' is no bilevel_quadratic"):
        consensus_limit(quadratic(), torch.zeros(10, 0))


def solved(problem: Problem, lam: Tensor, weights: Tensor) -> Tensor:
    """The minimiser of the weighted mean of f_i at one λ for all: one step of Newton's method."""

    def gradient(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        each = [problem.inner_loss(x, lam, problem.data.train.of(i)) for i in range(problem.clients)]
        return torch.autograd.grad((torch.stack(each) * weights).sum(), x, create_graph=True)[0]

    start = gradient(torch.zeros(3, dtype=torch.float64))
    hessian = torch.stack([gradient(unit.clone()) - start for unit in torch.eye(3, dtype=torch.float64)])
    return -torch.linalg.solve(hessian, start)


def objective(problem: Problem, lam: Tensor, weights: Tensor) -> Tensor:
    x = solved(problem, lam, weights)
    each = [problem.outer_loss(x, lam, problem.data.train.of(i)) for i in range(problem.clients)]
    return (torch.stack(each) * weights).sum()


@pytest.mark.parametrize("noise", [0.0, 0.4])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.0, 5.0]])
def test_the_shared_hypergradient_is_autograd_through_the_exact_inner_solution(
    noise: float, weights: list[float] | None
) -> None:
    problem = bilevel_quadratic(clients=4, noise=noise, samples=4, seed=3)
    w = torch.tensor(weights or [1.0] * 4, dtype=torch.float64)
    w = w / w.sum()
    lam = torch.tensor([0.7, -1.3], dtype=torch.float64)
    leaf = lam.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(problem, leaf, w), leaf)
    torch.testing.assert_close(shared_hypergradient(problem, lam, weights), slope)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.0, 5.0]])
def test_the_shared_solution_is_where_a_plain_optimizer_ends(weights: list[float] | None) -> None:
    problem = bilevel_quadratic(clients=4, seed=3)
    w = torch.tensor(weights or [1.0] * 4, dtype=torch.float64)
    w = w / w.sum()
    lam = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([lam], max_iter=50, tolerance_grad=1e-12, tolerance_change=1e-16)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective(problem, lam, w)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    best, x = shared_solution(problem, weights)
    torch.testing.assert_close(best, lam.detach(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(x, solved(problem, best, w).detach())
    assert shared_hypergradient(problem, best, weights).abs().max() < 1e-12


def mean_local_hypergradient(problem: Problem, lam: Tensor) -> Tensor:
    """Everybody with its own Hessian, at the exact common inner solution."""
    d, n, batch = Derivatives.of(problem), problem.clients, whole(problem)
    x = solved(problem, lam, torch.full((n,), 1 / n, dtype=torch.float64)).detach().repeat(n, 1)
    hessian, cross = whole_inner_jacobians(d, x, lam.repeat(n, 1), problem.data.train)
    by_x, by_lam, _ = d.outer_gradients(x, lam.repeat(n, 1), batch)
    return (by_lam - (cross @ torch.linalg.solve(hessian, by_x.unsqueeze(2)))[:, :, 0]).mean(0)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_descent_along_local_hypergradients_ends_at_a_solution_of_its_own(noise: float) -> None:
    problem = bilevel_quadratic(clients=4, curvature=(0.3, 3.0), noise=noise, samples=3)
    end, x = local_hypergradient_solution(problem)
    assert mean_local_hypergradient(problem, end).abs().max() < 1e-12
    even = torch.full((4,), 0.25, dtype=torch.float64)
    torch.testing.assert_close(x, solved(problem, end, even).detach())
    lam = torch.zeros(2, dtype=torch.float64)
    for _ in range(70):
        lam = lam - 0.5 * mean_local_hypergradient(problem, lam)
    true, _ = shared_solution(problem)
    assert (lam - end).norm() < 0.1 * end.norm()
    assert (end - true).norm() > 0.1  # it is biased


def test_local_hypergradients_can_lead_nowhere() -> None:
    problem = bilevel_quadratic(clients=2, dimension=2, curvature=(0.05, 20.0), seed=15)
    with pytest.raises(ScenarioError, match="descent along local hypergradients diverges on this problem"):
        local_hypergradient_solution(problem)
    shared_solution(problem)  # which is there all the same


def test_with_one_client_local_is_global() -> None:
    problem = bilevel_quadratic(clients=1)
    for local, shared in zip(local_hypergradient_solution(problem), shared_solution(problem), strict=True):
        torch.testing.assert_close(local, shared)


def test_shared_solutions_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ScenarioError, match="curved=False"):
        shared_solution(bilevel_quadratic(curved=True))
    with pytest.raises(ScenarioError, match="'quadratic' is no bilevel_quadratic"):
        shared_hypergradient(quadratic(), torch.zeros(2))
    for weights in ([1.0, 2.0], [1.0, 1.0, -1.0], [0.0] * 3, [1.0, 1.0, float("nan")]):
        with pytest.raises(
            ScenarioError,
            match=r"(they must be 3 numbers, one for each client|weights\[\d\] is .*; it must be a number)",
        ):
            shared_solution(bilevel_quadratic(clients=3), weights)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"curvature": (0.0, 1.0)},
            r"bilevel_quadratic: curvature\[0\] is 0\.0; it must be a finite number above 0",
        ),
        ({"curvature": (2.0, 1.0)}, "the smaller one first"),
        ({"clients": 0}, "bilevel_quadratic: clients is 0; it must be a whole number, at least 1"),
        ({"outer_dimension": 0}, "outer_dimension is 0"),
        ({"samples": 0}, "samples is 0"),
        ({"noise": -0.1}, r"bilevel_quadratic: noise is -0\.1; it must be a finite number, at least 0"),
        ({"noise": float("nan")}, "noise is nan"),
    ],
)
def test_bilevel_quadratics_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        bilevel_quadratic(**arguments)
