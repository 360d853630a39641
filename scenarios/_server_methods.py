"""What the studies of FedNest (004) and AggITD (000) share: where a run got to and what that cost, and
pictures of it.

Rounds and bytes are those of the metrics, `step` and `bytes`, which are the trace's own counts. A *course* is
a metric over the evaluations of a run, one per outer iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncfed import Result, Scenario
from asyncfed.problems import Problem
from asyncfed.protocols import (
    AggITD,
    FedNest,
    FedNestSGD,
    LFedNest,
    LFedNestNonAlt,
    LFedNestSVRG,
    Neumann,
)
from asyncfed.protocols.fednest import Sampling
from asyncfed.protocols.rounds import WithServer

FloatArray = npt.NDArray[np.float64]
Finding = tuple[str, bool | None]
PARTITIONS = {"iid": "iid", "non-iid": "shards:2"}
"""As the papers say it, and as `asyncfed.problems` does: two shards of one label each."""

ROUNDS = {"FBO-AggITD": 5, "FedNest": 10, "FedNest-SGD": 9, "LFedNest-SVRG": 3, "LFedNest": 2}
"""Communication rounds of an outer iteration with one inner round and five products."""

_SMOOTH = 10  # evaluations that one accuracy of a noisy course is a mean of
_RISES = 0.01  # accuracy, from one quarter of a run to the next
_NOISE = 20  # evaluations at the end whose ups and downs are looked at


def remembered(make: Callable[..., Problem]) -> Callable[..., Problem]:
    """The last two problems made, kept: parts that share one stand next to each other in a study."""
    return functools.lru_cache(maxsize=2)(make)


def parts_of(make: Callable[..., Scenario], names: Sequence[str]) -> dict[str, Callable[[], Scenario]]:
    """Name → a function that calls `make` with the steps of the name, when its turn comes."""
    return {name: functools.partial(make, *name.split("/")) for name in names}


def method(
    name: str,
    *,
    neumann: Neumann,
    inner_rounds: int = 1,
    sampling: Sampling = "parts",
    **common: Any,
) -> WithServer:
    """A method by the papers' name for it; `common` is what all of them take.

    AggITD takes the step of the series for its λ. Clients are drawn once for the inner and once for the outer
    part of an iteration; by AggITD and LFedNest-NonAlt, which have no such parts, once.
    """
    common |= {"inner_rounds": inner_rounds}
    if name.startswith("FBO-AggITD"):
        return AggITD(scale=neumann.scale, solver="sgd" if name.endswith("SGD") else "svrg", **common)
    kinds: dict[str, Callable[..., WithServer]] = {
        "FedNest": functools.partial(FedNest, sampling=sampling),
        "FedNest-SGD": functools.partial(FedNestSGD, sampling=sampling),
        "LFedNest": LFedNest,
        "LFedNest-SVRG": LFedNestSVRG,
        "LFedNest-NonAlt": LFedNestNonAlt,
    }
    return kinds[name](neumann=neumann, **common)


def course(result: Result, metric: str = "accuracy") -> FloatArray:
    return result.metrics[metric].to_numpy(dtype=float)


def rounds_to(result: Result, goal: float, metric: str = "accuracy") -> int | None:
    """Communication rounds until the first evaluation that reaches `goal`."""
    reached = np.flatnonzero(course(result, metric) >= goal)
    return int(result.metrics["step"].iloc[reached[0]]) if len(reached) else None


def ending(result: Result, metric: str = "accuracy") -> float:
    """The last evaluation."""
    return float(course(result, metric)[-1])


@dataclass(frozen=True)
class Level:
    """What a noisy course had come to: a mean of ten evaluations and its standard error, from how much the
    twenty evaluations that end there jump. Other seeds may differ by more.
    """

    mean: float
    error: float

    @classmethod
    def of(cls, values: FloatArray) -> Level:
        last = values[-_SMOOTH:]
        if not len(last):
            return cls(float("nan"), float("nan"))
        return cls(float(last.mean()), _jumps(values) / np.sqrt(2 * len(last)))

    def above(self, other: Level) -> bool | None:
        """None where they are closer than two standard errors."""
        difference = self.mean - other.mean
        if abs(difference) <= 2 * np.hypot(self.error, other.error):
            return None
        return difference > 0


def at_iteration(result: Result, number: int, metric: str = "accuracy") -> Level:
    """At that outer iteration; NaN where the run was shorter."""
    if number > iterations(result):
        return Level.of(np.zeros(0))
    return Level.of(course(result, metric)[result.metrics["outer_step"] <= number])


def at_end(result: Result, metric: str = "accuracy") -> Level:
    return Level.of(course(result, metric))


def at_round(result: Result, rounds: int, metric: str = "accuracy") -> Level:
    """After so many communication rounds."""
    return Level.of(course(result, metric)[result.metrics["step"] <= rounds])


def noise(result: Result, metric: str = "accuracy") -> float:
    """How much the metric jumps: the deviation of its changes between the last evaluations."""
    return _jumps(course(result, metric))


def _jumps(values: FloatArray) -> float:
    return float(np.diff(values[-_NOISE - 1 :]).std()) if len(values) > 2 else 0.0


def noisier(a: Result, b: Result, metric: str = "accuracy") -> bool | None:
    """None within a factor of 1.5: a deviation of twenty changes is known to a sixth."""
    ratio = noise(a, metric) / max(noise(b, metric), 1e-12)
    return None if 1 / 1.5 <= ratio <= 1.5 else ratio > 1.5


def mean_of(result: Result, column: str) -> float:
    """Of a column that not all methods have; NaN without it."""
    return float(result.metrics[column].mean()) if column in result.metrics else float("nan")


def iterations(result: Result) -> int:
    return int(result.metrics["outer_step"].iloc[-1])


def iterations_in(name: str, rounds: int) -> int:
    """How many outer iterations of a method there are between two evaluations that are to be about so many
    communication rounds apart.
    """
    return max(1, round(rounds / ROUNDS[name]))


def rise(result: Result, metric: str = "accuracy") -> float:
    """By how much the last quarter of the evaluations is higher than the quarter before it, in the mean."""
    values = course(result, metric)
    quarter = max(1, len(values) // 4)
    before = values[-2 * quarter : -quarter]
    return float(values[-quarter:].mean() - before.mean()) if len(before) else 0.0


def fate(result: Result, chance: float = 0.1) -> str:
    """What became of a run: "diverged", "at chance" (less than twice that accuracy at its end), "rising" (by
    more than a point, see `rise`) or "level".
    """
    if not result.complete:
        return "diverged"
    if ending(result) < 2 * chance:
        return "at chance"
    return "rising" if rise(result) > _RISES else "level"


def rounds_per_iteration(result: Result) -> float:
    return float(result.metrics["step"].iloc[-1] / max(1, iterations(result)))


def differences(a: Result, b: Result, metric: str = "accuracy", until: int | None = None) -> FloatArray:
    """a − b at the outer iterations that both have, up to number `until`."""
    both = a.metrics.merge(b.metrics, on="outer_step", suffixes=("_a", "_b"))
    both = both[both["outer_step"] > 0]
    if until is not None:
        both = both[both["outer_step"] <= until]
    return (both[f"{metric}_a"] - both[f"{metric}_b"]).to_numpy(dtype=float)


def average(values: Sequence[float | None]) -> float | None:
    """None where one of them is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def text(value: float | None, form: str = ".0f") -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None or np.isnan(value) else format(value, form)


def percent(value: float | None) -> str:
    return text(None if value is None else 100 * value, ".2f")


def with_spread(values: Sequence[float], form: str = ".0f") -> str:
    """The mean, and the smallest and largest of several."""
    if len(values) < 2:
        return text(average(values), form)
    return f"{format(float(np.mean(values)), form)} ({format(min(values), form)}–{format(max(values), form)})"


def compared(words: str, pairs: Mapping[str, tuple[Level, Level]]) -> list[Finding]:
    """Whether the first of each pair is above the second, with both: `words` speaks of {0} and {1}."""
    findings: list[Finding] = []
    for where, (a, b) in pairs.items():
        above = a.above(b)
        said = f"{where}: {words.format(percent(a.mean), percent(b.mean))}"
        findings.append((said if above is not None else f"{said} (too close to say)", above))
    return findings


def draw_costs(
    path: Path,
    title: str,
    groups: Mapping[str, Mapping[str, Result]],
    *,
    metric: str = "accuracy",
    ylabel: str = "test accuracy, %",
    scale: float = 100.0,
    low: float | None = None,
    logx: bool = False,
    logy: bool = False,
    first: tuple[str, str] = ("step", "communication rounds"),
) -> Path:
    """A metric against communication rounds (or another column, named with its label in `first`) and against
    bytes: a row of two panels for every group of runs.

    `low` is where the vertical axis begins, unless all lies below.
    """
    from asyncfed.report import add_curves
    from asyncfed.report.style import byte_unit, new_figure, save

    figure = new_figure(title, 11.0, 0.4 + 3.2 * len(groups))
    grid = figure.subplots(len(groups), 2, squeeze=False, sharey=True)
    for panels, (group, runs) in zip(grid, groups.items(), strict=True):
        size, unit = byte_unit(max(float(run.metrics["bytes"].max()) for run in runs.values()))
        for axes, column, divisor, label in (
            (panels[0], first[0], 1.0, first[1]),
            (panels[1], "bytes", size, f"sent ({unit})"),
        ):
            series: dict[str, Any] = {
                name: (run.metrics[column] / divisor, scale * course(run, metric))
                for name, run in runs.items()
            }
            left = column == first[0]
            add_curves(
                axes,
                series,
                xlabel=label,
                ylabel=ylabel if left else "",
                title=group if left else "",
                logx=logx,
                logy=logy,
                legend=not left,
            )
    highest = max(scale * course(run, metric).max() for runs in groups.values() for run in runs.values())
    if low is not None and highest > low:
        grid[0, 0].set_ylim(bottom=low)  # of all: they share it, and know all curves by now
    return save(figure, path)
