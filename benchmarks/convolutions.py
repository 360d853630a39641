"""The quarter-width CNN of `pdbo_emnist`, 20 clients, batch 64: a step of SGP and a Hessian-vector product,
against three ways to write them by hand: a loop over the clients, vmap, and one grouped convolution for all.

Images are random: speed does not depend on them. Minibatches of the three are drawn once, asyncfed's anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, grad, vjp, vmap
from torch.nn.functional import conv2d, max_pool2d

from asyncfed import Scenario
from asyncfed.data import client_data_from_lists
from asyncfed.models import build_model
from asyncfed.problems import Derivatives, Problem, personalized
from asyncfed.problems.classification import cross_entropies
from asyncfed.protocols import SGP
from benchmarks.bare import mixing
from benchmarks.measure import interleaved, stepping
from benchmarks.problems import NEVER
from benchmarks.table import Row
from topologies import stochastic_directed

CLIENTS, BATCH, CLASSES, SAMPLES, LR = 20, 64, 62, 488, 0.01
MODULE = "cnn:8,16,512"

Named = dict[str, Tensor]


def convolutions(rounds: int = 9) -> list[Row]:
    problem = _problem()
    by_hand = ByHand(problem)
    derivatives = Derivatives.of(problem)
    u = torch.randn_like(by_hand.z)
    batch, lam = by_hand.batch, by_hand.z.new_empty(CLIENTS, 0)
    scenario = Scenario(
        problem,
        stochastic_directed(CLIENTS, probability=(0.4, 0.8), seed=1),
        SGP(10**6, lr=LR, batch=BATCH),
        evaluate_every=NEVER,
    )
    ways: dict[str, Callable[[Named], Named]] = {
        "loop": by_hand.loop, "vmap": by_hand.vmapped, "grouped": by_hand.grouped
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        step, writer = stepping(scenario, Path(directory))
        steps: dict[str, Callable[[], object]] = {"asyncfed": step}
        steps |= {name: _bound(by_hand.step, way) for name, way in ways.items()}
        seconds = interleaved(steps, rounds=rounds, steps=2)
        writer.close()
    products: dict[str, Callable[[], object]] = {
        "asyncfed": lambda: derivatives.inner_hessian_vector(by_hand.z, lam, batch, u),
        "loop": lambda: by_hand.loop_product(u),
        "vmap": lambda: by_hand.vmapped_product(u),
        "grouped": lambda: by_hand.grouped_product(u),
    }
    rows = _rows("a step of SGP", seconds)
    return rows + _rows("a Hessian-vector product", interleaved(products, rounds=rounds, steps=1))


def _rows(what: str, seconds: dict[str, float]) -> list[Row]:
    ours = seconds.pop("asyncfed")
    best = min(seconds, key=lambda name: seconds[name])
    said = ", ".join(f"{name} {1e3 * value:.0f}" for name, value in seconds.items())
    ratio = ours / seconds[best]
    return [
        Row(f"CNN, n=20, {what}: by hand", f"{said} ms"),
        Row(f"CNN, n=20, {what}: asyncfed", f"{1e3 * ours:.0f} ms"),
        Row(f"CNN, n=20, {what}: asyncfed / {best}", f"{ratio:.2f}", "≤ 1", ratio <= 1),
    ]


def _bound(
    step: Callable[[Callable[[Named], Named]], None], way: Callable[[Named], Named]
) -> Callable[[], None]:
    return lambda: step(way)


def _problem() -> Problem:
    generator = torch.Generator().manual_seed(0)
    samples = [
        (
            torch.randn(SAMPLES, 1, 28, 28, generator=generator),
            torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
        )
        for _ in range(CLIENTS)
    ]
    module = build_model(MODULE, (1, 28, 28), CLASSES)
    return personalized(
        "random images", client_data_from_lists(samples), module, CLASSES, personalize="none", vectorize=False
    )


class ByHand:
    """z ← P z − α ∇f(z) for all clients, and products with their Hessians, with nothing around it."""

    def __init__(self, problem: Problem) -> None:
        self.module = build_model(MODULE, (1, 28, 28), CLASSES)
        self.layout = Derivatives.of(problem).inner
        start = self.layout.flatten(problem.init_inner(torch.Generator().manual_seed(0)))
        self.z = start.repeat(CLIENTS, 1)
        everybody = torch.arange(CLIENTS)
        index = torch.randint(0, SAMPLES, (CLIENTS, BATCH), generator=torch.Generator().manual_seed(1))
        self.batch = problem.data.train.gather(everybody, index)
        self.mixing = mixing(CLIENTS, torch.Generator().manual_seed(2))
        self._gradient = vmap(grad(self.loss))
        self._product = vmap(self._one_product)

    def step(self, gradient: Callable[[Named], Named]) -> None:
        found = gradient(self._views(self.z))
        descent = self.mixing @ self.z
        into = self._views(descent)
        for name, value in found.items():
            into[name].add_(value, alpha=-LR)
        self.z = descent

    def loss(self, w: Named, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropies(functional_call(self.module, w, (images,)), labels).mean()

    def loop(self, w: Named) -> Named:
        found: list[tuple[Tensor, ...]] = []
        for client in range(CLIENTS):
            own = {name: value[client].requires_grad_() for name, value in w.items()}
            loss = self.loss(own, *(part[client] for part in self.batch))
            found.append(torch.autograd.grad(loss, list(own.values())))
        return {name: torch.stack(each) for name, each in zip(w, zip(*found, strict=True), strict=True)}

    def vmapped(self, w: Named) -> Named:
        with torch.no_grad():
            gradient: Named = self._gradient(w, *self.batch)
        return gradient

    def grouped(self, w: Named) -> Named:
        own = {name: value.detach().requires_grad_() for name, value in w.items()}
        found = torch.autograd.grad(self._grouped_loss(own), list(own.values()))
        return dict(zip(own, found, strict=True))

    def loop_product(self, u: Tensor) -> Tensor:
        found: list[Tensor] = []
        for client in range(CLIENTS):
            own = {
                name: value[client].detach().requires_grad_() for name, value in self._views(self.z).items()
            }
            loss = self.loss(own, *(part[client] for part in self.batch))
            found.append(
                _product_of(loss, own, {name: value[client] for name, value in self._views(u).items()})
            )
        return torch.stack(found)

    def vmapped_product(self, u: Tensor) -> Named:
        with torch.no_grad():
            found: Named = self._product(self._views(self.z), *self.batch, self._views(u))
        return found

    def grouped_product(self, u: Tensor) -> Tensor:
        own = {name: value.detach().requires_grad_() for name, value in self._views(self.z).items()}
        return _product_of(self._grouped_loss(own), own, self._views(u))

    def _one_product(self, w: Named, images: Tensor, labels: Tensor, u: Named) -> Named:
        found: Named = vjp(lambda v: grad(self.loss)(v, images, labels), w)[1](u)[0]
        return found

    def _grouped_loss(self, w: Named) -> Tensor:
        """The sum over clients, whose channels stand side by side in one grouped convolution."""
        images, labels = self.batch
        h = images.transpose(0, 1).flatten(1, 2)  # (B, clients · 1, 28, 28)
        for name in ("conv1", "conv2"):
            kernel, bias = w[f"{name}.weight"].flatten(0, 1), w[f"{name}.bias"].flatten()
            h = max_pool2d(conv2d(h, kernel, bias, groups=CLIENTS).relu(), 2)
        h = h.unflatten(1, (CLIENTS, -1)).transpose(0, 1).flatten(2)  # (clients, B, features)
        h = torch.baddbmm(w["hidden1.bias"].unsqueeze(1), h, w["hidden1.weight"].mT).relu()
        logits = torch.baddbmm(w["head.bias"].unsqueeze(1), h, w["head.weight"].mT)
        each = -torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1))
        return each.mean((1, 2)).sum()

    def _views(self, rows: Tensor) -> Named:
        views = self.layout.views(rows)
        assert isinstance(views, dict)
        return views


def _product_of(loss: Tensor, own: Named, u: Named) -> Tensor:
    leaves = list(own.values())
    gradient = torch.autograd.grad(loss, leaves, create_graph=True)
    product = torch.stack([(g * u[name]).sum() for name, g in zip(own, gradient, strict=True)]).sum()
    return torch.cat([value.flatten() for value in torch.autograd.grad(product, leaves)])
