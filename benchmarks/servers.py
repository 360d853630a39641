"""Methods with a server against the same mathematics written by hand.

FedAvg: a plain PyTorch loop over the clients (a module, an optimizer, one client after the other), and a bare
vmapped version (clients in chunks, no network, trace or runtime). FedNest: one outer iteration against the
same algorithm as a plain loop over the clients, each with autograd. Images are random: speed does not depend
on them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, relu

from asyncfed import Scenario
from asyncfed.data import client_data_from_lists
from asyncfed.models import build_model, initial_parameters
from asyncfed.network import Lockstep, Timing, VirtualTime
from asyncfed.problems import Derivatives, Problem, Stages, quadratic
from asyncfed.problems.classification import cross_entropies
from asyncfed.protocols import Buffered, FedAvg, FedBuff, FedNest, LocalSteps, Neumann, Server
from asyncfed.protocols.part import Method
from asyncfed.trace import TraceWriter
from benchmarks.measure import interleaved, stepping
from benchmarks.table import Row
from topologies import star

CLIENTS, BATCH, LR = 100, 64, 0.05
_NEVER = 10**9
_LOCKSTEP, _PACES = Lockstep(), VirtualTime("exponential(1.0)")


def fedavg(rounds: int = 9) -> list[Row]:
    """One round: 100 clients, C = 0.1 and 1, MLP 784-200-10, one local epoch of 600 samples, batch 64."""
    rows: list[Row] = []
    problem = _single_level(600)
    for participation in (0.1, 1.0):
        protocol = FedAvg(_NEVER, LocalSteps(LR, epochs=1, batch=BATCH), Server(participation))
        count = int(CLIENTS * participation)
        with tempfile.TemporaryDirectory() as directory:
            step, writer = _serving(problem, protocol, 1, Path(directory))
            contestants = {
                "asyncfed": step,
                "loop": PlainFedAvg(problem, count).round,
                "bare": BareFedAvg(problem, count).round,
            }
            seconds = interleaved(contestants, rounds=rounds, steps=3 if count < CLIENTS else 1)
            writer.close()
        name = f"FedAvg, MLP, C = {participation:g}"
        loop, bare = (seconds["asyncfed"] / seconds[other] for other in ("loop", "bare"))
        rows += [
            Row(f"{name}: a round", f"{seconds['asyncfed'] * 1e3:.0f} ms"),
            Row(f"{name}: asyncfed / PyTorch loop over clients", f"{loop:.2f}", "≤ 0.7", loop <= 0.7),
            Row(f"{name}: asyncfed / bare vmapped", f"{bare:.2f}", "≤ 1.1", bare <= 1.1),
        ]
    return rows


def buffered(rounds: int = 9) -> list[Row]:
    """A move of FedBuff: 1,000 clients, 100 at work, K = 10 and 100, one step of batch 64 on an MLP,
    exponential paces; and 100,000 client steps of a problem that costs nothing.
    """
    rows: list[Row] = []
    problem = _single_level(100, clients=1000)
    for size in (10, 100):
        protocol = FedBuff(_NEVER, LocalSteps(LR, steps=1, batch=BATCH), server=Buffered(size, at_work=100))
        with tempfile.TemporaryDirectory() as directory:
            step, writer = _serving(problem, protocol, 1, Path(directory), _PACES)
            contestants = {"asyncfed": step, "bare": BareFedAvg(problem, size, samples=BATCH).round}
            seconds = interleaved(contestants, rounds=rounds, steps=400 // size)
            writer.close()
        over = (seconds["asyncfed"] - seconds["bare"]) / size * 1e3
        name = f"FedBuff, 1,000 clients, K = {size}"
        rows += [
            Row(f"{name}: bare step of a client", f"{seconds['bare'] / size * 1e3:.2f} ms"),
            Row(f"{name}: overhead of a client step", f"{over:.2f} ms", "≤ 0.3 ms", over <= 0.3),
        ]
    for size in (10, 1):
        protocol = FedBuff(_NEVER, LocalSteps(LR, steps=1), server=Buffered(size, at_work=100))
        with tempfile.TemporaryDirectory() as directory:
            step, writer = _serving(quadratic(clients=1000), protocol, 1, Path(directory), _PACES)
            seconds = interleaved({"asyncfed": step}, rounds=rounds, steps=1000 // size)
            writer.close()
        whole = seconds["asyncfed"] / size * 1e5
        what = f"FedBuff on a quadratic, K = {size}: 100,000 client steps"
        rows.append(Row(what, f"{whole:.0f} s", *(("≤ 60 s", whole <= 60) if size > 1 else ())))
    return rows


def fednest(rounds: int = 9) -> list[Row]:
    """One outer iteration: T = 1, N = 5, 10 of 100 clients, 5 local epochs of 300 samples, batch 64."""
    problem = _two_level(300)
    protocol = FedNest(
        _NEVER,
        LocalSteps(LR, epochs=5, batch=BATCH),
        LocalSteps(LR),
        neumann=Neumann(5, 0.01, "fixed"),
        sampling="parts",
        batch=BATCH,
        server=Server(0.1),
    )
    with tempfile.TemporaryDirectory() as directory:
        step, writer = _serving(problem, protocol, 10, Path(directory))
        contestants = {"asyncfed": step, "loop": PlainFedNest(problem).iteration}
        seconds = interleaved(contestants, rounds=rounds, steps=2)
        writer.close()
    ratio = seconds["asyncfed"] / seconds["loop"]
    return [
        Row("FedNest, MLP: an outer iteration", f"{seconds['asyncfed'] * 1e3:.0f} ms"),
        Row("FedNest: asyncfed / autograd loop over clients", f"{ratio:.2f}", "≤ 0.4", ratio <= 0.4),
    ]


def _serving(
    problem: Problem, protocol: Method, rounds: int, out: Path, timing: Timing = _LOCKSTEP
) -> tuple[Callable[[], None], TraceWriter]:
    """A function that makes the next iteration (so many rounds) of a real local run, trace on."""
    scenario = Scenario(
        problem=problem,
        topology=star(problem.clients),
        protocol=protocol,
        timing=timing,
        evaluate_every=_NEVER,
    )
    return stepping(scenario, out, ticks=rounds)


def tiny_rounds(rounds: int = 40) -> list[Row]:
    """What the simulator adds to a server round of a problem that costs nothing: FedAvg on a quadratic."""
    rows: list[Row] = []
    for clients in (5, 100):
        problem = quadratic(clients=clients)
        protocol = FedAvg(_NEVER, LocalSteps(LR, steps=1))
        with tempfile.TemporaryDirectory() as directory:
            step, writer = _serving(problem, protocol, 1, Path(directory))
            contestants = {"asyncfed": step, "bare": BareQuadratic(problem).round}
            seconds = interleaved(contestants, rounds=rounds, steps=20)
            writer.close()
        over = (seconds["asyncfed"] - seconds["bare"]) * 1e3
        rows += [
            Row(f"quadratic, {clients} clients: bare round", f"{seconds['bare'] * 1e3:.2f} ms"),
            Row(f"quadratic, {clients} clients: overhead", f"{over:.2f} ms", "≤ 0.6 ms", over <= 0.6),
        ]
    return rows


class BareQuadratic:
    """One local step of everybody on all of its samples, and the mean."""

    def __init__(self, problem: Problem) -> None:
        self.derivatives = Derivatives.of(problem)
        train = problem.data.to(torch.float32).train
        clients = torch.arange(problem.clients)
        self.batch = train.gather(clients, torch.arange(int(train.sizes[0])).expand(problem.clients, -1))
        start = problem.init_inner(torch.Generator().manual_seed(0))
        self.y = self.derivatives.inner.flatten(start).float()
        self.lam = torch.zeros(problem.clients, self.derivatives.outer.d)

    def round(self) -> None:
        y = self.y.expand(len(self.lam), -1).clone()
        self.derivatives.descend("inner", y, self.lam, self.batch, LR)
        self.y = y.mean(0)


def _images(samples: int, clients: int = CLIENTS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(samples, 784, generator=generator), torch.randint(0, 10, (samples,), generator=generator))
        for _ in range(clients)
    ]


def _single_level(samples: int, clients: int = CLIENTS) -> Problem:
    module = build_model("mlp:200", 784, 10)
    return Problem(
        name="random images",
        data=client_data_from_lists(_images(samples, clients)),
        inner_loss=lambda y, x, batch: cross_entropies(
            functional_call(module, y, (batch[0],)), batch[1]
        ).mean(),
        init_inner=lambda generator: initial_parameters(module, generator),
    )


def _two_level(samples: int) -> Problem:
    module = build_model("mlp:200", 784, 10)

    def part(generator: torch.Generator, layer: str) -> dict[str, torch.Tensor]:
        found = initial_parameters(module, generator)
        return {kind: found[f"{layer}.{kind}"] for kind in ("weight", "bias")}

    def encode(x: dict[str, torch.Tensor], batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return relu(batch[0] @ x["weight"].mT + x["bias"]), batch[1]

    def head(y: dict[str, torch.Tensor], batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return cross_entropies(batch[0] @ y["weight"].mT + y["bias"], batch[1]).mean()

    images = _images(samples)
    return Problem(
        name="random images, two levels",
        data=client_data_from_lists(images, validation=images),
        stages=Stages(encode, head),
        outer_loss=lambda y, x, batch: head(y, encode(x, batch)),
        outer_split="validation",
        init_inner=lambda generator: part(generator, "head"),
        init_outer=lambda generator: part(generator, "hidden1"),
    )


class PlainFedAvg:
    """As one would write it: load the global model, step an optimizer through an epoch, add to the mean."""

    def __init__(self, problem: Problem, count: int) -> None:
        self.data = [problem.data.train.of(client) for client in range(CLIENTS)]
        self.count = count
        self.model = build_model("mlp:200", 784, 10)
        self.state = {name: value.clone() for name, value in self.model.state_dict().items()}

    def round(self) -> None:
        mean = {name: torch.zeros_like(value) for name, value in self.state.items()}
        for client in torch.randperm(CLIENTS)[: self.count].tolist():
            images, labels = self.data[client]
            self.model.load_state_dict(self.state)
            optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
            for batch in torch.randperm(len(images)).split(BATCH):
                optimizer.zero_grad()
                cross_entropy(self.model(images[batch]), labels[batch]).backward()
                optimizer.step()
            for name, value in self.model.state_dict().items():
                mean[name].add_(value, alpha=1 / self.count)
        self.state = mean


class BareFedAvg:
    """Clients stacked, gradients through vmap, in chunks."""

    def __init__(self, problem: Problem, count: int, chunk: int = 26, samples: int = 600) -> None:
        self.layout, self.samples = Derivatives.of(problem).inner, samples
        self.shards, self.count, self.chunk = problem.data.to(torch.float32).train, count, chunk
        self.y = self.layout.flatten(problem.init_inner(torch.Generator().manual_seed(0)))
        self.gradient = vmap(grad(lambda y, batch: problem.inner_loss(y, {}, batch)))

    @torch.no_grad()
    def round(self) -> None:
        asked = torch.randperm(len(self.shards.sizes))[: self.count].sort().values
        total = torch.zeros_like(self.y)
        for clients in asked.split(self.chunk):
            y = self.y.expand(len(clients), -1).clone()
            views = self.layout.views(y)
            assert isinstance(views, dict)
            order = torch.rand(len(clients), self.samples).argsort(1)
            for index in order.split(BATCH, dim=1):
                gradient = self.gradient(views, self.shards.gather(clients, index))
                for name, value in gradient.items():
                    views[name].add_(value, alpha=-LR)
            total += y.sum(0)
        self.y = total / self.count


class PlainFedNest:
    """Alg. 1–4, T = 1, N = 5 products, one client after the other with autograd."""

    def __init__(self, problem: Problem) -> None:
        self.train = [problem.data.train.of(client) for client in range(CLIENTS)]
        self.hidden, self.head = nn.Linear(784, 200), nn.Linear(200, 10)
        self.x = [p.detach() for p in self.hidden.parameters()]
        self.y = [p.detach() for p in self.head.parameters()]

    def loss(
        self, x: list[torch.Tensor], y: list[torch.Tensor], client: int, index: torch.Tensor
    ) -> torch.Tensor:
        images, labels = self.train[client]
        hidden = relu(nn.functional.linear(images[index], *x))
        return cross_entropy(nn.functional.linear(hidden, *y), labels[index])

    def by_y(self, y: list[torch.Tensor], client: int, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [value.detach().requires_grad_() for value in y]
        return torch.autograd.grad(self.loss(self.x, leaves, client, index), leaves)

    def iteration(self) -> None:
        asked = torch.randperm(CLIENTS)[:10].tolist()
        some = {client: torch.randperm(300)[:BATCH] for client in range(CLIENTS)}
        q = _mean([self.by_y(self.y, client, some[client]) for client in asked])
        answers = []
        for client in asked:
            y = [value.clone() for value in self.y]
            for _ in range(5):
                for batch in torch.randperm(300).split(BATCH):
                    now, then = self.by_y(y, client, batch), self.by_y(self.y, client, batch)
                    for value, a, b, d in zip(y, now, then, q, strict=True):
                        value -= LR * (a - b + d)
            answers.append(tuple(y))
        self.y = _mean(answers)
        asked = torch.randperm(CLIENTS)[:10].tolist()
        p = [0.05 * value for value in _mean([self.by_y(self.y, client, some[client]) for client in asked])]
        for _ in range(5):
            p = _mean([self.product(p, client, some[client]) for client in asked])
        h = _mean([self.hypergradient(p, client, some[client]) for client in asked])
        self.x = [value - LR * d for value, d in zip(self.x, h, strict=True)]

    def product(self, p: list[torch.Tensor], client: int, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [value.detach().requires_grad_() for value in self.y]
        gradient = torch.autograd.grad(self.loss(self.x, leaves, client, index), leaves, create_graph=True)
        found = torch.autograd.grad(gradient, leaves, p)
        return tuple(value - 0.01 * d for value, d in zip(p, found, strict=True))

    def hypergradient(
        self, p: list[torch.Tensor], client: int, index: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        x = [value.detach().requires_grad_() for value in self.x]
        direct = torch.autograd.grad(self.loss(x, self.y, client, index), x)
        y = [value.detach().requires_grad_() for value in self.y]
        gradient = torch.autograd.grad(self.loss(x, y, client, index), y, create_graph=True)
        indirect = torch.autograd.grad(gradient, x, p)
        return tuple(a - b for a, b in zip(direct, indirect, strict=True))


def _mean(answers: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [torch.stack(values).mean(0) for values in zip(*answers, strict=True)]
