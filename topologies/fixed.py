"""Networks without chance: every edge is there at every step."""

from __future__ import annotations

import networkx as nx

from asyncfed.checks import PositiveInt
from topologies._marks import certain, count_of_clients, require_room_for
from topologies._recipes import generator


@generator
def fully_connected(n: PositiveInt) -> nx.Graph:
    """Every client linked with every other.

    Parameters
    ----------
    n : int
        Number of clients.
    """
    require_room_for(n, n * (n - 1) / 2)
    return certain(nx.complete_graph(n), f"fully connected, {count_of_clients(n)}")


@generator
def edgeless(n: PositiveInt) -> nx.Graph:
    """Clients alone: nobody sends anything to anybody else.

    Parameters
    ----------
    n : int
        Number of clients.
    """
    require_room_for(n, 0)
    return certain(nx.empty_graph(n), f"edgeless, {count_of_clients(n)}")


@generator
def ring(n: PositiveInt, directed: bool = False) -> nx.Graph:
    """Each client linked with the next, and the last with the first.

    Parameters
    ----------
    n : int
        Number of clients. Two make a single undirected edge (or one edge each way), one alone has none.
    directed : bool
        Whether messages travel only from i to i+1 (a DiGraph) or both ways (a Graph).
    """
    require_room_for(n, n)
    graph = nx.cycle_graph(n, create_using=nx.DiGraph if directed else nx.Graph)
    return certain(graph, f"{'directed ring' if directed else 'ring'}, {count_of_clients(n)}")


@generator
def grid(rows: PositiveInt, columns: PositiveInt, torus: bool = False) -> nx.Graph:
    """Clients on a grid, each linked with those beside, above and below.

    Client r·columns + c stands in row r, column c.

    Parameters
    ----------
    rows, columns : int
        Size of the grid.
    torus : bool
        Whether opposite borders are linked too.
    """
    require_room_for(rows * columns, 2 * rows * columns)
    kind = "torus" if torus else "grid"
    # Wrapping a side of 1 or 2 gives a loop or an edge that is already there; the canonical form has neither.
    square = nx.grid_2d_graph(rows, columns, periodic=torus)
    return certain(square, f"{kind} {rows}×{columns}, {count_of_clients(rows * columns)}")


@generator
def torus(rows: PositiveInt, columns: PositiveInt) -> nx.Graph:
    """A grid whose opposite borders are linked: four neighbours each, where both sides are 3 or longer.

    Parameters
    ----------
    rows, columns : int
        Size of the torus.
    """
    return grid(rows, columns, torus=True)
