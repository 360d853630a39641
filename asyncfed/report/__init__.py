"""Pictures of a result."""

from asyncfed.report.pictures import pictures

__all__ = ["pictures"]
