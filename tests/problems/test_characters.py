"""Personalized next-character prediction on a small play, and on the real text where it is at hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from asyncfed import Scenario, run
from asyncfed.data import load_shakespeare
from asyncfed.models import char_lstm
from asyncfed.problems import Derivatives, Problem, personalized_characters, problem_from_recipe
from asyncfed.problems.whole import evaluate
from asyncfed.protocols import FedEM, LocalSteps
from tests.data.test_shakespeare import needs_shakespeare, play, written
from topologies import star

SMALL = {"clients": 2, "hidden": 4, "length": 6, "components": 2, "min_characters": 50}


def predictions(x: dict[str, torch.Tensor], sequences: torch.Tensor) -> torch.Tensor:
    """Probabilities (2, B, length, classes) of both models."""
    module = char_lstm(x["head.bias"].shape[1], 8, 4, 2)
    own = ({name: tensor[k] for name, tensor in x.items()} for k in range(2))
    return torch.stack([functional_call(module, each, (sequences,)).softmax(-1) for each in own])


def at_labels(probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat = probabilities.flatten(0, -2)
    return flat[torch.arange(len(flat)), labels.flatten()].view(labels.shape)


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
    each = predictions(x, sequences)
    mean = (each[0] + each[1]) / 2
    loss, accuracy = (problem.metrics[name](x, lam, batch) for name in ("loss", "accuracy"))
    assert loss.shape == accuracy.shape == (len(labels),)
    torch.testing.assert_close(loss, -at_labels(mean, labels).log().mean(1))
    torch.testing.assert_close(accuracy, (mean.argmax(-1) == labels).float().mean(1))
    joint = problem.measured(x, lam, batch)
    assert torch.equal(joint["loss"], loss)
    assert torch.equal(joint["accuracy"], accuracy)


def test_ensembles_are_mixed_and_labels_are_weighed_at_every_position(problem: Problem) -> None:
    d = Derivatives.of(problem)
    g = torch.Generator().manual_seed(3)
    x = d.inner.views_one(torch.randn(d.inner.d, generator=g, dtype=torch.float64))
    lam = d.outer.views_one(torch.randn(d.outer.d, generator=g, dtype=torch.float64))
    assert isinstance(x, dict)
    assert isinstance(lam, dict)
    batch = sequences, labels = problem.data.train.of(0)
    share, classes = lam["ensemble"].softmax(0), len(lam["labels"])
    each = predictions(x, sequences)
    losses = -at_labels(share[0] * each[0] + share[1] * each[1], labels).log()
    weights = torch.tensor(
        [[classes * lam["labels"].softmax(0)[label] for label in row] for row in labels.tolist()]
    )
    square = sum(tensor.square().sum() for tensor in x.values())
    torch.testing.assert_close(
        problem.inner_loss(x, lam, batch), (weights.double() * losses).mean() + 0.05 * square
    )
    torch.testing.assert_close(
        problem.outer_loss(x, lam, batch), losses.mean() + 0.1 * lam["labels"].square().sum()
    )
    torch.testing.assert_close(problem.metrics["loss"](x, lam, batch), losses.mean(1))


def test_a_loss_may_be_over_the_last_position_only(problem: Problem) -> None:
    last = personalized_characters(**SMALL, positions="last")  # type: ignore[arg-type]
    x, lam = problem.init_inner(torch.Generator().manual_seed(0)), problem.init_outer(torch.Generator())
    assert isinstance(x, dict)
    sequences, labels = last.data.train.of(1)
    assert torch.equal(sequences, problem.data.train.of(1)[0])
    assert torch.equal(labels, problem.data.train.of(1)[1][:, -1])
    mean = predictions(x, sequences).mean(0)[:, -1]
    losses = -at_labels(mean, labels).log()
    torch.testing.assert_close(last.outer_loss(x, lam, (sequences, labels)), losses.mean())
    torch.testing.assert_close(last.metrics["loss"](x, lam, (sequences, labels)), losses)


def test_a_mixture_has_one_loss_for_each_model_and_sample(problem: Problem) -> None:
    mtl = personalized_characters(**SMALL, personalize="mtl")  # type: ignore[arg-type]
    x = problem.init_inner(torch.Generator().manual_seed(0))
    assert isinstance(x, dict)
    assert mtl.mixture is not None
    batch = sequences, labels = mtl.data.train.of(1)
    expected = torch.stack([-at_labels(own, labels).log().mean(1) for own in predictions(x, sequences)])
    torch.testing.assert_close(mtl.mixture.losses(x, batch), expected)
    method = FedEM(2, LocalSteps(0.5, steps=2, batch=4))
    result = run(Scenario(problem=mtl, topology=star(2), protocol=method))
    assert result.metrics["train_loss"].notna().any()


@pytest.mark.usefixtures("problem")
def test_recorded_derivatives_are_those_of_the_functions() -> None:
    """After some calls the operations of a gradient are recorded, with those that write into buffers."""
    small = SMALL | {"length": 2, "layers": 1, "personalize": "none"}
    problem = personalized_characters(**small)  # type: ignore[arg-type]
    together, alone = (
        Derivatives.of(dataclasses.replace(problem, vectorize=vectorize)) for vectorize in (True, False)
    )
    d, g = together, torch.Generator().manual_seed(1)
    lam, batch = torch.empty(2, 0), problem.data.train.gather(torch.arange(2), torch.arange(5).repeat(2, 1))
    for call in range(30):
        x, u = (0.3 * torch.randn(2, d.inner.d, generator=g, dtype=torch.float64) for _ in range(2))
        found = d.inner_gradient(x, lam, batch)[0], d.inner_hessian_vector(x, lam, batch, u)
        if call > 25:
            expected = alone.inner_gradient(x, lam, batch)[0], alone.inner_hessian_vector(x, lam, batch, u)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for replay in (d._replayed["inner"], d._replayed["hessian"]):
        assert [form.recorded is not None for form in replay._forms.values()] == [True]


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
    correct, count = evaluate(d, x, lam, problem.data.test)["accuracy"]
    assert (correct.sum() / count.sum()).item() > 0.2  # always a blank, the most frequent character: 0.16
