"""What tests of a server's schedules share: networks and timings to draw from, and how rows are compared."""

from __future__ import annotations

import math
from typing import Any

import networkx as nx
from hypothesis import strategies as st

from asyncfed.network import Lockstep, Table, VirtualTime


@st.composite
def stars(draw: st.DrawFn) -> tuple[nx.Graph, Lockstep | VirtualTime]:
    """A server with up to five clients, links of all kinds, in either timing."""
    clients = draw(st.integers(1, 5))
    hub = draw(st.integers(0, clients))
    directed = draw(st.booleans())
    graph: nx.Graph = nx.DiGraph() if directed else nx.Graph()
    graph.add_nodes_from(range(clients + 1))
    graph.graph["server"] = hub
    others = [node for node in range(clients + 1) if node != hub]
    extra = [(a, b) for a in others for b in others if a != b and (directed or a < b)]
    pairs = [(hub, node) for node in others] + [(node, hub) for node in others if directed]
    some = draw(st.lists(st.sampled_from(extra), unique=True, max_size=3)) if extra else []
    for a, b in pairs + some:
        marks: dict[str, Any] = {"probability": draw(st.sampled_from([1.0, 1.0, 0.8, 0.3]))}
        if draw(st.booleans()):
            marks["latency"] = draw(st.sampled_from([0.0, 0.7, "exponential(1.5)"]))
        if draw(st.booleans()):
            marks["loss"] = draw(st.sampled_from([0.0, 0.3]))
        if draw(st.booleans()):
            marks["bandwidth"] = draw(st.sampled_from([math.inf, 10.0, 3.0]))
        if not draw(st.integers(0, 3)):
            marks["ordered"] = draw(st.booleans())
        graph.add_edge(a, b, **marks)
    timing: Lockstep | VirtualTime = Lockstep(loss=draw(st.sampled_from([0.0, 0.2])))
    if draw(st.integers(0, 3)):
        table = Table(tuple((1.0, 0.5 + client, 2.0) for client in range(clients)))
        timing = VirtualTime(
            compute=draw(st.sampled_from([1.0, "exponential(1.0)", "uniform(0.5, 2.0)", table])),  # type: ignore[arg-type]
            factors={0: 3.0} if draw(st.booleans()) else {},
            latency=draw(st.sampled_from([0.0, 0.5, "exponential(2.0)"])),
            bandwidth=draw(st.sampled_from([math.inf, 20.0])),
            loss=draw(st.sampled_from([0.0, 0.2])),
            ordered=draw(st.booleans()),
        )
    return graph, timing


def assert_rows_alike(found: list[Any], expected: list[Any]) -> None:
    """As sets; times to rounding."""

    def sortable(row: Any) -> tuple[Any, ...]:
        return tuple(
            (value is not None, round(value, 6) if isinstance(value, float) else value)
            if value is not None
            else (False, 0)
            for value in row
        )

    assert len(found) == len(expected)
    for one, other in zip(sorted(found, key=sortable), sorted(expected, key=sortable), strict=True):
        assert type(one) is type(other)
        for name, a, b in zip(one._fields, one, other, strict=True):
            same = a == b or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b))
            assert same or (name == "weight" and a is not None and math.isclose(a, b)), (name, one, other)
