"""Models: sizes, names, shapes, and initial values that leave torch's global generator alone."""

from __future__ import annotations

import math

import pytest
import torch

from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.models import (
    build_model,
    emnist_cnn,
    has_convolutions,
    initial_parameters,
    logistic_regression,
    mlp,
)


def size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_models_have_the_sizes_of_the_papers() -> None:
    assert size(emnist_cnn()) == 2_278_334
    assert size(mlp([784, 200, 10])) == 157_000 + 2_010
    assert size(logistic_regression(64, 10)) == 650


@pytest.mark.parametrize(
    ("spec", "shape"),
    [("logistic", (64,)), ("mlp:20", (1, 28, 28)), ("mlp:20,10", (3, 5)), ("cnn", (1, 28, 28))],
)
def test_models_flatten_their_input(spec: str, shape: tuple[int, ...]) -> None:
    assert build_model(spec, shape, 7)(torch.zeros(5, *shape)).shape == (5, 7)


def test_layers_carry_names() -> None:
    names = [name for name, _ in build_model("mlp:20,10", 64, 10).named_parameters()]
    assert names == [
        f"{layer}.{kind}" for layer in ("hidden1", "hidden2", "head") for kind in ("weight", "bias")
    ]
    assert [name for name, _ in logistic_regression(4, 2).named_parameters()] == ["head.weight", "head.bias"]


def test_an_mlp_is_relu_between_affine_maps() -> None:
    module = mlp([3, 4, 2])
    p, x = dict(module.named_parameters()), torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    hidden = (x @ p["hidden1.weight"].T + p["hidden1.bias"]).clamp(min=0)
    torch.testing.assert_close(module(x), hidden @ p["head.weight"].T + p["head.bias"])


def test_initial_parameters_come_from_the_generator_and_nowhere_else() -> None:
    before = torch.get_rng_state()
    module = build_model("mlp:50", 64, 10)
    first, again, other = (initial_parameters(module, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert list(first) == [name for name, _ in module.named_parameters()]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert not any(tensor.requires_grad for tensor in first.values())
    weight = first["hidden1.weight"]
    bound = 1 / math.sqrt(64)
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_one_generator_yields_different_values_each_time() -> None:
    generator, module = torch.Generator().manual_seed(0), logistic_regression(5, 3)
    first, second = initial_parameters(module, generator), initial_parameters(module, generator)
    assert not torch.equal(first["head.weight"], second["head.weight"])


def test_convolutions_are_recognised() -> None:
    assert has_convolutions(emnist_cnn())
    assert not has_convolutions(mlp([4, 4, 2]))


def test_models_that_cannot_be_built_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown model 'logistc'; did you mean 'logistic'"):
        build_model("logistc", 4, 2)
    with pytest.raises(ScenarioError, match=r"needs images of shape \(1, 28, 28\), the samples have \(64,\)"):
        build_model("cnn", 64, 10)
    for spec in ("mlp", "logistic:3"):
        with pytest.raises(ScenarioError, match="hidden sizes go with mlp"):
            build_model(spec, 4, 2)
    with pytest.raises(ScenarioError, match="'a,b' is not a list of hidden sizes"):
        build_model("mlp:a,b", 4, 2)
    with pytest.raises(ScenarioError, match=r"sizes \[4, 0, 2\] cannot be built"):
        build_model("mlp:0", 4, 2)
