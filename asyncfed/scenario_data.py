"""A scenario as plain data (what JSON can hold), which a run directory keeps, and back.

Types are those of the registry; importing this module registers all that come along. A problem is its recipe,
a graph its edges in columns.

What is read may have been written by anybody: no name is imported, nothing is evaluated or downloaded, and
absurd sizes are refused.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import networkx as nx
import numpy as np

from asyncfed.checks import shown
from asyncfed.data.torchvision_import import no_downloads
from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.homes import find, homes_of
from asyncfed.network.attributes import OF_EDGES, OF_NODES, extra_of, extra_text
from asyncfed.problems import problem_from_recipe
from asyncfed.protocols.part import Method
from asyncfed.reading import is_whole
from asyncfed.registry import from_data, to_data
from asyncfed.scenario import Scenario

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MOST_NODES = 1 << 22
_MOST = 10**8  # of any number that says how much there is of something


def scenario_to_data(scenario: Scenario) -> dict[str, Any]:
    """Plain data (what JSON can hold) that says all of a scenario."""
    recipe = scenario.problem.recipe
    data = {
        "name": scenario.name,
        "problem": recipe.as_dict() if recipe is not None else {"own": scenario.problem.name},
        "topology": graph_to_data(scenario.topology),
        "protocol": to_data(scenario.protocol),
        "timing": to_data(scenario.timing),
        "weights": to_data(scenario.weights),
        "seed": int(scenario.seed),
        "precision": scenario.precision,
        "evaluate_every": scenario.evaluate_every,
        "until": to_data(scenario.until),
    }
    homes = homes_of({key: value for key, value in data.items() if key != "topology"})
    return data | ({"homes": homes} if homes else {})


def method_from_data(data: Mapping[str, Any], imports: Collection[str] = ()) -> Method:
    """The method of the scenario that `scenario_to_data` wrote down."""
    written = data.get("protocol")
    find({"protocol": written}, data.get("homes", {}), imports)
    method = from_data(written, "a scenario")
    if not isinstance(method, Method):
        raise ScenarioError(f"the scenario's protocol is {shown(written)}, which is no method")
    return method


def scenario_from_data(data: Mapping[str, Any], imports: Collection[str] = ()) -> Scenario:
    """The scenario that `scenario_to_data` wrote down; things of one's own are registered, or in modules that
    may be imported.
    """
    known = [f.name for f in dataclasses.fields(Scenario)]
    data = dict(data)
    homes = data.pop("homes", {})
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
            "which are not stored with a run; build the scenario from the Python file that defines them. "
            "To have it stored next time, make it in a function marked with @problem_factory from "
            "asyncfed.problems"
        )
    find({key: value for key, value in data.items() if key != "topology"}, homes, imports)
    values = {
        key: value if key == "name" else from_data(value, "a scenario")
        for key, value in data.items()
        if key not in ("problem", "topology")
    }
    topology = graph_from_data(data["topology"])
    _check_sizes(data["problem"].get("arguments", {}), len(topology))
    with no_downloads():
        problem = problem_from_recipe(data["problem"])
    return Scenario(problem=problem, topology=topology, **values)


def _check_sizes(arguments: Mapping[str, Any], nodes: int) -> None:
    """Refuse a recipe that would fill the memory with clients, samples or dimensions."""
    for name, value in arguments.items():
        most = nodes if name == "clients" else _MOST
        if name != "seed" and isinstance(value, int) and value > most:
            raise ScenarioError(
                f"the argument {name!r} of the problem is {shown(value)}; with {nodes:,} nodes, "
                f"at most {most:,} are read from a file"
            )


def comparable(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a scenario on disk says, without what may differ between two processes of one scenario."""
    there = {key: value for key, value in told.items() if key not in ("versions", "homes")}
    plain: dict[str, Any] = json.loads(_ADDRESS.sub("", json.dumps(there)), parse_constant=lambda _: None)
    return plain  # on disk, NaN is null


def difference(old: Mapping[str, Any], scenario: Scenario) -> str:
    """The first difference between a scenario on disk and this one; "" where there is none."""
    return _difference("", comparable(old), comparable(scenario_to_data(scenario)))


def _difference(where: str, old: Any, new: Any) -> str:
    if old == new:
        return ""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [key for key in {**new, **old} if old.get(key) != new.get(key)]
        if keys:
            return _difference(f"{where}.{keys[0]}".lstrip("."), old.get(keys[0]), new.get(keys[0]))
    return f"{where} is {shown(old)} there and {shown(new)} now"


def graph_to_data(graph: nx.Graph) -> dict[str, Any]:
    """A graph in columns: compact for many edges. Attributes of one's own decide nothing, so none is kept."""
    index = {node: place for place, node in enumerate(graph.nodes)}
    edges = [(index[a], index[b], marks) for a, b, marks in graph.edges(data=True)]
    names = [name for name in sorted(OF_EDGES) if any(name in marks for _, _, marks in edges)]
    server = graph.graph.get("server")
    about = {} if server is None else {"server": _label(server)}
    if own := extra_of(graph):
        about["extra"] = extra_text(own)
    return {
        "directed": graph.is_directed(),
        "nodes": len(index) if list(index) == list(range(len(index))) else [_label(node) for node in index],
        "about": {
            key: value for key, value in graph.graph.items() if isinstance(value, (str, int, float, bool))
        }
        | about,
        "from": [a for a, _, _ in edges],
        "to": [b for _, b, _ in edges],
        "marks": {name: [to_data(marks.get(name)) for _, _, marks in edges] for name in names},
    } | _of_nodes(graph)


def _of_nodes(graph: nx.Graph) -> dict[str, Any]:
    """What nodes say of themselves, where any does."""
    marks = [marks for _, marks in graph.nodes(data=True)]
    kept = [name for name in OF_NODES if any(name in own for own in marks)]
    if not kept:
        return {}
    return {"of_nodes": {name: [_node_data(own.get(name)) for own in marks] for name in kept}}


def _node_data(value: Any) -> Any:
    return to_data(value.tolist() if isinstance(value, np.ndarray) else value)


def graph_from_data(data: Mapping[str, Any]) -> nx.Graph:
    graph = nx.DiGraph() if data["directed"] else nx.Graph()
    nodes = data["nodes"]
    if not isinstance(nodes, list):
        if not is_whole(nodes, 1, _MOST_NODES):
            raise ScenarioError(
                f"the topology has {shown(nodes)} nodes; it must be a list of them, or a number "
                f"from 1 to {_MOST_NODES:,}"
            )
        nodes = list(range(nodes))
    graph.graph.update(data["about"])
    graph.add_nodes_from(nodes)
    for name, column in data.get("of_nodes", {}).items():
        for node, value in zip(nodes, column, strict=True):
            if value is not None:
                graph.nodes[node][name] = (
                    tuple(value) if isinstance(value, list) else from_data(value, "a topology")
                )
    columns = data["marks"]
    for place, (a, b) in enumerate(zip(data["from"], data["to"], strict=True)):
        marks = {
            name: from_data(column[place], "a topology")
            for name, column in columns.items()
            if column[place] is not None
        }
        graph.add_edge(nodes[a], nodes[b], **marks)
    return graph


def _label(node: object) -> str | int:
    node = node.item() if isinstance(node, np.integer) else node
    return node if isinstance(node, (str, int)) else str(node)
