"""Asynchronous gradient push in virtual time: random paces, one client 10 times slower, latency and loss.

A client that steps often while little arrives gives most of its push-sum weight ω away, and its next step has
length lr/ω. Hence sparse links (with few receivers a sender keeps a fair share for itself), the order (4a)
and a learning rate that is small and diminishes.
"""

from __future__ import annotations

from asyncfed import Scenario, VirtualTime
from asyncfed.problems import classification
from asyncfed.protocols import SGP, Diminishing
from topologies import small_world, stochastic_directed


def scenario(
    clients: int = 20,
    horizon: float = 400.0,
    lr: float = 0.1,
    slowdown: float = 10.0,
    loss: float = 0.005,
    seed: int = 0,
) -> Scenario:
    links = small_world(clients, neighbours=8, rewire=0.2, seed=1)
    return Scenario(
        name="stragglers",
        problem=classification("digits", clients=clients, model="logistic", partition="dirichlet:0.4"),
        topology=stochastic_directed(links, probability=(0.4, 0.8), seed=1),
        # A step takes 1 on average, so nobody comes to the end of its steps before the horizon.
        protocol=SGP(steps=int(1.3 * horizon) + 10, lr=Diminishing(lr, after=100), order="4a", batch=32),
        timing=VirtualTime(
            compute="exponential(1.0)",
            factors={0: slowdown},
            latency="exponential(0.2)",
            loss=loss,
            horizon=horizon,
        ),
        seed=seed,
    )
