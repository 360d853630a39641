"""Networks in files: CSV, GraphML and GEXF, which other tools write and read, and JSON of our own.

A graph comes back exactly as it was saved. Where a format cannot hold something (GraphML knows no control
characters, say) the graph is not saved at all: what was written is read again before it takes its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import networkx as nx

from asyncfed.checks import PathLike, PositiveFloat, PositiveInt, checked
from asyncfed.errors import ScenarioError, TopologyError
from asyncfed.network.attributes import OF_EDGES, checked_extra, extra_of, extra_text
from asyncfed.network.names import Names
from asyncfed.reading import open_regular
from asyncfed.registry import register
from topologies._edge_lists import edge_list
from topologies._marks import (
    OF_NODES_IN_TABLES,
    canonical,
    check_marks,
    checked_place,
    count_of_clients,
)
from topologies._recipes import note_recipe

_JSON_FORMAT = "asyncfed topology 1"
_UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    ElementTree.ParseError,
    nx.NetworkXException,
)


@checked(error=TopologyError)
def save(graph: nx.Graph, path: PathLike) -> None:
    """Write a network to a file, whole or not at all.

    Parameters
    ----------
    graph : nx.Graph or nx.DiGraph
        A network whose nodes are 0..n-1 in order, or have names.
    path : path
        A name that ends in ``.graphml`` or ``.json``.

    Raises
    ------
    TopologyError
        For another ending, a graph that breaks a convention, or an attribute that the format cannot hold.
    """
    path = Path(path)
    file_format = _format_of(path, _SAVED)
    _check(graph, f"cannot save {path}")
    if not path.parent.is_dir():
        raise TopologyError(f"cannot save {path}: there is no directory {path.parent}; create it first")
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        try:
            with part.open("wb") as stream:
                file_format.write(graph.copy(), stream)  # networkx takes "id" out of what it writes
                stream.flush()
                os.fsync(stream.fileno())
            exact = _same(graph, _tidied(file_format.read(part)))
        except _UNREADABLE as error:
            raise TopologyError(
                f"cannot save {path}: {error}; attributes must be numbers or strings"
            ) from error
        if not exact:
            raise TopologyError(
                f"cannot save {path}: {path.suffix} would change an attribute; keep to numbers and strings"
            )
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@register("topology")
def from_file(
    path: PathLike,
    directed: bool | None = None,
    server: str | int | None = None,
    nodes: PathLike | None = None,
    n: PositiveInt | None = None,
    period: PositiveFloat | None = None,
    extra: str | Collection[str] = (),
) -> nx.Graph:
    """Read a network; nodes keep their names, and are numbered as they stand in the file.

    Parameters
    ----------
    path : path
        ``.csv``: an edge list with the header ``from,to`` and, where wanted, ``probability,latency,bandwidth,
        loss,ordered,schedule,bursts``; an empty cell is for what a link does not say. In a contact trace,
        ``from,to,t1,t2``, links are up in [t1, t2) (an empty t2 never ends), and there is a line for each
        time that two nodes met; times that overlap are one. Without a probability a link is always there.
        ``.graphml``, ``.gexf``: graphs with these as attributes of edges, and ``compute,uplink,downlink,
        device`` of nodes. Nodes are called by their attribute ``label`` where all have one, else by their id.
        ``.json``: what `save` wrote.
    directed : bool, optional
        Whether a link goes one way only: for CSV it must be said. Of a graph, None is what its file says, and
        True makes two directions of each undirected link.
    server : name, optional
        The node that is the server, where the file does not say so itself.
    nodes : path, optional
        With an edge list: a file in CSV with the header ``node`` and, where wanted, ``compute,uplink,
        downlink,device``, which says which nodes there are, in which order.
    n : int, optional
        With an edge list: how many nodes there are, which are 0..n-1 then.
    period : float, optional
        After which a contact trace begins anew. Without it there are no links after its last contact.
    extra : names
        Columns or attributes of one's own, which are let through; any other that is unknown is refused.

    Raises
    ------
    TopologyError
        For a file that is missing, truncated or foreign, and for a network that breaks a convention.
    """
    path, own = Path(path), checked_extra(extra)
    table = None if nodes is None else os.fspath(nodes)
    file_format = _format_of(path, _READ)
    if path.suffix == ".csv":
        if not isinstance(directed, bool):
            raise TopologyError(
                f"directed is {directed!r} for {path}; say directed=True where a line is one direction, or "
                " directed=False where it is both"
            )
        graph = edge_list(str(path), directed=directed, nodes=table, n=n, period=period, extra=own)
    else:
        for name, value in (("nodes", nodes), ("n", n), ("period", period)):
            if value is not None:
                raise TopologyError(f"{name} is {value!r}, which is for edge lists in .csv; leave it out")
        graph = _read_graph(path, file_format, directed)
    if own:
        graph.graph["extra"] = extra_text(own | extra_of(graph))
    if server is not None:
        graph.graph["server"] = server
    _check(graph, f"cannot read {path}")
    if path.suffix not in _SAVED:  # a graph that was saved comes back as it was
        graph.graph.setdefault("name", f"{path.name}, {count_of_clients(len(graph))}")
        given = {"path": str(path), "directed": directed, "server": server, "nodes": table, "n": n}
        note_recipe(graph, "from_file", given | {"period": period, "extra": sorted(own)})
    return graph


def _read_graph(path: Path, file_format: _Format, directed: bool | None) -> nx.Graph:
    try:
        graph = _tidied(file_format.read(path))
    except OSError as error:
        raise TopologyError(
            f"cannot read {path}: {error.strerror}; check the name, or write it with save"
        ) from error
    except _UNREADABLE as error:
        raise TopologyError(
            f"cannot read {path} as a topology: {error}; it is truncated, or no such file"
        ) from error
    if graph.is_multigraph():
        raise TopologyError(f"cannot read {path}: it has parallel edges, but a link is single; join them")
    if directed is not None and directed != graph.is_directed():
        if not directed:
            raise TopologyError(
                f"cannot read {path}: directed is False, but its links have directions; leave it out"
            )
        graph = canonical(graph, directed=True)
    return graph


def _tidied(graph: nx.Graph) -> nx.Graph:
    """Without the bookkeeping of a format, numbers as numbers, and nodes called as people call them."""
    for leftover in _BOOKKEEPING:
        graph.graph.pop(leftover, None)
    for _, data in graph.nodes(data=True):
        if isinstance(data.get("pos"), str):
            data["pos"] = tuple(map(float, data["pos"].split()))
        for mark in OF_NODES_IN_TABLES:
            _as_number(data, mark)
    for *_, data in graph.edges(data=True):
        for mark in OF_EDGES:
            _as_number(data, mark)
    labels = [data.get("label") for _, data in graph.nodes(data=True)]
    if labels and all(isinstance(label, (str, int)) for label in labels):
        if len(set(map(str, labels))) == len(labels):
            graph = nx.relabel_nodes(graph, dict(zip(graph, labels, strict=True)))
        for _, data in graph.nodes(data=True):
            data.pop("label")
    if all(isinstance(node, str) and node.isdecimal() and str(int(node)) == node for node in graph):
        graph = nx.relabel_nodes(graph, {node: int(node) for node in graph})
    return graph


def _as_number(data: dict[str, Any], mark: str) -> None:
    """Some tools write every attribute as text."""
    if isinstance(data.get(mark), str) and mark != "device":
        with contextlib.suppress(ValueError):
            data[mark] = float(data[mark])


def _not_written(graph: nx.Graph, stream: BinaryIO) -> None:
    raise NotImplementedError


def _not_read(path: Path) -> nx.Graph:
    raise NotImplementedError


class _Format(NamedTuple):
    write: Callable[[nx.Graph, BinaryIO], None] = _not_written
    read: Callable[[Path], nx.Graph] = _not_read


def _format_of(path: Path, known: Sequence[str]) -> _Format:
    if path.suffix not in known:
        raise TopologyError(
            f"{path} ends in {path.suffix!r}; a topology is kept in {' or '.join(known)}: rename it"
        )
    return _FORMATS[path.suffix]


def _write_json(graph: nx.Graph, stream: BinaryIO) -> None:
    number = {node: place for place, node in enumerate(graph)}
    content = {
        "format": _JSON_FORMAT,
        "directed": graph.is_directed(),
        "graph": graph.graph,
        "nodes": [data for _, data in graph.nodes(data=True)],
        "edges": [(number[a], number[b], data) for a, b, data in graph.edges(data=True)],
    }
    if Names(list(graph)).given:
        content["names"] = list(graph)
    stream.write(json.dumps(content, allow_nan=False).encode())


def _read_json(path: Path) -> nx.Graph:
    with open_regular(path) as file:
        content = json.loads(file.read())
    if not isinstance(content, dict) or content.get("format") != _JSON_FORMAT:
        raise ValueError(f'it does not say "format": "{_JSON_FORMAT}"')
    graph = nx.DiGraph() if content["directed"] else nx.Graph()
    graph.graph.update(content["graph"])
    graph.add_nodes_from(enumerate(content["nodes"]))
    for _, marks in graph.nodes(data=True):
        if "pos" in marks:
            marks["pos"] = tuple(marks["pos"])
    names = content.get("names")
    for i, j, data in content["edges"]:
        if type(i) is not int or type(j) is not int or not {i, j} <= graph.nodes or graph.has_edge(i, j):
            raise ValueError(f"the edge [{i!r}, {j!r}] is given twice or leads to no node")
        graph.add_edges_from([(i, j, data)])
    if names is None:
        return graph
    if not isinstance(names, list) or len(set(names)) != len(graph):
        raise ValueError(f"its names are {names!r:.200}, for {len(graph)} nodes")
    return nx.relabel_nodes(graph, dict(enumerate(names)))


def _write_graphml(graph: nx.Graph, stream: BinaryIO) -> None:
    for node, data in graph.nodes(data=True):  # GraphML knows no lists
        if "pos" in data:
            data["pos"] = " ".join(map(repr, checked_place(node, data["pos"])))
    nx.write_graphml_xml(graph, stream)


def _read_graphml(path: Path) -> nx.Graph:
    with open_regular(path) as file:
        return nx.read_graphml(file)


def _read_gexf(path: Path) -> nx.Graph:
    with open_regular(path) as file:
        graph = nx.read_gexf(file)
    for *_, data in graph.edges(data=True):
        data.pop("id", None)  # of the edge, in the file
    return graph


_FORMATS = {
    ".csv": _Format(),
    ".graphml": _Format(_write_graphml, _read_graphml),
    ".gexf": _Format(read=_read_gexf),
    ".json": _Format(_write_json, _read_json),
}
_READ = tuple(_FORMATS)
_SAVED = tuple(suffix for suffix, one in _FORMATS.items() if one.write is not _not_written)
_BOOKKEEPING = ("node_default", "edge_default", "mode", "timeformat", "start", "end")  # of networkx


def _check(graph: nx.Graph, what: str) -> None:
    """Refuse what breaks a convention of this package, beginning the message with `what`."""
    if not isinstance(graph, nx.Graph) or graph.is_multigraph():
        raise TopologyError(f"{what}: {graph} is not a networkx Graph or DiGraph")
    counted = not Names(list(graph)).given
    if not len(graph) or (counted and list(graph) != list(range(len(graph)))):
        raise TopologyError(f"{what}: its nodes must be 0..n-1 in order, or have names")
    if not all(isinstance(node, (str, int)) and not isinstance(node, bool) for node in graph):
        raise TopologyError(f"{what}: its nodes must be called by text or whole numbers")
    loop = next(iter(nx.nodes_with_selfloops(graph)), None)
    if loop is not None:
        raise TopologyError(f"{what}: node {loop} has a self-loop; these are implicit: remove it")
    if "server" in graph.graph and graph.graph["server"] not in graph:
        raise TopologyError(f"{what}: its server {graph.graph['server']!r} is not a node")
    try:
        check_marks(graph)
    except ScenarioError as error:
        raise TopologyError(f"{what}: {error}") from None


def _same(one: nx.Graph, other: nx.Graph) -> bool:
    return bool(
        one.is_directed() == other.is_directed()
        and one.graph == other.graph
        and list(one.nodes(data=True)) == list(other.nodes(data=True))
        and list(one.edges(data=True)) == list(other.edges(data=True))
    )
