"""Networks written out layer by layer: the same derivatives as autograd's, by every way to ask for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from asyncfed.data import client_data_from_lists
from asyncfed.errors import ScenarioError
from asyncfed.models import build_model, lenet
from asyncfed.problems import Derivatives, Network, Problem, personalized
from asyncfed.problems.layerwise import Layers

CLASSES = 5


def images(*shape: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    each = []
    for _ in range(3):
        x = torch.randn(8, *shape, generator=generator, dtype=torch.float64)
        x[:, :, :6] = 0.0  # a background, of which pooling sees equals
        each.append((x, torch.randint(CLASSES, (8,), generator=generator)))
    return each


def odd_network() -> nn.Module:
    """Padding, a pooling that leaves a row and a column out, and a ReLU that is not pooled."""
    return nn.Sequential(
        OrderedDict(
            a=nn.Conv2d(2, 3, 3, padding=1), r1=nn.ReLU(), p1=nn.MaxPool2d(2),
            b=nn.Conv2d(3, 4, 2), r2=nn.ReLU(), flatten=nn.Flatten(),
            c=nn.Linear(4 * 2 * 3, 6), r3=nn.ReLU(), head=nn.Linear(6, CLASSES),
        )
    )  # fmt: skip


CASES: dict[str, Callable[[], tuple[nn.Module, list[tuple[Tensor, Tensor]]]]] = {
    "cnn": lambda: (build_model("cnn:2,3,8", (1, 28, 28), CLASSES), images(1, 28, 28)),
    "lenet": lambda: (lenet((1, 28, 28), CLASSES), images(1, 28, 28)),
    "odd": lambda: (odd_network(), images(2, 7, 9)),
    "perceptron": lambda: (build_model("mlp:6,4", (1, 8, 8), CLASSES), images(1, 8, 8)),
    "logistic": lambda: (build_model("logistic", (1, 8, 8), CLASSES), images(1, 8, 8)),
}


@pytest.fixture(params=[(name, kind) for name in CASES for kind in ("none", "da", "mtl", "mtl+da")], ids=str)
def pair(request: pytest.FixtureRequest) -> tuple[Derivatives, Derivatives, tuple[Tensor, ...]]:
    """Written out; by autograd through the same losses; and variables of three clients."""
    name, kind = request.param
    module, samples = CASES[name]()
    problem = personalized(
        name, client_data_from_lists(samples), module, CLASSES, personalize=kind, components=2, l2=0.3,
        outer_l2=0.2, vectorize=False,
    )  # fmt: skip
    plain = replace(problem, network=None, inner_loss=problem.inner_loss, outer_loss=problem.outer_loss)
    written, autograd = Derivatives.of(problem), Derivatives.of(plain)
    assert Layers.of(module) is not None
    generator = torch.Generator().manual_seed(1)

    def rows(width: int) -> Tensor:
        return 0.3 * torch.randn(3, width, generator=generator, dtype=torch.float64)

    batch = tuple(torch.stack(tensors) for tensors in zip(*samples, strict=True))
    x, lam = rows(written.inner.d), rows(written.outer.d)
    return written, autograd, (x, lam, rows(written.inner.d), rows(written.inner.d), *batch)


def test_derivatives_are_those_of_autograd(
    pair: tuple[Derivatives, Derivatives, tuple[Tensor, ...]],
) -> None:
    written, autograd, (x, lam, u, w, *batch) = pair
    samples = tuple(batch)
    scale = torch.tensor([[1.0], [-0.5], [2.0]], dtype=torch.float64)

    def found(d: Derivatives) -> list[Tensor]:
        by_y, crossed = d.inner_second_vectors(x, lam, samples, (u, w), scale)
        return [
            *d.inner_gradient(x, lam, samples, scale),
            *d.inner_gradient(x, lam, samples),
            d.inner_hessian_vector(x, lam, samples, u),
            *by_y,
            *crossed,
            d.inner_cross_vector(x, lam, samples, u),
            *d.outer_gradients(x, lam, samples),
            *d.outer_gradient(x, lam, samples, "inner", -0.5),
            *(d.outer_gradient(x, lam, samples, "outer", scale) if d.outer.d else ()),
        ]

    for ours, theirs in zip(found(written), found(autograd), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Tanh(), nn.Conv2d(1, 2, 3, stride=2), nn.Conv2d(1, 2, 3, padding="same"),
        nn.Conv2d(1, 2, 3, bias=False), nn.MaxPool2d(3), nn.MaxPool2d(2, padding=1), nn.Dropout(),
    ],
    ids=str,
)  # fmt: skip
def test_other_layers_are_left_to_autograd(layer: nn.Module) -> None:
    assert Layers.of(nn.Sequential(nn.ReLU(), layer)) is None
    assert Layers.of(nn.Sequential(layer, nn.Linear(3, 2))) is None


def test_a_network_says_what_the_losses_are() -> None:
    module, samples = CASES["logistic"]()
    network = Network(module, lambda logits, lam, batch: logits.square().mean())
    data = client_data_from_lists(samples)

    def made(**more: object) -> Problem:
        return Problem(name="p", data=data, network=network, init_inner=lambda generator: {}, **more)  # type: ignore[arg-type]

    assert replace(made(), vectorize=False).inner_loss == network.inner_loss  # it can be changed elsewhere
    with pytest.raises(ScenarioError, match="has a network, which says what its losses are"):
        made(inner_loss=lambda x, lam, batch: x)
