"""NumPy's numbers as Python's own: what the parts of a scenario hold is written down as JSON, and compared,
multiplied and used as an index in ways that NumPy's scalars do not all allow.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """`np.int64(2)` as 2, also inside tuples and lists; everything else as it is."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (tuple, list):
        return type(value)(plain(item) for item in value)
    return value


def plain_fields(part: Any) -> None:
    """For the `__post_init__` of a frozen dataclass: the same for all its fields."""
    for field in dataclasses.fields(part):
        object.__setattr__(part, field.name, plain(getattr(part, field.name)))
