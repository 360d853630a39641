"""When things are on: nodes that come and go, links that are up at some times only.

One mechanism for both. A thing has intervals [from, to) in which it is on, half open: at `from` it is, at
`to` it is no more. Whether it is on at a time is a pure function of (seed, stream, thing, time), so it can be
asked in any order; what is kept is only what has been worked out.

    Always            everything is always on
    GivenTimes        intervals as given, of each thing its own, once or again and again
    WholeSteps        the same things, looked at at whole times only
    AlternatingTimes  on and off by turns, for drawn times; the process is stationary from time 0 on
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncfed.errors import ScenarioError
from asyncfed.network.distributions import Distribution
from asyncfed.rng import Streams

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Intervals: TypeAlias = Sequence[tuple[float, float]]

_STATE, _RESIDUAL = 1, 2  # lanes of what is drawn of the sojourn that holds time 0


class Uptimes(Protocol):
    """When each of some things is on."""

    def on(self, things: IntArray, times: FloatArray | float) -> BoolArray:
        """Whether each of the things is on, at a time of its own or at one time."""
        ...

    def next_on(self, thing: int, time: float) -> float:
        """`time` itself where the thing is on; when it next is; infinite if never again."""
        ...

    def next_off(self, thing: int, time: float) -> float:
        """The end of the interval that holds `time`, at which the thing is on; infinite if it never ends."""
        ...


class Always:
    """Everything is always on."""

    def on(self, things: IntArray, times: FloatArray | float) -> BoolArray:
        return np.ones(len(things), dtype=np.bool_)

    def next_on(self, thing: int, time: float) -> float:
        return time

    def next_off(self, thing: int, time: float) -> float:
        return math.inf


def checked_intervals(
    intervals: Intervals, what: str, period: float = math.inf
) -> tuple[tuple[float, float], ...]:
    """Sorted intervals that do not overlap, of `what`; those that touch become one. With a period they must
    lie within it.
    """
    pairs: list[tuple[float, float]] = []
    if isinstance(intervals, (str, Mapping)) or not hasattr(intervals, "__iter__"):
        raise ScenarioError(f"the intervals of {what} are {intervals!r}; give a list of pairs (from, to)")
    for one in intervals:
        try:
            begin, end = (float(bound) for bound in one)
        except (TypeError, ValueError):
            raise ScenarioError(f"an interval of {what} is {one!r}; it must be a pair (from, to)") from None
        if not 0 <= begin < end:
            raise ScenarioError(
                f"the interval ({begin:g}, {end:g}) of {what} must have 0 ≤ from < to; to may be infinite"
            )
        if end > period:
            raise ScenarioError(
                f"the interval ({begin:g}, {end:g}) of {what} does not lie within its period of {period:g}"
            )
        pairs.append((begin, end))
    pairs.sort()
    for before, after in pairwise(pairs):
        if after[0] < before[1]:
            raise ScenarioError(
                f"the intervals ({before[0]:g}, {before[1]:g}) and ({after[0]:g}, {after[1]:g}) of {what} "
                "overlap; make them one"
            )
    joined: list[tuple[float, float]] = []
    for begin, end in pairs:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return tuple(joined)


class GivenTimes:
    """Intervals as given, of some of the things 0..count-1; what is not named is always on.

    With a period (one for all, or each its own) a thing's intervals lie within [0, period) and come again and
    again: the one of cycle c begins at c · period + from.
    """

    def __init__(
        self,
        count: int,
        intervals: Mapping[int, Intervals],
        period: float | Mapping[int, float] | None = None,
        what: str = "thing",
    ) -> None:
        self._period = np.full(count, np.inf)
        # Of each thing the times at which it changes, one after the other: it is on after an odd number of
        # them. What ends with its cycle ends where the next one says so.
        changes: list[list[float]] = [[-math.inf] for _ in range(count)]
        for thing, given in intervals.items():
            own = period.get(thing) if isinstance(period, Mapping) else period
            if own is not None:
                if not 0 < own < math.inf:
                    raise ScenarioError(
                        f"the period of {what} {thing} is {own}; it must be above 0 and finite"
                    )
                self._period[thing] = own
            pairs = checked_intervals(given, f"{what} {thing}", float(self._period[thing]))
            changes[thing] = [
                math.inf if bound == self._period[thing] else bound for pair in pairs for bound in pair
            ]
        self._changes = np.array([bound for some in changes for bound in some])
        self._first = np.concatenate([[0], np.cumsum([len(some) for some in changes])]).astype(np.int64)
        # One sorted array of whole numbers for all: (thing, rank of the time).
        self._ranks = np.unique(self._changes)
        rank = np.searchsorted(self._ranks, self._changes) + 1
        self._keys = np.repeat(np.arange(count), np.diff(self._first)) * (len(self._ranks) + 1) + rank

    def on(self, things: IntArray, times: FloatArray | float) -> BoolArray:
        _, passed = self._place(things, np.broadcast_to(np.asarray(times, dtype=np.float64), things.shape))
        odd: BoolArray = passed % 2 == 1
        return odd

    def next_on(self, thing: int, time: float) -> float:
        return self._next(thing, time, True)

    def next_off(self, thing: int, time: float) -> float:
        return self._next(thing, time, False)

    def _next(self, thing: int, time: float, wanted: bool) -> float:
        which = np.array([thing])
        period = float(self._period[thing])
        changes = self._changes[self._first[thing] : self._first[thing + 1]]
        last_cycle = math.inf
        while True:
            cycles, passed = self._place(which, np.array([time]))
            cycle, k = int(cycles[0]), int(passed[0])
            if (k % 2 == 1) == wanted:
                return time
            if cycle > last_cycle:  # a whole cycle brought no change
                return math.inf
            if k < len(changes) and changes[k] < math.inf:
                time = float(changes[k]) + (cycle * period if cycle else 0.0)
            elif period == math.inf:
                return math.inf
            else:
                last_cycle = min(last_cycle, cycle + 1)
                time = (cycle + 1) * period

    def _place(self, things: IntArray, times: FloatArray) -> tuple[FloatArray, IntArray]:
        """The cycle that each time falls into, and how many changes of that cycle have passed by then.

        Rounding must not put a change before or after itself, so the candidates are compared as they are.
        """
        period = self._period[things]
        cycle = np.floor(times / period)
        endless = np.isinf(period)
        length = np.where(endless, 0.0, period)
        cycle = np.where(~endless & ((cycle + 1) * length <= times), cycle + 1, cycle)
        cycle = np.where(cycle * length > times, cycle - 1, cycle)
        start = cycle * length
        first, stop = self._first[things], self._first[things + 1]
        rank = np.searchsorted(self._ranks, times - start, side="right")
        at = np.searchsorted(self._keys, things * (len(self._ranks) + 1) + rank, side="right")
        if len(self._changes):
            later = np.minimum(at, len(self._changes) - 1)
            at = at + ((at < stop) & (self._changes[later] + start <= times))
            before = np.maximum(at - 1, 0)
            at = at - ((at > first) & (self._changes[before] + start > times))
        return cycle, at - first


class AlternatingTimes:
    """On and off by turns: sojourn number k of thing i is drawn from (seed, stream, row k, index i).

    The process is stationary: at time 0 a thing is on with probability mean(on) / (mean(on) + mean(off)), and
    what is left of that first sojourn has the law of what is left at an instant that falls into one.

    `kinds` are pairs of distributions (on, off), and `kind_of` says which of them each thing has, -1 for one
    that is always on. The time that a thing is on is its own draw: others change nothing about it.
    """

    def __init__(
        self,
        streams: Streams,
        stream: str,
        kinds: Sequence[tuple[Distribution, Distribution]],
        kind_of: IntArray,
    ) -> None:
        for on, off in kinds:
            for name, own in (("on", on), ("off", off)):
                if not 0 < own.mean < math.inf:
                    raise ScenarioError(f"the time {name}, {own}, must have a finite mean above 0")
        self._streams, self._stream, self._kinds = streams, stream, tuple(kinds)
        self._kind_of = np.asarray(kind_of, dtype=np.int64)
        self._members = [np.flatnonzero(self._kind_of == kind) for kind in range(len(self._kinds))]
        count = len(self._kind_of)
        self._ends = np.empty((16, count))  # of each sojourn (row) of each thing
        self._rows = 0
        self._found = np.zeros(count, dtype=np.int64)
        self._begins_on = np.ones(count, dtype=np.bool_)
        for (on, off), some in zip(self._kinds, self._members, strict=True):
            u = streams.uniforms(stream, 0, 0, count, lane=_STATE)[some]
            self._begins_on[some] = u < on.mean / (on.mean + off.mean)

    def on(self, things: IntArray, times: FloatArray | float) -> BoolArray:
        moments = np.broadcast_to(np.asarray(times, dtype=np.float64), things.shape)
        result = np.ones(len(things), dtype=np.bool_)
        drawn = self._kind_of[things] >= 0
        if drawn.any():
            some = things[drawn]
            result[drawn] = self._begins_on[some] ^ (self._passed(some, moments[drawn]) % 2 == 1)
        return result

    def next_on(self, thing: int, time: float) -> float:
        return time if self._kind_of[thing] < 0 else self._next(thing, time, True)

    def next_off(self, thing: int, time: float) -> float:
        return math.inf if self._kind_of[thing] < 0 else self._next(thing, time, False)

    def _next(self, thing: int, time: float, wanted: bool) -> float:
        which = np.array([thing])
        while True:
            sojourn = int(self._passed(which, np.array([time]))[0])
            if (bool(self._begins_on[thing]) ^ (sojourn % 2 == 1)) == wanted:
                return time
            time = float(self._ends[sojourn, thing])

    def _passed(self, things: IntArray, times: FloatArray) -> IntArray:
        """How many sojourns of each thing have ended by its time."""
        while not self._rows or (self._ends[self._rows - 1, things] <= times).any():
            self._draw_on()
        # Most are asked again soon: look first where they were found the last time.
        low = self._found[things]
        low = np.where(self._ends[np.maximum(low - 1, 0), things] <= times, low, 0)
        late = self._ends[low, things] <= times
        if late.any():
            high = np.where(late, self._rows - 1, low)
            while (low < high).any():
                middle = (low + high) // 2
                over = self._ends[middle, things] <= times
                low, high = np.where(over, middle + 1, low), np.where(over, high, middle)
            self._found[things] = low
        return low

    def _draw_on(self) -> None:
        """The next sojourn of everything."""
        k, count = self._rows, len(self._kind_of)
        if k == len(self._ends):
            self._ends = np.concatenate([self._ends, np.empty_like(self._ends)])
        u = self._streams.uniforms(self._stream, k, 0, count)
        v = self._streams.uniforms(self._stream, 0, 0, count, lane=_RESIDUAL) if k == 0 else u
        lasts = np.full(count, np.inf)
        for kind, some in zip(self._kinds, self._members, strict=True):
            for law, turn in zip(kind, (True, False), strict=True):
                here = some[self._begins_on[some] ^ (k % 2 == 1) == turn]
                lasts[here] = law.residual(u[here], v[here]) if k == 0 else law.quantile(u[here])
        self._ends[k] = lasts if k == 0 else self._ends[k - 1] + lasts
        self._rows = k + 1


class WholeSteps:
    """Things as they are at whole times, at which alone they are looked at: on from one to another."""

    def __init__(self, uptimes: Uptimes) -> None:
        self._uptimes = uptimes

    def on(self, things: IntArray, times: FloatArray | float) -> BoolArray:
        return self._uptimes.on(things, times)

    def next_on(self, thing: int, time: float) -> float:
        there, time = time, -math.inf
        while math.isfinite(there) and there > time:  # it may be off again at the next whole time
            time = float(np.ceil(there))
            there = self._uptimes.next_on(thing, time)
        return there

    def next_off(self, thing: int, time: float) -> float:
        off = time
        while math.isfinite(off) and (off == time or self._uptimes.next_on(thing, off) == off):
            off = float(np.ceil(self._uptimes.next_off(thing, off)))
        return off
