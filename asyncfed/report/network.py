"""What the network did: who reached whom, whether links kept their word, and who sent how much."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asyncfed.explorer.graph import declared, places
from asyncfed.network.names import Names
from asyncfed.report.style import BLUE, GREEN, GREY, ORANGE, byte_unit, new_figure, save, tidy
from asyncfed.trace.queries import check_quantity

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from asyncfed.result import Result
    from asyncfed.trace import Trace

LARGEST_MATRIX = 400  # clients; beyond it a cell is smaller than a dot
MOST_NAMED = 30  # nodes whose names can be read beside one another
_ROADSIDE = 0.006  # of the width: how far a direction is from the middle of its link


def draw_network(result: Result, title: str, path: Path) -> Path | None:
    edges = edges_by_number(result.trace)
    if edges.empty:
        return None
    small = result.trace.node_count <= LARGEST_MATRIX
    figure = new_figure(title, 13 if small else 9, 4.4)
    *matrix, kept_word, traffic = figure.subplots(1, 3 if small else 2)
    topology = result.scenario_data["topology"]
    where = places(topology)
    for axes in matrix:
        if where is None:
            draw_matrix(figure, axes, result.trace)
        else:
            draw_map(figure, axes, edges, where, "delivery_rate", result.trace.names)
    _draw_promises(kept_word, edges, declared(topology))
    _draw_traffic(traffic, result.trace)
    return save(figure, path)


def draw_matrix(figure: Figure, axes: Axes, trace: Trace, quantity: str = "delivery_rate") -> None:
    """Sender × receiver of a column of `Trace.edges`."""
    values = np.where(trace.matrix("attempts") > 0, trace.matrix(quantity), np.nan)
    low, high = _limits(quantity)
    image = axes.imshow(values, vmin=low, vmax=high, cmap="viridis", interpolation="nearest")
    axes.set_facecolor("#eeeeee")
    tidy(axes, f"{_words(quantity)} (grey: no link)", "receiver", "sender")
    axes.grid(visible=False)
    axes.locator_params(integer=True)
    name_nodes(axes.xaxis, trace.names, np.arange(len(values)), rotation=90)
    name_nodes(axes.yaxis, trace.names, np.arange(len(values)))
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
    bar.ax.tick_params(labelsize=8)


def draw_map(
    figure: Figure,
    axes: Axes,
    edges: pd.DataFrame,
    where: npt.NDArray[np.float64],
    quantity: str,
    names: Names,
) -> None:
    """Nodes where they are, and links by a column of `Trace.edges`: as on a road, each direction has its own
    side.
    """
    from matplotlib.collections import LineCollection

    check_quantity(quantity, edges)
    start, end = where[edges["sender"].to_numpy()], where[edges["receiver"].to_numpy()]
    along = end - start
    length = np.maximum(np.hypot(along[:, 0], along[:, 1]), 1e-12)[:, None]
    aside = np.stack([along[:, 1], -along[:, 0]], axis=1) / length * _ROADSIDE * np.ptp(where, axis=0).max()
    lines = LineCollection(
        list(np.stack([start + aside, end + aside], axis=1)),
        array=edges[quantity].to_numpy(dtype=float),
        linewidths=float(np.clip(120 / len(edges), 0.6, 1.6)),
    )
    lines.set_clim(*_limits(quantity))
    axes.add_collection(lines)
    size = float(np.clip(600 / len(where), 3, 30))
    axes.scatter(where[:, 0], where[:, 1], s=size, color=GREY, zorder=3, linewidths=0)
    if len(where) <= MOST_NAMED:
        for node, place in enumerate(where):
            axes.annotate(
                names[node], place, xytext=(4, 4), textcoords="offset points", fontsize=8, parse_math=False
            )
    tidy(axes, f"{_words(quantity)} of the links", "", "")
    axes.set_aspect("equal")
    axes.grid(visible=False)
    bar = figure.colorbar(lines, ax=axes, fraction=0.046, pad=0.03)
    bar.ax.tick_params(labelsize=8)


def _limits(quantity: str) -> tuple[float | None, float | None]:
    """Of the colours: rates are within 0 and 1, the others as they come."""
    return (0.0, 1.0) if quantity.endswith("_rate") else (None, None)


def _words(quantity: str) -> str:
    return quantity.replace("_", " ")


def _draw_promises(axes: Axes, edges: pd.DataFrame, promises: dict[tuple[int, int], float]) -> None:
    """How often each link was up against its declared probability, and whether that is within two standard
    errors of it, by the number of its own attempts.
    """
    pairs = zip(edges["sender"], edges["receiver"], strict=True)
    promised = np.array([promises.get((int(sender), int(receiver)), np.nan) for sender, receiver in pairs])
    up = edges["up_rate"].to_numpy(dtype=float)
    delivered = edges["delivery_rate"].to_numpy(dtype=float)
    if not np.isfinite(promised).any() or float(np.nanmin(promised)) == 1.0:
        bins = np.linspace(0, 1, 41).tolist()
        axes.hist(delivered, bins=bins, color=BLUE)
        tidy(axes, "delivery rate of the links", "delivery rate", "links")
        return
    spread = np.sqrt(promised * (1 - promised) / edges["attempts"].to_numpy(dtype=float))
    beyond = np.abs(up - promised) > 2 * spread + 1e-12
    known = np.isfinite(promised)
    size = float(np.clip(900 / np.sqrt(len(edges)) / 4, 1.5, 14))
    axes.axline((0.5, 0.5), slope=1, color=GREY, linewidth=0.8)
    for which, colour, words in ((~beyond, BLUE, "within"), (beyond, ORANGE, "beyond")):
        axes.scatter(
            promised[which & known],
            up[which & known],
            s=size,
            color=colour,
            alpha=0.6 if len(edges) < 3000 else 0.2,
            linewidths=0,
            label=f"{words} 2 standard errors",
        )
    low, high = float(np.nanmin(promised)), float(np.nanmax(promised))
    margin = 0.08 + 0.1 * (high - low)
    axes.set_xlim(max(0, low - margin), min(1.02, high + margin))
    axes.set_ylim(max(0, min(low, float(up.min())) - margin), min(1.02, max(high, float(up.max())) + margin))
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    title = f"links: how often up ({beyond[known].mean():.1%} beyond, 4.6% by chance)"
    tidy(axes, title, "declared probability", "share of steps in which it was up")


def _draw_traffic(axes: Axes, trace: Trace) -> None:
    """A server talks with everybody: its bar would hide all others, so its figures stand in the title."""
    title, nodes, server = "payload per client", trace.nodes(), trace.server
    if server is not None:
        its, nodes = nodes.iloc[server], nodes.drop(index=server)
        size, unit = byte_unit(float(max(its["bytes_sent"], its["bytes_received"])))
        sent_by_it, received_by_it = its["bytes_sent"] / size, its["bytes_received"] / size
        title += f"\n(the server sent {sent_by_it:.3g}, received {received_by_it:.3g} {unit})"
    size, unit = byte_unit(float(max(nodes["bytes_sent"].max(), nodes["bytes_received"].max())))
    client = nodes.index.to_numpy()
    sent, received = nodes["bytes_sent"].to_numpy() / size, nodes["bytes_received"].to_numpy() / size
    if len(client) <= 40:
        axes.bar(client - 0.2, sent, width=0.4, color=BLUE, label="sent")
        axes.bar(client + 0.2, received, width=0.4, color=GREEN, label="received")
        axes.locator_params(axis="x", integer=True)
        name_nodes(axes.xaxis, trace.names, client, rotation=90)
        tidy(axes, title, "client", unit)
    else:
        order = np.argsort(-sent, kind="stable")
        axes.plot(np.sort(sent)[::-1], color=BLUE, linewidth=1.8, label="sent")
        axes.plot(
            received[order],
            color=ORANGE,
            linewidth=0,
            marker=".",
            markersize=3,
            label="received by the same client",
        )
        tidy(axes, title, "clients, most sent first", unit)
    axes.set_ylim(0, 1.18 * max(sent.max(), received.max()))
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper right")


def edges_by_number(trace: Trace) -> pd.DataFrame:
    """The table of edges with the numbers of their ends."""
    edges = trace.edges()
    if trace.names.given:
        edges = edges.assign(**{end: edges[end].cat.codes.to_numpy() for end in ("sender", "receiver")})
    return edges


def name_nodes(axis: Axis, names: Names, nodes: npt.NDArray[Any], rotation: float = 0) -> None:
    """Where nodes have names, and few enough to be read."""
    if names.given and len(nodes) <= MOST_NAMED:
        axis.set_ticks(nodes, [names[int(node)] for node in nodes], rotation=rotation, parse_math=False)
