"""The one-feature problem: its formulas, its data, and that plain descent solves it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from asyncfed.data import load_dataset
from asyncfed.errors import DataError, ScenarioError
from asyncfed.problems import Derivatives, Problem, logistic_pair, problem_from_recipe
from asyncfed.problems.whole import evaluate

real = os.environ.get("ASYNCFED_DATA")
needs_mnist = pytest.mark.skipif(
    real is None or not Path(real, "MNIST").is_dir(),
    reason="ASYNCFED_DATA does not point to a directory with MNIST",
)


def from_digits(**options: object) -> Problem:
    return logistic_pair(**({"samples": 40, "dataset": "digits"} | options))  # type: ignore[arg-type]


def test_the_losses_are_binary_cross_entropies() -> None:
    problem = from_digits(l2=0.3)
    assert problem.outer_split == "validation"
    g = torch.Generator().manual_seed(0)
    w, c = torch.randn(2, generator=g, dtype=torch.float64)
    lam = torch.randn(2, generator=g, dtype=torch.float64)
    x = {"weight": w, "bias": c}
    for client in range(3):
        feature, label = batch = problem.data.train.of(client)
        each = binary_cross_entropy_with_logits(
            w * feature[:, 0] + c, label.to(torch.float64), reduction="none"
        )
        weights = 2 * lam.exp() / lam.exp().sum()
        inner = (weights[label] * each).mean() + 0.15 * (w * w + c * c)
        torch.testing.assert_close(problem.inner_loss(x, {"labels": lam}, batch), inner)
        torch.testing.assert_close(problem.outer_loss(x, {"labels": lam}, batch), each.mean())
        torch.testing.assert_close(problem.metrics["loss"](x, {"labels": lam}, batch), each)


def test_the_feature_is_the_mean_pixel_of_two_digits() -> None:
    digits = load_dataset("digits")
    raw = from_digits(digits=(3, 8), standardize=False, seed=4)
    assert raw.name == "digits-3-or-8-da"
    means = {
        label: {round(x.mean().item(), 6) for x in digits.x[digits.y == digit].double()}
        for label, digit in enumerate((3, 8))
    }
    for split in (raw.data.train, raw.data.validation):
        feature, label = split.tensors
        assert feature.dtype == torch.float64
        assert split.sizes.tolist() == [40, 40, 40]
        for value, own in zip(feature[:, 0].tolist(), label.tolist(), strict=True):
            assert round(value, 6) in means[own]
    assert raw.data.test.total == 0
    scaled = from_digits(digits=(3, 8), seed=4).data
    train = scaled.train.tensors[0]
    assert train.mean().item() == pytest.approx(0, abs=1e-12)
    assert train.std(correction=0).item() == pytest.approx(1)
    deviation, mean = torch.std_mean(raw.data.train.tensors[0], correction=0)
    torch.testing.assert_close(
        scaled.validation.tensors[0], (raw.data.validation.tensors[0] - mean) / deviation
    )


def test_no_image_is_dealt_twice() -> None:
    digits = load_dataset("digits")
    images = digits.x[digits.y <= 1].double()
    problem = from_digits(digits=(0, 1), samples=60, standardize=False)  # 3 · (60 + 60) = all 360 of them
    dealt = torch.cat((problem.data.train.tensors[0], problem.data.validation.tensors[0]))
    torch.testing.assert_close(dealt[:, 0].sort().values, images.mean(1).sort().values)


def test_the_seed_draws_the_digits_and_deals_the_samples() -> None:
    names = [from_digits(seed=seed).name for seed in range(6)]
    assert len(set(names)) > 3
    first, again, other = (from_digits(digits=(0, 1), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.data.train.tensors[0], again.data.train.tensors[0])
    assert not torch.equal(first.data.train.tensors[0], other.data.train.tensors[0])


def descend(problem: Problem, steps: int, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient descent on the mean of the inner losses from 0 at λ = 0; the point and its last gradient."""
    d, clients = Derivatives.of(problem), problem.clients
    x = d.inner.flatten(problem.init_inner(torch.Generator())).double().repeat(clients, 1)
    assert (x == 0).all()
    lam = x.new_zeros(clients, d.outer.d)
    samples = int(problem.data.train.sizes[0])
    batch = problem.data.train.gather(torch.arange(clients), torch.arange(samples).repeat(clients, 1))
    for _ in range(steps):
        gradient = d.inner_gradient(x, lam, batch)[0].mean(0)
        x = x - lr * gradient
    return x[0], gradient


@pytest.mark.parametrize("seed", range(3))
def test_500_steps_at_rate_1_solve_the_inner_problem(seed: int) -> None:
    _, gradient = descend(from_digits(seed=seed), 500, 1.0)
    assert gradient.abs().max() < 1e-10


@needs_mnist
def test_the_problem_of_the_paper() -> None:
    problem = logistic_pair(digits=(1, 2))
    assert problem.data.train.sizes.tolist() == problem.data.validation.sizes.tolist() == [100] * 3
    x, gradient = descend(problem, 500, 1.0)
    assert gradient.abs().max() < 1e-10
    assert x[0] > 1  # a two has more ink than a one
    correct = evaluate(Derivatives.of(problem), x.repeat(3, 1), x.new_zeros(3, 2), problem.data.validation)
    assert correct["accuracy"][0].sum() > 0.8 * 300


def test_a_recipe_builds_the_same_problem_again() -> None:
    first = from_digits(seed=5, personal="none")
    assert first.init_outer(torch.Generator()) == {}
    assert first.recipe is not None
    again = problem_from_recipe(json.loads(json.dumps(first.recipe.as_dict())))
    assert again.recipe == first.recipe
    assert torch.equal(first.data.validation.tensors[0], again.data.validation.tensors[0])


def test_pairs_that_make_no_sense_are_refused() -> None:
    for digits in ((3, 3), (1, 10), (1, 2, 3)):
        with pytest.raises(DataError, match=r"they must be two different labels in 0\.\.9"):
            from_digits(digits=digits)
    with pytest.raises(DataError, match=r"need 600, but 'digits' has 36\d images of 0 and 1; use at most 60"):
        from_digits(digits=(0, 1), samples=100)
    with pytest.raises(DataError, match="personal is 'label'; did you mean 'labels'"):
        from_digits(personal="label")
    with pytest.raises(ScenarioError, match=r"l2 is 0\.0; it must be a finite number above 0"):
        from_digits(l2=0.0)
    with pytest.raises(DataError, match="clients is 0; it must be a whole number, at least 1"):
        from_digits(clients=0)
