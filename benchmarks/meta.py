"""Meta FL against the same algorithm as one would write it: a loop over the clients, each with autograd.

Images are random: speed does not depend on them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from asyncfed import Scenario
from asyncfed.data import client_data_from_lists
from asyncfed.models import build_model
from asyncfed.problems import Problem, from_module
from asyncfed.protocols import MetaFL, Server
from benchmarks.measure import interleaved, stepping
from benchmarks.table import Row
from topologies import star

CLIENTS, ASKED, SAMPLES, BATCH, TAU, NU, ALPHA, BETA = 50, 10, 800, 40, 4, 3, 0.01, 0.001
_NEVER = 10**9


def meta(rounds: int = 9) -> list[Row]:
    """One round: 10 of 50 clients, τ = 4, ν = 3, MLP 3072-80-60-10, batch 40."""
    rows: list[Row] = []
    problem = _problem()
    for variant in ("exact", "fo"):
        protocol = MetaFL(
            _NEVER,
            NU,
            TAU,
            ALPHA,
            BETA,
            BATCH,
            variant,
            server=Server(ASKED / CLIENTS),  # type: ignore[arg-type]
        )
        scenario = Scenario(problem, star(CLIENTS), protocol, evaluate_every=_NEVER)
        with tempfile.TemporaryDirectory() as directory:
            step, writer = stepping(scenario, Path(directory))
            plain = PlainMetaFL(problem, variant)  # type: ignore[arg-type]
            seconds = interleaved({"asyncfed": step, "loop": plain.round}, rounds=rounds, steps=2)
            writer.close()
        ratio = seconds["asyncfed"] / seconds["loop"]
        name = f"MetaFL, MLP, {variant}"
        rows += [
            Row(f"{name}: a round", f"{seconds['asyncfed'] * 1e3:.0f} ms"),
            Row(f"{name}: asyncfed / autograd loop over clients", f"{ratio:.2f}", "≤ 0.5", ratio <= 0.5),
        ]
    return rows


def _problem() -> Problem:
    generator = torch.Generator().manual_seed(0)
    images = [
        (
            torch.rand(SAMPLES, 3072, generator=generator),
            torch.randint(0, 10, (SAMPLES,), generator=generator),
        )
        for _ in range(CLIENTS)
    ]
    return from_module(
        lambda: build_model("mlp:80,60", 3072, 10), client_data_from_lists(images), name="random images"
    )


class PlainMetaFL:
    """002 Alg. 1 to 3, one client after the other."""

    def __init__(self, problem: Problem, variant: Literal["exact", "fo"]) -> None:
        self.data = [problem.data.train.of(client) for client in range(CLIENTS)]
        self.model, self.variant = build_model("mlp:80,60", 3072, 10), variant
        self.names = [name for name, _ in self.model.named_parameters()]
        self.w = [value.detach().clone() for value in self.model.parameters()]

    def loss(self, w: list[Tensor], client: int) -> Tensor:
        """On a minibatch of its own."""
        images, labels = self.data[client]
        index = torch.randint(0, SAMPLES, (BATCH,))
        logits = functional_call(self.model, dict(zip(self.names, w, strict=True)), (images[index],))
        return cross_entropy(logits, labels[index])

    def gradient(self, w: list[Tensor], client: int) -> tuple[Tensor, ...]:
        leaves = [value.detach().requires_grad_() for value in w]
        return torch.autograd.grad(self.loss(leaves, client), leaves)

    def hessian_vector(self, w: list[Tensor], d: list[Tensor], client: int) -> tuple[Tensor, ...]:
        leaves = [value.detach().requires_grad_() for value in w]
        gradient = torch.autograd.grad(self.loss(leaves, client), leaves, create_graph=True)
        return torch.autograd.grad(gradient, leaves, d)

    def update(self, w: list[Tensor], client: int) -> list[Tensor]:
        path = [w]
        for _ in range(NU):
            step = self.gradient(path[-1], client)
            path.append([value - ALPHA * g for value, g in zip(path[-1], step, strict=True)])
        d = list(self.gradient(path[NU], client))
        for here in reversed(path[:NU]) if self.variant == "exact" else ():
            product = self.hessian_vector(here, d, client)
            d = [value - ALPHA * h for value, h in zip(d, product, strict=True)]
        return [value - BETA * g for value, g in zip(w, d, strict=True)]

    def round(self) -> None:
        mean = [torch.zeros_like(value) for value in self.w]
        for client in torch.randperm(CLIENTS)[:ASKED].tolist():
            w = self.w
            for _ in range(TAU):
                w = self.update(w, client)
            for total, value in zip(mean, w, strict=True):
                total.add_(value, alpha=1 / ASKED)
        self.w = mean
