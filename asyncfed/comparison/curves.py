"""What was known when: the values of a metric along an axis, as a staircase.

A run is judged now and then, and between two evaluations its last one counts. So the value at a point is the
last at or before it (nothing, before the first), and the area under a curve is that of the staircase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncfed.errors import TraceError

if TYPE_CHECKING:
    import pandas as pd

    from asyncfed.result import Result

Floats: TypeAlias = npt.NDArray[np.float64]

AXES = {"step": "step", "virtual_time": "virtual time", "bytes": "bytes", "rounds": "rounds"}
"""Along which runs are compared, and what each is called."""


@dataclass(frozen=True)
class Staircase:
    """A metric's evaluations along an axis."""

    x: Floats
    y: Floats

    def at(self, points: Sequence[float] | Floats) -> Floats:
        """The last value at or before each point; NaN before the first."""
        place = np.searchsorted(self.x, np.asarray(points, float), side="right") - 1
        values: Floats = np.where(place >= 0, self.y[np.maximum(place, 0)], np.nan)
        return values

    def area(self, start: float, end: float) -> float:
        """Under it from start to end, divided by the distance: the mean height. NaN where that is nothing."""
        if not end > start:
            return float("nan")
        within = np.unique(self.x[(self.x > start) & (self.x < end)])
        edges = np.concatenate([[start], within, [end]])
        return float(self.at(edges[:-1]) @ np.diff(edges) / (end - start))


def evaluations(result: Result) -> pd.DataFrame:
    """The metrics of a run, with the communication rounds made by each evaluation (from the trace)."""
    metrics = result.metrics
    if metrics.empty:
        raise TraceError(
            f"{result.path} has no evaluation that could be compared; it is {result.status}: "
            "leave it out, or go on with it first"
        )
    steps = metrics["step"].to_numpy(float)
    return metrics.assign(rounds=np.searchsorted(_rounds(result), steps).astype(float))


def staircase(result: Result, metrics: pd.DataFrame, metric: str, axis: str) -> Staircase:
    """Where both are known."""
    x, y = (metrics[name].to_numpy(float) for name in (axis, metric))
    known = np.isfinite(x) & ~np.isnan(y)
    x, y = x[known], y[known]
    if not len(x):
        raise TraceError(f"{result.path} has no {metric} at any known {AXES[axis]}; leave it out")
    if (np.diff(x) < 0).any():
        raise TraceError(
            f"metrics.jsonl of {result.path} is damaged: its {AXES[axis]} goes back from one row to the next"
        )
    return Staircase(x, y)


def common_range(stairs: Sequence[Staircase]) -> tuple[float, float]:
    """From where all are known to where the first one ends."""
    return max(each.x[0] for each in stairs), min(each.x[-1] for each in stairs)


def mean_and_error(values: Floats) -> tuple[Floats, Floats]:
    """Over the first axis, of what is known: the mean, and its standard error where there are two or more."""
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, values, 0.0).sum(axis=0) / count
        squares = np.where(known, (values - mean) ** 2, 0.0).sum(axis=0)
        error = np.sqrt(squares / (count - 1) / count)
    return np.where(count > 0, mean, np.nan), np.where(count > 1, error, np.nan)


def _rounds(result: Result) -> npt.NDArray[np.int64]:
    """The numbers of the steps that were communication rounds, as `Trace.communication_rounds` counts."""
    trace = result.trace
    if trace.server is None:
        steps = trace.by_step()
        return steps.loc[steps["sent"] > 0, "step"].to_numpy()
    rounds = trace.rounds()
    return rounds.loc[rounds["answered"] > 0, "round"].to_numpy()
