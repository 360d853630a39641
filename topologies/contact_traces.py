"""Networks from contact traces: who met whom, from when to when."""

from __future__ import annotations

import os

import networkx as nx

from asyncfed.checks import PathLike, PositiveFloat, PositiveInt
from asyncfed.errors import ScenarioError, TopologyError
from asyncfed.network.over_time import LinkTimes
from asyncfed.network.presence import csv_interval, csv_rows
from topologies._marks import count_of_clients, require_room_for
from topologies._recipes import generator


@generator
def contacts(
    path: PathLike,
    n: PositiveInt | None = None,
    period: PositiveFloat | None = None,
    directed: bool = False,
) -> nx.Graph:
    """A network whose links are up while two nodes are in contact, from a file in CSV.

    Parameters
    ----------
    path : str
        A file with the header ``from,to,t1,t2``: a line for each contact, up in [t1, t2); an empty t2 is for
        one that never ends. Contacts of one pair that overlap are one.
    n : int, optional
        Number of clients. Nodes are numbers 0..n-1 in the file; without n they may also be names, which are
        numbered as they come and kept as the node attribute ``label``.
    period : float, optional
        After which the trace begins anew. Without it there are no links after its last contact.
    directed : bool
        Whether a contact goes one way only.
    """
    path = os.fspath(path)
    network = nx.DiGraph() if directed else nx.Graph()
    try:
        rows = csv_rows(path, ("from", "to", "t1", "t2"))
        number = _numbers(path, [(line, row[:2]) for line, row in rows], n)
        nodes = max(number.values(), default=-1) + 1 if n is None else n
        require_room_for(nodes, 0)
        network.add_nodes_from(range(nodes))
        network.add_nodes_from(
            (place, {"label": name}) for name, place in number.items() if not name.isdecimal()
        )
        met: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for line, (a, b, begin, end) in rows:
            where = f"{path}, line {line}"
            pair = (number[a], number[b])
            if pair[0] == pair[1]:
                raise TopologyError(f"{where}: node {a} is in contact with itself; leave that out")
            interval = csv_interval(begin, end, where)
            met.setdefault(pair if directed or pair[0] < pair[1] else pair[::-1], []).append(interval)
        for (i, j), intervals in sorted(met.items()):
            times = LinkTimes(_joined(intervals), period)
            network.add_edge(i, j, probability=1.0, schedule=str(times))
    except ScenarioError as error:
        raise TopologyError(str(error)) from None
    if not len(network):
        raise TopologyError(
            f"{path} has no contacts, so there are no clients; give n for some that never meet"
        )
    network.graph["name"] = f"contacts of {os.path.basename(path)}, {count_of_clients(len(network))}"
    return network


def _numbers(path: str, rows: list[tuple[int, list[str]]], n: int | None) -> dict[str, int]:
    names = dict.fromkeys(name for _, pair in rows for name in pair)
    if n is None and not all(name.isdecimal() for name in names):
        return {name: place for place, name in enumerate(names)}
    for line, pair in rows:
        for name in pair:
            if not name.isdecimal() or (n is not None and int(name) >= n):
                raise TopologyError(
                    f"{path}, line {line} names node {name!r}; with n={n} the nodes are 0 to n - 1"
                )
    return {name: int(name) for name in names}


def _joined(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union, as intervals that do not overlap."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
