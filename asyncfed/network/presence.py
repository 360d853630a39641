"""Who is there when: clients that come late, go for a while, crash, or leave for good.

A presence is a value that a timing takes, `Lockstep(presence=GivenPresence({3: [(10, 50)]}))`. A client is
there in intervals [from, to) of time: it joins late where the first begins after 0, and leaves for good where
the last one ends. Clients that are not named are always there, and so is a server.

What an absence does, each presence says:

    absence   "pause"      the state is kept, and what was being computed goes on when the client is back
              "crash"      the state is lost: it comes back with nothing, and takes the server's or its
                           neighbours' model
    leaving   "hand over"  who leaves for good hands what it holds to those it can reach, before it goes
              "lost"       what it holds is lost
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from asyncfed.checks import PathLike, Words
from asyncfed.errors import ScenarioError
from asyncfed.network.distributions import Duration, PositiveTime, as_distribution
from asyncfed.network.names import Names, plain_name
from asyncfed.network.uptimes import AlternatingTimes, GivenTimes, Intervals, Uptimes, checked_intervals
from asyncfed.reading import csv_lines
from asyncfed.registry import register
from asyncfed.rng import Streams

Absence: TypeAlias = Literal["pause", "crash"]
Leaving: TypeAlias = Literal["hand over", "lost"]
Timetable = Annotated[
    Mapping[int | str, Any],
    Words(
        "a table {client: [(from, to), …]}; GivenPresence.of(function, clients=20) makes one of a function, "
        "which cannot be stored with a run"
    ),
]


@dataclass(frozen=True, eq=False)
class Attendance:
    """A presence, opened for a run: what schedules read."""

    uptimes: Uptimes  # of the clients, by number
    crashes: bool  # whether an absence loses the state
    hands_over: bool  # whether who leaves for good hands over what it holds


@runtime_checkable
class Presence(Protocol):
    """When clients are there, as a value that a scenario names."""

    def attend(self, names: Names, streams: Streams) -> Attendance:
        """Of clients that are called so; refuses what does not fit them."""
        ...


@register("presence")
@dataclass(frozen=True)
class GivenPresence:
    """A table: {client: [(from, to), …]}. `to` may be infinite; an empty list is for one that never comes.

    With a `period` the intervals lie within [0, period] and come again and again.
    """

    intervals: Timetable
    period: PositiveTime | None = None
    absence: Absence = "pause"
    leaving: Leaving = "hand over"

    def __post_init__(self) -> None:
        given, period = self.intervals, self.period
        within = math.inf if period is None else period
        table = {plain_name(c): checked_intervals(some, f"client {c}", within) for c, some in given.items()}
        object.__setattr__(self, "intervals", table)

    @classmethod
    def of(cls, function: Callable[[int], Intervals], clients: int, **more: Any) -> GivenPresence:
        """The table of a function that says when client 0, 1, … is there."""
        return cls({client: function(client) for client in range(clients)}, **more)

    def attend(self, names: Names, streams: Streams) -> Attendance:
        intervals = {names.number(name, "the presence"): some for name, some in self.intervals.items()}
        return _attendance(self, GivenTimes(len(names), intervals, self.period, "client"))


@register("presence")
@dataclass(frozen=True)
class DrawnPresence:
    """There and away by turns, for times that are drawn: of all clients, or of some.

    It is as if this had always gone on: at any time, 0 included, a client is there with probability
    mean(there) / (mean(there) + mean(away)). Nobody leaves for good.
    """

    there: Duration
    away: Duration
    clients: Annotated[Sequence[int | str] | None, Words("a list of those who come and go, or None")] = None
    absence: Absence = "pause"
    leaving: Leaving = "hand over"

    def __post_init__(self) -> None:
        for name in ("there", "away"):
            law = as_distribution(getattr(self, name))
            if not 0 < law.mean < math.inf:
                raise ScenarioError(f"the time {name}, {law}, must have a finite mean above 0")
            object.__setattr__(self, name, law)
        if self.clients is not None:
            object.__setattr__(self, "clients", tuple(map(plain_name, self.clients)))

    def attend(self, names: Names, streams: Streams) -> Attendance:
        kind_of = np.zeros(len(names), dtype=np.int64)
        if self.clients is not None:
            kind_of[:] = -1
            kind_of[[names.number(name, "the presence") for name in self.clients]] = 0
        laws = as_distribution(self.there), as_distribution(self.away)
        return _attendance(self, AlternatingTimes(streams, "presence", [laws], kind_of))


@register("presence")
@dataclass(frozen=True)
class PresenceFile:
    """A file in CSV with the header `node,from,to`: a line for each interval, `to` empty if it has no end."""

    path: PathLike
    absence: Absence = "pause"
    leaving: Leaving = "hand over"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))

    def attend(self, names: Names, streams: Streams) -> Attendance:
        intervals: dict[int, list[tuple[float, float]]] = {}
        for line, (node, begin, end) in csv_rows(self.path, ("node", "from", "to")):
            where = f"{self.path}, line {line}"
            pair = csv_interval(begin, end, where)
            some = intervals.setdefault(names.number(plain_name(node), where), [])
            checked_intervals([*some, pair], f"node {node} ({where})")
            some.append(pair)
        return _attendance(self, GivenTimes(len(names), intervals, None, "client"))


def csv_rows(path: str | os.PathLike[str], header: tuple[str, ...]) -> list[tuple[int, list[str]]]:
    """Line numbers and fields of a file in CSV, which must have this header; empty lines are passed over."""
    named = ",".join(header)
    rows = csv_lines(path, f"the header {named}")
    if not rows or tuple(rows[0][1]) != header:
        found = ",".join(rows[0][1]) if rows else "nothing"
        raise ScenarioError(f"{path} begins with {found}; its first line must be the header {named}")
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise ScenarioError(f"{path}, line {line} has {len(row)} fields; it must have {named}")
    return rows[1:]


def csv_interval(begin: str, end: str, where: str) -> tuple[float, float]:
    """[begin, end) as a file has it; an empty end is never."""
    numbers = []
    for text in (begin, end or "inf"):
        try:
            numbers.append(float(text))
        except ValueError:
            raise ScenarioError(f"{where}: {text!r} is no time; it must be a number") from None
    if not 0 <= numbers[0] < numbers[1]:
        raise ScenarioError(f"{where}: an interval from {begin} to {end or 'ever'} must have 0 ≤ from < to")
    return numbers[0], numbers[1]


def _attendance(presence: GivenPresence | DrawnPresence | PresenceFile, uptimes: Uptimes) -> Attendance:
    return Attendance(uptimes, presence.absence == "crash", presence.leaving == "hand over")
