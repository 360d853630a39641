"""Links over time: marks of an edge that say more than one probability.

    schedule      it is up only at given times, once or again and again: LinkTimes, or a list of (from, to)
    probability   how likely it is changes with time: VaryingProbability
    bursts        good and bad times by turns (Gilbert & Elliott): Bursts

A link is up at a time if its schedule says so and its draw (seed, "links", step, edge) lies below its
probability of that time; in a bad burst that is the burst's. So the independent draw is the one that it would
be without all this. The two directions of an undirected link share schedule, bursts and draw.

The time is that at which a message is sent: in lockstep step t sends at t + 1, as the trace has it.

As marks they may be written as text, `Bursts(20, 5)`, which is how files have them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

import numpy as np

from asyncfed.checks import UnitFloat, Words
from asyncfed.errors import ScenarioError, TopologyError
from asyncfed.network.distributions import Distribution, Exponential, Geometric, PositiveTime, Time
from asyncfed.network.uptimes import (
    AlternatingTimes,
    FloatArray,
    GivenTimes,
    IntArray,
    Intervals,
    checked_intervals,
)
from asyncfed.registry import has_call, read, register
from asyncfed.rng import Streams

Mark = TypeVar("Mark")


@register("link")
@dataclass(frozen=True)
class LinkTimes:
    """A link is up only in these intervals [from, to); with a `period` they come again and again."""

    intervals: Intervals
    period: PositiveTime | None = None

    def __post_init__(self) -> None:
        within = math.inf if self.period is None else self.period
        object.__setattr__(self, "intervals", checked_intervals(self.intervals, "a schedule", within))

    def __str__(self) -> str:
        return f"LinkTimes({_pairs_text(self.intervals)}, {self.period})"


@register("link")
@dataclass(frozen=True)
class Bursts:
    """Good and bad times by turns, without memory (Gilbert 1960, Elliott 1963).

    `good` and `bad` are the mean lengths. In virtual time they are exponential; in lockstep they are whole
    steps, at least one, so that the state is a Markov chain that turns bad with probability 1/good and good
    again with probability 1/bad. While it is good a link is up with the edge's own probability, while it is
    bad with the `probability` given here.
    """

    good: PositiveTime
    bad: PositiveTime
    probability: UnitFloat = 0.0

    def __str__(self) -> str:
        return f"Bursts({self.good}, {self.bad}, {self.probability})"

    @property
    def share_good(self) -> float:
        """Of all time."""
        return self.good / (self.good + self.bad)

    def laws(self, whole_steps: bool) -> tuple[Distribution, Distribution]:
        """Of the good times and of the bad ones."""
        if not whole_steps:
            return Exponential(self.good), Exponential(self.bad)
        if min(self.good, self.bad) < 1:
            raise ScenarioError(
                f"{self} has a mean time below 1, but in lockstep a link stays good or bad for at least one "
                "step; make it longer, or use timing=VirtualTime(…)"
            )
        return Geometric(1 / self.good), Geometric(1 / self.bad)


@register("link")
@dataclass(frozen=True)
class VaryingProbability:
    """A probability that changes with time: points (time, probability), the first at time 0.

    Between two points it is that of the first ("constant") or lies on the line from one to the other
    ("linear"); after the last one it stays as it is, or begins anew with every `period`.
    """

    points: Annotated[
        Sequence[tuple[Time, UnitFloat]], Words("a list of points (time, probability), each in [0, 1]")
    ]
    period: PositiveTime | None = None
    between: Literal["constant", "linear"] = "constant"

    def __post_init__(self) -> None:
        times = [time for time, _ in self.points]
        if not times or times[0] != 0 or any(a >= b for a, b in pairwise(times)):
            raise ScenarioError(
                f"the points of a varying probability are at {times}; they must begin at 0 and rise"
            )
        if not any(value for _, value in self.points):
            raise ScenarioError(
                "a varying probability is 0 at all times; leave out an edge that never exists"
            )
        if self.period is not None and self.period <= times[-1]:
            raise ScenarioError(
                f"the period of a probability is {self.period}; it must end after its last point"
            )
        points = tuple((float(time), float(value)) for time, value in self.points)  # as their text has them
        object.__setattr__(self, "points", points)

    def __str__(self) -> str:
        return f"VaryingProbability({_pairs_text(self.points)}, {self.period}, {self.between!r})"

    def at(self, times: FloatArray) -> FloatArray:
        """The probability at each of some times."""
        knots, values = (np.array(column) for column in zip(*self.points, strict=True))
        phase = times if self.period is None else np.mod(times, self.period)
        if self.between == "linear":
            return np.asarray(np.interp(phase, knots, values, period=self.period))
        return np.asarray(values[np.searchsorted(knots, phase, side="right") - 1])


@dataclass(frozen=True, eq=False)
class LinksOverTime:
    """What changes with time of the links of a network: arrays are over its edges."""

    times: GivenTimes | None
    probability: FloatArray  # while nothing says otherwise
    varying: tuple[VaryingProbability, ...]
    varying_of: IntArray  # which of them an edge has; -1 for none
    bursts: tuple[tuple[Distribution, Distribution], ...]
    bursts_of: IntArray  # likewise
    bad: FloatArray  # the probability while it is bad
    draw: IntArray  # the edge whose bursts each has: that of a pair
    _opened: dict[int, AlternatingTimes] = field(default_factory=dict, repr=False)

    @property
    def stationary(self) -> bool:
        """Whether each link is up with the same probability at any time."""
        return self.times is None and not self.varying

    def limits(self, streams: Streams, edges: IntArray, times: FloatArray | float) -> FloatArray:
        """The probability of each of some edges at its time."""
        at = np.broadcast_to(np.asarray(times, dtype=np.float64), edges.shape)
        limits = self.probability[edges]
        for number, one in enumerate(self.varying):
            here = self.varying_of[edges] == number
            limits[here] = one.at(at[here])
        if self.bursts:
            good = self._good(streams).on(self.draw[edges], at)
            limits = np.where(good, limits, self.bad[edges])
        if self.times is not None:
            limits = np.where(self.times.on(edges, at), limits, 0.0)
        return limits

    def _good(self, streams: Streams) -> AlternatingTimes:
        if streams.seed not in self._opened:
            self._opened.clear()
            self._opened[streams.seed] = AlternatingTimes(streams, "bursts", self.bursts, self.bursts_of)
        return self._opened[streams.seed]


def compile_over_time(
    marks: list[Mapping[str, Any]],
    names: list[str],
    probability: FloatArray,
    draw: IntArray,
    *,
    whole_steps: bool,
) -> tuple[LinksOverTime | None, FloatArray]:
    """Of edges with these marks and names: what changes with time (None where nothing does), and the
    probability of each at any time, nan where there is none. The one given is nan where it varies.
    """
    intervals: dict[int, Intervals] = {}
    periods: dict[int, float] = {}
    varying: dict[VaryingProbability, int] = {}
    bursts: dict[tuple[Distribution, Distribution], int] = {}
    varying_of, bursts_of = (np.full(len(marks), -1, dtype=np.int64) for _ in range(2))
    bad, marginal = np.zeros(len(marks)), probability.copy()
    for edge, own in enumerate(marks):
        if math.isnan(probability[edge]):
            varies = as_varying(own["probability"], names[edge])
            varying_of[edge] = varying.setdefault(varies, len(varying))
        if "bursts" in own:
            burst = as_bursts(own["bursts"], names[edge])
            with _naming("bursts", names[edge]):
                laws = burst.laws(whole_steps)
            bursts_of[edge] = bursts.setdefault(laws, len(bursts))
            bad[edge] = burst.probability
            marginal[edge] = burst.share_good * marginal[edge] + (1 - burst.share_good) * bad[edge]
        if "schedule" in own:
            schedule = as_schedule(own["schedule"], names[edge])
            intervals[edge], marginal[edge] = schedule.intervals, np.nan
            if schedule.period is not None:
                periods[edge] = schedule.period
    if not (intervals or varying or bursts):
        return None, probability
    times = GivenTimes(len(marks), intervals, periods) if intervals else None
    changing = LinksOverTime(
        times, probability, tuple(varying), varying_of, tuple(bursts), bursts_of, bad, draw
    )  # fmt: skip
    return changing, marginal


def varies(probability: Any) -> bool:
    """Whether the mark `probability` is one that changes with time: a value, or its text."""
    written = isinstance(probability, str) and has_call(probability)
    return written or isinstance(probability, VaryingProbability)


def as_schedule(value: Any, where: str) -> LinkTimes:
    """The mark `schedule` of an edge: also as text, or as a list of (from, to)."""
    if isinstance(value, (list, tuple)):
        with _naming("schedule", where):
            return LinkTimes(value)
    allowed = "a list of (from, to), or LinkTimes([(from, to), …], period)"
    return _as(LinkTimes, "schedule", value, where, allowed)


def as_bursts(value: Any, where: str) -> Bursts:
    """The mark `bursts` of an edge."""
    return _as(Bursts, "bursts", value, where, "Bursts(good, bad), with their mean lengths")


def as_varying(value: Any, where: str) -> VaryingProbability:
    """The mark `probability` of an edge that is no number."""
    allowed = "a number in (0, 1], or VaryingProbability([(0, probability), …])"
    return _as(VaryingProbability, "probability", value, where, allowed)


def _as(kind: type[Mark], mark: str, value: Any, where: str, allowed: str) -> Mark:
    with _naming(mark, where):
        found = read(value, "link", "a link's mark") if isinstance(value, str) else value
    if not isinstance(found, kind):
        raise TopologyError(f"{mark}{where and f' of {where}'} is {value!r}; it must be {allowed}")
    return found


@contextmanager
def _naming(mark: str, where: str) -> Iterator[None]:
    try:
        yield
    except ScenarioError as error:
        raise TopologyError(f"{mark}{where and f' of {where}'}: {error}") from None


def _pairs_text(pairs: Intervals) -> str:
    return f"[{', '.join(f'({a!r}, {b!r})' for a, b in pairs)}]"
