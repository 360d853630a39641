"""Networks in files: GraphML, which other tools read, and JSON, which people read.

A graph comes back exactly as it was saved. Where a format cannot hold something (GraphML knows no control
characters, say) the graph is not saved at all: what was written is read again before it takes its name.
"""

from __future__ import annotations

import json
import os
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import networkx as nx

from asyncfed.checks import PathLike, checked
from asyncfed.errors import TopologyError
from asyncfed.reading import open_regular
from topologies._marks import check_marks, checked_place

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
        A network with nodes 0..n-1 in order; `with_links(graph)` makes one of any other.
    path : path
        A name that ends in ``.graphml`` or ``.json``.

    Raises
    ------
    TopologyError
        For another ending, a graph that breaks a convention, or an attribute that the format cannot hold.
    """
    path = Path(path)
    file_format = _format_of(path)
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
            exact = _same(graph, file_format.read(part))
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


@checked(error=TopologyError)
def load(path: PathLike) -> nx.Graph:
    """Read a network that `save` wrote.

    Parameters
    ----------
    path : path
        A name that ends in ``.graphml`` or ``.json``.

    Raises
    ------
    TopologyError
        For a file that is missing, truncated or foreign, and for a network that breaks a convention.
    """
    path = Path(path)
    file_format = _format_of(path)
    try:
        graph = file_format.read(path)
    except OSError as error:
        raise TopologyError(
            f"cannot read {path}: {error.strerror}; check the name, or write it with save"
        ) from error
    except _UNREADABLE as error:
        raise TopologyError(
            f"cannot read {path} as a topology: {error}; it is truncated or not from topologies.save"
        ) from error
    _check(graph, f"cannot read {path}")
    return graph


class _Format(NamedTuple):
    write: Callable[[nx.Graph, BinaryIO], None]
    read: Callable[[Path], nx.Graph]


def _format_of(path: Path) -> _Format:
    if path.suffix not in _FORMATS:
        raise TopologyError(
            f"{path} ends in {path.suffix!r}; a topology is kept in {' or '.join(_FORMATS)}: rename it"
        )
    return _FORMATS[path.suffix]


def _write_json(graph: nx.Graph, stream: BinaryIO) -> None:
    content = {
        "format": _JSON_FORMAT,
        "directed": graph.is_directed(),
        "graph": graph.graph,
        "nodes": [data for _, data in graph.nodes(data=True)],
        "edges": list(graph.edges(data=True)),
    }
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
    for i, j, data in content["edges"]:
        if type(i) is not int or type(j) is not int or not {i, j} <= graph.nodes or graph.has_edge(i, j):
            raise ValueError(f"the edge [{i!r}, {j!r}] is given twice or leads to no node")
        graph.add_edges_from([(i, j, data)])
    return graph


def _write_graphml(graph: nx.Graph, stream: BinaryIO) -> None:
    for node, data in graph.nodes(data=True):  # GraphML knows no lists
        if "pos" in data:
            data["pos"] = " ".join(map(repr, checked_place(node, data["pos"])))
    nx.write_graphml_xml(graph, stream)


def _read_graphml(path: Path) -> nx.Graph:
    with open_regular(path) as file:
        graph = nx.read_graphml(file, node_type=int)
    for leftover in ("node_default", "edge_default"):  # networkx's own bookkeeping
        graph.graph.pop(leftover, None)
    for _, data in graph.nodes(data=True):
        if "pos" in data:
            data["pos"] = tuple(map(float, str(data["pos"]).split()))
    return graph


_FORMATS = {
    ".graphml": _Format(_write_graphml, _read_graphml),
    ".json": _Format(_write_json, _read_json),
}


def _check(graph: nx.Graph, what: str) -> None:
    """Refuse what breaks a convention of this package, beginning the message with `what`."""
    if not isinstance(graph, nx.Graph) or graph.is_multigraph():
        raise TopologyError(f"{what}: {graph} is not a networkx Graph or DiGraph")
    if not len(graph) or list(graph) != list(range(len(graph))):
        raise TopologyError(
            f"{what}: its nodes must be 0..n-1 in order; with_links(graph) relabels a graph so"
        )
    loop = next(iter(nx.nodes_with_selfloops(graph)), None)
    if loop is not None:
        raise TopologyError(f"{what}: node {loop} has a self-loop; these are implicit: remove it")
    if graph.graph.get("server", 0) not in graph:
        raise TopologyError(f"{what}: its server {graph.graph['server']!r} is not a node")
    try:
        check_marks(graph)
    except TopologyError as error:
        raise TopologyError(f"{what}: {error}") from None


def _same(one: nx.Graph, other: nx.Graph) -> bool:
    return bool(
        one.is_directed() == other.is_directed()
        and one.graph == other.graph
        and list(one.nodes(data=True)) == list(other.nodes(data=True))
        and list(one.edges(data=True)) == list(other.edges(data=True))
    )
