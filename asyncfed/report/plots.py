"""Figures of a result and of a trace, to be looked at in a notebook or saved: `figure.savefig("x.png")`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from asyncfed.errors import ScenarioError
from asyncfed.explorer.layout import spring
from asyncfed.report.learning import learning_figure
from asyncfed.report.network import draw_map, draw_matrix, edges_by_number
from asyncfed.report.pictures import title_of
from asyncfed.report.style import empty, new_figure
from asyncfed.report.timeline import draw_timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from asyncfed.result import Result
    from asyncfed.trace import Trace


def plot(result: Result) -> Figure:
    """Loss and accuracy of a result, against steps or virtual time and against what was sent."""
    figure = learning_figure(result, title_of(result))
    if figure is None:
        figure = new_figure(title_of(result), 7, 3)
        empty(figure.subplots(), "nothing was evaluated yet")
    return figure


class TracePlots:
    """Figures of a trace; each takes a column of `Trace.edges()`, or a window of time."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __repr__(self) -> str:
        return f"<plots of {self._trace!r}: network(), timeline(), matrix()>"

    def network(
        self, quantity: str = "delivery_rate", places: npt.NDArray[np.float64] | None = None
    ) -> Figure:
        """Nodes and the links between them by a quantity, each direction to the right of its middle.

        `places` (nodes, 2) says where nodes stand; otherwise those with links stand near one another.
        """
        trace = self._trace
        edges = edges_by_number(trace)
        figure = new_figure("", 6, 5)
        axes = figure.subplots()
        if edges.empty:
            empty(axes, "nothing was sent")
            return figure
        if places is None:
            places = spring(trace.node_count, edges["sender"].to_numpy(), edges["receiver"].to_numpy())
            axes.set_axis_off()  # where such places are says nothing
        elif np.shape(places) != (trace.node_count, 2):
            raise ScenarioError(
                f"places is of shape {np.shape(places)}; it must be ({trace.node_count}, 2), a place on the "
                "plane for each node"
            )
        draw_map(figure, axes, edges, np.asarray(places, float), quantity, trace.names)
        return figure

    def timeline(self, start: float = 0.0, end: float = math.inf) -> Figure:
        """A lane per node, a bar per step, a line per message, in the virtual time from `start` to `end`;
        where these are too many to be told apart, how many were sent.
        """
        if not start < end:
            raise ScenarioError(f"the time from {start} to {end} is empty; start must lie before end")
        figure = new_figure("", 10, min(1.5 + 0.3 * self._trace.node_count, 8.0))
        draw_timeline(figure, figure.subplots(), self._trace, start, end)
        return figure

    def matrix(self, quantity: str = "delivery_rate") -> Figure:
        """Sender × receiver of a quantity."""
        figure = new_figure("", 5.5, 4.6)
        draw_matrix(figure, figure.subplots(), self._trace, quantity)
        return figure
