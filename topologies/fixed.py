"""Networks without chance: every edge is there at every step."""

from __future__ import annotations

import networkx as nx

from asyncfed.errors import TopologyError
from topologies._marks import certain, count_of_clients, whole_number
from topologies._recipes import generator


@generator
def fully_connected(n: int) -> nx.Graph:
    """Every client linked with every other.

    Parameters
    ----------
    n : int
        Number of clients.
    """
    return certain(nx.complete_graph(whole_number("n", n, 1)), f"fully connected, {count_of_clients(n)}")


@generator
def edgeless(n: int) -> nx.Graph:
    """Clients alone: nobody sends anything to anybody else.

    Parameters
    ----------
    n : int
        Number of clients.
    """
    return certain(nx.empty_graph(whole_number("n", n, 1)), f"edgeless, {count_of_clients(n)}")


@generator
def ring(n: int, directed: bool = False) -> nx.Graph:
    """Each client linked with the next, and the last with the first.

    Parameters
    ----------
    n : int
        Number of clients. Two make a single undirected edge (or one edge each way), one alone has none.
    directed : bool
        Whether messages travel only from i to i+1 (a DiGraph) or both ways (a Graph).
    """
    n = whole_number("n", n, 1)
    _check_flag("directed", directed)
    graph = nx.cycle_graph(n, create_using=nx.DiGraph if directed else nx.Graph)
    return certain(graph, f"{'directed ring' if directed else 'ring'}, {count_of_clients(n)}")


@generator
def grid(rows: int, columns: int, torus: bool = False) -> nx.Graph:
    """Clients on a grid, each linked with those beside, above and below.

    Client r·columns + c stands in row r, column c.

    Parameters
    ----------
    rows, columns : int
        Size of the grid.
    torus : bool
        Whether opposite borders are linked too.
    """
    rows = whole_number("rows", rows, 1)
    columns = whole_number("columns", columns, 1)
    _check_flag("torus", torus)
    kind = "torus" if torus else "grid"
    # Wrapping a side of 1 or 2 gives a loop or an edge that is already there; the canonical form has neither.
    square = nx.grid_2d_graph(rows, columns, periodic=torus)
    return certain(square, f"{kind} {rows}×{columns}, {count_of_clients(rows * columns)}")


@generator
def torus(rows: int, columns: int) -> nx.Graph:
    """A grid whose opposite borders are linked: four neighbours each, where both sides are 3 or longer.

    Parameters
    ----------
    rows, columns : int
        Size of the torus.
    """
    return grid(rows, columns, torus=True)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TopologyError(f"{name} is {value!r}; it must be True or False")
