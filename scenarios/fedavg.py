"""FedAvg with a server: a quarter of 40 clients per round, two local epochs, uneven label mixtures."""

from __future__ import annotations

from asyncfed import Scenario
from asyncfed.problems import classification
from asyncfed.protocols import FedAvg, LocalSteps, Server
from topologies import star


def scenario(
    clients: int = 40, rounds: int = 60, participation: float = 0.25, epochs: int = 2, lr: float = 0.3
) -> Scenario:
    return Scenario(
        name="fedavg",
        problem=classification("digits", clients=clients, model="mlp:32", partition="dirichlet:0.4"),
        topology=star(clients),
        protocol=FedAvg(
            outer_steps=rounds,
            local=LocalSteps(lr, epochs=epochs, batch=16),
            server=Server(participation, weighted=True),
        ),
    )
