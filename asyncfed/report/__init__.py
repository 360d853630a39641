"""Pictures of a result, and curves for studies."""

from asyncfed.report.curves import add_curves, draw_curves
from asyncfed.report.pictures import pictures

__all__ = ["add_curves", "draw_curves", "pictures"]
