"""Decentralized SGD on a fixed Erdős–Rényi graph with Metropolis weights, digits, 20 clients."""

from __future__ import annotations

from asyncfed import Scenario
from asyncfed.network import Metropolis
from asyncfed.problems import classification
from asyncfed.protocols import DSGD
from topologies import erdos_renyi


def scenario(
    clients: int = 20,
    steps: int = 300,
    lr: float = 0.5,
    density: float = 0.4,
    model: str = "mlp:32",
    seed: int = 0,
) -> Scenario:
    return Scenario(
        name="dsgd",
        problem=classification("digits", clients=clients, model=model, partition="dirichlet:0.4"),
        topology=erdos_renyi(clients, density, seed=1),
        protocol=DSGD(steps=steps, lr=lr, batch=32),
        weights=Metropolis(),
        seed=seed,
    )
