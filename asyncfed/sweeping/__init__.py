"""Sweeps: a scenario with all combinations of some settings, side by side, and one table of all."""

from asyncfed.sweeping.running import sweep

__all__ = ["sweep"]
