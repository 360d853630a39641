"""What a graph, its nodes and its edges may say, and nothing else: a misspelt attribute would do nothing.

Attributes of one's own are let through where the graph lists them: graph.graph["extra"] = {"weight", "club"}.
A file has them as one text, "club, weight".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from asyncfed.checks import shown
from asyncfed.errors import TopologyError, UnknownNameError

if TYPE_CHECKING:
    import networkx as nx

OF_EDGES = ("probability", "latency", "bandwidth", "loss", "ordered", "schedule", "bursts")
OF_NODES = ("compute", "uplink", "downlink", "device", "pos")
OF_GRAPHS = ("name", "server", "recipe", "extra")


def check_attributes(graph: nx.Graph) -> None:
    """Refuse what is neither known nor listed in `extra`, naming the nearest that is."""
    own = extra_of(graph)
    arrow = "→" if graph.is_directed() else "–"
    for places, known in (
        ([(graph.graph,)], OF_GRAPHS),
        (graph.nodes(data=True), OF_NODES),
        (graph.edges(data=True), OF_EDGES),
    ):
        allowed = own.union(known)
        for *ends, marks in places:
            if not marks.keys() <= allowed:
                where = f"{'edge' if len(ends) == 2 else 'node'} {arrow.join(map(str, ends))}"
                _refuse(where if ends else "the graph", marks, known, own)


def extra_of(graph: nx.Graph) -> frozenset[str]:
    """The attributes of one's own that a graph lists."""
    return checked_extra(graph.graph.get("extra", ()))


def checked_extra(given: object) -> frozenset[str]:
    """A list of attributes: names, or one text with commas."""
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(
        isinstance(name, str) for name in names
    ):
        raise TopologyError(
            f"extra is {shown(given)}; it must be names of attributes, such as ['weight', 'club']"
        )
    return frozenset(stripped for name in names if (stripped := name.strip()))


def extra_text(names: Iterable[str]) -> str:
    """As files have it."""
    return ", ".join(sorted(names))


def _refuse(where: str, marks: Mapping[Any, Any], known: tuple[str, ...], own: frozenset[str]) -> NoReturn:
    name = next(name for name in marks if name not in known and name not in own)
    remedy = f"where it is one of your own, say so: graph.graph['extra'] = [{str(name)!r}]"
    raise UnknownNameError(f"attribute of {where}", str(name), known, remedy)
