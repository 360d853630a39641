"""Regularization tuning: the penalty by hand, and a hypergradient against the slope of the answer."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from asyncfed.errors import ScenarioError
from asyncfed.problems import Derivatives, Problem, problem_from_recipe, regularization_tuning
from asyncfed.problems.whole import whole_inner_jacobians, whole_outer_gradients


def small(**options: object) -> Problem:
    return regularization_tuning(**({"clients": 3} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["logistic", "mlp:6"])
@pytest.mark.parametrize("per", ["class", "parameter"])
def test_the_penalty_weighs_every_row_or_every_number(per: str, model: str) -> None:
    problem = small(per=per, model=model, l2=0.2)
    g = torch.Generator().manual_seed(0)
    y, x = problem.init_inner(g), problem.init_outer(g)
    assert isinstance(y, dict)
    assert isinstance(x, dict)
    assert {round(value, 5) for tensor in x.values() for value in tensor.flatten().tolist()} == {
        round(math.log(0.01), 5)
    }
    x = {name: torch.randn(tensor.shape, generator=g) for name, tensor in x.items()}
    batch = problem.data.train.of(1)
    plain = problem.outer_loss(y, x, batch)
    penalty = 0.1 * sum(tensor.square().sum().item() for tensor in y.values())
    if per == "class":
        for label, rate in enumerate(x["class"].exp().tolist()):
            row = [*y["head.weight"][label].tolist(), y["head.bias"][label].item()]
            penalty += 0.5 * rate * sum(number**2 for number in row)
    else:
        assert {name: t.shape for name, t in x.items()} == {name: t.shape for name, t in y.items()}
        penalty += sum((0.5 * x[name].exp() * y[name] ** 2).sum().item() for name in y)
    assert problem.inner_loss(y, x, batch).item() == pytest.approx(plain.item() + penalty, rel=1e-5)


def solved(images: Tensor, labels: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax regression with a decay per class, by hand: its weights, bias last (C, 65), and its Hessian."""
    features = torch.cat((images, torch.ones(len(images), 1, dtype=torch.float64)), 1)
    decay = rates.repeat_interleave(65)
    W = torch.zeros(10, 65, dtype=torch.float64)
    for _ in range(15):
        p = torch.softmax(features @ W.T, 1)
        error = p - torch.nn.functional.one_hot(labels, 10)
        gradient = (error.T @ features / len(labels)).flatten() + decay * W.flatten()
        curvature = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        each = torch.einsum("nab,ni,nj->aibj", curvature, features, features) / len(labels)
        hessian = each.reshape(650, 650) + decay.diag()
        W = W - torch.linalg.solve(hessian, gradient).view(10, 65)
    assert gradient.norm() < 1e-10
    return W, hessian


def test_the_implicit_hypergradient_is_the_slope_of_the_validation_loss() -> None:
    problem = small(limit=90, clients=1, fractions=(0.5, 0.4, 0.1), rate=0.1)
    train, validation = problem.data.train.to(torch.float64), problem.data.validation.to(torch.float64)
    d, x = Derivatives.of(problem), torch.linspace(-3, -1, 10, dtype=torch.float64)

    def flat(W: Tensor) -> Tensor:
        return d.inner.flatten({"head.weight": W[:, :-1], "head.bias": W[:, -1]}).unsqueeze(0)

    def answer(x: Tensor) -> Tensor:
        W, _ = solved(*train.of(0), x.exp())
        return whole_outer_gradients(d, flat(W), x.unsqueeze(0), validation)[2]

    W, hessian = solved(*train.of(0), x.exp())
    gradient, _ = d.inner_gradient(flat(W), x.unsqueeze(0), tuple(t.unsqueeze(0) for t in train.of(0)))
    assert gradient.abs().max() < 1e-10
    by_y, by_x, _ = whole_outer_gradients(d, flat(W), x.unsqueeze(0), validation)
    assert (by_x == 0).all()
    views = d.inner.views_one(by_y[0])
    assert isinstance(views, dict)
    q = torch.linalg.solve(
        hessian, torch.cat((views["head.weight"], views["head.bias"][:, None]), 1).flatten()
    )
    batch = tuple(t.unsqueeze(0) for t in train.of(0))
    hypergradient = -d.inner_cross_vector(flat(W), x.unsqueeze(0), batch, flat(q.view(10, 65)))[0]
    for label in (0, 7):
        nudge = 1e-4 * torch.nn.functional.one_hot(torch.tensor(label), 10)
        slope = (answer(x + nudge) - answer(x - nudge))[0] / 2e-4
        torch.testing.assert_close(hypergradient[label], slope, rtol=1e-5, atol=1e-9)


def test_every_client_of_a_logistic_model_is_strongly_convex_per_class() -> None:
    problem = small(limit=30, clients=2, rate=0.05)
    d = Derivatives.of(problem)
    y = torch.zeros(2, d.inner.d)
    x = d.outer.flatten(problem.init_outer(torch.Generator())).repeat(2, 1)
    hessian, _ = whole_inner_jacobians(d, y, x, problem.data.train)
    assert torch.linalg.eigvalsh(hessian).min().item() == pytest.approx(0.05, rel=0.01)


def test_a_recipe_builds_the_same_problem_again() -> None:
    first = small(per="parameter", model="mlp:5", seed=3)
    assert first.name == "digits-mlp:5-decay-per-parameter"
    assert first.recipe is not None
    again = problem_from_recipe(json.loads(json.dumps(first.recipe.as_dict())))
    assert again.recipe == first.recipe
    assert torch.equal(first.data.validation.tensors[0], again.data.validation.tensors[0])
    assert first.outer_split == "validation"


def test_decays_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ScenarioError, match="per is 'classes'; did you mean 'class'"):
        small(per="classes")
    with pytest.raises(ScenarioError, match="rate is 0; it must be a finite number above 0"):
        small(rate=0)
    with pytest.raises(ScenarioError, match=r"l2 is -0\.5; it must be a finite number, at least 0"):
        small(l2=-0.5)
