"""Who did what when: a lane per node, a bar per step, a line per message from its sending to its arrival.

What there is to draw is the explorer's answer about a window of time. Where its messages are too many to be
told apart, it counts them instead, and so does the picture.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfed.explorer.index import ChunkCache, Columns, TraceIndex
from asyncfed.explorer.windows import window
from asyncfed.network.waves import Status
from asyncfed.report.network import name_nodes
from asyncfed.report.style import BLUE, GREEN, GREY, ORANGE, PALETTE, empty, tidy
from asyncfed.trace.columns import STATUS_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from asyncfed.trace import Trace

_BINS, _LANES = 400, 200
_BAR = 0.7  # of a lane
_COLOURS = {
    "delivered": BLUE,
    "lost": PALETTE[4],
    "link_down": GREY,
    "in_flight": PALETTE[3],
    "late": ORANGE,
    "carried": GREEN,
}


def draw_timeline(figure: Figure, axes: Axes, trace: Trace, start: float, end: float) -> None:
    """The steps and messages of the window [start, end)."""
    index = TraceIndex(trace.directory, trace.node_count, trace.server, ChunkCache())
    index.follow()
    columns, facts = window(index, (start, end), 0, trace.node_count, _BINS, _LANES)
    if not facts["steps"] and facts["kind"] == "messages" and not facts["messages"]:
        empty(axes, "nothing happened in this time")
        return
    _draw_steps(axes, columns)
    if facts["kind"] == "messages":
        _draw_messages(axes, columns)
        title = f"{facts['messages']:,} messages"
    else:
        _draw_counts(figure, axes, columns, facts)
        title = "messages sent, counted (fewer are drawn one by one: give start and end)"
    first, last = index.span()
    axes.set_xlim(max(start, first), min(end, last) if math.isfinite(end) else None)
    axes.set_ylim(trace.node_count - 0.5, -0.5)
    axes.locator_params(axis="y", integer=True)
    name_nodes(axes.yaxis, trace.names, np.arange(trace.node_count))
    tidy(axes, title, "virtual time", "node")
    axes.grid(visible=False)


def _draw_steps(axes: Axes, columns: Columns) -> None:
    from matplotlib.collections import PolyCollection

    if "step_client" not in columns:
        return
    left, right = columns["step_started_at"], columns["step_ended_at"]
    low, high = columns["step_client"] - _BAR / 2, columns["step_client"] + _BAR / 2
    corners = np.stack([left, low, right, low, right, high, left, high], axis=1).reshape(-1, 4, 2)
    axes.add_collection(
        PolyCollection(list(corners), facecolors="#dde3e9", edgecolors="white", linewidths=0.5)
    )


def _draw_messages(axes: Axes, columns: Columns) -> None:
    """What does not arrive stays on its sender's lane, as a mark where it was sent."""
    from matplotlib.collections import LineCollection

    sent, arrived, status = columns["sent_at"], columns["arrived_at"], columns["status"]
    for code in Status:
        name = STATUS_NAMES[code]
        chosen = status == code
        if not chosen.any():
            continue
        words, colour = name.replace("_", " "), _COLOURS[name]
        ends = chosen & np.isfinite(arrived)
        lines = np.stack([sent, columns["sender"], arrived, columns["receiver"]], axis=1)[ends]
        width = float(np.clip(300 / max(len(sent), 1), 0.3, 1.2))
        axes.add_collection(LineCollection(list(lines.reshape(-1, 2, 2)), colors=colour, linewidths=width))
        stays = chosen & ~ends
        axes.scatter(sent[stays], columns["sender"][stays], s=12, color=colour, marker="x", linewidths=0.8)
        axes.plot([], [], color=colour, label=f"{words} ({int(chosen.sum()):,})")
    if len(sent):
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _draw_counts(figure: Figure, axes: Axes, columns: Columns, facts: dict[str, Any]) -> None:
    shape = (facts["lanes"], facts["bins"])
    found = (columns[f"cells_{name}"] for name in STATUS_NAMES if f"cells_{name}" in columns)
    counts = sum(found, np.zeros(shape[0] * shape[1], np.int64)).reshape(shape)
    begin, (low, high) = facts["begin"], facts["nodes"]
    extent = (begin, begin + facts["bins"] * facts["width"], high - 0.5, low - 0.5)
    image = axes.imshow(counts, aspect="auto", cmap="Blues", extent=extent, interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
    bar.ax.tick_params(labelsize=8)
