"""How all pictures look."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#2f6db3", "#d9742b", "#3a9a5b", "#8a8a8a"
PALETTE = (BLUE, ORANGE, GREEN, "#8b5fb0", "#c23b45", "#3b9fae", "#a67c3d", "#5c5c5c")


def new_figure(title: str, width: float, height: float) -> Figure:
    """An empty figure that draws without a screen."""
    from asyncfed.report.picture import Picture

    figure = Picture(width, height)
    if title:
        figure.suptitle(title, fontsize=11, parse_math=False)  # a $ in a name is a $
    return figure


def tidy(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2, linewidth=0.6)
    axes.set_axisbelow(True)


def empty(axes: Axes, words: str) -> None:
    """Says why there is nothing to see."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, words, ha="center", va="center", fontsize=10, color=GREY, transform=axes.transAxes)


def save(figure: Figure, path: Path) -> Path:
    from asyncfed.report.picture import DPI

    figure.savefig(path, dpi=DPI)
    return path


def byte_unit(largest: float) -> tuple[float, str]:
    """What to divide by, and what that is called."""
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= size:
            return size, name
    return 1.0, "bytes"
