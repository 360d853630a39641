"""Features written out, against plain autograd on the same layers: in every derivative of a staged loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from asyncfed.data import ClientData, ClientShards
from asyncfed.models import build_model, initial_parameters, outputs, split_layers
from asyncfed.problems import Derivatives, Problem
from asyncfed.problems.encoding import encoder
from asyncfed.problems.problem import Batch, Stages

CLIENTS, SAMPLES = 2, 5


def problem(written_out: bool, model: str = "lenet") -> Problem:
    body, head = split_layers(build_model(model, (1, 28, 28), 10), 2 if model == "lenet" else 1)
    g = torch.Generator().manual_seed(3)
    images = torch.randn(CLIENTS * SAMPLES, 1, 28, 28, generator=g, dtype=torch.float64)
    labels = torch.randint(10, (len(images),), generator=g)
    shards = ClientShards((images, labels), torch.full((CLIENTS,), SAMPLES).numpy())
    features = encoder(body)

    def encode(x: dict[str, Tensor], batch: Batch) -> Batch:
        return features(x, batch[0]) if written_out else outputs(body, x, batch[0]), batch[1]

    def loss(y: dict[str, Tensor], encoded: Batch) -> Tensor:
        return cross_entropy(outputs(head, y, encoded[0]), encoded[1])

    return Problem(
        name="pair",
        data=ClientData(shards, shards, shards),
        stages=Stages(encode, loss, vectorize=True),
        init_inner=lambda g: initial_parameters(head, g),
        init_outer=lambda g: initial_parameters(body, g),
        vectorize=False,
    )


@pytest.fixture(params=["lenet", "cnn"])
def pair(request: pytest.FixtureRequest) -> tuple[Derivatives, Derivatives]:
    """With features written out, and by plain autograd."""
    both = [Derivatives.of(problem(written_out, request.param)) for written_out in (True, False)]
    return both[0], both[1]


def test_derivatives_are_those_of_autograd(pair: tuple[Derivatives, Derivatives]) -> None:
    """First ones, those that go down through the layers once, and those that differentiate the way down."""
    ours, plain = pair
    g = torch.Generator().manual_seed(0)
    y, u = (0.1 * torch.randn(CLIENTS, ours.inner.d, generator=g, dtype=torch.float64) for _ in range(2))
    x, w = (0.1 * torch.randn(CLIENTS, ours.outer.d, generator=g, dtype=torch.float64) for _ in range(2))
    batch = ours.problem.data.train.whole(torch.arange(CLIENTS).numpy())
    results = []
    for d in (ours, plain):
        results.append(
            (
                *d.outer_gradients(y, x, batch),
                *d.outer_gradient(y, x, batch, "outer"),
                d.inner_cross_vector(y, x, batch, u),
                d.inner_hessian_vector(y, x, batch, u),
                *(part[0] for part in d.inner_second_vectors(y, x, batch, (u,))),
                d.inner_outer_gradient(y, x, batch),
                d.inner_cross_transposed(y, x, batch, w),
            )
        )
    for found, expected in zip(*results, strict=True):
        assert expected.abs().max() > 1e-6
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_layers_that_are_not_known_are_autograds() -> None:
    """And so is a perceptron, which runs for all clients at once."""
    for body in (torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, stride=2)), build_model("mlp:4", 784, 10)):
        w = initial_parameters(body, torch.Generator().manual_seed(1))
        images = torch.randn(3, 1, 28, 28)
        leaves = {name: value.requires_grad_() for name, value in w.items()}
        features = encoder(body)(leaves, images)
        assert "Encode" not in type(features.grad_fn).__name__
        assert torch.equal(features, body_of(body, w, images))
    lenet, _ = split_layers(build_model("lenet", (1, 28, 28), 10), 2)
    w = initial_parameters(lenet, torch.Generator().manual_seed(1))
    made = encoder(lenet)({name: value.requires_grad_() for name, value in w.items()}, images)
    assert "Encode" in type(made.grad_fn).__name__


def body_of(module: torch.nn.Module, w: dict[str, Tensor], images: Tensor) -> Tensor:
    found: Tensor = torch.func.functional_call(module, w, (images,))
    return found
