"""Derivatives of perceptrons, written out: against autograd, one client at a time, in double precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from asyncfed.data import client_data_from_lists
from asyncfed.models import build_model
from asyncfed.problems import Problem, classification, from_module, hyper_representation
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.layout import aligned, aligned_rows
from asyncfed.problems.perceptron import PerceptronLoss, written_out

INPUTS, CLASSES, BATCH = 6, 4, 5
# The last has matrices on either side of what is written out in one go.
MODELS = ["logistic", "mlp:7", "mlp:7,5:tanh", "mlp:7,5:gelu", "mlp:7,5,3:softplus", "mlp:1500,8"]
L2 = [0.0, 0.3]


class Given:
    """Random variables, directions and batches of k clients of a perceptron; and the truth about them."""

    def __init__(self, model: str, l2: float, k: int) -> None:
        generator = torch.Generator().manual_seed(k)
        self.module, self.l2 = build_model(model, INPUTS, CLASSES), l2
        inputs = torch.randn(k, BATCH, INPUTS, generator=generator, dtype=torch.float64) * 3
        self.batch = (inputs, torch.randint(0, CLASSES, (k, BATCH), generator=generator))
        loss = written_out(self.plain, self.module, (INPUTS,), l2)
        assert isinstance(loss, PerceptronLoss)
        rows = [(inputs[0], self.batch[1][0])]
        self.derivatives = Derivatives.of(
            Problem(
                name="given",
                data=client_data_from_lists(rows),
                inner_loss=loss,
                init_inner=lambda generator: dict(self.module.named_parameters()),
            )
        )
        d = self.derivatives.inner.d
        self.x, self.u = torch.randn(2, k, d, generator=generator, dtype=torch.float64) * 0.5
        self.lam = self.x.new_zeros(k, 0)

    def plain(self, x: dict[str, Tensor], lam: Any, batch: tuple[Tensor, ...]) -> Tensor:
        logits = functional_call(self.module, x, (batch[0],))
        penalty = sum(((value**2).sum() for value in x.values()), start=torch.zeros(()))
        return cross_entropy(logits, batch[1]) + self.l2 / 2 * penalty

    def truth(self) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, gradients and Hessian products by autograd, from the flat vector down."""
        found = []
        for i in range(len(self.x)):
            flat = self.x[i].clone().requires_grad_()
            own = tuple(tensor[i] for tensor in self.batch)
            value = self.plain(self.derivatives.inner.views_one(flat), None, own)  # type: ignore[arg-type]
            (g,) = torch.autograd.grad(value, flat, create_graph=True)
            (h,) = torch.autograd.grad(g @ self.u[i], flat)
            found.append((value.detach(), g.detach(), h))
        losses, gradients, products = (torch.stack(part) for part in zip(*found, strict=True))
        return losses, gradients, products


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def rates(k: int) -> dict[str, float | Tensor]:
    return {"a number": -0.7, "one each": torch.linspace(0.2, 0.9, k, dtype=torch.float64)[:, None]}


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("l2", L2)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_and_hessian_products_are_autograds(model: str, l2: float, k: int) -> None:
    given = Given(model, l2, k)
    losses, gradients, products = given.truth()
    at = (given.x, given.lam, given.batch)
    found, value = given.derivatives.inner_gradient(*at)
    close(value, losses)
    close(found, gradients)
    close(given.derivatives.inner_hessian_vector(*at, given.u), products)
    for scale in rates(k).values():
        nothing = torch.full_like(given.x, torch.nan)  # what is written over is never read
        close(given.derivatives.inner_gradient(*at, scale, nothing)[0], scale * gradients)
        nothing = torch.full_like(given.x, torch.nan)
        close(given.derivatives.inner_hessian_vector(*at, given.u, scale, nothing), scale * products)


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("l2", L2)
@pytest.mark.parametrize("model", MODELS)
def test_steps_and_products_may_be_made_in_place(model: str, l2: float, spaced: bool) -> None:
    given = Given(model, l2, 3)
    losses, gradients, products = given.truth()
    for scale in rates(3).values():
        x, u = (
            aligned_rows(3, given.x).copy_(rows) if spaced else rows.clone() for rows in (given.x, given.u)
        )
        close(given.derivatives.descend("inner", x, given.lam, given.batch, scale), losses)
        close(x, given.x - scale * gradients)
        elsewhere = given.u.clone()
        given.derivatives.descend("inner", given.x, given.lam, given.batch, scale, elsewhere)
        close(elsewhere, given.u - scale * gradients)
        given.derivatives.inner_hessian_vector(given.x, given.lam, given.batch, u, scale, u, add=True)
        close(u, given.u + scale * products)


def test_products_are_added_in_place_for_other_losses_too() -> None:
    given = Given("mlp:7", 0.0, 3)
    plain = replace(given.derivatives.problem, inner_loss=given.plain)
    u = given.u.clone()
    Derivatives.of(plain).inner_hessian_vector(given.x, given.lam, given.batch, u, -0.7, u, add=True)
    close(u, given.u - 0.7 * given.truth()[2])


def test_images_are_flattened() -> None:
    images, labels = torch.rand(2, 3, 1, 2, 3), torch.randint(0, CLASSES, (2, 3))
    given = Given("mlp:7", 0.0, 2)
    x, lam = given.x.float(), given.lam.float()
    one, _ = given.derivatives.inner_gradient(x, lam, (images, labels))
    other, _ = given.derivatives.inner_gradient(x, lam, (images.flatten(2), labels))
    assert torch.equal(one, other)


def layers(*between: nn.Module) -> nn.Sequential:
    first, *others = between
    return nn.Sequential(first, *others)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (layers(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4)), (6,)),
        (layers(nn.Flatten(), nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 4)), (6,)),
        (layers(nn.Flatten(), nn.Linear(6, 5), nn.GELU(approximate="tanh"), nn.Linear(5, 4)), (6,)),
        (layers(nn.Flatten(), nn.Linear(6, 5), nn.Softplus(beta=2), nn.Linear(5, 4)), (6,)),
        (layers(nn.Flatten(), nn.Linear(6, 5), nn.Dropout(), nn.Linear(5, 4)), (6,)),
        (layers(nn.Flatten(), nn.Linear(6, 5), nn.Linear(5, 4)), (6,)),
        (layers(nn.Flatten(), nn.Linear(6, 4), nn.ReLU()), (6,)),
        (layers(nn.Flatten(2), nn.Linear(6, 4)), (2, 6)),
        (layers(nn.Linear(6, 4)), (2, 6)),  # works along the last axis
        (nn.Linear(6, 4), (6,)),
    ],
)
def test_what_is_no_perceptron_is_left_to_autograd(module: nn.Module, shape: tuple[int, ...]) -> None:
    def loss(x: Any, lam: Any, batch: tuple[Tensor, ...]) -> Tensor:
        return cross_entropy(functional_call(module, x, (batch[0],)), batch[1])

    assert written_out(loss, module, shape) is loss


def two(*labels: int) -> Any:
    target = torch.tensor(labels)
    return client_data_from_lists(
        [(torch.rand(len(labels), 6), target), (torch.rand(len(labels), 6), target)]
    )


def test_problems_say_of_themselves_that_they_are_perceptrons() -> None:
    perceptron = layers(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    assert isinstance(classification("digits", 4, "mlp:6").inner_loss, PerceptronLoss)
    known = from_module(perceptron, two(0, 3, 1))
    assert isinstance(known.inner_loss, PerceptronLoss)
    for other in (
        from_module(perceptron, two(0, -100, 1)),
        from_module(perceptron, two(0, 3, 1), outer="0"),
        from_module(perceptron, two(0, 3, 1), loss=nn.CrossEntropyLoss(label_smoothing=0.1)),
        from_module(layers(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)), two(0, 3, 1)),
        hyper_representation("digits", 4, "mlp:6"),
    ):
        assert not isinstance(other.inner_loss, PerceptronLoss)
        staged = Derivatives.of(other).staged()
        assert staged is None or not isinstance(staged.problem.inner_loss, PerceptronLoss)


def test_a_module_trains_as_its_plain_loss_would() -> None:
    perceptron = layers(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    problem = from_module(perceptron, two(0, 3, 1))
    assert isinstance(problem.inner_loss, PerceptronLoss)
    ours, plain = (
        Derivatives.of(given) for given in (problem, replace(problem, inner_loss=problem.inner_loss.loss))
    )
    x = ours.inner.flatten(problem.init_inner(torch.Generator())).double().repeat(2, 1)
    images, labels = problem.data.train.gather(torch.arange(2), torch.arange(3).expand(2, 3))
    batch = (images.double(), labels)
    for found, expected in zip(
        ours.inner_gradient(x, x.new_zeros(2, 0), batch),
        plain.inner_gradient(x, x.new_zeros(2, 0), batch),
        strict=True,
    ):
        close(found, expected)


def test_rows_can_begin_at_cache_lines() -> None:
    like = torch.zeros(2, 13)
    rows = aligned_rows(3, like)
    assert rows.shape == (3, 13)
    assert all(row.data_ptr() % 64 == 0 for row in rows)
    assert aligned(rows)
    assert not aligned(like)
    assert not aligned(rows[:, 1:])
    assert aligned(aligned_rows(3, like.double()))
