"""What every generator shares: checked numbers, marks on edges, and one canonical form of a graph.

The canonical form (nodes 0..n-1 in order, edges sorted, no self-loops) is what makes "the k-th edge" mean
something, and so what lets a random mark be drawn by position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from operator import itemgetter
from typing import Annotated, Any, TypeAlias

import networkx as nx
import numpy as np
import numpy.typing as npt

from asyncfed.checks import FiniteFloat, Words, fits, fitting, shown
from asyncfed.errors import ScenarioError, TopologyError
from asyncfed.network.attributes import check_attributes
from asyncfed.network.distributions import as_distribution
from asyncfed.network.names import Names
from asyncfed.network.over_time import as_bursts, as_schedule, as_varying, varies
from asyncfed.rng import Streams
from asyncfed.room import require_room

Edge: TypeAlias = tuple[Any, Any]  # (sender, receiver), as their graph calls them
EdgeFunction: TypeAlias = Callable[[Any, Any], float]
Probability: TypeAlias = Annotated[
    float | tuple[float, float] | EdgeFunction | Mapping[Edge, float] | npt.NDArray[np.floating[Any]],
    Words(
        "a number in (0, 1], a range (low, high), a function of (sender, receiver), a mapping "
        "{(sender, receiver): probability} or an n×n array"
    ),
]

_ALLOWED: dict[str, tuple[Callable[[float], bool], str]] = {
    "probability": (lambda x: 0 < x <= 1, "lie in (0, 1]; leave out an edge that never exists"),
    "latency": (lambda x: 0 <= x < math.inf, "be finite and at least 0"),
    "bandwidth": (lambda x: 0 < x < math.inf, "be finite and above 0; leave it out where it has no limit"),
    "loss": (lambda x: 0 <= x < 1, "lie in [0, 1); leave out an edge that loses everything"),
}
OVER_TIME: dict[str, Callable[[Any, str], object]] = {"schedule": as_schedule, "bursts": as_bursts}
MARKS = (*_ALLOWED, *OVER_TIME, "ordered")
_BYTES_EACH = 400.0  # of a node or an edge and its marks, or more
_Place = Annotated[tuple[FiniteFloat, ...], Words("coordinates, such as (0.25, 0.75)")]
_OF_NODES: dict[str, tuple[Callable[[float], bool], str]] = {
    "compute": (lambda x: 0 < x < math.inf, "be finite and above 0: how many times slower the node is"),
    "uplink": (lambda x: 0 < x < math.inf, "be finite and above 0; leave it out where it has no limit"),
    "downlink": (lambda x: 0 < x < math.inf, "be finite and above 0; leave it out where it has no limit"),
}
OF_NODES_IN_TABLES = (*_OF_NODES, "device")


def require_room_for(nodes: int, links: float) -> None:
    """Refuse a graph that there is no memory for."""
    require_room(
        _BYTES_EACH * (nodes + links),
        f"a graph of {nodes:,} nodes and about {links:,.0f} edges",
        "use fewer clients, or a sparser graph such as random_graph(n, mean_degree)",
    )


def checked_mark(mark: str, value: Any, where: str = "") -> float:
    """The value as a float, or an error that names the mark, the place and what is allowed."""
    holds, allowed = (_ALLOWED | _OF_NODES)[mark]
    if not fits(value, float) or not holds(number := float(value)):
        raise TopologyError(f"{mark}{where and f' of {where}'} is {shown(value)}; it must {allowed}")
    return number


def checked(mark: str, value: object, where: str = "") -> float | str | bool:
    """The same for any mark; what changes with time is kept as its text, which files can hold."""
    if mark in OVER_TIME:
        return str(OVER_TIME[mark](value, where))
    if mark == "ordered":
        if not isinstance(value, (bool, np.bool_)):
            raise TopologyError(f"ordered{where and f' of {where}'} is {value!r}; it must be True or False")
        return bool(value)
    if mark == "latency" and isinstance(value, str):
        try:
            return str(as_distribution(value))
        except ScenarioError as error:
            raise TopologyError(f"latency{where and f' of {where}'}: {error}") from None
    if mark == "probability" and varies(value):
        return str(as_varying(value, where))
    return checked_mark(mark, value, where)


def edge_name(edge: Edge, directed: bool) -> str:
    return f"edge {edge[0]}{'→' if directed else '–'}{edge[1]}"


def checked_node_mark(mark: str, value: object, where: str) -> float | str:
    """What a table may say of a node."""
    return str(value) if mark == "device" else checked_mark(mark, value, where)


def check_marks(graph: nx.Graph) -> None:
    """Refuse a graph with a mark out of its range, or one that nobody knows; marks that are absent are no
    concern here.
    """
    check_attributes(graph)
    for i, j, data in graph.edges(data=True):
        for mark in MARKS:
            if mark in data:
                checked(mark, data[mark], edge_name((i, j), graph.is_directed()))
    for node, data in graph.nodes(data=True):
        for mark in _OF_NODES:
            if mark in data:
                checked_mark(mark, data[mark], f"node {node}")
        if "pos" in data:
            checked_place(node, data["pos"])


def checked_place(node: object, pos: object) -> tuple[float, ...]:
    """Where a node is, as a tuple of floats."""
    place: tuple[float, ...] = fitting(pos, _Place, f"pos of node {node}", TopologyError)
    if not place:
        raise TopologyError(f"pos of node {node} is empty; it must be coordinates, such as (0.25, 0.75)")
    return tuple(map(float, place))


def canonical(graph: nx.Graph, directed: bool | None = None) -> nx.Graph:
    """A copy with nodes in the order of their numbers, sorted edges and no self-loops.

    Nodes keep their names; whole numbers stand in their order. `directed=True` splits an undirected edge into
    its two directions. The copy has no recipe: it is made to be changed.
    """
    if not isinstance(graph, nx.Graph):
        raise TopologyError(f"{graph!r} is no network; give a networkx Graph or DiGraph")
    if graph.is_multigraph():
        raise TopologyError(
            f"{graph} may have parallel edges; a link is single: convert it to a Graph or DiGraph first"
        )
    labels = list(graph)
    if not labels:
        raise TopologyError("the graph has no nodes; a network needs at least 1 client")
    if all(isinstance(label, Integral) for label in labels):
        labels.sort()
    number = {label: k for k, label in enumerate(labels)}
    split = directed is True and not graph.is_directed()
    directed = graph.is_directed() if directed is None else directed

    edges = []
    for sender, receiver, data in graph.edges(data=True):
        i, j = number[sender], number[receiver]
        if i == j:
            continue
        edges.append((i, j, dict(data)) if directed or i < j else (j, i, dict(data)))
        if split:
            edges.append((j, i, dict(data)))
    edges.sort(key=itemgetter(0, 1))

    copy = nx.DiGraph() if directed else nx.Graph()
    copy.graph.update((key, value) for key, value in graph.graph.items() if key != "recipe")
    if "server" in copy.graph and copy.graph["server"] not in number:
        raise TopologyError(
            f"the server {copy.graph['server']!r} is not a node of the graph; name one that is"
        )
    copy.add_nodes_from((label, dict(graph.nodes[label])) for label in labels)
    for node, data in copy.nodes(data=True):
        if "pos" in data:
            data["pos"] = checked_place(node, data["pos"])
    copy.add_edges_from((labels[i], labels[j], data) for i, j, data in edges)
    return copy


def certain(graph: nx.Graph, name: str) -> nx.Graph:
    """The graph in canonical form, its nodes counted off, every edge present at every step."""
    counted = nx.convert_node_labels_to_integers(graph) if Names(list(graph)).given else graph
    network = canonical(counted)
    nx.set_edge_attributes(network, 1.0, "probability")
    network.graph["name"] = name
    return network


def count_of_clients(n: int) -> str:
    return f"{n} client{'s' if n != 1 else ''}"


def probabilities(
    rule: Probability,
    edges: Sequence[Edge],
    nodes: Sequence[Any],
    directed: bool,
    streams: Streams,
    start: int = 0,
) -> list[float]:
    """One probability per edge; a range is drawn by position, the first edge standing at `start`."""
    if callable(rule):
        return [checked_mark("probability", rule(*edge), edge_name(edge, directed)) for edge in edges]
    if isinstance(rule, Mapping):
        return _from_mapping(rule, edges, directed)
    if isinstance(rule, np.ndarray):
        return _from_matrix(rule, edges, nodes, directed)
    if isinstance(rule, tuple):
        low, high = _checked_range(rule)
        draws = streams.uniforms("topology probability", 0, start, start + len(edges))
        return [float(p) for p in np.minimum(low + (high - low) * draws, high)]  # rounding may pass `high`
    return [checked_mark("probability", rule)] * len(edges)


def _checked_range(rule: tuple[float, float]) -> tuple[float, float]:
    low, high = (checked_mark("probability", bound, f"range {tuple(rule)!r}") for bound in rule)
    if low > high:
        raise TopologyError(
            f"probability range ({low}, {high}) has low > high; write ({high}, {low}) if that is meant"
        )
    return low, high


def _from_mapping(rule: Mapping[Any, object], edges: Sequence[Edge], directed: bool) -> list[float]:
    given: dict[Edge, float] = {}
    known = set(edges)
    for key, value in rule.items():
        edge: Edge = key
        if not directed and isinstance(key, tuple) and key not in known:
            edge = key[::-1]  # {j, i} is the edge {i, j}
        if edge not in known:
            raise TopologyError(
                f"probability is given for {key!r}, which is not an edge; keys are edges (sender, receiver)"
            )
        p = checked_mark("probability", value, edge_name(edge, directed))
        if given.setdefault(edge, p) != p:
            raise TopologyError(
                f"probability of {edge_name(edge, directed)} is given as {given[edge]} and as {p}; "
                "an undirected edge has one: give it once, or use stochastic_directed"
            )
    for edge in edges:
        if edge not in given:
            raise TopologyError(
                f"{edge_name(edge, directed)} has no probability in the mapping; "
                "add it, or pass a base graph without that edge"
            )
    return [given[edge] for edge in edges]


def _from_matrix(
    rule: npt.NDArray[Any], edges: Sequence[Edge], nodes: Sequence[Any], directed: bool
) -> list[float]:
    n = len(nodes)
    if rule.shape != (n, n):
        raise TopologyError(
            f"the array of probabilities has shape {rule.shape}; it must be ({n}, {n}), [sender, receiver]"
        )
    values = []
    number = {node: place for place, node in enumerate(nodes)}
    for edge in edges:
        i, j = (number[end] for end in edge)
        if not directed and rule[i, j] != rule[j, i] and rule[i, j] == rule[i, j]:
            raise TopologyError(
                f"probability of {edge_name(edge, directed)} is given as {rule[i, j]} and as {rule[j, i]}; "
                "an undirected edge has one: make the array symmetric, or use stochastic_directed"
            )
        values.append(checked_mark("probability", rule[i, j], edge_name(edge, directed)))
    return values
