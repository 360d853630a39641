"""A scenario: a problem, a network, a protocol and a seed.

`check` refuses what cannot be run before anything runs. How a scenario is written down and read again is in
`scenario_data`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import networkx as nx
import numpy as np

from asyncfed.checks import Range, Words, checked, shown
from asyncfed.errors import ScenarioError, TopologyError, UnknownNameError
from asyncfed.goals import Goal
from asyncfed.markup import panel
from asyncfed.network import Lockstep, Timing, Uniform, Weights
from asyncfed.problems import Derivatives, Problem
from asyncfed.problems.checking import check_data, check_functions
from asyncfed.protocols.part import Method, Scene, Sizes
from asyncfed.protocols.saturation import warn_saturated
from asyncfed.protocols.soundness import warn_unsound
from asyncfed.rng import Streams


@checked
@dataclass(frozen=True, eq=False, repr=False)
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
        End the run at the first evaluation in which all these metrics have come so far:
        {"accuracy": AtLeast(0.9), "loss": AtMost(0.1)}. For methods with a server.
    """

    problem: Annotated[Problem, Words("a Problem, such as classification('digits')")]
    topology: Annotated[nx.Graph, Words("a networkx graph, such as ring(20)")]
    protocol: Annotated[Method, Words("a method with its parameters, such as SGP(steps=200, lr=0.05)")]
    timing: Annotated[Timing, Words("a timing, Lockstep(…) or VirtualTime(…)")] = field(
        default_factory=Lockstep
    )
    weights: Annotated[
        Weights, Words("weights: Uniform(), Metropolis(), FastestMixing() or Given(matrix)")
    ] = field(default_factory=Uniform)
    seed: int = 0
    precision: Literal["float32", "float64"] = "float32"
    evaluate_every: Annotated[
        float | None,
        Range(0, above=True),
        Words("a finite number above 0, or None for about twenty evaluations"),
    ] = None
    until: Annotated[
        Mapping[str, Goal] | None,
        Words("a mapping that says which way each metric goes, such as {'accuracy': AtLeast(0.9)}, or None"),
    ] = None
    name: str = "scenario"

    def __repr__(self) -> str:
        lines = [f"  {name:<9} {value}" for name, value in self._said().items()]
        return "\n".join([f"<{self._title()}", *lines]) + ">"

    def _repr_html_(self) -> str:
        return panel(self._title(), self._said())

    def _title(self) -> str:
        return f"Scenario {self.name}, seed {self.seed}, {self.precision}"

    def _said(self) -> dict[str, str]:
        graph = self.topology.graph.get("name") or str(self.topology)
        return {
            "problem": f"{self.problem.name}, {self.clients:,} clients",
            "topology": str(graph),
            "protocol": shown(self.protocol, 400),
            "timing": shown(self.timing),
            "weights": shown(self.weights),
            "judged": f"every {self.evaluate_every:g}" if self.evaluate_every else "about twenty times",
            **({"until": shown(self.until)} if self.until else {}),
        }

    @property
    def clients(self) -> int:
        return self.problem.clients


AnyScenario = Annotated[Scenario, Words("Scenario(problem=…, topology=…, protocol=…)")]


@checked
def check(scenario: AnyScenario) -> Scene:
    """Refuse what cannot be run, naming the reason, and warn of what can but has no right to its answer;
    returns what the method is to run on.
    """
    _check_settings(scenario)
    problem, method, timing = scenario.problem, scenario.protocol, scenario.timing
    network = timing.network(scenario.topology)
    check_functions(problem)
    check_data(problem)
    derivatives = Derivatives.of(problem)
    sizes = Sizes(derivatives.inner.d, derivatives.outer.d, problem.clients)
    scene = Scene(problem, sizes, network, scenario.weights, timing)
    with_server = method.server is not None
    if not (with_server and network.server is None):  # which the method itself refuses, with a remedy
        if network.n - with_server != problem.clients:
            served = network.server is not None
            nodes = f"{network.n - 1} clients and a server" if served else f"{network.n} nodes"
            remedy = "make them equal"
            if served and not with_server:
                remedy = (
                    "this method has no server, so every node must be a client: use a topology among peers, "
                    "such as ring(clients), or a method with a server, such as FedAvg"
                )
            raise TopologyError(
                f"the topology has {nodes}, but the problem has {problem.clients} clients; {remedy}"
            )
        timing.pace(network, problem.clients)  # refuses what does not fit the clients
        timing.attendance(network, problem.clients, Streams(0))  # likewise
    if method.needs_outer:
        _require_outer(problem)
    require_moved(problem, method)
    method.check(scene)
    if not with_server:
        parts = next(method.iterations(Streams(scenario.seed)), ())
        warn_unsound(parts, scene)
        warn_saturated(parts, scene, 8 if scenario.precision == "float64" else 4)
    return scene


def require_moved(problem: Problem, method: Method) -> None:
    """Refuse buffers that a method would leave as they are."""
    kept = None if problem.buffers is None else problem.buffers.kept
    if kept is not None and kept not in method.moves_buffers:
        other = [one for one in method.moves_buffers if one != kept]
        raise ScenarioError(
            f"problem {problem.name!r} has buffers that are {kept} (running statistics of BatchNorm), and "
            f"{type(method).__name__} does not move such; "
            + (
                f"give from_module buffers={other[0]!r}, or 'frozen'"
                if other
                else "give from_module buffers='frozen'"
            )
        )


def _check_settings(scenario: Scenario) -> None:
    every, with_server = scenario.evaluate_every, scenario.protocol.server is not None
    if not scenario.timing.barrier and (every is not None or with_server):
        raise ScenarioError(
            "barrier is False, so that clients are at different parts at one time; "
            + (
                "a server's rounds have no such parts (a Buffered server does not wait): leave it out"
                if with_server
                else f"they are judged when all are through, so evaluate_every={every:g} has no meaning"
            )
        )
    if every is not None and every % 1:
        if with_server:
            raise ScenarioError(
                f"evaluate_every is {every}; with a server it is a whole number of outer iterations"
            )
        if isinstance(scenario.timing, Lockstep):
            raise ScenarioError(f"evaluate_every is {every}; in lockstep it is a whole number of steps")
    if scenario.until is None:
        return
    if not with_server:
        raise ScenarioError(
            "until is for methods with a server; a protocol among peers makes the steps it says, so give it "
            "fewer, or leave until out"
        )
    for name in scenario.until:
        if name not in scenario.problem.metrics:
            raise UnknownNameError("metric in until", name, scenario.problem.metrics)


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
    without = np.flatnonzero(problem.outer_data.sizes == 0)
    if len(without):
        raise ScenarioError(
            f"the outer loss of problem {problem.name!r} is over {problem.outer_split} samples, and client "
            f"{without[0]} has none ({len(without)} such clients in all); give every client at least one"
        )
    unused = derivatives.unused_outer(tuple(tensor[:2] for tensor in problem.data.train.tensors))
    if unused:
        raise ScenarioError(
            f"neither loss of problem {problem.name!r} depends on {', '.join(map(repr, unused))} of its "
            "outer variable, so its hypergradient is zero; use it in a loss, or leave it out"
        )
