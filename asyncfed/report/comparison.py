"""One metric of several runs, along each axis on which they differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncfed.report.curves import add_curves
from asyncfed.report.style import byte_unit, new_figure, save

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncfed.report.curves import Curve

_MOST_LABEL = 40


def draw_comparison(
    path: Path, metric: str, along: Mapping[str, Mapping[str, tuple[npt.NDArray[np.float64], ...]]]
) -> Path:
    """Axis → name → (x, mean, low, high). An axis that says what the first one says is left out."""
    first = next(iter(along))
    panels = {axis: curves for axis, curves in along.items() if axis == first or _new(curves, along)}
    figure = new_figure(metric.replace("_", " "), 1.6 + 4.2 * len(panels), 3.8)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for place, (axes, (axis, curves)) in enumerate(zip(grid, panels.items(), strict=True)):
        size, label = 1.0, axis.replace("_", " ")
        if axis == "bytes":
            size, unit = byte_unit(max(float(x.max(initial=0.0)) for x, *_ in curves.values()))
            label = f"sent ({unit})"
        series: dict[str, Curve] = {
            _cut(name): (x / size, mean, low, high) for name, (x, mean, low, high) in curves.items()
        }
        last = place == len(panels) - 1
        add_curves(axes, series, xlabel=label, ylabel="" if place else metric.replace("_", " "), legend=last)
    return save(figure, path)


def _new(
    curves: Mapping[str, tuple[npt.NDArray[np.float64], ...]],
    along: Mapping[str, Mapping[str, tuple[npt.NDArray[np.float64], ...]]],
) -> bool:
    """Whether no axis before it has the same points, and it has any extent."""
    if not any(np.ptp(x) > 0 for x, *_ in curves.values()):
        return False
    for earlier in along.values():
        if earlier is curves:
            return True
        if all(np.array_equal(curves[name][0], earlier[name][0]) for name in curves):
            return False
    return True


def _cut(name: str) -> str:
    return name if len(name) <= _MOST_LABEL else f"{name[: _MOST_LABEL - 1]}…"
