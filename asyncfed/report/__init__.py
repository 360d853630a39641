"""Reports of runs and studies as one HTML file, pictures of a result, and curves for studies."""

from asyncfed.report.curves import add_curves, draw_curves
from asyncfed.report.document import report
from asyncfed.report.pictures import pictures

__all__ = ["add_curves", "draw_curves", "pictures", "report"]
