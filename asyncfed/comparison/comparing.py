"""`compare`: several runs as tables and a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncfed.checks import FiniteFloat, checked
from asyncfed.comparison.curves import (
    AXES,
    Floats,
    Staircase,
    common_range,
    evaluations,
    mean_and_error,
    staircase,
)
from asyncfed.comparison.rows import Given, Row, found_runs, in_rows
from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.result import Result

if TYPE_CHECKING:
    import pandas as pd

_PREFERRED = ("accuracy", "validation_accuracy", "loss", "validation_loss", "train_loss")
_SMALL_IS_GOOD = ("loss", "error", "consensus", "distance", "gap")
_DRAWN = (".png", ".svg", ".pdf")
_NOT_COMPARED = ("phase", *AXES)


class Quantity(NamedTuple):
    """One number of every run: its last value ("last"), the one "at" a point of an axis, or the "area" along
    an axis up to a point.
    """

    kind: str
    axis: str | None = None
    point: float | None = None

    @property
    def heading(self) -> str:
        if self.axis is None or self.point is None:
            return self.kind
        point = f"{self.point:,.6g}" if abs(self.point) < 1e6 else f"{self.point:,.0f}"
        name = AXES[self.axis]
        place = f"{point} {name}" if self.axis in ("bytes", "rounds") else f"{name} {point}"
        return f"{self.kind} {place}" if self.kind == "at" else f"{self.kind} to {place}"


class Comparison:
    """Several runs, side by side.

    `rows` are the runs, those together that differ by their seed only; `differences` is a table of the
    settings that differ; `table` has what a metric came to, `values` has plain numbers, of all metrics.
    """

    def __init__(self, runs: Mapping[str, Result], at: Mapping[str, Sequence[float]]) -> None:
        self.runs = dict(runs)
        self.rows, self._differing = in_rows(self.runs)
        self._evaluations = {run.path: evaluations(run) for run in self.runs.values()}
        self._points = _checked_points(at)
        self._made: dict[tuple[Path, str, str], Staircase] = {}

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.runs)} runs in {len(self.rows)} rows>"

    @cached_property
    def differences(self) -> pd.DataFrame:
        """One line per setting that differs, by its name of `--set`, and one column per row."""
        import pandas as pd

        told = {
            row.label: [texts[place] for texts in self._differing.values()]
            for place, row in enumerate(self.rows)
        }
        return pd.DataFrame({"setting": list(self._differing)} | told)

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics that all runs have."""
        frames = list(self._evaluations.values())
        known = [[str(name) for name in frame if frame[name].notna().any()] for frame in frames]
        everywhere = set(known[0]).intersection(*known)
        return [name for name in known[0] if name in everywhere and name not in _NOT_COMPARED]

    @property
    def notes(self) -> list[str]:
        """What a reader must know: runs that did not come to their end."""
        return [
            f"{name} is {run.status}: what it had come to counts, its curve ends early"
            for name, run in self.runs.items()
            if not run.complete
        ]

    def table(self, metric: str | None = None, *, sort: bool = False) -> pd.DataFrame:
        """One line per row: its last value, the value at each point, and the area under its curve (divided by
        the steps it goes over), each as `mean ± standard error` over seeds, in text.

        Points are those given to `compare`, or else the furthest that all runs have come to. With `sort`, the
        best last value comes first: the smallest of a loss, an error or a distance, the largest of others.
        """
        import pandas as pd

        chosen = self.checked_metric(metric)
        columns: dict[str, Any] = {"run": [row.label for row in self.rows]}
        columns["seeds"] = [len(row.runs) for row in self.rows]
        shown = [each for each in self._quantities(chosen) if each.kind != "area" or each.axis == "step"]
        sums = {quantity: self._summed(chosen, quantity) for quantity in shown}
        for quantity, (mean, error) in sums.items():
            columns[quantity.heading] = _texts(mean, error)
        frame = pd.DataFrame(columns)
        if sort:
            last, _ = sums[Quantity("last")]
            small = any(chosen.endswith(word) for word in _SMALL_IS_GOOD)
            order = np.argsort(last if small else -last, kind="stable")
            frame = frame.iloc[order].reset_index(drop=True)
        return frame

    @cached_property
    def values(self) -> pd.DataFrame:
        """All of it as plain numbers, for other programs: a line for each row, metric and quantity.

        quantity is last, at or area, along `axis` at (or up to) `point`; mean and standard_error are over
        seeds. The settings that differ have a column each.
        """
        import pandas as pd

        lines = []
        for metric in self.metrics:
            for quantity in self._quantities(metric):
                mean, error = self._summed(metric, quantity)
                for place, row in enumerate(self.rows):
                    told = {path: texts[place] for path, texts in self._differing.items()}
                    number = {"mean": mean[place], "standard_error": error[place]}
                    where = dict(zip(("quantity", "axis", "point"), quantity, strict=True))
                    lines.append(
                        {"run": row.label, **told, "seeds": len(row.runs), "metric": metric} | where | number
                    )
        return pd.DataFrame(lines)

    def curves(self, metric: str | None = None, axis: str = "step") -> dict[str, tuple[Floats, ...]]:
        """Row → its points, mean, and mean − and + standard error, of the range that its runs share."""
        chosen = self.checked_metric(metric)
        found: dict[str, tuple[Floats, ...]] = {}
        for row in self.rows:
            stairs = self._stairs(row, chosen, _checked_axis(axis))
            start, end = common_range(stairs)
            points = np.unique(np.concatenate([each.x for each in stairs]))
            points = points[(points >= start) & (points <= end)]
            mean, error = mean_and_error(np.stack([each.at(points) for each in stairs]))
            error = np.nan_to_num(error)
            found[row.label] = (points, mean, mean - error, mean + error)
        return found

    def picture(self, path: str | os.PathLike[str], metric: str | None = None) -> Path:
        """Draw the curves of a metric along step, virtual time, bytes and rounds, where these differ; returns
        the path.
        """
        from asyncfed.report.comparison import draw_comparison

        if Path(path).suffix.lower() not in _DRAWN:
            raise ScenarioError(f"the picture {path} must end in {', '.join(_DRAWN)}")
        chosen = self.checked_metric(metric)
        return draw_comparison(Path(path), chosen, {axis: self.curves(chosen, axis) for axis in AXES})

    def checked_metric(self, metric: str | None) -> str:
        """The metric that is meant; where none is said, the first of accuracy and losses that all have."""
        if metric is None:
            found = [name for name in (*_PREFERRED, *self.metrics) if name in self.metrics]
            if not found:
                raise ScenarioError("these runs have no metric in common; compare those that have")
            return found[0]
        if metric not in self.metrics:
            raise UnknownNameError("metric of all these runs", metric, self.metrics)
        return metric

    def _quantities(self, metric: str) -> list[Quantity]:
        ends = {axis: common_range(self._all_stairs(metric, axis))[1] for axis in AXES}
        points = self._points or {axis: [end] for axis, end in ends.items()}
        at = [Quantity("at", axis, point) for axis in AXES for point in points.get(axis, ())]
        return [Quantity("last"), *at, *(Quantity("area", axis, end) for axis, end in ends.items())]

    def _summed(self, metric: str, quantity: Quantity) -> tuple[Floats, Floats]:
        """Mean and standard error of each row."""
        axis = quantity.axis or "step"
        start, end = common_range(self._all_stairs(metric, axis))
        sums = []
        for row in self.rows:
            stairs = self._stairs(row, metric, axis)
            if quantity.kind == "last":
                values = [each.y[-1] for each in stairs]
            elif quantity.kind == "at":
                values = [each.at([quantity.point or 0.0])[0] for each in stairs]
            else:
                values = [each.area(start, end) for each in stairs]
            sums.append(mean_and_error(np.array(values)))
        return np.array([mean for mean, _ in sums]), np.array([error for _, error in sums])

    def _stairs(self, row: Row, metric: str, axis: str) -> list[Staircase]:
        for run in row.runs:
            if (run.path, metric, axis) not in self._made:
                made = staircase(run, self._evaluations[run.path], metric, axis)
                self._made[run.path, metric, axis] = made
        return [self._made[run.path, metric, axis] for run in row.runs]

    def _all_stairs(self, metric: str, axis: str) -> list[Staircase]:
        return [each for row in self.rows for each in self._stairs(row, metric, axis)]


@checked
def compare(*runs: Given, at: Mapping[str, Sequence[FiniteFloat]] | None = None) -> Comparison:
    """Compare runs: results, or directories of runs, studies and sweeps (all their complete parts).

    `at` says where: axis (step, virtual_time, bytes, rounds) → points. Unless given, at the furthest point of
    each axis that all runs have come to.
    """
    found = found_runs(runs)
    if not found:
        raise ScenarioError("nothing to compare; give runs, or their directories")
    return Comparison(found, at or {})


def _checked_axis(axis: object) -> str:
    if axis not in AXES:
        raise UnknownNameError("axis", str(axis), AXES)
    return str(axis)


def _checked_points(at: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {_checked_axis(axis): list(points) for axis, points in at.items()}


def _texts(means: Floats, errors: Floats) -> list[str]:
    """Numbers of a column, with as many digits as their errors (or differences) are worth."""
    return [_text(mean, error) for mean, error in zip(means.tolist(), errors.tolist(), strict=True)]


def _text(mean: float, error: float) -> str:
    if np.isnan(mean):
        return ""
    if np.isnan(error):
        return f"{mean:.4g}"
    if error == 0.0:
        return f"{mean:.4g} ± 0"
    decimals = max(0, 1 - int(np.floor(np.log10(error))))
    return f"{mean:,.{decimals}f} ± {error:,.{decimals}f}" if decimals < 7 else f"{mean:.4g} ± {error:.1e}"
