"""Networks whose links come and go: each edge has a probability of its own, drawn or given once.

A probability is a number, a range ``(low, high)`` drawn uniformly once per edge, a function of (sender,
receiver), a mapping ``{(sender, receiver): probability}`` or an n×n array indexed [sender, receiver]. A
mapping must cover every edge; entries of an array where there is no edge are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import networkx as nx

from asyncfed.checks import PositiveInt, Words
from asyncfed.errors import TopologyError
from asyncfed.rng import Streams
from topologies._marks import (
    Edge,
    Probability,
    canonical,
    checked,
    count_of_clients,
    edge_name,
    probabilities,
    require_room_for,
)
from topologies._recipes import generator

Base = Annotated[PositiveInt | nx.Graph, Words("the number of clients, at least 1, or a networkx graph")]


@generator
def stochastic_undirected(
    n_or_base: Base, probability: Probability | None = (0.4, 0.8), seed: int = 0
) -> nx.Graph:
    """Links that exist at random in both directions together, each with its own probability (StoU in [1]_).

    Parameters
    ----------
    n_or_base : int or nx.Graph
        Number of clients, all linked with all, or an undirected graph that says which links there are. Its
        nodes keep their names, its self-loops are dropped.
    probability : number, range, function, mapping, array or None
        How likely each link exists at a step. A function is called with the smaller client first, a mapping
        may name an edge either way round, an array must be symmetric. None keeps the base graph's own.
    seed : int
        Seed for a range.

    References
    ----------
    .. [1] N. Terashita and S. Hara, "Decentralized hyper-gradient computation over time-varying directed
       networks", 2022.
    """
    if isinstance(n_or_base, nx.Graph) and n_or_base.is_directed():
        raise TopologyError(
            f"the base graph of stochastic_undirected is directed ({n_or_base}); "
            "use stochastic_directed, or pass base.to_undirected()"
        )
    return _stochastic(n_or_base, probability, seed, directed=False)


@generator
def stochastic_directed(
    n_or_base: Base, probability: Probability | None = (0.4, 0.8), seed: int = 0
) -> nx.DiGraph:
    """Links that exist at random, each direction by itself with its own probability (StoD in [1]_).

    Parameters
    ----------
    n_or_base : int or nx.Graph or nx.DiGraph
        Number of clients, all linked with all, or a graph that says which links there are; an undirected edge
        gives both directions. Its nodes keep their names, its self-loops are dropped.
    probability : number, range, function, mapping, array or None
        How likely each direction exists at a step. None keeps the base graph's own.
    seed : int
        Seed for a range.

    References
    ----------
    .. [1] N. Terashita and S. Hara, "Decentralized hyper-gradient computation over time-varying directed
       networks", 2022.
    """
    return _stochastic(n_or_base, probability, seed, directed=True)


@generator
def star(clients: PositiveInt, up: Probability = 1.0, down: Probability = 1.0, seed: int = 0) -> nx.DiGraph:
    """Clients 0..clients−1, and a server, node number `clients`, that alone they talk with.

    Parameters
    ----------
    clients : int
        Number of clients; the graph has one node more.
    up : number, range, function, mapping or array
        Probability of each link client → server.
    down : number, range, function, mapping or array
        Probability of each link server → client.
    seed : int
        Seed for a range.
    """
    require_room_for(clients, 2 * clients)
    n = clients + 1
    streams = Streams(seed)
    server = n - 1
    uplinks = [(client, server) for client in range(server)]
    downlinks = [(server, client) for client in range(server)]
    graph = nx.DiGraph(name=f"star, {count_of_clients(clients)}", server=server)
    graph.add_nodes_from(range(n))
    # Positions as in the sorted list of all edges: the server's links stand last.
    for edges, rule, start in ((uplinks, up, 0), (downlinks, down, len(uplinks))):
        drawn = probabilities(rule, edges, range(n), True, streams, start)
        graph.add_edges_from((i, j, {"probability": p}) for (i, j), p in zip(edges, drawn, strict=True))
    return graph


def _stochastic(n_or_base: Base, probability: Probability | None, seed: int, directed: bool) -> nx.Graph:
    streams = Streams(seed)
    kind = f"stochastic {'directed' if directed else 'undirected'}"
    if isinstance(n_or_base, nx.Graph):
        graph = canonical(n_or_base, directed)
        n = len(graph)
        over = graph.graph.get("name")
        name = f"{kind} on {over}" if over else f"{kind}, {count_of_clients(n)}"
    else:
        n = n_or_base
        require_room_for(n, n * (n - 1) / (1 if directed else 2))
        graph = nx.complete_graph(n, create_using=nx.DiGraph if directed else nx.Graph)
        name = f"{kind}, {count_of_clients(n)}"
        if probability is None:
            raise TopologyError(
                f"probability is None, but {n} clients are no base graph whose probabilities could be kept; "
                "give a number, a range (low, high), a function, a mapping or an array"
            )
    edges = list(graph.edges)
    drawn: Sequence[float | str | bool]
    if probability is None:
        drawn = [_kept(graph, edge) for edge in edges]
    else:
        drawn = probabilities(probability, edges, list(graph), directed, streams)
    for (_, _, data), p in zip(graph.edges(data=True), drawn, strict=True):
        data["probability"] = p
    graph.graph["name"] = name
    return graph


def _kept(graph: nx.Graph, edge: Edge) -> float | str | bool:
    where = edge_name(edge, graph.is_directed())
    if "probability" not in graph.edges[edge]:
        raise TopologyError(
            f"{where} of the base graph has no probability; set its attribute `probability`, "
            "or pass a number or a range for all edges"
        )
    return checked("probability", graph.edges[edge]["probability"], where)
