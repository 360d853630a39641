"""Stochastic gradient push on links that come and go, digits, 20 clients; a few seconds."""

from __future__ import annotations

from asyncfed import Scenario
from asyncfed.problems import classification
from asyncfed.protocols import SGP, StepDecay
from topologies import stochastic_directed


def scenario(
    clients: int = 20, steps: int = 400, lr: float = 0.3, model: str = "mlp:32", seed: int = 0
) -> Scenario:
    return Scenario(
        name="sgp_digits",
        problem=classification("digits", clients=clients, model=model, partition="dirichlet:0.4"),
        topology=stochastic_directed(clients, probability=(0.4, 0.8), seed=1),
        # The last quarter at a tenth of the rate lets the clients settle on a common model.
        protocol=SGP(steps=steps, lr=StepDecay(lr, at=(3 * steps // 4,)), batch=32),
        seed=seed,
    )
