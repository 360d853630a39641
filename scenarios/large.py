"""Ten thousand clients on a sparse random graph whose links come and go; quadratics, 100 lockstep rounds."""

from __future__ import annotations

from asyncfed import Scenario
from asyncfed.problems import quadratic
from asyncfed.protocols import SGP
from topologies import random_graph, stochastic_undirected


def scenario(
    clients: int = 10_000,
    steps: int = 100,
    lr: float = 0.1,
    mean_degree: float = 10.0,
    dimension: int = 20,
    seed: int = 0,
) -> Scenario:
    # Both directions of a link come and go together: among so many clients, some with a single neighbour,
    # one that sends for long and hears nothing would otherwise lose nearly all of its push-sum weight, and
    # overshoot.
    return Scenario(
        name="large",
        problem=quadratic(clients=clients, dimension=dimension),
        topology=stochastic_undirected(
            random_graph(clients, mean_degree, seed=1), probability=(0.4, 0.8), seed=1
        ),
        protocol=SGP(steps=steps, lr=lr),
        seed=seed,
    )
