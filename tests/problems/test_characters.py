"""Personalized next-character prediction on a small play, and on the real text where it is at hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from asyncfed.data import load_shakespeare
from asyncfed.models import char_lstm
from asyncfed.problems import Derivatives, Problem, personalized_characters, problem_from_recipe
from tests.data.test_shakespeare import needs_shakespeare, play, written

SMALL = {"clients": 2, "hidden": 4, "length": 6, "components": 2, "min_characters": 50}


@pytest.fixture
def problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Problem:
    monkeypatch.setenv("ASYNCFED_DATA", str(written(tmp_path, play())))
    return personalized_characters(**SMALL, l2=0.1, outer_l2={"labels": 0.2})  # type: ignore[arg-type]


def test_the_labels_are_the_characters(problem: Problem) -> None:
    classes = load_shakespeare(2, 6, min_characters=50).classes
    lam = problem.init_outer(torch.Generator())
    assert isinstance(lam, dict)
    assert {part: tuple(tensor.shape) for part, tensor in lam.items()} == {
        "ensemble": (2,),
        "labels": (classes,),
    }
    assert problem.outer_split == "train"
    assert problem.vectorize


def test_the_prediction_is_the_mean_of_the_networks_at_the_beginning(problem: Problem) -> None:
    x, lam = problem.init_inner(torch.Generator().manual_seed(0)), problem.init_outer(torch.Generator())
    assert isinstance(x, dict)
    batch = sequences, labels = problem.data.train.of(1)
    module = char_lstm(x["head.bias"].shape[1], 8, 4, 2)
    each = [
        functional_call(module, {name: tensor[k] for name, tensor in x.items()}, (sequences,)).softmax(1)
        for k in range(2)
    ]
    mean = (each[0] + each[1]) / 2
    torch.testing.assert_close(
        problem.metrics["loss"](x, lam, batch), -mean[torch.arange(len(labels)), labels].log()
    )
    torch.testing.assert_close(
        problem.metrics["accuracy"](x, lam, batch), (mean.argmax(1) == labels).to(torch.float32)
    )


def test_clients_together_and_one_by_one_agree_up_to_second_derivatives(problem: Problem) -> None:
    found = []
    for vectorize in (True, False):
        d = Derivatives.of(dataclasses.replace(problem, vectorize=vectorize))
        g = torch.Generator().manual_seed(1)
        x, u = (0.3 * torch.randn(2, d.inner.d, generator=g, dtype=torch.float64) for _ in range(2))
        lam = torch.randn(2, d.outer.d, generator=g, dtype=torch.float64)
        batch = problem.data.train.gather(torch.arange(2), torch.arange(5).repeat(2, 1))
        gradient, loss = d.inner_gradient(x, lam, batch)
        product = d.inner_hessian_vector(x, lam, batch, u)
        cross = d.inner_cross_vector(x, lam, batch, u)
        found.append((gradient, loss, product, cross, *d.outer_gradients(x, lam, batch)))
        h = 1e-6
        ahead, behind = (d.inner_gradient(x + step * u, lam, batch)[0] for step in (h, -h))
        torch.testing.assert_close(product, (ahead - behind) / (2 * h), rtol=1e-5, atol=1e-8)
    for vmapped, looped in zip(*found, strict=True):
        torch.testing.assert_close(vmapped, looped, rtol=1e-9, atol=1e-12)


def test_a_recipe_builds_the_same_problem_again(problem: Problem) -> None:
    assert problem.recipe is not None
    again = problem_from_recipe(json.loads(json.dumps(problem.recipe.as_dict())))
    assert again.recipe == problem.recipe
    assert torch.equal(problem.data.test.tensors[0], again.data.test.tensors[0])


@pytest.mark.usefixtures("problem")
def test_wide_networks_run_client_by_client() -> None:
    assert not personalized_characters(**(SMALL | {"hidden": 256})).vectorize  # type: ignore[arg-type]


@needs_shakespeare
def test_gradient_descent_learns_what_speakers_say() -> None:
    problem = personalized_characters(clients=3, hidden=16, layers=1, length=12, personalize="none", stride=2)
    d = Derivatives.of(problem)
    x = d.inner.flatten(problem.init_inner(torch.Generator().manual_seed(0))).repeat(3, 1)
    lam, train, generator = x.new_empty(3, 0), problem.data.train, torch.Generator().manual_seed(1)
    for _ in range(200):
        index = torch.randint(int(train.sizes.min()), (3, 32), generator=generator)
        step, _ = d.inner_gradient(x, lam, train.gather(torch.arange(3), index), scale=-2.0)
        x = (x + step).mean(0, keepdim=True).repeat(3, 1)
    correct, count = d.evaluate(x, lam, problem.data.test)["accuracy"]
    assert (correct.sum() / count.sum()).item() > 0.2  # always a blank, the most frequent character: 0.16
