"""Marks on the edges of a graph that already exists."""

import networkx as nx
import numpy as np
import pytest

from asyncfed.errors import TopologyError
from asyncfed.network import Bursts, VaryingProbability
from topologies import ring, star, with_links


def test_a_number_is_set_on_every_edge_of_a_copy() -> None:
    graph = ring(3)
    marked = with_links(graph, latency=2, bandwidth=1e6, loss=0.1)
    expected = {"probability": 1.0, "latency": 2.0, "bandwidth": 1e6, "loss": 0.1}
    assert all(data == expected for *_, data in marked.edges(data=True))
    assert all(data == {"probability": 1.0} for *_, data in graph.edges(data=True))
    assert marked.graph["name"] == "ring, 3 clients"


def test_a_function_is_asked_for_every_direction_of_a_directed_graph() -> None:
    marked = with_links(star(2), latency=lambda sender, receiver: 10 * sender + receiver)
    assert list(marked.edges(data="latency")) == [(0, 2, 2.0), (1, 2, 12.0), (2, 0, 20.0), (2, 1, 21.0)]
    assert marked.graph["server"] == 2


def test_a_function_is_asked_once_per_undirected_edge() -> None:
    marked = with_links(ring(3), probability=lambda sender, receiver: np.float32(0.5))
    assert list(marked.edges(data="probability")) == [(0, 1, 0.5), (0, 2, 0.5), (1, 2, 0.5)]
    assert all(type(p) is float for *_, p in marked.edges(data="probability"))


def test_a_users_own_graph_becomes_a_network() -> None:
    marked = with_links(nx.Graph([("x", "y"), ("y", "y"), ("y", "z")]), probability=0.5)
    assert list(marked.edges(data=True)) == [
        ("x", "y", {"probability": 0.5}),
        ("y", "z", {"probability": 0.5}),
    ]


@pytest.mark.parametrize(
    ("mark", "value", "allowed"),
    [
        ("probability", 0, r"lie in \(0, 1\]"),
        ("probability", 1.4, r"lie in \(0, 1\]"),
        ("latency", -1, "be finite and at least 0"),
        ("latency", float("inf"), "be finite and at least 0"),
        ("bandwidth", 0, "be finite and above 0"),
        ("bandwidth", -5.0, "be finite and above 0"),
        ("loss", 1, r"lie in \[0, 1\)"),
        ("loss", -0.1, r"lie in \[0, 1\)"),
        ("loss", "some", r"lie in \[0, 1\)"),
        ("latency", float("nan"), "be finite and at least 0"),
    ],
)
def test_a_mark_out_of_range_is_refused_by_name(mark: str, value: object, allowed: str) -> None:
    with pytest.raises(TopologyError, match=rf"^(with_links: )?{mark} is .*; it must (be|lie in) "):
        with_links(ring(4), **{mark: value})
    with pytest.raises(TopologyError, match=f"^{mark} of edge 0–1 is .*; it must {allowed}"):
        with_links(ring(4), **{mark: lambda sender, receiver: value})
    graph = ring(4, directed=True)
    graph.edges[3, 0][mark] = value
    with pytest.raises(TopologyError, match=f"^{mark} of edge 3→0 is .*; it must {allowed}"):
        with_links(graph)


def test_limits_that_are_allowed() -> None:
    marked = with_links(ring(2), probability=1, latency=0, bandwidth=5e-324, loss=0)
    assert marked.edges[0, 1] == {"probability": 1.0, "latency": 0.0, "bandwidth": 5e-324, "loss": 0.0}


def test_what_changes_with_time_stands_on_the_edges_as_text() -> None:
    marked = with_links(
        ring(3),
        probability=VaryingProbability([(0, 0.5), (2, 1)], period=4.0),
        schedule=lambda i, j: [(i, j)] if i else None,
        bursts=Bursts(8, 2),
    )
    assert marked.edges[0, 1] == {
        "probability": "VaryingProbability([(0.0, 0.5), (2.0, 1.0)], 4.0, 'constant')",
        "bursts": "Bursts(8.0, 2.0, 0.0)",
    }
    assert marked.edges[1, 2]["schedule"] == "LinkTimes([(1.0, 2.0)], None)"
    assert with_links(marked).edges[1, 2] == marked.edges[1, 2]
    with pytest.raises(TopologyError, match=r"^schedule of edge 0–1: the interval \(3, 1\)"):
        with_links(ring(3), schedule=lambda i, j: [(3, 1)])
    with pytest.raises(TopologyError, match=r"^with_links: bursts is 3; it must be Bursts"):
        with_links(ring(3), bursts=3)


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(TopologyError, match="with_links: graph is 5; it must be a networkx graph"):
        with_links(5)
