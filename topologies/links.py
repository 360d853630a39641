"""Marks for the edges of a graph that already exists."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import networkx as nx

from asyncfed.checks import NonNegativeFloat, Words
from asyncfed.checks import checked as checked_arguments
from asyncfed.errors import TopologyError
from asyncfed.network.over_time import Bursts, LinkTimes, VaryingProbability
from asyncfed.network.uptimes import Intervals
from topologies._marks import (
    OVER_TIME,
    EdgeFunction,
    canonical,
    check_marks,
    checked,
    edge_name,
)


def _or_function(allowed: str) -> Words:
    return Words(f"{allowed}, a function of (sender, receiver), or None for what it is already")


Rule: TypeAlias = Callable[[Any, Any], Any]


@checked_arguments(error=TopologyError)
@dataclass(frozen=True)
class ByDistance:
    """`base` + `per_unit` · distance of the two ends."""

    base: NonNegativeFloat
    per_unit: NonNegativeFloat

    def on(self, graph: nx.Graph) -> EdgeFunction:
        places = dict(graph.nodes(data="pos"))
        first = next(iter(places.values())) or ()
        for node, place in places.items():
            if place is None:
                raise TopologyError(
                    f"node {node} has no place; set `pos` on every node, for instance with "
                    "nx.set_node_attributes(graph, nx.spring_layout(graph, seed=1), 'pos')"
                )
            if len(place) != len(first):
                raise TopologyError(
                    f"node {node} has {len(place)} coordinates and another has {len(first)}; give all "
                    "equally many"
                )
        return lambda i, j: self.base + self.per_unit * math.dist(places[i], places[j])


def by_distance(base: float, per_unit: float) -> ByDistance:
    """A latency that grows with distance, for `with_links` on a graph whose nodes carry `pos`.

    Parameters
    ----------
    base : float
        What every message needs, at least 0.
    per_unit : float
        What a unit of distance adds, at least 0.
    """
    return ByDistance(base, per_unit)


@checked_arguments(error=TopologyError)
def with_links(
    graph: nx.Graph,
    probability: Annotated[
        float | VaryingProbability | Rule | None, _or_function("a number in (0, 1], VaryingProbability(…)")
    ] = None,
    latency: Annotated[
        float | EdgeFunction | ByDistance | None, _or_function("a number, at least 0, by_distance(…)")
    ] = None,
    bandwidth: Annotated[float | EdgeFunction | None, _or_function("a finite number above 0")] = None,
    loss: Annotated[float | EdgeFunction | None, _or_function("a number in [0, 1)")] = None,
    schedule: Annotated[
        Intervals | LinkTimes | Rule | None, _or_function("a list of (from, to), LinkTimes(…)")
    ] = None,
    bursts: Annotated[Bursts | Rule | None, _or_function("Bursts(good, bad)")] = None,
) -> nx.Graph:
    """A copy of the graph with these attributes set on every edge.

    The copy has no self-loops, like every graph here, and no recipe; nodes keep their names.

    Parameters
    ----------
    graph : nx.Graph or nx.DiGraph
        Any network, a user's own included.
    probability : number, VaryingProbability or function, optional
        Probability in (0, 1] that the link exists at a step. What is None stays as it is in the graph.
    latency : number, function or by_distance(base, per_unit), optional
        Virtual time a message needs, at least 0.
    bandwidth : number or function, optional
        Bytes per unit of virtual time, above 0.
    loss : number or function, optional
        Probability in [0, 1) that a message sent on an existing link does not arrive.
    schedule : list of (from, to), LinkTimes or function, optional
        When the link is up at all.
    bursts : Bursts or function, optional
        Good and bad times by turns; the probability is that of the good ones.

    Notes
    -----
    A function is called with (sender, receiver), on an undirected graph once per edge, smaller client first;
    a schedule or bursts of None leave an edge as it is. What changes with time stands on the edge as text.
    """
    network = canonical(graph)
    if isinstance(latency, ByDistance):
        latency = latency.on(network)
    rules: dict[str, Any] = {
        "probability": probability, "latency": latency, "bandwidth": bandwidth, "loss": loss,
        "schedule": schedule, "bursts": bursts,
    }  # fmt: skip
    for mark, rule in rules.items():
        if rule is None:
            continue
        constant = None if callable(rule) else checked(mark, rule)
        for i, j, data in network.edges(data=True):
            given = rule(i, j) if callable(rule) else constant
            if given is not None or mark not in OVER_TIME:
                data[mark] = checked(mark, given, edge_name((i, j), network.is_directed()))
    check_marks(network)
    return network
