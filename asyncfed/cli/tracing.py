"""The questions that `asyncfed trace` can ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfed.errors import UnknownNameError

if TYPE_CHECKING:
    import pandas as pd

    from asyncfed.trace import Trace


def question(
    trace: Trace, by: str, edge: tuple[str, str] | None, sort: str | None, ascending: bool
) -> tuple[pd.DataFrame, str]:
    """The table, and what its rows are."""
    tables = {
        "edge": (trace.edges, "edges"),
        "node": (trace.nodes, "nodes"),
        "phase": (trace.phases, "phases"),
        "step": (trace.by_step, "steps"),
        "round": (trace.rounds, "rounds"),
    }
    if by not in tables:
        raise UnknownNameError("--by", by, tables)
    if edge is not None:
        frame, what = trace.edge(*edge), f"messages from {edge[0]} to {edge[1]}"
    else:
        ask, what = tables[by]
        frame = ask()
        if by == "edge" and sort is None:
            sort = "bytes"
    if sort is None:
        return frame, what
    if sort not in frame.columns:
        raise UnknownNameError("column", sort, map(str, frame.columns))
    return frame.sort_values(sort, ascending=ascending, kind="stable", ignore_index=True), what
