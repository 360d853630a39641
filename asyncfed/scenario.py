"""A scenario: a problem, a network, a protocol and a seed; a Python value that can be written down and read
again.

`check` refuses what cannot be run before anything runs. `scenario_to_data` turns a scenario into plain data
(which a run directory keeps), `scenario_from_data` back; only types listed here are ever built from data, and
nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import networkx as nx
import numpy as np
import torch

from asyncfed.errors import ScenarioError, TopologyError, UnknownNameError
from asyncfed.goals import AtLeast, AtMost, Goal, check_goal
from asyncfed.network import (
    FastestMixing,
    Given,
    Lockstep,
    Metropolis,
    Table,
    Timing,
    Uniform,
    VirtualTime,
    Weights,
)
from asyncfed.network.distributions import Constant, Exponential, LogNormal
from asyncfed.network.distributions import Uniform as UniformTime
from asyncfed.network.links import Network
from asyncfed.plain import plain_fields
from asyncfed.problems import Derivatives, Problem, problem_from_recipe
from asyncfed.protocols import (
    CDBO,
    DSGD,
    HGP,
    PDBO,
    SGP,
    VRHGP,
    AggITD,
    CompareHypergradients,
    Diminishing,
    EstimateHypergradient,
    ExactBackprop,
    FedAvg,
    FedAvgS,
    FedNest,
    FedNestSGD,
    GossipBilevel,
    ITDBackward,
    ITDForward,
    LFedNest,
    LFedNestNonAlt,
    LFedNestSVRG,
    Local,
    LocalSteps,
    Neumann,
    PeerFedAvg,
    Server,
    StepDecay,
)
from asyncfed.protocols.gossip_bilevel import GossipRounds, check_size
from asyncfed.protocols.outer import OuterPush, OuterStep, rates_by_part
from asyncfed.protocols.phase import Phase, ProtocolLike
from asyncfed.protocols.rounds import ServerProtocol

_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        SGP, DSGD, PeerFedAvg, Local, HGP, VRHGP, ExactBackprop, ITDForward, ITDBackward,
        PDBO, CDBO, CompareHypergradients, EstimateHypergradient,
        FedAvg, FedNest, FedNestSGD, LFedNest, LFedNestSVRG, LFedNestNonAlt, FedAvgS, AggITD, GossipBilevel,
        LocalSteps, Neumann, Server, StepDecay, Diminishing, Lockstep, VirtualTime, Table, Uniform,
        Metropolis, FastestMixing, Given, AtLeast, AtMost,
    )
}  # fmt: skip
_DURATIONS = (Constant, Exponential, LogNormal, UniformTime)


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
        End the run at the first evaluation in which all these metrics have come so far:
        {"accuracy": AtLeast(0.9), "loss": AtMost(0.1)}. For methods with a server.
    """

    problem: Problem
    topology: nx.Graph
    protocol: ProtocolLike | ServerProtocol
    timing: Timing = field(default_factory=Lockstep)
    weights: Weights = field(default_factory=Uniform)
    seed: int = 0
    precision: Literal["float32", "float64"] = "float32"
    evaluate_every: float | None = None
    until: Mapping[str, Goal] | None = None
    name: str = "scenario"

    def __post_init__(self) -> None:
        plain_fields(self)

    @property
    def clients(self) -> int:
        return self.problem.clients


def check(scenario: Scenario) -> Network:
    """Refuse what cannot be run, naming the reason; returns the network, read."""
    _check_kinds(scenario)
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


def _check_kinds(scenario: Scenario) -> None:
    """Every part must be of its kind: neither its name nor its class, say."""

    def method(value: object) -> bool:
        return any(callable(getattr(value, name, None)) for name in ("phases", "rounds"))

    methods = [name for name, kind in _TYPES.items() if method(kind)]
    kinds = (
        ("problem", isinstance(scenario.problem, Problem), "a Problem, such as classification('digits')"),
        ("topology", isinstance(scenario.topology, nx.Graph), "a networkx graph, such as ring(20)"),
        (
            "protocol",
            method(scenario.protocol) and not isinstance(scenario.protocol, type),
            f"a method with its parameters, such as SGP(steps=200, lr=0.05): {', '.join(methods)}",
        ),
        (
            "timing",
            isinstance(scenario.timing, (Lockstep, VirtualTime)),
            "a timing, Lockstep(…) or VirtualTime(…)",
        ),
        (
            "weights",
            not isinstance(scenario.weights, type) and hasattr(scenario.weights, "prepare"),
            "weights: Uniform(), Metropolis(), FastestMixing() or Given(matrix)",
        ),
    )
    for name, fits, allowed in kinds:
        if not fits:
            raise ScenarioError(f"{name} is {getattr(scenario, name)!r}; it must be {allowed}")


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
    if scenario.until is not None and not isinstance(scenario.until, Mapping):
        raise ScenarioError(
            f"until is {scenario.until!r}; it must be a mapping such as {{'accuracy': AtLeast(0.9)}}, or None"
        )
    for name, goal in (scenario.until or {}).items():
        if name not in scenario.problem.metrics:
            raise UnknownNameError("metric in until", str(name), scenario.problem.metrics)
        check_goal(name, goal)


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


def scenario_to_data(scenario: Scenario) -> dict[str, Any]:
    """Plain data (what JSON can hold) that says all of a scenario."""
    recipe = scenario.problem.recipe
    return {
        "name": scenario.name,
        "problem": recipe.as_dict() if recipe is not None else {"own": scenario.problem.name},
        "topology": graph_to_data(scenario.topology),
        "protocol": _encode(scenario.protocol),
        "timing": _encode(scenario.timing),
        "weights": _encode(scenario.weights),
        "seed": int(scenario.seed),
        "precision": scenario.precision,
        "evaluate_every": scenario.evaluate_every,
        "until": _encode(scenario.until),
    }


def scenario_from_data(data: Mapping[str, Any]) -> Scenario:
    """The scenario that `scenario_to_data` wrote down."""
    known = [f.name for f in dataclasses.fields(Scenario)]
    for key in data:
        if key not in known:
            raise UnknownNameError("key in a scenario", key, known)
    missing = [key for key in ("problem", "topology", "protocol") if key not in data]
    if missing:
        raise ScenarioError(
            f"the scenario lacks {', '.join(missing)}; it was not written by this version of asyncfed"
        )
    if "own" in data["problem"]:
        raise ScenarioError(
            f"the problem {data['problem']['own']!r} was made of a user's own functions, "
            "which are not stored with a run; "
            "build the scenario from the Python file that defines them"
        )
    values = {key: _decode(value) for key, value in data.items() if key not in ("problem", "topology")}
    return Scenario(
        problem=problem_from_recipe(data["problem"]), topology=graph_from_data(data["topology"]), **values
    )


def graph_to_data(graph: nx.Graph) -> dict[str, Any]:
    """A graph in columns: compact for many edges."""
    index = {node: place for place, node in enumerate(graph.nodes)}
    edges = [(index[a], index[b], marks) for a, b, marks in graph.edges(data=True)]
    names = sorted({name for _, _, marks in edges for name in marks})
    server = graph.graph.get("server")
    about = {} if server is None else {"server": _label(server)}
    return {
        "directed": graph.is_directed(),
        "nodes": len(index) if list(index) == list(range(len(index))) else [_label(node) for node in index],
        "about": {
            key: value for key, value in graph.graph.items() if isinstance(value, (str, int, float, bool))
        }
        | about,
        "from": [a for a, _, _ in edges],
        "to": [b for _, b, _ in edges],
        "marks": {name: [_encode(marks.get(name)) for _, _, marks in edges] for name in names},
    }


def graph_from_data(data: Mapping[str, Any]) -> nx.Graph:
    graph = nx.DiGraph() if data["directed"] else nx.Graph()
    nodes = list(range(data["nodes"])) if isinstance(data["nodes"], int) else data["nodes"]
    graph.graph.update(data["about"])
    graph.add_nodes_from(nodes)
    columns = data["marks"]
    for place, (a, b) in enumerate(zip(data["from"], data["to"], strict=True)):
        marks = {name: _mark(column[place]) for name, column in columns.items() if column[place] is not None}
        graph.add_edge(nodes[a], nodes[b], **marks)
    return graph


def _mark(value: Any) -> Any:
    return float(value) if value == "inf" else value


def _label(node: object) -> str | int:
    node = node.item() if isinstance(node, np.integer) else node
    return node if isinstance(node, (str, int)) else str(node)


def _encode(value: Any) -> Any:
    if isinstance(value, _DURATIONS):
        return str(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value == float("inf"):
        return "inf"  # JSON has no infinity
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and _TYPES.get(type(value).__name__) is type(value):
        return {"type": type(value).__name__} | {
            f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)
        }
    return {"own": repr(value)}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "own" in value:
        raise ScenarioError(
            f"{value['own']} is not one of asyncfed's own types and cannot be built from data"
        )
    if "type" not in value:
        return {key: _decode(item) for key, item in value.items()}
    name = value["type"]
    if name not in _TYPES:
        raise UnknownNameError("type in a scenario", name, _TYPES)
    known = [f.name for f in dataclasses.fields(_TYPES[name])]
    for key in value:
        if key != "type" and key not in known:
            raise UnknownNameError(f"field of {name}", key, known)
    return _TYPES[name](**{key: _decode(item) for key, item in value.items() if key != "type"})
