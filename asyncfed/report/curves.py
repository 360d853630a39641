"""Curves of several runs in one picture: a method each, say, over steps, bytes or virtual time.

The names stand beside the curves, from the highest end to the lowest, so that the eye need not search;
colours come first, line styles when those are used up.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncfed.errors import ScenarioError
from asyncfed.report.style import PALETTE, empty, new_figure, save, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values: TypeAlias = "Sequence[float] | npt.NDArray[Any] | Any"  # a pandas column, too
Curve: TypeAlias = "tuple[Values, Values] | tuple[Values, Values, Values, Values]"

_STYLES = ("-", "--", ":", "-.")
_MOST_MARKED = 40  # points of a curve that are worth a dot each


def draw_curves(
    path: str | os.PathLike[str],
    series: Mapping[str, Curve],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    logx: bool = False,
    logy: bool = False,
) -> Path:
    """Draw curves by name, each (x, y) or, with a band around it, (x, mean, low, high); returns the path.

    What is not finite, or on a logarithmic axis not above zero, is left out.
    """
    figure = new_figure(title, 7.2, 4.2)
    add_curves(figure.subplots(), series, xlabel=xlabel, ylabel=ylabel, logx=logx, logy=logy)
    return save(figure, Path(path))


def add_curves(
    axes: Axes,
    series: Mapping[str, Curve],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    logx: bool = False,
    logy: bool = False,
    legend: bool = True,
) -> None:
    """The same, as one panel of a figure of your own; panels of the same series share colours."""
    ends: dict[str, float] = {}
    for place, (name, curve) in enumerate(series.items()):
        x, y, *band = _columns(name, curve)
        shown = _visible(x, logx) & _visible(y, logy)
        if not shown.any():
            continue
        colour = PALETTE[place % len(PALETTE)]
        style = _STYLES[place // len(PALETTE) % len(_STYLES)]
        marker = "." if shown.sum() <= _MOST_MARKED else ""
        axes.plot(
            x[shown], y[shown], style, color=colour, label=name, linewidth=1.6, marker=marker, markersize=5
        )
        ends[name] = float(y[shown][-1])
        if band:
            low, high = band
            shown &= _visible(low, logy) & _visible(high, logy)
            axes.fill_between(x[shown], low[shown], high[shown], color=colour, alpha=0.15, linewidth=0)
    if not ends:
        empty(axes, f"no {ylabel or 'value'} to show")
        return
    for direction, logarithmic in (("x", logx), ("y", logy)):
        if logarithmic:
            _logarithmic(axes, direction)
    tidy(axes, title, xlabel, ylabel)
    if legend and (len(ends) > 1 or next(iter(ends))):
        _name_curves(axes, ends)


def _columns(name: str, curve: Curve) -> list[npt.NDArray[np.float64]]:
    columns = [np.asarray(values, dtype=float) for values in curve]
    if len(columns) not in (2, 4) or len({column.shape for column in columns}) > 1 or columns[0].ndim != 1:
        shapes = ", ".join(str(column.shape) for column in columns)
        raise ScenarioError(
            f"the curve {name!r} has values of shapes {shapes}; "
            "it must be (x, y) or (x, mean, low, high), of one length"
        )
    return columns


def _visible(values: npt.NDArray[np.float64], logarithmic: bool) -> npt.NDArray[np.bool_]:
    return np.isfinite(values) & (values > 0) if logarithmic else np.isfinite(values)


def _logarithmic(axes: Axes, direction: str) -> None:
    """Powers of ten; within few of them also what lies between, written out."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    axis = axes.xaxis if direction == "x" else axes.yaxis
    axes.set(**{f"{direction}scale": "log"})
    low, high = sorted(axis.get_view_interval())
    if high < 300 * low:
        between = (1.0, 2.0, 5.0) if high > 10 * low else tuple(map(float, range(1, 10)))
        axis.set_major_locator(LogLocator(subs=between))
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_locator(NullLocator())


def _name_curves(axes: Axes, ends: Mapping[str, float]) -> None:
    handles, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda place: -ends[names[place]])
    axes.legend(
        [handles[place] for place in order],
        [names[place] for place in order],
        fontsize=8,
        frameon=False,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
    )
