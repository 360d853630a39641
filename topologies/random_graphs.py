"""Graphs drawn once from a seed and then fixed: every edge that was drawn is there at every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import networkx as nx

from asyncfed.checks import MOST, NonNegativeFloat, PositiveInt, Range, UnitFloat, Words
from asyncfed.errors import TopologyError
from asyncfed.rng import Streams
from topologies._marks import Probability, certain, count_of_clients, probabilities, require_room_for
from topologies._recipes import generator
from topologies.links import by_distance, with_links

Attempts = Annotated[int, Range(1, 10_000)]


@generator
def erdos_renyi(
    n: PositiveInt,
    p: Annotated[
        float, Range(0, 1, above=True), Words("a number in (0, 1]; use edgeless(n) for no links at all")
    ],
    seed: int = 0,
    attempts: Attempts = 100,
) -> nx.Graph:
    """A random graph G(n, p): each edge with probability p, redrawn until it is connected [1]_.

    Parameters
    ----------
    n : int
        Number of clients.
    p : float
        Probability that an edge is in the graph, in (0, 1]. Connected graphs become likely above ln(n)/n.
    seed : int
        Every attempt is a fresh draw from this seed.
    attempts : int
        How many draws to make before giving up with a TopologyError.

    References
    ----------
    .. [1] P. Erdős and A. Rényi, "On the evolution of random graphs", 1960.
    """
    require_room_for(n, p * n * (n - 1) / 2)
    streams = Streams(seed)
    graph = _first_connected(lambda attempt: _gnp(n, p, streams, attempt), attempts)
    if graph is None:
        raise TopologyError(
            f"none of {attempts} random graphs with n={n} and p={p} was connected; that is likely only "
            f"above the threshold p = ln(n)/n = {math.log(n) / n:.4g}: raise p, allow more attempts, "
            "or use random_graph(n, mean_degree), which joins the pieces"
        )
    return certain(graph, f"Erdős–Rényi p={p:g}, {count_of_clients(n)}")


@generator
def random_graph(n: Annotated[int, Range(2, MOST)], mean_degree: NonNegativeFloat, seed: int = 0) -> nx.Graph:
    """A sparse connected random graph, of any size and for any seed.

    A graph G(n, mean_degree/(n-1)) is drawn once; each of its components but the largest is then joined to
    the largest by one edge between two members drawn from the seed. At n = 10,000 and mean degree 10 that
    adds an edge or none; far below ln(n) it adds more, and the mean degree comes out a little higher than
    asked for.

    Parameters
    ----------
    n : int
        Number of clients, at least 2.
    mean_degree : float
        Mean number of neighbours, from 2(n-1)/n, that of a tree, to n-1, that of the complete graph.
    seed : int
        Seed of the draw.
    """
    tree = 2 * (n - 1) / n
    if not tree <= mean_degree <= n - 1:
        raise TopologyError(
            f"mean_degree is {mean_degree}; it must lie in [{tree:g}, {n - 1}], from a tree to the complete "
            "graph"
        )
    require_room_for(n, n * mean_degree / 2)
    streams = Streams(seed)
    graph = _gnp(n, mean_degree / (n - 1), streams, 0)
    # Sorted, because sets and equally large components have no order of their own.
    largest, *rest = sorted(map(sorted, nx.connected_components(graph)), key=lambda part: (-len(part), part))
    draws = streams.uniforms("topology joins", 0, 0, 2 * len(rest))
    for part, here, there in zip(rest, draws[::2], draws[1::2], strict=True):
        graph.add_edge(part[int(here * len(part))], largest[int(there * len(largest))])
    return certain(graph, f"random graph of mean degree {mean_degree:g}, {count_of_clients(n)}")


@generator
def small_world(
    n: Annotated[int, Range(3, MOST)],
    neighbours: Annotated[int, Range(2, MOST)],
    rewire: UnitFloat,
    seed: int = 0,
    attempts: Attempts = 100,
) -> nx.Graph:
    """A ring of near neighbours with some edges rewired to anywhere, redrawn until it is connected [1]_.

    Parameters
    ----------
    n : int
        Number of clients.
    neighbours : int
        How many nearest neighbours each client has on the ring: even, from 2 to n-1.
    rewire : float
        Probability in [0, 1] that an edge is rewired.
    seed : int
        Every attempt is a fresh draw from this seed.
    attempts : int
        How many draws to make before giving up with a TopologyError.

    References
    ----------
    .. [1] D. J. Watts and S. H. Strogatz, "Collective dynamics of 'small-world' networks", Nature 393, 1998.
    """
    if neighbours % 2 or neighbours >= n:
        raise TopologyError(
            f"neighbours is {neighbours}; it must be even (half on each side) and less than n = {n}"
        )
    require_room_for(n, n * neighbours / 2)
    streams = Streams(seed)
    graph = _first_connected(
        lambda attempt: nx.watts_strogatz_graph(
            n, neighbours, rewire, seed=streams.seed_for("topology small world", attempt)
        ),
        attempts,
    )
    if graph is None:
        raise TopologyError(
            f"none of {attempts} small worlds with n={n}, neighbours={neighbours} and rewire={rewire} "
            "was connected; take more neighbours, rewire less or allow more attempts"
        )
    return certain(graph, f"small world k={neighbours} rewire={rewire:g}, {count_of_clients(n)}")


@generator
def random_geometric(
    n: PositiveInt,
    radius: Annotated[
        float,
        Range(0, math.sqrt(2), above=True),
        Words("a number in (0, √2], √2 being the longest way there is"),
    ],
    seed: int = 0,
    latency: Annotated[
        tuple[NonNegativeFloat, NonNegativeFloat] | None, Words("(base, per_unit), or None for none")
    ] = None,
    probability: Probability = 1.0,
    attempts: Attempts = 100,
) -> nx.Graph:
    """Clients strewn over the unit square, those within a radius linked; redrawn until it is connected [1]_.

    Where each is stays with it as `pos`.

    Parameters
    ----------
    n : int
        Number of clients.
    radius : float
        How far a link reaches, above 0. Connected graphs become likely above sqrt(ln(n) / (π n)).
    seed : int
        Every attempt is a fresh draw from this seed.
    latency : (base, per_unit), optional
        Virtual time a message needs: base + per_unit · distance; see `by_distance`.
    probability : number, range, function or mapping
        How likely each link exists at a step.
    attempts : int
        How many draws to make before giving up with a TopologyError.

    References
    ----------
    .. [1] M. Penrose, "Random geometric graphs", Oxford University Press, 2003.
    """
    require_room_for(n, n * (n - 1) / 2 * min(1.0, math.pi * radius**2))
    streams = Streams(seed)
    graph = _first_connected(lambda attempt: _strewn(n, radius, streams, attempt), attempts)
    if graph is None:
        raise TopologyError(
            f"none of {attempts} random geometric graphs with n={n} and radius={radius:g} was connected; "
            f"that is likely only above sqrt(ln(n) / (π n)) = {math.sqrt(math.log(n) / (math.pi * n)):.4g}: "
            "raise the radius, or allow more attempts"
        )
    network = certain(graph, f"random geometric r={radius:g}, {count_of_clients(n)}")
    drawn = probabilities(probability, list(network.edges), range(n), False, streams)
    for (_, _, data), p in zip(network.edges(data=True), drawn, strict=True):
        data["probability"] = p
    return network if latency is None else with_links(network, latency=by_distance(*latency))


def _strewn(n: int, radius: float, streams: Streams, attempt: int) -> nx.Graph:
    places = streams.uniforms("topology places", attempt, 0, 2 * n).reshape(n, 2)
    return nx.random_geometric_graph(n, radius, pos=dict(enumerate(map(tuple, places.tolist()))))


def _first_connected(draw: Callable[[int], nx.Graph], attempts: int) -> nx.Graph | None:
    graphs = (draw(attempt) for attempt in range(attempts))
    return next((graph for graph in graphs if nx.is_connected(graph)), None)


def _gnp(n: int, p: float, streams: Streams, attempt: int) -> nx.Graph:
    if 1.0 - p == 1.0:  # networkx divides by log(1 - p)
        return nx.empty_graph(n)
    return nx.fast_gnp_random_graph(n, p, seed=streams.seed_for("topology edges", attempt))
