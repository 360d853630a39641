"""The work that is measured."""

from __future__ import annotations

import os

import torch
from torch.func import functional_call

from asyncfed import Scenario
from asyncfed.data import IID, Bootstrap, client_data_from_lists
from asyncfed.models import build_model, initial_parameters
from asyncfed.problems import Problem, classification
from asyncfed.problems.classification import cross_entropies
from asyncfed.protocols import SGP
from topologies import random_graph, stochastic_directed

NEVER = 10**9
LR = 0.05


def reference_problem(clients: int = 100) -> Problem:
    """MLP 784-200-10: MNIST where its files are at hand, otherwise random images of the same shape (the cost
    is the same).
    """
    if os.environ.get("ASYNCFED_DATA"):
        return classification("mnist", clients=clients, model="mlp:200", partition=IID(), limit=20_000)
    generator = torch.Generator().manual_seed(0)
    module = build_model("mlp:200", 784, 10)
    lists = [
        (torch.rand(120, 784, generator=generator), torch.randint(0, 10, (120,), generator=generator))
        for _ in range(clients)
    ]
    return Problem(
        name="random images",
        data=client_data_from_lists(lists),
        inner_loss=lambda x, lam, batch: cross_entropies(
            functional_call(module, x, (batch[0],)), batch[1]
        ).mean(),
        init_inner=lambda g: initial_parameters(module, g),
    )


def reference(steps: int, **changes: object) -> Scenario:
    """SGP (4b), 100 clients, MLP of 159,010 parameters, batch 64, stochastic directed links U[0.4, 0.8]."""
    settings: dict[str, object] = {
        "problem": reference_problem(),
        "topology": stochastic_directed(100, probability=(0.4, 0.8), seed=1),
        "protocol": SGP(steps=steps, lr=LR, batch=64),
        "evaluate_every": NEVER,
        "name": "reference",
    }
    return Scenario(**(settings | changes))  # type: ignore[arg-type]


def small(steps: int, clients: int = 100) -> Scenario:
    """Logistic regression on digits."""
    return Scenario(
        problem=classification("digits", clients=clients, partition=IID()),
        topology=stochastic_directed(clients, probability=(0.4, 0.8), seed=1),
        protocol=SGP(steps=steps, lr=LR, batch=16),
        evaluate_every=NEVER,
        name="small",
    )


def sparse(clients: int, steps: int = 100) -> Scenario:
    """Logistic regression on digits over a random graph of mean degree 10, links U[0.4, 0.8]."""
    return Scenario(
        problem=classification("digits", clients=clients, partition=Bootstrap(20)),
        topology=stochastic_directed(random_graph(clients, 10, seed=1), probability=(0.4, 0.8), seed=1),
        protocol=SGP(steps=steps, lr=LR, batch=16),
        evaluate_every=NEVER,
        name="sparse",
    )
