"""What there is to draw in a window of time: every message and step, or how many, where they are too many.

The page draws arrows as long as they can be told apart. So a window with few messages is answered with them
all, one with more with counts by lane, bin and status: exact ones from the rows where those are few enough to
be read at once, and from the overview else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from asyncfed.explorer.index import Columns, Piece, TraceIndex, Window
from asyncfed.explorer.overview import LANES
from asyncfed.network.waves import Status
from asyncfed.trace.columns import MESSAGES, SCHEMAS, STALENESS, STATUS_NAMES, STEPS
from asyncfed.trace.queries import dictionary_codes, status_codes

MOST_ARROWS = 4000
MOST_BARS = 12_000
MOST_LISTED = 2000  # messages of one edge
_MOST_READ = 1 << 20  # rows for one answer
_MOST_SEARCHED = 1 << 19  # for the messages of one edge

_PLAIN = ("step", "sender", "receiver", "sent_at", "arrived_at", "weight", "bytes")
_NULLABLE = ("absorbed_step", STALENESS)
Answer = tuple[Columns, dict[str, Any]]


def window(index: TraceIndex, time: Window, low: int, high: int, bins: int, lanes: int = LANES) -> Answer:
    """Messages under way in [from, to) from or to the nodes [low, high), and their steps; in at most so many
    lanes, and bins where these are counted from rows."""
    pieces = index.pieces(time)
    columns, facts = _bars(index, time, low, high)
    if sum(piece.rows for piece in pieces) > _MOST_READ:
        cells, about = _overview_cells(index, time, low, high)
        return columns | cells, facts | about
    tables = [_chosen(rows, time, low, high) for piece in pieces for rows in index.rows(piece)]
    count = sum(map(len, tables))
    if count > MOST_ARROWS:
        cells, about = _counted_cells(index, tables, time, (low, high), bins, lanes)
        return columns | cells, facts | about | {"messages": count}
    found, labels = message_columns(tables)
    return columns | found, facts | labels | {"kind": "messages", "messages": count}


def edge(index: TraceIndex, sender: int, receiver: int, time: Window, at: float) -> Answer:
    """Of one edge: what became of its messages chunk by chunk, and those around a time.

    All in the window, where they are few enough to be read and listed; else as many as are near.
    """
    by_piece = [
        (piece, sums)
        for piece, sums in index.edge_by_piece(sender, receiver)
        if piece.first < time[1] and piece.last >= time[0]
    ]
    strip: Columns = {
        "strip_from": np.array([piece.first for piece, _ in by_piece]),
        "strip_to": np.array([piece.last for piece, _ in by_piece]),
    }
    for name in STATUS_NAMES:
        strip[f"strip_{name}"] = np.array([sums.get(name, 0) for _, sums in by_piece], np.int32)
    read, tables = 0, []
    for piece, _ in sorted(by_piece, key=lambda pair: _distance(pair[0], at)):
        if read and read + piece.rows > _MOST_SEARCHED:
            break
        read += piece.rows
        tables += [_on_edge(rows, sender, receiver, time) for rows in index.rows(piece)]
    columns, labels = message_columns(tables)
    order = np.argsort(columns["sent_at"], kind="stable")
    if len(order) > MOST_LISTED:
        middle = int(np.searchsorted(columns["sent_at"][order], at))
        begin = min(max(middle - MOST_LISTED // 2, 0), len(order) - MOST_LISTED)
        order = order[begin : begin + MOST_LISTED]
    whole = read == sum(piece.rows for piece, _ in by_piece) and len(order) == len(columns["sent_at"])
    return strip | {name: values[order] for name, values in columns.items()}, labels | {"whole": whole}


def message_columns(tables: list[pa.Table]) -> Answer:
    """Rows as numbers, and what the numbers of phases and kinds stand for."""
    rows = pa.concat_tables([SCHEMAS[MESSAGES].empty_table(), *tables]).unify_dictionaries()
    columns: Columns = {name: rows[name].to_numpy() for name in _PLAIN}
    for name in _NULLABLE:
        columns[name] = rows[name].fill_null(-1).to_numpy()
    columns["status"] = status_codes(rows["status"]).astype(np.uint8)
    labels = {}
    for name in ("phase", "kind"):
        columns[name], labels[f"{name}s"] = dictionary_codes(rows[name])
    return columns, labels


def _bars(index: TraceIndex, time: Window, low: int, high: int) -> Answer:
    pieces = index.step_pieces(time)
    many: Answer = ({}, {"steps": None})
    inside = sum(piece.rows for piece in pieces if time[0] <= piece.first and piece.last < time[1])
    if (
        inside * (high - low) > 4 * MOST_BARS * index.nodes
        or sum(piece.rows for piece in pieces) > _MOST_READ
    ):
        return many  # without looking
    found = []
    for piece in pieces:
        for rows in index.rows(piece, STEPS):
            client = rows["client"].to_numpy()
            chosen = (rows["started_at"].to_numpy() < time[1]) & (rows["ended_at"].to_numpy() >= time[0])
            found.append(rows.filter(pa.array(chosen & (client >= low) & (client < high))))
    if sum(map(len, found)) > MOST_BARS:
        return many
    if not found:
        return {}, {"steps": 0, "step_phases": []}
    rows = pa.concat_tables(found).unify_dictionaries()
    phase, labels = dictionary_codes(rows["phase"])
    columns: Columns = {f"step_{name}": rows[name].to_numpy() for name in _STEP_COLUMNS}
    return columns | {"step_phase": phase}, {"steps": len(rows), "step_phases": labels}


_STEP_COLUMNS = ("client", "step", "started_at", "ended_at", "absorbed")


def _chosen(rows: pa.Table, time: Window, low: int, high: int) -> pa.Table:
    sent, arrived = rows["sent_at"].to_numpy(), rows["arrived_at"].to_numpy()
    sender, receiver = rows["sender"].to_numpy(), rows["receiver"].to_numpy()
    chosen = (sent < time[1]) & (np.fmax(sent, arrived) >= time[0])
    chosen &= ((sender >= low) & (sender < high)) | ((receiver >= low) & (receiver < high))
    return rows.filter(pa.array(chosen))


def _on_edge(rows: pa.Table, sender: int, receiver: int, time: Window) -> pa.Table:
    sent = rows["sent_at"].to_numpy()
    chosen = (rows["sender"].to_numpy() == sender) & (rows["receiver"].to_numpy() == receiver)
    return rows.filter(pa.array(chosen & (sent >= time[0]) & (sent < time[1])))


def _distance(piece: Piece[Any], at: float) -> float:
    return max(piece.first - at, at - piece.last, 0.0)


def _counted_cells(
    index: TraceIndex, tables: list[pa.Table], time: Window, nodes: tuple[int, int], bins: int, most: int
) -> Answer:
    """Messages sent in the window by the nodes [low, high), from their rows."""
    low, high = nodes
    first, last = index.span()
    begin, end = max(time[0], first), min(time[1], last)
    width = 2.0 ** np.ceil(
        np.log2(max(end - begin, 1e-9) / bins)
    )  # as the overview's: they stay when one zooms
    begin = float(np.floor(begin / width) * width)
    bins = int((end - begin) / width) + 1
    lanes = min(high - low, most)
    cells: npt.NDArray[np.int64] = np.zeros(len(Status) * lanes * bins, np.int64)
    for rows in tables:
        sender, sent = rows["sender"].to_numpy(), rows["sent_at"].to_numpy()
        chosen = (sender >= low) & (sender < high) & (sent >= begin) & (sent <= end)
        lane = (sender[chosen].astype(np.int64) - low) * lanes // (high - low)
        place = np.minimum(((sent[chosen] - begin) / width).astype(np.int64), bins - 1)
        status = status_codes(rows["status"])[chosen]
        cells += np.bincount((status * lanes + lane) * bins + place, minlength=len(cells))
    return _cells(cells.reshape(len(Status), lanes, bins), begin, width, (low, high))


def _overview_cells(index: TraceIndex, time: Window, low: int, high: int) -> Answer:
    overview = index.overview_now()
    per_lane = overview.nodes / overview.lanes
    first, last = int(low / per_lane), min(int(np.ceil(high / per_lane)), overview.lanes)
    begin, end = overview.between(*time)
    counts = overview.counts[:, first:last, begin:end]
    of = (round(first * per_lane), min(round(last * per_lane), overview.nodes))
    return _cells(counts, begin * overview.width, overview.width, of)


def _cells(counts: npt.NDArray[Any], begin: float, width: float, nodes: tuple[int, int]) -> Answer:
    columns: Columns = {
        f"cells_{name}": np.ascontiguousarray(counts[place], np.int32).reshape(-1)
        for place, name in enumerate(STATUS_NAMES)
        if counts[place].any()
    }
    _, lanes, bins = counts.shape
    about = {"begin": begin, "width": width, "lanes": lanes, "bins": bins, "nodes": nodes}
    return columns, {"kind": "cells", "messages": None, **about}
