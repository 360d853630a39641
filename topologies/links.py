"""Marks for the edges of a graph that already exists."""

from __future__ import annotations

import networkx as nx

from topologies._marks import EdgeFunction, canonical, check_marks, checked_mark, edge_name


def with_links(
    graph: nx.Graph,
    probability: float | EdgeFunction | None = None,
    latency: float | EdgeFunction | None = None,
    bandwidth: float | EdgeFunction | None = None,
    loss: float | EdgeFunction | None = None,
) -> nx.Graph:
    """A copy of the graph with these attributes set on every edge.

    The copy has nodes 0..n-1 and no self-loops, like every graph here, and no recipe.

    Parameters
    ----------
    graph : nx.Graph or nx.DiGraph
        Any network, a user's own included.
    probability : number or function, optional
        Probability in (0, 1] that the link exists at a step. What is None stays as it is in the graph.
    latency : number or function, optional
        Virtual time a message needs, at least 0.
    bandwidth : number or function, optional
        Bytes per unit of virtual time, above 0.
    loss : number or function, optional
        Probability in [0, 1) that a message sent on an existing link does not arrive.

    Notes
    -----
    A function is called with (sender, receiver), on an undirected graph once per edge, smaller client first.
    """
    network = canonical(graph)
    rules = {"probability": probability, "latency": latency, "bandwidth": bandwidth, "loss": loss}
    for mark, rule in rules.items():
        if rule is None:
            continue
        constant = None if callable(rule) else checked_mark(mark, rule)
        for i, j, data in network.edges(data=True):
            where = edge_name((i, j), network.is_directed())
            data[mark] = checked_mark(mark, rule(i, j), where) if callable(rule) else constant
    check_marks(network)
    return network
