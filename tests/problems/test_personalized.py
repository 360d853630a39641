"""Personalized classification against formulas written out by hand, finite differences and plain autograd."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncfed.data import client_data_from_lists
from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.models import mlp
from asyncfed.problems import (
    Derivatives,
    Problem,
    classification,
    personalized,
    personalized_classification,
    problem_from_recipe,
)
from asyncfed.problems.personalized import label_weights, log_mixture
from asyncfed.problems.whole import evaluate
from tests.data.idx import small_images

CLIENTS, CLASSES, B = 3, 4, 7
KINDS = ("none", "da", "mtl", "mtl+da")


def small(personalize: str, **options: object) -> Problem:
    """Three clients with random inputs in R⁵ and a network 5-6-4, in float64."""
    g = torch.Generator().manual_seed(5)
    shards = [
        (torch.randn(9, 5, generator=g, dtype=torch.float64), torch.randint(CLASSES, (9,), generator=g))
        for _ in range(CLIENTS)
    ]
    data = client_data_from_lists(shards)
    return personalized("small", data, mlp([5, 6, CLASSES]), CLASSES, personalize=personalize, **options)  # type: ignore[arg-type]


class Point:
    """A block of all clients at random variables, with a batch and directions."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.d = problem, Derivatives.of(problem)
        g = torch.Generator().manual_seed(0)
        inner, outer = self.d.inner.d, self.d.outer.d
        self.x, self.u = (torch.randn(CLIENTS, inner, generator=g, dtype=torch.float64) for _ in range(2))
        self.lam, self.w = (torch.randn(CLIENTS, outer, generator=g, dtype=torch.float64) for _ in range(2))
        self.batch = problem.data.train.gather(
            torch.arange(CLIENTS), torch.randint(9, (CLIENTS, B), generator=g)
        )

    def of(self, i: int) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[Tensor, ...]]:
        """Client i's named variables and batch."""
        inner, outer = self.d.inner.views_one(self.x[i]), self.d.outer.views_one(self.lam[i])
        assert isinstance(inner, dict)
        assert isinstance(outer, dict)
        return inner, outer, tuple(t[i] for t in self.batch)

    def flat(self, which: str, i: int, x: Tensor, lam: Tensor) -> Tensor:
        loss: Tensor = getattr(self.problem, which)(
            self.d.inner.views_one(x), self.d.outer.views_one(lam), tuple(t[i] for t in self.batch)
        )
        return loss


def probabilities(x: dict[str, Tensor], k: int | None, inputs: Tensor) -> Tensor:
    """Of model k (None: the only one), by hand."""
    own = {name: tensor if k is None else tensor[k] for name, tensor in x.items()}
    hidden = (inputs @ own["hidden1.weight"].T + own["hidden1.bias"]).clamp(min=0)
    logits = hidden @ own["head.weight"].T + own["head.bias"]
    return logits.exp() / logits.exp().sum(1, keepdim=True)


def prediction(x: dict[str, Tensor], lam: dict[str, Tensor], inputs: Tensor) -> Tensor:
    if "ensemble" not in lam:
        return probabilities(x, None, inputs)
    weights = (lam["ensemble"].exp() / lam["ensemble"].exp().sum()).tolist()
    return sum(
        (weight * probabilities(x, k, inputs) for k, weight in enumerate(weights)),
        start=torch.zeros((), dtype=torch.float64),
    )


def test_label_weights_are_classes_times_softmax() -> None:
    assert label_weights(torch.tensor([1.0, 2.0, 3.0]).log()).tolist() == pytest.approx([0.5, 1.0, 1.5])
    assert label_weights(torch.zeros(5)).tolist() == pytest.approx([1.0] * 5)


def test_a_mixture_is_a_weighted_mean_of_probabilities() -> None:
    each = torch.tensor([[0.2, 0.5], [0.6, 0.1]])
    found = log_mixture(each.log(), torch.tensor([1.0, 3.0]).log()).exp()
    assert found.tolist() == pytest.approx([0.25 * 0.2 + 0.75 * 0.6, 0.25 * 0.5 + 0.75 * 0.1])
    tiny = log_mixture(torch.tensor([-1000.0, -1001.0]), torch.zeros(2))
    assert tiny.item() == pytest.approx(-1000 + math.log((1 + math.exp(-1)) / 2))


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_metrics_are_the_formulas_of_the_paper(kind: str) -> None:
    problem = small(kind, l2=0.3, outer_l2=0.2)
    point = Point(problem)
    for i in range(CLIENTS):
        x, lam, batch = point.of(i)
        inputs, labels = batch
        p = prediction(x, lam, inputs)
        nll = -p[torch.arange(B), labels].log()
        weights = torch.ones(CLASSES, dtype=torch.float64)
        if "labels" in lam:
            weights = CLASSES * lam["labels"].exp() / lam["labels"].exp().sum()
        inner = (weights[labels] * nll).sum() / B + 0.15 * point.x[i].square().sum()
        outer = nll.sum() / B + 0.1 * point.lam[i].square().sum()
        torch.testing.assert_close(problem.inner_loss(x, lam, batch), inner)
        torch.testing.assert_close(problem.outer_loss(x, lam, batch), outer)
        torch.testing.assert_close(problem.metrics["loss"](x, lam, batch), nll)
        assert problem.metrics["accuracy"](x, lam, batch).tolist() == (p.argmax(1) == labels).tolist()


def test_an_ensemble_begins_as_the_mean_of_different_models() -> None:
    problem = small("mtl+da", components=3)
    x, lam = problem.init_inner(torch.Generator().manual_seed(1)), problem.init_outer(torch.Generator())
    assert isinstance(x, dict)
    assert isinstance(lam, dict)
    assert {name: tuple(t.shape) for name, t in x.items()} == {
        "hidden1.weight": (3, 6, 5),
        "hidden1.bias": (3, 6),
        "head.weight": (3, CLASSES, 6),
        "head.bias": (3, CLASSES),
    }
    assert not torch.equal(x["head.weight"][0], x["head.weight"][1])
    assert not torch.equal(x["head.weight"][1], x["head.weight"][2])
    assert {part: tensor.tolist() for part, tensor in lam.items()} == {
        "ensemble": [0.0] * 3,
        "labels": [0.0] * CLASSES,
    }
    assert list(lam) == ["ensemble", "labels"]
    inputs, labels = problem.data.train.of(0)
    inputs = inputs.float()
    mean = torch.stack([probabilities(x, k, inputs) for k in range(3)]).mean(0)
    torch.testing.assert_close(
        problem.metrics["loss"](x, lam, (inputs, labels)), -mean[torch.arange(9), labels].log()
    )


def test_without_personalization_it_is_plain_classification() -> None:
    plain = classification(clients=4, l2=0.1, seed=2)
    same = personalized_classification(clients=4, l2=0.1, seed=2, personalize="none")
    one = personalized_classification(clients=4, l2=0.1, seed=2, personalize="mtl", components=1)
    assert one.outer_split == same.outer_split == "train"
    assert same.init_outer(torch.Generator()) == {}
    found = []
    for problem in (plain, same, one):
        d = Derivatives.of(problem)
        x = d.inner.flatten(problem.init_inner(torch.Generator().manual_seed(0))).repeat(4, 1)
        lam = x.new_zeros(4, d.outer.d)
        batch = problem.data.train.gather(torch.arange(4), torch.arange(5).repeat(4, 1))
        metrics = evaluate(d, x, lam, problem.data.test)
        found.append((*d.inner_gradient(x, lam, batch), metrics["loss"][0], metrics["accuracy"][0]))
    for expected, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(other, expected, rtol=1e-5, atol=1e-6)


def test_every_part_has_its_own_rate() -> None:
    point = Point(small("mtl+da"))
    x, lam, batch = point.of(0)
    plain = point.problem.outer_loss(x, lam, batch)
    ensemble, labels = (lam[part].square().sum() for part in ("ensemble", "labels"))
    for outer_l2, penalty in (
        (0.4, 0.2 * (ensemble + labels)),
        ({"ensemble": 0.01, "labels": 0.0005}, 0.005 * ensemble + 0.00025 * labels),
        ({"labels": 2.0}, labels),
    ):
        problem = small("mtl+da", outer_l2=outer_l2)
        torch.testing.assert_close(problem.outer_loss(x, lam, batch), plain + penalty)
        assert torch.equal(problem.inner_loss(x, lam, batch), point.problem.inner_loss(x, lam, batch))


def slopes(function: object, at: Tensor, h: float = 1e-6) -> Tensor:
    """Central differences of a function of one flat row, one row per coordinate."""
    steps = h * torch.eye(len(at), dtype=torch.float64)
    return torch.stack([(function(at + e) - function(at - e)) / (2 * h) for e in steps])  # type: ignore[operator]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_derivatives_in_the_outer_variable_agree_with_finite_differences(kind: str) -> None:
    point = Point(small(kind, l2=0.3, outer_l2=0.2))
    x, lam, d = point.x, point.lam, point.d
    by_lam = d.inner_outer_gradient(x, lam, point.batch)
    cross = d.inner_cross_vector(x, lam, point.batch, point.u)
    transposed = d.inner_cross_transposed(x, lam, point.batch, point.w)
    F_x, F_lam, _ = d.outer_gradients(x, lam, point.batch)
    for i in range(CLIENTS):

        def gradient_along_u(lam_: Tensor, i: int = i) -> Tensor:
            moved = lam.clone()
            moved[i] = lam_
            return d.inner_gradient(x, moved, point.batch)[0][i] @ point.u[i]

        def outer_gradient_along_w(x_: Tensor, i: int = i) -> Tensor:
            moved = x.clone()
            moved[i] = x_
            return d.inner_outer_gradient(moved, lam, point.batch)[i] @ point.w[i]

        for found, expected in (
            (by_lam, slopes(lambda a, i=i: point.flat("inner_loss", i, x[i], a), lam[i])),
            (F_lam, slopes(lambda a, i=i: point.flat("outer_loss", i, x[i], a), lam[i])),
            (F_x, slopes(lambda a, i=i: point.flat("outer_loss", i, a, lam[i]), x[i])),
            (cross, slopes(gradient_along_u, lam[i])),
            (transposed, slopes(outer_gradient_along_w, x[i])),
        ):
            torch.testing.assert_close(found[i], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_hessian_products_agree_with_plain_autograd_and_one_by_one(kind: str) -> None:
    problem = small(kind, l2=0.3, outer_l2=0.2)
    found = []
    for vectorize in (True, False):
        point = Point(dataclasses.replace(problem, vectorize=vectorize))
        arguments = (point.x, point.lam, point.batch)
        found.append(
            (
                *point.d.inner_gradient(*arguments),
                point.d.inner_hessian_vector(*arguments, point.u),
                point.d.inner_cross_vector(*arguments, point.u),
                *point.d.outer_gradients(*arguments),
                *(total for total, _ in evaluate(point.d, point.x, point.lam, problem.data.train).values()),
            )
        )
    for vmapped, looped in zip(*found, strict=True):
        torch.testing.assert_close(vmapped, looped, rtol=1e-10, atol=1e-12)
    for i in range(CLIENTS):
        x = point.x[i].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(point.flat("inner_loss", i, x, point.lam[i]), x, create_graph=True)
        (product,) = torch.autograd.grad(gradient @ point.u[i], x)
        torch.testing.assert_close(found[0][2][i], product, rtol=1e-10, atol=1e-12)


def test_an_ensemble_of_convolutional_networks_runs_client_by_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_images(tmp_path / "EMNIST" / "raw", "emnist-byclass-test", packed=True)
    monkeypatch.setenv("ASYNCFED_DATA", str(tmp_path))
    problem = personalized_classification("emnist", 2, "cnn", "mtl", components=2, partition="iid")
    assert not problem.vectorize
    d = Derivatives.of(problem)
    assert d.inner.d == 2 * 2_278_334
    x = d.inner.flatten(problem.init_inner(torch.Generator().manual_seed(0))).unsqueeze(0)
    lam = torch.tensor([[0.3, -0.2]])
    batch = tuple(t[:3].unsqueeze(0) for t in problem.data.train.tensors)
    gradient, loss = d.inner_gradient(x, lam, batch)
    step = 1e-2 * gradient / gradient.norm()
    _, lower = d.inner_gradient(x - step, lam, batch)
    assert (loss - lower).item() == pytest.approx(1e-2 * gradient.norm().item(), rel=0.1)


@pytest.mark.parametrize("outer_l2", [0.01, {"ensemble": 0.01, "labels": 0.0005}])
def test_a_recipe_builds_the_same_problem_again(outer_l2: float | dict[str, float]) -> None:
    first = personalized_classification(clients=6, personalize="mtl&da", outer_l2=outer_l2, seed=3)
    assert first.name == "digits-logistic-mtl+da"
    assert first.recipe is not None
    assert first.recipe.arguments["outer_l2"] == outer_l2
    again = problem_from_recipe(json.loads(json.dumps(first.recipe.as_dict())))
    assert again.recipe == first.recipe
    assert torch.equal(first.data.train.tensors[0], again.data.train.tensors[0])


def test_personalizations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown personalization 'mlt'.*Known: da, mtl, mtl\+da, none"
    ):
        small("mlt")
    with pytest.raises(
        ScenarioError, match="personalized: components is 0; it must be a whole number in \\[1, 10,000\\]"
    ):
        small("mtl", components=0)
    with pytest.raises(ScenarioError, match=r"outer_l2\['labels'\] is -0\.1; it must be a finite number"):
        small("mtl+da", outer_l2={"labels": -0.1})
    with pytest.raises(ScenarioError, match=r"outer_l2 is -1; it must be .*, or a mapping"):
        small("mtl", outer_l2=-1)
    with pytest.raises(
        UnknownNameError, match=r"unknown part of the outer variable of 'mtl' in outer_l2 'labels'.*ensemble"
    ):
        small("mtl", outer_l2={"labels": 0.1})
    with pytest.raises(ScenarioError, match="outer_split is 'test'"):
        small("da", outer_split="test")
