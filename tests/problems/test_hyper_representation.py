"""Hyper-representation: where the network is cut, its losses by hand, and its two stages."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from asyncfed.errors import DataError, ScenarioError, UnknownNameError
from asyncfed.models import build_model
from asyncfed.problems import Derivatives, Problem, hyper_representation, problem_from_recipe
from asyncfed.problems.whole import whole_outer_gradients
from tests.data.idx import small_images

real = os.environ.get("ASYNCFED_DATA")
needs_mnist = pytest.mark.skipif(
    real is None or not Path(real, "MNIST").is_dir(),
    reason="ASYNCFED_DATA does not point to a directory with MNIST",
)


def from_digits(**options: object) -> Problem:
    return hyper_representation(**({"dataset": "digits", "clients": 6, "model": "mlp:12"} | options))  # type: ignore[arg-type]


def variables(problem: Problem) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    y = problem.init_inner(torch.Generator().manual_seed(1))
    x = problem.init_outer(torch.Generator().manual_seed(2))
    assert isinstance(y, dict)
    assert isinstance(x, dict)
    return y, x


@needs_mnist
@pytest.mark.parametrize("partition", ["iid", "shards:2"])
def test_the_problem_of_the_papers(partition: str) -> None:
    problem = hyper_representation(partition=partition)
    d = Derivatives.of(problem)
    assert (d.outer.d, d.inner.d) == (157_000, 2_010)
    assert set(problem.data.train.sizes) == set(problem.data.validation.sizes) == {300}
    assert set(problem.data.test.sizes) == {100}
    held = [len(problem.data.train.of(i)[1].unique()) for i in range(100)]
    assert (max(held) <= 4) == (partition == "shards:2")
    assert len(problem.data.test.of(0)[1].unique()) > 7
    lenet = Derivatives.of(hyper_representation(model="lenet", inner_layers=2, limit=1000))
    assert not lenet.problem.vectorize
    assert (lenet.inner.d, lenet.outer.d) == (10_164 + 850, 61_706 - 10_164 - 850)


@pytest.mark.parametrize(("model", "inner_layers"), [("mlp:12", 1), ("mlp:12,9", 1), ("mlp:12,9", 2)])
def test_losses_are_cross_entropies_of_the_whole_network(model: str, inner_layers: int) -> None:
    problem = from_digits(model=model, inner_layers=inner_layers, l2=0.3)
    y, x = variables(problem)
    module = build_model(model, 64, 10)
    assert [*x, *y] == [name for name, _ in module.named_parameters()]
    assert problem.outer_split == "validation"
    images, labels = batch = problem.data.validation.of(2)
    logits = functional_call(module, x | y, (images,))
    each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    penalty = 0.15 * sum(tensor.square().sum() for tensor in y.values())
    torch.testing.assert_close(problem.inner_loss(y, x, batch), each.mean() + penalty)
    torch.testing.assert_close(problem.outer_loss(y, x, batch), each.mean())
    torch.testing.assert_close(problem.metrics["loss"](y, x, batch), each)
    assert problem.metrics["accuracy"](y, x, batch).tolist() == (logits.argmax(1) == labels).tolist()


def test_the_first_stage_makes_features_and_the_second_is_the_inner_loss() -> None:
    problem = from_digits(l2=0.3)
    y, x = variables(problem)
    images, labels = batch = problem.data.train.of(0)
    assert problem.stages is not None
    features, same = problem.stages.encode(x, batch)
    expected = (images @ x["hidden1.weight"].T + x["hidden1.bias"]).clamp(min=0)
    torch.testing.assert_close(features, expected)
    assert same is labels
    torch.testing.assert_close(problem.stages.loss(y, (features, labels)), problem.inner_loss(y, x, batch))


def test_derivatives_of_many_clients_are_those_of_each() -> None:
    problem = from_digits(l2=0.1)
    d = Derivatives.of(problem)
    g = torch.Generator().manual_seed(0)
    y, u = (torch.randn(3, d.inner.d, generator=g, dtype=torch.float64) for _ in range(2))
    x = 0.3 * torch.randn(3, d.outer.d, generator=g, dtype=torch.float64)
    batch = problem.data.to(torch.float64).train.gather(torch.arange(3), torch.arange(7).repeat(3, 1))
    cross = d.inner_cross_vector(y, x, batch, u)
    for i in range(3):
        leaf = x[i].clone().requires_grad_()
        inner = y[i].clone().requires_grad_()
        loss = problem.inner_loss(
            d.inner.views_one(inner), d.outer.views_one(leaf), tuple(part[i] for part in batch)
        )
        (gradient,) = torch.autograd.grad(loss, inner, create_graph=True)
        torch.testing.assert_close(d.inner_gradient(y, x, batch)[0][i], gradient.detach())
        torch.testing.assert_close(cross[i], torch.autograd.grad(gradient @ u[i], leaf)[0])


def test_data_without_a_test_part_keep_a_fifth_for_testing() -> None:
    data = from_digits(clients=9).data  # 199 or 200 samples each
    assert set(data.train.sizes) <= {79, 80}
    assert set(data.validation.sizes) == {80}
    assert set(data.test.sizes) == {40}
    assert from_digits(fractions=(0.2, 0.6, 0.2), clients=9).data.validation.sizes[0] == 120


def test_clients_may_be_judged_on_samples_of_their_own() -> None:
    """On some of them, each once, or on all; what they learn from stays."""
    usual, some, everything = (from_digits(judged_on_own=each).data for each in (None, 40, 10_000))
    assert usual.test.sizes.min() == 60
    assert set(some.test.sizes) == {40}
    for split in ("train", "validation"):
        assert torch.equal(getattr(usual, split).tensors[0], getattr(some, split).tensors[0])
    for client in range(6):
        own = torch.cat([usual.train.of(client)[0], usual.validation.of(client)[0]])
        assert len(everything.test.of(client)[0]) == len(own)
        same = (some.test.of(client)[0][:, None] == own).flatten(2).all(2)
        assert same.any(1).all()
        labels = torch.cat([usual.train.of(client)[1], usual.validation.of(client)[1]])
        places = same.float().argmax(1)
        assert torch.equal(labels[places], some.test.of(client)[1])
        assert (places < len(usual.train.of(client)[0])).any()
        assert (places >= len(usual.train.of(client)[0])).any()


def test_a_convolutional_network_runs_client_by_client_on_its_own_test_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stem in ("train", "t10k"):
        small_images(tmp_path / "MNIST" / "raw", stem, packed=True)
    monkeypatch.setenv("ASYNCFED_DATA", str(tmp_path))
    problem = hyper_representation(clients=2, model="lenet", inner_layers=2)
    assert not problem.vectorize
    assert [split.total for split in (problem.data.train, problem.data.validation, problem.data.test)] == [
        6,
        6,
        12,
    ]
    y, x = variables(problem)
    assert [*x, *y] == [name for name, _ in build_model("lenet", (1, 28, 28), 10).named_parameters()]
    d = Derivatives.of(problem)
    flat = [d.inner.flatten(y).repeat(2, 1), d.outer.flatten(x).repeat(2, 1)]
    _, by_x, value = whole_outer_gradients(d, flat[0], flat[1], problem.data.validation)
    assert value.tolist() == pytest.approx([2.3, 2.3], abs=0.3)
    assert by_x.abs().max() > 0


@pytest.mark.parametrize("partition", ["shards:2", "iid"])
def test_a_recipe_builds_the_same_problem_again(partition: str) -> None:
    first = from_digits(partition=partition, seed=3)
    assert first.name == "digits-mlp:12-representation"
    assert first.recipe is not None
    again = problem_from_recipe(json.loads(json.dumps(first.recipe.as_dict())))
    assert again.recipe == first.recipe
    for split in ("train", "validation", "test"):
        a, b = getattr(first.data, split), getattr(again.data, split)
        assert all(torch.equal(s, t) for s, t in zip(a.tensors, b.tensors, strict=True))


def test_networks_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ScenarioError, match="inner_layers is 1, which is all of model 'logistic'"):
        from_digits(model="logistic")
    with pytest.raises(ScenarioError, match="inner_layers is 2, which is all of model 'mlp:12'"):
        from_digits(inner_layers=2)
    with pytest.raises(ScenarioError, match=r"the last 3 linear layers .* 1\.\.2"):
        from_digits(inner_layers=3)
    with pytest.raises(
        ScenarioError, match=r"hyper_representation: l2 is -0\.1; it must be a finite number, at least 0"
    ):
        from_digits(l2=-0.1)
    with pytest.raises(DataError, match="the second fraction must be positive"):
        from_digits(fractions=(0.8, 0.0, 0.2))
    with pytest.raises(DataError, match="dataset 'digits' has no test part"):
        from_digits(separate_test=True)
    with pytest.raises(UnknownNameError, match="unknown dataset 'digit'; did you mean 'digits'"):
        from_digits(dataset="digit")
