"""A scenario: a problem, a network, a protocol and a seed.

`check` refuses what cannot be run before anything runs. How a scenario is written down and read again is in
`scenario_data`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import networkx as nx
import numpy as np
import torch

from asyncfed.errors import ScenarioError, TopologyError, UnknownNameError
from asyncfed.network import Lockstep, Timing, Uniform, Weights
from asyncfed.network.links import Network
from asyncfed.problems import Derivatives, Problem
from asyncfed.protocols import LocalSteps
from asyncfed.protocols.gossip_bilevel import GossipRounds, check_size
from asyncfed.protocols.outer import OuterPush, OuterStep, rates_by_part
from asyncfed.protocols.phase import Phase, ProtocolLike
from asyncfed.protocols.rounds import ServerProtocol


@dataclass(frozen=True, eq=False)
class Scenario:
    """Everything that decides a run.

    Parameters
    ----------
    problem
        Losses, initial values and the clients' data; see `asyncfed.problems`.
    topology
        A networkx graph whose edges carry `probability` (and, where wanted, `latency`, `bandwidth`, `loss`):
        one node per client.
    protocol
        The method, for instance `SGP(steps=200, lr=0.05)`.
    timing
        `Lockstep()`, the papers' rounds, or `VirtualTime(…)`, everybody at its own pace.
    weights
        What a sender gives to whom: `Uniform()` over the links it has, `Metropolis()`, `FastestMixing()`,
        `Given(matrix)`.
    seed
        Decides links, losses, delays, minibatches and initial values.
    precision
        "float32" or "float64".
    evaluate_every
        Steps (in lockstep) or virtual time between evaluations; by default about twenty in a run. For a
        method with a server: outer iterations.
    until
        End the run at the first evaluation in which these metrics have come so far: {"accuracy": 0.9} (at
        least), {"loss": 0.1} (a loss or distance: at most). For methods with a server.
    """

    problem: Problem
    topology: nx.Graph
    protocol: ProtocolLike | ServerProtocol
    timing: Timing = field(default_factory=Lockstep)
    weights: Weights = field(default_factory=Uniform)
    seed: int = 0
    precision: Literal["float32", "float64"] = "float32"
    evaluate_every: float | None = None
    until: Mapping[str, float] | None = None
    name: str = "scenario"

    @property
    def clients(self) -> int:
        return self.problem.clients


def check(scenario: Scenario) -> Network:
    """Refuse what cannot be run, naming the reason; returns the network, read."""
    if not isinstance(scenario.seed, (int, np.integer)) or isinstance(scenario.seed, bool):
        raise ScenarioError(f"seed is {scenario.seed!r}; it must be a whole number")
    if scenario.precision not in ("float32", "float64"):
        raise ScenarioError(f"precision is {scenario.precision!r}; it must be 'float32' or 'float64'")
    if scenario.evaluate_every is not None and not 0 < scenario.evaluate_every < float("inf"):
        raise ScenarioError(
            f"evaluate_every is {scenario.evaluate_every}; "
            "it must be finite and above 0, or None for about twenty evaluations"
        )
    if (
        isinstance(scenario.timing, Lockstep)
        and scenario.evaluate_every is not None
        and scenario.evaluate_every % 1
    ):
        raise ScenarioError(
            f"evaluate_every is {scenario.evaluate_every}; in lockstep it is a whole number of steps"
        )
    network = scenario.timing.network(scenario.topology)
    if not isinstance(scenario.protocol, ProtocolLike):
        _check_server(scenario, network)
        return network
    if scenario.until is not None:
        raise ScenarioError(
            "until is for methods with a server; a protocol among peers makes the steps it says, so give it "
            "fewer, or leave until out"
        )
    if network.n != scenario.problem.clients:
        raise TopologyError(
            f"the topology has {network.n} nodes, but the problem has {scenario.problem.clients} clients; "
            "make them equal"
        )
    scenario.timing.pace(network.n)  # refuses what does not fit the clients
    phases = scenario.protocol.phases()
    _check_phases(scenario, phases)
    for phase in _different(phases):
        if phase.sends:
            phase.check(network, scenario.weights, scenario.timing)
        else:
            phase.check(network.silent(), Uniform(), scenario.timing)
    return network


def _check_server(scenario: Scenario, network: Network) -> None:
    """The same for a method with a server."""
    protocol, clients = scenario.protocol, scenario.problem.clients
    assert not isinstance(protocol, ProtocolLike)
    if scenario.evaluate_every is not None and scenario.evaluate_every % 1:
        raise ScenarioError(
            f"evaluate_every is {scenario.evaluate_every}; with a server it is a whole number of outer "
            "iterations"
        )
    if getattr(scenario.timing, "horizon", None) is not None:
        raise ScenarioError(
            f"a horizon of {getattr(scenario.timing, 'horizon', None)} would cut an outer iteration "
            "somewhere in the middle; leave it out and give the protocol outer_steps or max_rounds"
        )
    if network.server is not None and network.n != clients + 1:
        raise TopologyError(
            f"the topology has {network.n - 1} clients and a server, but the problem has {clients} clients; "
            "make them equal"
        )
    protocol.server.check(network, isinstance(scenario.timing, Lockstep))
    scenario.timing.pace(clients)
    for name in ("inner", "outer", "local"):
        steps = getattr(protocol, name, None)
        if isinstance(steps, LocalSteps):
            steps.check(clients)
    if protocol.needs_outer:
        _require_outer(scenario.problem)
    for name in scenario.until or ():
        if name not in scenario.problem.metrics:
            raise UnknownNameError("metric in until", name, scenario.problem.metrics)


def _different(phases: tuple[Phase, ...]) -> list[Phase]:
    """Each phase once: an outer loop repeats its phases."""
    found: list[Phase] = []
    for phase in phases:
        if phase not in found:
            found.append(phase)
    return found


def _check_phases(scenario: Scenario, phases: tuple[Phase, ...]) -> None:
    horizon = getattr(scenario.timing, "horizon", None)
    if len(phases) > 1 and horizon is not None:
        raise ScenarioError(
            f"a horizon of {horizon} would cut a protocol of {len(phases)} phases somewhere "
            "in the middle of one; leave the horizon out, the protocol says how many steps are made"
        )
    for before, phase in pairwise(phases):
        if phase.estimates and before.judged and before.sends and not before.steps:
            raise ScenarioError(
                f"{phase.name} is to estimate p̄ and δ̄ from the inner steps, but {before.name} makes none; "
                "give it steps, or the method expectations='exact'"
            )
    if any(phase.needs_outer for phase in phases):
        _require_outer(scenario.problem)
        outer = Derivatives.of(scenario.problem).outer
        for phase in _different(phases):
            if isinstance(phase, GossipRounds):
                check_size(outer.d, Derivatives.of(scenario.problem).inner.d, phase.method.terms)
            if isinstance(phase, (OuterStep, OuterPush)):
                rates_by_part(phase.outer_lr, outer, torch.empty(0))  # refuses parts that λ does not have


def _require_outer(problem: Problem) -> None:
    derivatives = Derivatives.of(problem)
    if not derivatives.outer.d:
        raise ScenarioError(
            f"problem {problem.name!r} has no outer variable, so there is no hypergradient; give it "
            "init_outer (and losses that depend on it), or use a protocol of one level such as SGP"
        )
    if problem.outer_split == "validation" and not problem.data.validation.total:
        raise ScenarioError(
            f"the outer loss of problem {problem.name!r} is over validation samples, and there are none; "
            "give it some, or outer_split='train'"
        )
    over = problem.data.validation if problem.outer_split == "validation" else problem.data.train
    without = np.flatnonzero(over.sizes == 0)
    if len(without):
        raise ScenarioError(
            f"the outer loss of problem {problem.name!r} is over {problem.outer_split} samples, and client "
            f"{without[0]} has none ({len(without)} such clients in all); give every client at least one"
        )
    sample = tuple(tensor[:1] for tensor in problem.data.train.tensors)
    unused = derivatives.unused_outer(sample)
    if unused:
        raise ScenarioError(
            f"neither loss of problem {problem.name!r} depends on {', '.join(map(repr, unused))} of its "
            "outer variable, so its hypergradient is zero; use it in a loss, or leave it out"
        )
