"""My scenario: ten clients learn the digits together, over links that come and go.

Run it here: asyncfed run FILE
With other parameters of `scenario` below: asyncfed run FILE --set clients=20 --set lr=0.1
With other parts: asyncfed run FILE --set timing='VirtualTime(latency=0.2)' --set protocol.batch=None
With every client in a process of its own: asyncfed run FILE --backend ray
What went over every link of a run: asyncfed trace RUN
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from asyncfed import Lockstep, Scenario
from asyncfed.data import DirichletOverClients, load_dataset, partition_data
from asyncfed.problems import Problem
from asyncfed.protocols import SGP
from topologies import stochastic_directed


def scenario(clients: int = 10, steps: int = 100, lr: float = 0.5, seed: int = 0) -> Scenario:
    """Its arguments are what `--set` changes by name."""
    return Scenario(
        # What is learned, and from which data: see `problem` below, or asyncfed.problems for ready ones.
        problem=problem(clients),
        # Who can talk to whom: any networkx graph whose edges carry `probability`. Here every link exists at
        # a step with a probability of its own, drawn once. star(clients) has a server, for methods that need
        # one.
        topology=stochastic_directed(clients, probability=(0.4, 0.8), seed=1),
        # By which method: stochastic gradient push. With a server: FedAvg(50, LocalSteps(lr, steps=5)).
        protocol=SGP(steps=steps, lr=lr, batch=32),
        # In rounds, or in virtual time: VirtualTime(compute="uniform(0.8, 1.2)", latency=0.2).
        timing=Lockstep(),
        # The same seed gives the same bytes, on every backend.
        seed=seed,
    )


def problem(clients: int) -> Problem:
    """A few plain functions of one client and one batch. Nothing is subclassed, nothing knows of clients."""
    digits = load_dataset("digits")  # x (N, 64), y (N,); client_data_from_lists takes tensors of your own
    data = partition_data(digits, DirichletOverClients(0.4), clients, seed=0, fractions=(0.6, 0.2, 0.2))

    def initial(generator: torch.Generator) -> dict[str, Tensor]:
        """Where everybody begins: a tensor, or a dict of them."""
        return {"weight": 0.01 * torch.randn(10, 64, generator=generator), "bias": torch.zeros(10)}

    def logits(model: dict[str, Tensor], images: Tensor) -> Tensor:
        return images @ model["weight"].T + model["bias"]

    def loss(model: dict[str, Tensor], outer: object, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean over a batch (images, labels): one number."""
        images, labels = batch
        return cross_entropy(logits(model, images), labels)

    def accuracy(model: dict[str, Tensor], outer: object, batch: tuple[Tensor, ...]) -> Tensor:
        """A metric has one number for every sample."""
        images, labels = batch
        return (logits(model, images).argmax(-1) == labels).float()

    return Problem(
        name="my problem",
        data=data,
        init_inner=initial,
        inner_loss=loss,
        metrics={"accuracy": accuracy},
        # For a bilevel problem: init_outer=…, outer_loss=… of the same form, and a method such as PDBO(…).
    )
