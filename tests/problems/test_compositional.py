"""Compositions: the formulas, and a closed form against a plain optimizer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncfed.errors import DataError, ScenarioError
from asyncfed.problems import (
    Derivatives,
    Problem,
    compositional,
    compositional_solution,
    problem_from_recipe,
    quadratic,
)


def composed(problem: Problem, x: Tensor, bend: float = 0.0) -> tuple[Tensor, Tensor]:
    """(1/n) Σ f_i(r̄(x)) and r̄(x), client by client."""
    clients = [[tensor[0] for tensor in problem.data.train.of(i)] for i in range(problem.clients)]
    y = torch.stack([M @ x + c + bend * torch.sin(M @ x) for M, c, _, _ in clients]).mean(0)
    return torch.stack([0.5 * (y - t) @ W @ (y - t) for _, _, W, t in clients]).mean(), y


@pytest.mark.parametrize("bend", [0.0, 0.4])
def test_losses_are_the_formulas(bend: float) -> None:
    problem = compositional(clients=3, bend=bend)
    g = torch.Generator().manual_seed(0)
    y, x = (torch.randn(k, generator=g, dtype=torch.float64) for k in (5, 3))
    for i in range(3):
        batch = problem.data.train.of(i)
        M, c, W, t = (tensor[0] for tensor in batch)
        r = M @ x + c + bend * torch.sin(M @ x)
        torch.testing.assert_close(problem.inner_loss(y, x, batch), 0.5 * (y - r) @ (y - r))
        torch.testing.assert_close(problem.outer_loss(y, x, batch), 0.5 * (y - t) @ W @ (y - t))
        for name, loss in (("loss", problem.inner_loss), ("outer_loss", problem.outer_loss)):
            assert problem.metrics[name](y, x, batch).tolist() == [loss(y, x, batch).item()]


@pytest.mark.parametrize("bend", [0.0, 0.4])
def test_the_mean_of_the_inner_functions_solves_the_inner_problem(bend: float) -> None:
    problem = compositional(clients=4, bend=bend)
    d = Derivatives.of(problem)
    x = torch.tensor([0.3, -1.0, 0.5], dtype=torch.float64)
    _, y = composed(problem, x, bend)
    batch = problem.data.train.gather(torch.arange(4), torch.zeros(4, 1, dtype=torch.long))
    gradient, _ = d.inner_gradient(y.repeat(4, 1), x.repeat(4, 1), batch)
    assert gradient.mean(0).abs().max() < 1e-12
    assert gradient.abs().max() > 0.1
    u = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    product = d.inner_hessian_vector(y.repeat(4, 1), x.repeat(4, 1), batch, u)
    torch.testing.assert_close(product, u)


@pytest.mark.parametrize("heterogeneity", [0.0, 2.0])
def test_the_solution_is_where_a_plain_optimizer_ends(heterogeneity: float) -> None:
    problem = compositional(clients=6, heterogeneity=heterogeneity, seed=2)
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([x], max_iter=100, tolerance_grad=1e-12, tolerance_change=1e-16)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss, _ = composed(problem, x)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    best, y = compositional_solution(problem)
    torch.testing.assert_close(best, x.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(y, composed(problem, best)[1])
    assert torch.func.grad(lambda x: composed(problem, x)[0])(best).abs().max() < 1e-12


def test_without_heterogeneity_clients_differ_in_curvature_alone() -> None:
    M, c, W, t = compositional(clients=3, heterogeneity=0.0, curvature=(0.4, 0.9)).data.train.tensors
    for tensor in (M, c, t):
        assert torch.equal(tensor[0], tensor[2])
    assert not torch.equal(W[0], W[2])
    eigenvalues = torch.linalg.eigvalsh(W)
    assert eigenvalues.min() >= 0.4 - 1e-9
    assert eigenvalues.max() <= 0.9 + 1e-9


def test_a_recipe_builds_the_same_problem_again() -> None:
    first = compositional(clients=3, seed=4, bend=0.1)
    assert first.recipe is not None
    again = problem_from_recipe(json.loads(json.dumps(first.recipe.as_dict())))
    assert again.recipe == first.recipe
    assert all(
        torch.equal(a, b) for a, b in zip(first.data.train.tensors, again.data.train.tensors, strict=True)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 0}, "clients is 0"),
        ({"outer_dimension": 6}, r"outer_dimension is 6; it must lie in 1\.\.5"),
        ({"outer_dimension": 0}, "outer_dimension is 0"),
        ({"curvature": (0.0, 1.0)}, r"compositional: curvature\[0\] is 0\.0"),
        ({"bend": -1.0}, r"compositional: bend is -1\.0; it must be a finite number, at least 0"),
        ({"heterogeneity": -1.0}, r"heterogeneity is -1\.0"),
    ],
)
def test_compositions_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        compositional(**arguments)


def test_only_straight_compositions_have_a_closed_form() -> None:
    with pytest.raises(ScenarioError, match="make it with bend=0"):
        compositional_solution(compositional(bend=0.1))
    with pytest.raises(ScenarioError, match="'quadratic' is no compositional"):
        compositional_solution(quadratic())
