"""A figure that shows itself in a notebook, whether or not pyplot was imported there."""

from __future__ import annotations

from io import BytesIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI = 120


class Picture(Figure):
    """An ordinary figure of matplotlib that draws without a screen."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        drawn = BytesIO()
        self.savefig(drawn, format="png", dpi=DPI)
        return drawn.getvalue()
