"""The reference work: gradient push on MNIST (in $ASYNCFED_DATA), 100 clients, MLP 784-200-10, batch 64."""

from __future__ import annotations

from asyncfed import Scenario
from asyncfed.problems import classification
from asyncfed.protocols import SGP
from topologies import stochastic_directed


def scenario(
    clients: int = 100, steps: int = 100, lr: float = 0.1, batch: int = 64, seed: int = 0
) -> Scenario:
    return Scenario(
        name="sgp_mnist",
        problem=classification("mnist", clients=clients, model="mlp:200", partition="shards:2"),
        topology=stochastic_directed(clients, probability=(0.4, 0.8), seed=1),
        protocol=SGP(steps=steps, lr=lr, order="4b", batch=batch),
        seed=seed,
    )
