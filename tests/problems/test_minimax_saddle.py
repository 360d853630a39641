"""The saddle: its formula, where gradients vanish, and what it is made of."""

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
    minimax_saddle,
    problem_from_recipe,
    quadratic,
    saddle_point,
)
from asyncfed.problems.whole import evaluate


def batch_of(problem: Problem) -> tuple[Tensor, ...]:
    return problem.data.train.gather(
        torch.arange(problem.clients), torch.zeros(problem.clients, 1, dtype=torch.long)
    )


def test_the_losses_are_the_formula_of_the_paper_and_each_others_negative() -> None:
    problem = minimax_saddle(clients=4, dimension=3, regularization=2.0)
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, generator=g, dtype=torch.float64) for _ in range(2))
    for i in range(4):
        t, b, c = batch = problem.data.train.of(i)
        assert 0 < t.item() < 0.1
        assert c.item() == 1
        A = t[0] * torch.eye(3, dtype=torch.float64)
        f = -(0.5 * y @ y - b[0] @ y + y @ A @ x) + x @ x
        torch.testing.assert_close(problem.outer_loss(y, x, batch), f)
        torch.testing.assert_close(problem.inner_loss(y, x, batch), -f)
        torch.testing.assert_close(problem.metrics["outer_loss"](y, x, batch), f.unsqueeze(0))


@pytest.mark.parametrize("curvature", [(1.0, 1.0), (0.5, 2.0)])
@pytest.mark.parametrize("centred", [True, False])
def test_both_gradients_vanish_at_the_saddle_and_only_there(
    centred: bool, curvature: tuple[float, float]
) -> None:
    problem = minimax_saddle(
        clients=7, dimension=4, spread=3.0, regularization=0.5, centred=centred, curvature=curvature
    )
    d, batch = Derivatives.of(problem), batch_of(problem)
    x, y = saddle_point(problem)
    assert (x.norm() < 1e-12) == (y.norm() < 1e-12) == centred
    by_y, by_x, _ = d.outer_gradients(y.repeat(7, 1), x.repeat(7, 1), batch)
    assert by_y.mean(0).abs().max() < 1e-12
    assert by_x.mean(0).abs().max() < 1e-12
    assert by_y.abs().max() > 0.1  # clients do not agree
    by_y, by_x, _ = d.outer_gradients(y.repeat(7, 1) + 1, x.repeat(7, 1) - 1, batch)
    assert min(by_y.mean(0).abs().min(), by_x.mean(0).abs().min()) > 0.1


def test_descent_and_ascent_end_at_the_saddle() -> None:
    problem = minimax_saddle(clients=5, dimension=3, regularization=2.0, centred=False)
    d, batch = Derivatives.of(problem), batch_of(problem)
    y = d.inner.flatten(problem.init_inner(torch.Generator().manual_seed(0))).repeat(5, 1)
    x = d.outer.flatten(problem.init_outer(torch.Generator().manual_seed(1))).repeat(5, 1)
    assert min(x.abs().max(), y.abs().max()) > 0.1
    start = evaluate(d, y, x, problem.data.test)["distance"][0]
    for _ in range(200):
        y = y - 0.3 * d.inner_gradient(y, x, batch)[0].mean(0)
        x = x - 0.3 * d.outer_gradients(y, x, batch)[1].mean(0)
    for found, expected in zip((x[0], y[0]), saddle_point(problem), strict=True):
        torch.testing.assert_close(found, expected)
    end, count = evaluate(d, y, x, problem.data.test)["distance"]
    assert count.tolist() == [1] * 5
    assert end.max() < 1e-10 < 1 < start.min()


def test_the_distance_is_euclidean() -> None:
    problem = minimax_saddle(clients=3, dimension=2, centred=False)
    x, y = saddle_point(problem)
    away = torch.tensor([3.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 4.0], dtype=torch.float64)
    distance = problem.metrics["distance"](y + away[1], x + away[0], problem.data.test.of(1))
    assert distance.tolist() == pytest.approx([5.0])


def test_clients_are_as_different_as_asked() -> None:
    t, b, c = minimax_saddle(clients=4000, dimension=2, spread=3.0, curvature=(0.5, 2.0)).data.train.tensors
    assert b.mean(0).abs().max() < 1e-12
    assert b.std(0).tolist() == pytest.approx([3.0] * 2, rel=0.05)
    assert t.mean().item() == pytest.approx(0.05, rel=0.05)
    assert 0.5 <= c.min() < 0.51 < 1.99 < c.max() <= 2.0
    assert t.dtype == b.dtype == c.dtype == torch.float64


def test_other_curvatures_change_nothing_else_about_a_client() -> None:
    paper, other = (minimax_saddle(clients=3, curvature=range_) for range_ in ((1.0, 1.0), (0.5, 2.0)))
    for first, second in zip(paper.data.train.tensors[:2], other.data.train.tensors[:2], strict=True):
        assert torch.equal(first, second)
    x, y = (torch.ones(10, dtype=torch.float64) * value for value in (1.0, 2.0))
    t, b, c = batch = other.data.train.of(0)
    bracket = 0.5 * c * 40 - 2 * b.sum() + 20 * t
    torch.testing.assert_close(other.outer_loss(y, x, batch), (50 - bracket)[0])


def test_a_recipe_builds_the_same_problem_again() -> None:
    first = minimax_saddle(clients=3, seed=4, curvature=(0.5, 2.0))
    assert first.recipe is not None
    again = problem_from_recipe(json.loads(json.dumps(first.recipe.as_dict())))
    assert all(
        torch.equal(a, b) for a, b in zip(first.data.train.tensors, again.data.train.tensors, strict=True)
    )
    assert not torch.equal(
        minimax_saddle(clients=3, seed=5).data.train.tensors[1], first.data.train.tensors[1]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 0}, "minimax_saddle: clients is 0; it must be a whole number, at least 1"),
        ({"dimension": 0}, "dimension is 0"),
        ({"spread": -1.0}, r"minimax_saddle: spread is -1\.0; it must be"),
        (
            {"regularization": 0.0},
            r"minimax_saddle: regularization is 0\.0; it must be a finite number above 0",
        ),
        ({"curvature": (2.0, 1.0)}, r"curvature is \(2\.0, 1\.0\); give the smaller one first"),
    ],
)
def test_saddles_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        minimax_saddle(**arguments)


def test_other_problems_have_no_saddle() -> None:
    with pytest.raises(ScenarioError, match="'quadratic' is no minimax_saddle"):
        saddle_point(quadratic())
