"""Learning rates over a client's own steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveFloat
from asyncfed.registry import register

Steps = npt.NDArray[np.int64] | npt.NDArray[np.float64]  # or times, for methods that count by these
Rates = npt.NDArray[np.float64]


@register("rate")
@dataclass(frozen=True)
class StepDecay:
    """`lr`, multiplied by `factor` at each of the steps `at` (001: 0.1 at 500 and 550)."""

    lr: PositiveFloat
    at: tuple[NonNegativeInt, ...]
    factor: PositiveFloat = 0.1

    def rates(self, steps: Steps) -> Rates:
        passed = np.searchsorted(np.array(sorted(self.at)), steps, side="right")
        return np.asarray(self.lr * np.power(float(self.factor), passed), dtype=np.float64)


@register("rate")
@dataclass(frozen=True)
class Diminishing:
    """`lr` / (1 + t / `after`)^`power`; a power in (1/2, 1] sums to infinity while its squares do not."""

    lr: PositiveFloat
    after: PositiveFloat = 1.0
    power: NonNegativeFloat = 1.0

    def rates(self, steps: Steps) -> Rates:
        return np.asarray(self.lr / np.power(1.0 + steps / self.after, self.power), dtype=np.float64)


LearningRate: TypeAlias = PositiveFloat | StepDecay | Diminishing


def rates(lr: LearningRate, steps: Steps, like: torch.Tensor) -> float | torch.Tensor:
    """The learning rate of each client at its own step: one number where all are at the same, else (k, 1)."""
    if isinstance(lr, (int, float)):
        return float(lr)
    if (steps == steps[0]).all():
        return float(lr.rates(steps[:1])[0])
    return torch.from_numpy(lr.rates(steps)).to(like)[:, None]


def rate_at(lr: LearningRate, step: int) -> float:
    """The rate of one step."""
    if isinstance(lr, (StepDecay, Diminishing)):
        return float(lr.rates(np.array([step], dtype=np.int64))[0])
    return float(lr)


def first_rate(lr: LearningRate) -> float:
    """The rate that a schedule begins with."""
    return rate_at(lr, 0)
