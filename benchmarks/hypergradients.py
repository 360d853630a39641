"""A round of HGP and of VR-HGP against its bare mathematics: vmapped second derivatives, one dense mixing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch.func import functional_call, grad, vjp, vmap

from asyncfed import Scenario
from asyncfed.data import IID, client_data_from_lists
from asyncfed.models import build_model, initial_parameters
from asyncfed.problems import Derivatives, Problem, personalized_classification
from asyncfed.problems.classification import cross_entropies
from asyncfed.problems.personalized import label_weights
from asyncfed.protocols import HGP, SGP, VRHGP, EstimateHypergradient
from benchmarks.bare import mixing
from benchmarks.measure import interleaved, stepping
from benchmarks.problems import LR, NEVER
from benchmarks.table import Row
from topologies import stochastic_directed

CLIENTS, BATCH = 100, 64
_SMALL_LR = 0.001  # so that the series of an untrained network does not diverge


def hypergradient_rounds(rounds: int = 8) -> list[Row]:
    rows: list[Row] = []
    problem = personal_problem()
    for name, method, vectors in (
        ("HGP", HGP(2 * (rounds + 2), sampling="joint", expectations="exact", lr=_SMALL_LR), 1),
        ("VR-HGP", VRHGP(2 * (rounds + 2), sampling="joint", expectations="exact", lr=_SMALL_LR), 2),
    ):
        scenario = Scenario(
            problem=problem,
            topology=stochastic_directed(CLIENTS, probability=(0.4, 0.8), seed=1),
            protocol=EstimateHypergradient(SGP(steps=1, lr=LR, batch=BATCH), method, solve=False),
            evaluate_every=NEVER,
        )
        bare = BareRounds(problem, vectors=vectors, chunk=26 if vectors == 1 else 13)
        with tempfile.TemporaryDirectory() as directory:
            step, writer = stepping(scenario, Path(directory))
            seconds = interleaved({"local": step, "bare": bare.step}, rounds=rounds, steps=2)
            writer.close()
        ratio = seconds["local"] / seconds["bare"]
        rows += [
            Row(f"{name}, MLP, n=100: bare round", f"{seconds['bare'] * 1e3:.0f} ms"),
            Row(f"{name}, MLP, n=100: local", f"{seconds['local'] * 1e3:.0f} ms"),
            Row(f"{name}: local / bare", f"{ratio:.2f}", "≤ 1.1", ratio <= 1.1),
        ]
    return rows


def personal_problem() -> Problem:
    """MLP 784-200-10 with label weights as outer variables: MNIST where it is at hand, else random images."""
    if os.environ.get("ASYNCFED_DATA"):
        return personalized_classification(
            "mnist", clients=CLIENTS, model="mlp:200", personalize="da", partition=IID(), limit=20_000
        )
    generator = torch.Generator().manual_seed(0)
    module = build_model("mlp:200", 784, 10)
    lists = [
        (torch.rand(120, 784, generator=generator), torch.randint(0, 10, (120,), generator=generator))
        for _ in range(CLIENTS)
    ]

    def losses(x: dict[str, torch.Tensor], batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return cross_entropies(functional_call(module, x, (batch[0],)), batch[1])

    return Problem(
        name="random images",
        data=client_data_from_lists(lists),
        inner_loss=lambda x, lam, batch: (label_weights(lam["labels"])[batch[1]] * losses(x, batch)).mean(),
        outer_loss=lambda x, lam, batch: losses(x, batch).mean(),
        init_inner=lambda g: initial_parameters(module, g),
        init_outer=lambda g: {"labels": torch.zeros(10)},
    )


class BareRounds:
    """u ← W u − lr H u and v ← v − lr C u for all clients (for VR-HGP of u and w), products through vmap in
    chunks, with no network, trace or runtime around it.
    """

    def __init__(self, problem: Problem, *, vectors: int, chunk: int) -> None:
        derivatives = Derivatives.of(problem)
        self.inner, self.outer, self.chunk = derivatives.inner, derivatives.outer, chunk
        generator = torch.Generator().manual_seed(0)
        start = self.inner.flatten(problem.init_inner(generator))
        self.x = start.expand(CLIENTS, -1).clone()
        self.lam = torch.zeros(CLIENTS, self.outer.d)
        self.shards = problem.data.to(torch.float32).train
        self.sizes = torch.from_numpy(self.shards.sizes)
        self.generator = generator
        self.mixing = mixing(CLIENTS, generator).T.contiguous()
        self.c = torch.randn(CLIENTS, self.inner.d, generator=generator) / CLIENTS
        self.state = [self.c.clone() for _ in range(vectors)]
        self.next = [torch.empty_like(self.c) for _ in range(vectors)]
        self.v = torch.zeros_like(self.lam)
        self.alpha, self.beta = 0.9, 0.1
        gradient = grad(problem.inner_loss, argnums=0)

        def products(x, lam, batch, directions):  # type: ignore[no-untyped-def]
            pull = vjp(lambda x_, lam_: gradient(x_, lam_, batch), x, lam)[1]
            return tuple(pull(u) for u in directions)

        self.products = vmap(products)

    @torch.no_grad()
    def step(self) -> None:
        index = (torch.rand(CLIENTS, BATCH, generator=self.generator) * self.sizes[:, None]).long()
        crossed = [torch.empty_like(self.lam) for _ in self.state]
        for start in range(0, CLIENTS, self.chunk):
            here = slice(start, min(start + self.chunk, CLIENTS))
            batch = self.shards.gather(torch.arange(here.start, here.stop), index[here])
            directions = tuple(self.inner.views(u[here]) for u in self.state)
            found = self.products(
                self.inner.views(self.x[here]), self.outer.views(self.lam[here]), batch, directions
            )
            for place, (by_x, by_lam) in enumerate(found):
                target = self.inner.leaves(self.inner.views(self.next[place][here]))
                for value, view in zip(self.inner.leaves(by_x), target, strict=True):
                    torch.mul(value, -_SMALL_LR, out=view)
                self.outer.flatten_stacked(by_lam, out=crossed[place][here])
        if len(self.state) == 1:
            self.v.sub_(crossed[0], alpha=_SMALL_LR)
            self.next[0].addmm_(self.mixing, self.state[0])
        else:
            u, w = self.state
            self.v.sub_(crossed[0], alpha=_SMALL_LR).mul_(self.alpha)
            self.v.sub_(crossed[1], alpha=(1 - self.alpha) * _SMALL_LR)
            self.next[0].addmm_(self.mixing, u)
            self.next[1].addmm_(self.mixing, w).add_(self.c).mul_(self.beta)
            self.next[1].add_(w, alpha=1 - self.beta).add_(self.next[0], alpha=1 - self.beta)
        self.state, self.next = self.next, self.state
