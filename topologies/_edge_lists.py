"""Edge lists in CSV: a line for each link, or, in a contact trace, for each time that two nodes met."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx

from asyncfed.errors import ScenarioError, TopologyError, UnknownNameError
from asyncfed.network.attributes import OF_EDGES
from asyncfed.network.over_time import LinkTimes
from asyncfed.network.presence import csv_interval
from asyncfed.reading import csv_lines
from topologies._marks import OF_NODES_IN_TABLES, checked, checked_node_mark, edge_name, require_room_for

_TIMES = ("t1", "t2")
Line = tuple[str, dict[str, str]]  # where it stands, and its cells by column


def edge_list(
    path: str,
    *,
    directed: bool,
    nodes: str | None,
    n: int | None,
    period: float | None,
    extra: frozenset[str],
) -> nx.Graph:
    """The network of a file with the columns from, to, and any marks of links; `from_file` says the rest."""
    lines = _lines(path, ("from", "to"), (*OF_EDGES, *_TIMES), extra)
    about = [] if nodes is None else _lines(nodes, ("node",), OF_NODES_IN_TABLES, extra)
    given = [cells["node"] for _, cells in about]
    graph = nx.DiGraph() if directed else nx.Graph()
    label = _labels(path, lines, given, n)
    require_room_for(n or 0, 0)
    graph.add_nodes_from(range(n) if n is not None else label.values())
    for where, cells in about:
        marks = {name: _cell(text) for name, text in cells.items() if text and name != "node"}
        for name in marks.keys() - extra:
            marks[name] = checked_node_mark(name, marks[name], f"node {cells['node']} ({where})")
        graph.nodes[label[cells["node"]]].update(marks)
    met: dict[tuple[Any, Any], tuple[str, dict[str, Any], list[tuple[float, float]]]] = {}
    number = {node: place for place, node in enumerate(graph)}
    for where, cells in lines:
        a, b = label[cells["from"]], label[cells["to"]]
        if a == b:
            raise TopologyError(f"{where}: node {a} is linked with itself; leave that out")
        pair = (a, b) if directed or number[a] < number[b] else (b, a)
        marks = _marks(cells, edge_name(pair, directed), where, extra)
        first, before, times = met.setdefault(pair, (where, marks, []))
        if cells.get("t2") and not cells.get("t1"):
            raise TopologyError(f"{where}: t2 is {cells['t2']} and t1 is empty; say from when")
        if cells.get("t1") and "schedule" in marks:
            raise TopologyError(f"{where}: it has a schedule and t1; give one of them")
        if first is not where and (before != marks or not times or not cells.get("t1")):
            raise TopologyError(
                f"{where}: the link {a}→{b} stands in {first} already"
                + ("; give it once, or say directed=True where its two directions are meant" * (not directed))
            )
        if cells.get("t1"):
            times.append(csv_interval(cells["t1"], cells.get("t2", ""), where))
    for (a, b), (where, marks, times) in sorted(met.items(), key=lambda one: [number[x] for x in one[0]]):
        if times:
            marks["schedule"] = str(_over(LinkTimes, where, _joined(times), period))
        elif period is not None:
            raise TopologyError(f"{where}: a period is for links with times, and it has no t1")
        graph.add_edge(a, b, **{"probability": 1.0} | marks)
    return graph


def _lines(path: str, needed: Sequence[str], known: Sequence[str], extra: frozenset[str]) -> list[Line]:
    """The lines of a file with a header, which must have some columns and may have others."""
    allowed = f"{','.join(needed)}, and where wanted {', '.join(known)}"
    rows = csv_lines(path, allowed)
    header = rows[0][1] if rows else []
    if not set(needed) <= set(header) or len(set(header)) < len(header):
        raise TopologyError(
            f"{path} begins with {','.join(header) or 'nothing'}; its first line must be a header: {allowed}"
        )
    for name in header:
        if name not in (*needed, *known) and name not in extra:
            raise UnknownNameError(
                f"column of {path}",
                name,
                known,
                f"where it is one of your own, say so: from_file(…, extra=[{name!r}])",
            )
    found = []
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise TopologyError(f"{path}, line {line} has {len(row)} fields; its header has {len(header)}")
        cells = dict(zip(header, row, strict=True))
        for name in needed:
            if not cells[name]:
                raise TopologyError(f"{path}, line {line}: {name} is empty; name a node")
        found.append((f"{path}, line {line}", cells))
    return found


def _labels(path: str, lines: list[Line], given: list[str], n: int | None) -> dict[str, Any]:
    """The node that each text stands for, in the order of their numbers: those of the file of nodes as they
    stand there; else whole numbers in their order, or names as they come.
    """
    if len(set(given)) < len(given):
        twice = next(name for name in given if given.count(name) > 1)
        raise TopologyError(f"node {twice!r} stands twice in the file of nodes; give each one line")
    named = {name: where for where, cells in lines for name in (cells["from"], cells["to"])}
    whole = all(name.isdecimal() and str(int(name)) == name for name in (*named, *given))
    for name, where in named.items():
        if n is not None and not (whole and int(name) < n):
            raise TopologyError(f"{where} names node {name!r}; with n={n} the nodes are 0 to {n - 1}")
        if given and name not in given:
            raise UnknownNameError(f"node in {where}", name, given)
    if not (named or given or n):
        raise TopologyError(
            f"{path} has no links, so there are no clients; give nodes, or n, for some without"
        )
    order = given or (sorted(named, key=int) if whole else list(named))
    return {name: int(name) if whole else name for name in order}


def _marks(cells: dict[str, str], edge: str, where: str, extra: frozenset[str]) -> dict[str, Any]:
    marks: dict[str, Any] = {}
    for name, text in cells.items():
        if text and name in OF_EDGES:
            marks[name] = _over(checked, where, name, _cell(text), edge)
        elif text and name in extra:
            marks[name] = _cell(text)
    return marks


def _cell(text: str) -> Any:
    """A number, a truth value, a list of times, or text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text) if text.startswith("[") else float(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _over(function: Callable[..., Any], where: str, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ScenarioError as error:
        raise TopologyError(f"{where}: {error}") from None


def _joined(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union, as intervals that do not overlap."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
