"""The network as other programs read it, every edge and node with what was measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncfed.errors import TraceError
from asyncfed.printable import printable

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd

    from asyncfed.result import Result
    from asyncfed.trace import Trace

MOST = 1_000_000  # edges in memory take some 2 GB


def measured_graph(trace: Trace) -> nx.DiGraph:
    """The directed graph of what was (or could have been) sent: a node has the columns of `Trace.nodes`, an
    edge those of `Trace.edges`. What was not measured, such as the delay where nothing arrived, is missing.
    """
    import networkx as nx

    _check(trace, trace.node_count, "nodes")
    edges = trace.edges()
    _check(trace, len(edges), "edges")
    graph = nx.DiGraph()
    graph.add_nodes_from((printable(str(row.pop("client"))), row) for row in _rows(trace.nodes()))
    for row in _rows(edges):
        graph.add_edge(printable(str(row.pop("sender"))), printable(str(row.pop("receiver"))), **row)
    return graph


def write_graphml(result: Result, path: Path) -> None:
    import networkx as nx

    nx.write_graphml(measured_graph(result.trace), path)


def write_gexf(result: Result, path: Path) -> None:
    import networkx as nx

    nx.write_gexf(measured_graph(result.trace), path)


def _check(trace: Trace, count: int, what: str) -> None:
    if count > MOST:
        raise TraceError(
            f"{trace.directory} has {count:,} {what}, too many for a graph file (at most {MOST:,}); "
            "export it as csv or parquet"
        )


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Plain numbers, without those that are missing."""
    names = [str(name) for name in frame.columns]
    columns = [frame[name].tolist() for name in names]
    return [
        {
            name: value
            for name, value in zip(names, row, strict=True)
            if not isinstance(value, float) or math.isfinite(value)
        }
        for row in zip(*columns, strict=True)
    ]
