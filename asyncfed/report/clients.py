"""How the clients differ at the end: what they reached, and what data they had."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from asyncfed.explorer.runs import class_counts
from asyncfed.report.style import BLUE, ORANGE, empty, new_figure, save, tidy

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from asyncfed.result import Result

_MOST_LABELS = 60
MOST_COUNTED = 400  # clients whose class counts can be told apart


def draw_clients(result: Result, title: str, path: Path) -> Path | None:
    clients = result.clients
    measures = [name for name in clients.columns if name not in ("client", "steps", "samples")]
    if clients.empty or not measures:
        return None
    measure = "accuracy" if "accuracy" in measures else measures[0]
    order = np.argsort(clients[measure].to_numpy(dtype=float), kind="stable")  # without test samples: last
    counts = class_counts(result) if len(clients) <= MOST_COUNTED else None
    figure = new_figure(title, 7.5 if len(clients) <= 60 else 10, 3.4 if counts is None else 6.4)
    if counts is None:
        top = figure.subplots()
    else:
        top, bottom = figure.subplots(2, 1, sharex=True)
        _draw_counts(figure, bottom, counts[order])
        label_clients(bottom, clients["client"].iloc[order].tolist())
    _draw_measure(top, clients.iloc[order], measure, labelled=counts is None)
    return save(figure, path)


def _draw_measure(axes: Axes, clients: pd.DataFrame, measure: str, labelled: bool) -> None:
    values = clients[measure].to_numpy(dtype=float)
    place = np.arange(len(values))
    if not np.isfinite(values).any():
        empty(axes, f"no client has a finite {measure}")
        return
    if len(values) <= 200:
        axes.bar(place, values, color=BLUE, width=0.8)
    else:
        axes.fill_between(place, values, color=BLUE, step="mid", linewidth=0)
    mean = float(np.nanmean(values))
    axes.axhline(mean, color=ORANGE, linewidth=1.2, linestyle="--")
    axes.set_xlim(-0.7, len(values) - 0.3)
    if measure == "accuracy":
        axes.set_ylim(0, 1.02)
    title = f"{measure} on each client's own test samples (dashed: mean over clients, {mean:.3f})"
    tidy(axes, title, "clients, lowest first" if labelled else "", measure)
    if labelled:
        label_clients(axes, clients["client"].tolist())


def label_clients(axes: Axes, clients: Sequence[object]) -> None:
    """Who stands where: everybody, or every so manieth of many."""
    every = -(-len(clients) // _MOST_LABELS)
    names = [str(client) for client in clients[::every]]
    few = len(clients) <= 20
    axes.set_xticks(range(0, len(clients), every), names)
    upright = few and max(map(len, names)) <= 3
    axes.tick_params(axis="x", labelsize=8 if few else 6, rotation=0 if upright else 90)


def _draw_counts(figure: Figure, axes: Axes, counts: npt.NDArray[np.int32]) -> None:
    image = axes.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest", origin="lower")
    tidy(
        axes,
        "training samples of each class",
        "client, lowest first" if len(counts) <= 30 else "clients, lowest first",
        "class",
    )
    axes.grid(visible=False)
    axes.locator_params(axis="y", integer=True)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
    bar.ax.tick_params(labelsize=8)
