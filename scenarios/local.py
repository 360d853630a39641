"""Everybody alone: the baseline that sends nothing, digits, 20 clients."""

from __future__ import annotations

from asyncfed import Scenario
from asyncfed.problems import classification
from asyncfed.protocols import Local
from topologies import edgeless


def scenario(
    clients: int = 20, steps: int = 300, lr: float = 0.1, model: str = "mlp:32", seed: int = 0
) -> Scenario:
    return Scenario(
        name="local",
        problem=classification("digits", clients=clients, model=model, partition="dirichlet:0.4"),
        topology=edgeless(clients),
        protocol=Local(steps=steps, lr=lr, batch=32),
        seed=seed,
    )
