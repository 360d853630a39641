"""Loss and accuracy, against steps (or virtual time) and against what was sent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncfed.report.style import BLUE, GREY, ORANGE, byte_unit, new_figure, save, tidy

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from asyncfed.result import Result


def draw_learning(result: Result, title: str, path: Path) -> Path | None:
    figure = learning_figure(result, title)
    return None if figure is None else save(figure, path)


def learning_figure(result: Result, title: str) -> Figure | None:
    """Nothing for a run without an evaluation."""
    metrics = result.metrics
    if metrics.empty:
        return None
    size, unit = byte_unit(float(metrics["bytes"].max()))
    against = [_progress_axis(metrics)]
    if metrics["bytes"].max() > 0:
        against.append((metrics["bytes"] / size, f"sent ({unit})"))
    rows = [_draw_loss] + ([_draw_accuracy] if "accuracy" in metrics else [])
    figure = new_figure(title, 1.6 + 4.6 * len(against), 0.5 + 2.9 * len(rows))
    grid = figure.subplots(len(rows), len(against), squeeze=False, sharey="row", sharex="col")
    for row, (draw, panels) in enumerate(zip(rows, grid, strict=True)):
        for column, (axes, (x, label)) in enumerate(zip(panels, against, strict=True)):
            name = draw(axes, x, metrics)
            tidy(axes, "", label if row == len(rows) - 1 else "", name if column == 0 else "")
        panels[-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _progress_axis(metrics: pd.DataFrame) -> tuple[pd.Series, str]:
    if (metrics["virtual_time"] == metrics["step"]).all():
        return metrics["step"], "round" if (metrics["phase"] == "server").all() else "step"
    return metrics["virtual_time"], "virtual time"


def _draw_loss(axes: Axes, x: pd.Series, metrics: pd.DataFrame) -> str:
    shown = [
        (name, words, colour)
        for name, words, colour in _LOSSES
        if name in metrics and metrics[name].notna().any()
    ]
    for name, words, colour in shown:
        present = metrics[name].notna()
        axes.plot(
            x[present],
            metrics.loc[present, name],
            color=colour,
            label=words,
            linewidth=1.6,
            marker=".",
            markersize=4,
        )
    values = metrics[[name for name, _, _ in shown]].to_numpy(dtype=float)
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() > 20 * values.min():
        from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_locator(NullLocator())
    return "loss"


_LOSSES = (("train_loss", "minibatches", GREY), ("loss", "test samples", BLUE))


def _draw_accuracy(axes: Axes, x: pd.Series, metrics: pd.DataFrame) -> str:
    axes.plot(
        x, metrics["accuracy"], color=BLUE, label="test samples", linewidth=1.6, marker=".", markersize=4
    )
    if "accuracy_p10" in metrics:
        axes.plot(
            x,
            metrics["accuracy_p10"],
            color=ORANGE,
            label="10th percentile of clients",
            linewidth=1.2,
            linestyle="--",
        )
    axes.set_ylim(0, 1.02)
    return "accuracy"
