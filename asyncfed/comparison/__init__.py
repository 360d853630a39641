"""Runs side by side: in what they differ, and what each had come to at equal steps, times, bytes and rounds.

Runs that differ by their seed only are one row, mean ± standard error. Nothing is interpolated: the value at
a point is the last one that was known there.
"""

from asyncfed.comparison.comparing import Comparison, compare

__all__ = ["Comparison", "compare"]
