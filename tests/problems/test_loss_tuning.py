"""Loss tuning: the VS-loss by hand, weights that belong to everybody's data, and what balance means."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncfed.data import class_counts
from asyncfed.errors import DataError, ScenarioError
from asyncfed.problems import Derivatives, Problem, loss_tuning, problem_from_recipe
from asyncfed.problems.whole import evaluate, whole_outer_gradients

real = os.environ.get("ASYNCFED_DATA")
needs_mnist = pytest.mark.skipif(
    real is None or not Path(real, "MNIST").is_dir(),
    reason="ASYNCFED_DATA does not point to a directory with MNIST",
)


def from_digits(**options: object) -> Problem:
    defaults = {"dataset": "digits", "clients": 4, "model": "mlp:8", "largest": 150, "ratio": 0.1}
    return loss_tuning(**(defaults | options))  # type: ignore[arg-type]


def somewhere(problem: Problem) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    g = torch.Generator().manual_seed(3)
    y = problem.init_inner(g)
    assert isinstance(y, dict)
    return y, {name: torch.randn(10, generator=g) for name in ("multiplicative", "additive")}


def logits_of(y: dict[str, Tensor], images: Tensor) -> Tensor:
    hidden = (images @ y["hidden1.weight"].T + y["hidden1.bias"]).clamp(min=0)
    return hidden @ y["head.weight"].T + y["head.bias"]


def negative_log(logits: Tensor, labels: Tensor) -> Tensor:
    probabilities = logits.exp() / logits.exp().sum(1, keepdim=True)
    return -probabilities[torch.arange(len(labels)), labels].log()


@pytest.mark.parametrize("train_weights", ["equal", "balanced"])
def test_the_inner_loss_is_the_vs_loss(train_weights: str) -> None:
    problem = from_digits(train_weights=train_weights, l2=0.2)
    y, x = somewhere(problem)
    images, _, labels = batch = problem.data.train.of(1)
    delta = 2 / (1 + (-x["multiplicative"]).exp())
    each = negative_log(delta * logits_of(y, images) + x["additive"], labels)
    if train_weights == "balanced":
        counts = torch.bincount(problem.data.train.tensors[2])
        each = each * problem.data.train.total / (10 * counts[labels])
    penalty = 0.1 * sum(tensor.square().sum() for tensor in y.values())
    torch.testing.assert_close(problem.inner_loss(y, x, batch), each.mean() + penalty)


def test_tuning_starts_at_plain_cross_entropy() -> None:
    problem = from_digits()
    y, _ = somewhere(problem)
    images, _, labels = batch = problem.data.train.of(0)
    x = problem.init_outer(torch.Generator())
    plain = torch.nn.functional.cross_entropy(logits_of(y, images), labels)
    torch.testing.assert_close(problem.inner_loss(y, x, batch), plain)


def test_the_mean_of_the_outer_losses_is_the_loss_averaged_over_classes() -> None:
    problem = from_digits(partition="shards:3", clients=5, fractions=(0.5, 0.5, 0.0))
    y, x = somewhere(problem)
    validation = problem.data.validation
    images, _, labels = validation.tensors
    each = negative_log(logits_of(y, images), labels)
    classes = [each[labels == label].mean() for label in labels.unique()]
    shares = torch.from_numpy(validation.sizes / validation.total)
    found = torch.stack([problem.outer_loss(y, x, validation.of(i)) for i in range(5)])
    torch.testing.assert_close((found * shares).sum().float(), torch.stack(classes).mean())
    whole = class_counts(validation, 10).to_numpy()
    assert (whole == 0).any()  # clients lack classes, and still the weights are everybody's


def test_the_outer_variable_acts_through_the_model_alone() -> None:
    problem = from_digits()
    d = Derivatives.of(problem)
    y = d.inner.flatten(problem.init_inner(torch.Generator().manual_seed(0))).repeat(4, 1)
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    by_y, by_x, _ = whole_outer_gradients(d, y, x, problem.data.validation)
    assert (by_x == 0).all()
    assert by_y.abs().max() > 0
    batch = problem.data.train.gather(torch.arange(4), torch.arange(9).repeat(4, 1))
    assert d.inner_cross_vector(y, x, batch, torch.ones_like(y)).abs().min() > 0
    assert d.unused_outer(problem.data.train.of(0)) == []


@pytest.mark.parametrize("split", ["validation", "test"])
def test_balanced_accuracy_is_the_mean_over_classes_of_each_ones_accuracy(split: str) -> None:
    problem = from_digits(ratio=0.3, seed=1)
    shards = getattr(problem.data, split)
    d = Derivatives.of(problem)
    y, x = somewhere(problem)
    right, seen = np.zeros(10), np.zeros(10)
    for image, _, label in zip(*shards.tensors, strict=True):
        seen[label] += 1
        right[label] += int(logits_of(y, image.unsqueeze(0)).argmax()) == int(label)
    flat = d.inner.flatten(y).repeat(4, 1), d.outer.flatten(x).repeat(4, 1)
    found = {
        name: (total.sum() / count.sum()).item()
        for name, (total, count) in evaluate(d, *flat, shards).items()
    }
    assert len(set(seen)) > 2
    assert found["balanced_accuracy"] == pytest.approx(np.mean(right[seen > 0] / seen[seen > 0]))
    assert found["accuracy"] == pytest.approx(right.sum() / seen.sum())
    assert found["accuracy"] != pytest.approx(found["balanced_accuracy"], abs=1e-3)


def test_data_are_long_tailed_and_split_four_to_one() -> None:
    problem = from_digits(clients=2)
    data = problem.data
    assert class_counts(data, 10).sum().tolist() == [150, 116, 90, 70, 54, 42, 32, 25, 19, 15]
    own = data.train.total + data.validation.total
    assert data.validation.total / own == pytest.approx(0.2, abs=0.01)
    assert data.test.total / (own + data.test.total) == pytest.approx(0.2, abs=0.01)


@needs_mnist
def test_the_problem_of_the_paper() -> None:
    problem = loss_tuning()
    d = Derivatives.of(problem)
    assert d.inner.d == 784 * 200 + 200 + 200 * 100 + 100 + 100 * 10 + 10
    assert d.outer.names == ("multiplicative", "additive")
    assert d.outer.d == 20
    own = class_counts(problem.data.train, 10) + class_counts(problem.data.validation, 10)
    assert own.sum().tolist() == [5923, 3597, 2156, 1293, 775, 465, 278, 167, 100, 60]
    assert set(problem.data.train.sizes) == {118, 119}
    assert set(problem.data.validation.sizes) == {30}
    assert set(problem.data.test.sizes) == {100}


def test_a_recipe_builds_the_same_problem_again() -> None:
    first = from_digits(seed=3, train_weights="balanced")
    assert first.recipe is not None
    again = problem_from_recipe(json.loads(json.dumps(first.recipe.as_dict())))
    assert again.recipe == first.recipe
    for a, b in zip(first.data.validation.tensors, again.data.validation.tensors, strict=True):
        assert torch.equal(a, b)


def test_losses_that_cannot_be_tuned_are_refused() -> None:
    with pytest.raises(DataError, match="train_weights is 'balance'; did you mean 'balanced'"):
        from_digits(train_weights="balance")
    with pytest.raises(ScenarioError, match=r"l2 is -1; it must be a finite number, at least 0"):
        from_digits(l2=-1)
    with pytest.raises(DataError, match="ratio is 2; it must be a number in"):
        from_digits(ratio=2)
    with pytest.raises(DataError, match="the second fraction must be positive"):
        from_digits(fractions=(1.0, 0.0, 0.0))
