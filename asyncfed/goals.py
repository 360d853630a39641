"""How far a metric is to come before a run may end: `until={"accuracy": AtLeast(0.9), "loss": AtMost(0.1)}`.

Which way a metric goes is said, never guessed from its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from asyncfed.checks import FiniteFloat
from asyncfed.registry import register


@register("goal")
@dataclass(frozen=True)
class AtLeast:
    """Met once a metric is `value` or more; a metric that is NaN never is."""

    value: FiniteFloat

    def met(self, value: float) -> bool:
        return value >= self.value


@register("goal")
@dataclass(frozen=True)
class AtMost:
    """Met once a metric is `value` or less; a metric that is NaN never is."""

    value: FiniteFloat

    def met(self, value: float) -> bool:
        return value <= self.value


Goal: TypeAlias = AtLeast | AtMost
