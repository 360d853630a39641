"""Learning rates over a client's own steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from asyncfed.errors import ScenarioError
from asyncfed.registry import register

Steps = npt.NDArray[np.int64] | npt.NDArray[np.float64]  # or times, for methods that count by these
Rates = npt.NDArray[np.float64]


def _require_positive(lr: float) -> None:
    if isinstance(lr, bool) or not isinstance(lr, (int, float)):
        raise ScenarioError(
            f"a learning rate is {lr!r}; it must be a number above 0, StepDecay(…) or Diminishing(…)"
        )
    if not 0 < lr < float("inf"):
        raise ScenarioError(f"a learning rate of {lr} must be finite and above 0")


@register("rate")
@dataclass(frozen=True)
class StepDecay:
    """`lr`, multiplied by `factor` at each of the steps `at` (001: 0.1 at 500 and 550)."""

    lr: float
    at: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        _require_positive(self.lr)
        object.__setattr__(self, "at", tuple(int(t) for t in self.at))

    def rates(self, steps: Steps) -> Rates:
        passed = np.searchsorted(np.array(sorted(self.at)), steps, side="right")
        return np.asarray(self.lr * np.power(float(self.factor), passed), dtype=np.float64)


@register("rate")
@dataclass(frozen=True)
class Diminishing:
    """`lr` / (1 + t / `after`)^`power`; a power in (1/2, 1] sums to infinity while its squares do not."""

    lr: float
    after: float = 1.0
    power: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(self.lr)
        if not (self.after > 0 and self.power >= 0):
            raise ScenarioError(
                f"a diminishing rate with after={self.after} and power={self.power} "
                "needs after > 0 and power ≥ 0"
            )

    def rates(self, steps: Steps) -> Rates:
        return np.asarray(self.lr / np.power(1.0 + steps / self.after, self.power), dtype=np.float64)


LearningRate: TypeAlias = float | StepDecay | Diminishing


def check_rate(lr: LearningRate) -> None:
    if not isinstance(lr, (StepDecay, Diminishing)):
        _require_positive(lr)


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
