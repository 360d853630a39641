"""How far a metric is to come before a run may end: `until={"accuracy": AtLeast(0.9), "loss": AtMost(0.1)}`.

Which way a metric goes is said, never guessed from its name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from asyncfed.errors import ScenarioError
from asyncfed.registry import register


@register("goal")
@dataclass(frozen=True)
class AtLeast:
    """Met once a metric is `value` or more; a metric that is NaN never is."""

    value: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _finite(self))

    def met(self, value: float) -> bool:
        return value >= self.value


@register("goal")
@dataclass(frozen=True)
class AtMost:
    """Met once a metric is `value` or less; a metric that is NaN never is."""

    value: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _finite(self))

    def met(self, value: float) -> bool:
        return value <= self.value


Goal: TypeAlias = AtLeast | AtMost


def check_goal(metric: str, goal: object) -> None:
    """Refuse what does not say which way the metric goes."""
    if not isinstance(goal, (AtLeast, AtMost)):
        number = goal if _is_number(goal) else "…"
        raise ScenarioError(
            f"until[{metric!r}] is {goal!r}, which does not say which way {metric} goes; write "
            f"until={{{metric!r}: AtLeast({number})}} where more is better, or "
            f"until={{{metric!r}: AtMost({number})}} where less is"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _finite(goal: Goal) -> float:
    if not _is_number(goal.value) or not math.isfinite(goal.value):
        raise ScenarioError(
            f"{type(goal).__name__} was given {goal.value!r}; give it a finite number, such as 0.9"
        )
    return float(goal.value)
