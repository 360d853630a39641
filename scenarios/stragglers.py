"""Asynchronous gradient push in virtual time: random paces, one client 10 times slower, latency, loss.

Every client has its own pace (log-normal), its steps take random times, and client 0 is a straggler. The
rate is three times what SGP bears on this network in lockstep. Where ω is small a client tells others
only what its ω bears of its new gradient, and the rest later. `method` chooses among the candidates that
the study `stragglers_compared` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np

from asyncfed import Scenario, VirtualTime
from asyncfed.errors import UnknownNameError
from asyncfed.problems import Problem, classification
from asyncfed.protocols import SGP, AsyncSGP, PushDIGing
from asyncfed.rng import Streams
from topologies import small_world, stochastic_directed

SPREAD = 0.5  # standard deviation of the logarithm of a client's mean step time

# Each from steps, rate and the mean time between steps of a client.
METHODS: dict[str, Callable[[int, float, float], Any]] = {
    "plain": lambda steps, lr, per: SGP(steps, lr, order="4a", batch=32),
    "by time": lambda steps, lr, per: AsyncSGP(steps, lr, per, omega0=None, batch=32),
    "debt": lambda steps, lr, per: AsyncSGP(steps, lr, per=None, batch=32),
    "by time, debt": lambda steps, lr, per: AsyncSGP(steps, lr, per, batch=32),
    "by time, time owed": lambda steps, lr, per: AsyncSGP(steps, lr, per, omega0=0.5, owed="time", batch=32),
    "tracking, debt": lambda steps, lr, per: PushDIGing(steps, lr, batch=32, omega0=1.0),
}


def scenario(
    clients: int = 20,
    horizon: float = 200.0,
    lr: float = 0.6,
    slowdown: float = 10.0,
    loss: float = 0.005,
    method: str = "tracking, debt",
    seed: int = 0,
) -> Scenario:
    factors = paces(clients, slowdown, seed)
    # Nobody comes to the end of its steps before the horizon.
    steps = int(1.5 * horizon / min(factors)) + 50
    return Scenario(
        name="stragglers",
        problem=digits(clients),
        topology=network(clients),
        protocol=_chosen(method)(steps, lr, sum(factors) / clients),
        timing=VirtualTime(
            compute="exponential(1.0)",
            factors=factors,
            latency="exponential(0.2)",
            loss=loss,
            horizon=horizon,
        ),
        evaluate_every=horizon / 100,
        seed=seed,
    )


def _chosen(method: str) -> Callable[[int, float, float], Any]:
    if method not in METHODS:
        raise UnknownNameError("method of stragglers", method, METHODS)
    return METHODS[method]


def paces(clients: int, slowdown: float, seed: int) -> tuple[float, ...]:
    """The clients' mean step times."""
    drawn = np.exp(SPREAD * Streams(seed).generator("paces").standard_normal(clients))
    return (slowdown, *drawn[1:].tolist())


def network(clients: int) -> nx.DiGraph:
    links = small_world(clients, neighbours=8, rewire=0.2, seed=1)
    return stochastic_directed(links, probability=(0.4, 0.8), seed=1)


def digits(clients: int) -> Problem:
    return classification("digits", clients=clients, model="logistic", partition="dirichlet:0.4")
