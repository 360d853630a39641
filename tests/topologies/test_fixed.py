"""Networks without chance."""

import networkx as nx
import pytest

from asyncfed.errors import TopologyError
from topologies import edgeless, fully_connected, grid, ring, torus


def test_fully_connected_links_every_pair_once_with_certainty() -> None:
    graph = fully_connected(4)
    assert type(graph) is nx.Graph
    assert list(graph.edges(data="probability")) == [
        (0, 1, 1.0), (0, 2, 1.0), (0, 3, 1.0), (1, 2, 1.0), (1, 3, 1.0), (2, 3, 1.0),
    ]  # fmt: skip
    assert list(fully_connected(1).edges) == []


def test_edgeless_has_clients_and_nothing_else() -> None:
    assert list(edgeless(3)) == [0, 1, 2]
    assert list(edgeless(3).edges) == []


def test_a_ring_goes_round() -> None:
    assert list(ring(4).edges) == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert list(ring(4, directed=True).edges) == [(0, 1), (1, 2), (2, 3), (3, 0)]


def test_small_rings_have_neither_loops_nor_double_edges() -> None:
    assert list(ring(1).edges) == []
    assert list(ring(1, directed=True).edges) == []
    assert list(ring(2).edges) == [(0, 1)]
    assert list(ring(2, directed=True).edges) == [(0, 1), (1, 0)]


def test_a_grid_counts_its_clients_row_by_row() -> None:
    assert list(grid(2, 3).edges) == [(0, 1), (0, 3), (1, 2), (1, 4), (2, 5), (3, 4), (4, 5)]
    assert set(grid(2, 3).edges.data("probability", default=None)) == {
        (i, j, 1.0) for i, j in grid(2, 3).edges
    }


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (3, 5), (4, 4), (5, 3)])
def test_every_client_of_a_torus_has_four_neighbours(rows: int, columns: int) -> None:
    graph = torus(rows, columns)
    assert {degree for _, degree in graph.degree} == {4}
    assert nx.is_connected(graph)
    assert set(graph[0]) == {1, columns - 1, columns, (rows - 1) * columns}


def test_a_torus_with_a_short_side_has_neither_loops_nor_double_edges() -> None:
    assert list(torus(1, 1).edges) == []
    assert list(torus(1, 2).edges) == [(0, 1)]
    assert list(torus(2, 1).edges) == [(0, 1)]
    assert list(torus(1, 4).edges) == list(ring(4).edges)
    assert list(torus(4, 1).edges) == list(ring(4).edges)
    assert list(torus(2, 2).edges) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert {degree for _, degree in torus(2, 3).degree} == {3}


def test_a_torus_is_a_grid_with_its_borders_linked() -> None:
    assert list(torus(3, 4).edges(data=True)) == list(grid(3, 4, torus=True).edges(data=True))
    assert set(grid(3, 4).edges) < set(torus(3, 4).edges)


@pytest.mark.parametrize("generator", [fully_connected, edgeless, ring])
@pytest.mark.parametrize("n", [0, -1, 2.0, "4", None, True])
def test_a_number_of_clients_must_be_a_whole_number_of_at_least_one(generator: object, n: object) -> None:
    with pytest.raises(TopologyError, match=rf"n is {n!r}; it must be a whole number, at least 1"):
        generator(n)


def test_sides_and_flags_are_checked() -> None:
    with pytest.raises(TopologyError, match="rows is 0; it must be a whole number, at least 1"):
        grid(0, 3)
    with pytest.raises(TopologyError, match="columns is -2; it must be"):
        torus(3, -2)
    with pytest.raises(TopologyError, match="directed is 'yes'; it must be True or False"):
        ring(3, directed="yes")
    with pytest.raises(TopologyError, match="torus is 1; it must be True or False"):
        grid(3, 3, torus=1)
