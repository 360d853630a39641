"""What settings that many methods have must be, as `checks` reads it off a field."""

from __future__ import annotations

from typing import Annotated, Literal

from asyncfed.checks import MOST, Range, Words

Batch = Annotated[
    int | None, Range(1, MOST), Words("a whole number, at least 1, or None for all of a client's data")
]
OuterSteps = Annotated[int, Range(0, 10**6)]
"""Of methods whose parts are laid out before a run."""

StartFrom = Annotated[
    Literal["fresh", "warm"],
    Words(
        "'fresh' (every inner problem from the same initial values) or 'warm' (from where the last one ended)"
    ),
]

Momentum = Annotated[float, Range(0, 1, below=True)]
