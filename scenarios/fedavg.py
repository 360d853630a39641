"""FedAvg with one local step per round: everybody averages with everybody, digits, 20 clients."""

from __future__ import annotations

from asyncfed import Scenario
from asyncfed.problems import classification
from asyncfed.protocols import FedAvg
from topologies import fully_connected


def scenario(
    clients: int = 20, steps: int = 300, lr: float = 0.5, model: str = "mlp:32", seed: int = 0
) -> Scenario:
    return Scenario(
        name="fedavg",
        problem=classification("digits", clients=clients, model=model, partition="dirichlet:0.4"),
        topology=fully_connected(clients),
        protocol=FedAvg(steps=steps, lr=lr, batch=32),
        seed=seed,
    )
