"""When each client begins and ends its steps: decided by its own clock and presence alone.

A client begins its next step when its last one has ended, and a step takes as long as its distribution says.
Nothing that arrives plays a part, so steps are drawn many at once, ahead of what is asked for. Where clients
come and go:

    pause       what a client was computing goes on when it is back
    crash       what it was computing is lost, and so is all it knew: it comes back with nothing, and begins
                when a message has reached it (`Paces.wake`); so does one that joins late
    leaving     when it goes for good it may hand over what it holds: a step that computes nothing, takes no
                time, and sends everything
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from asyncfed.network.distributions import Constant, Distribution, Table
from asyncfed.network.links import BoolArray, FloatArray, IntArray
from asyncfed.network.presence import Attendance
from asyncfed.recall import recalled
from asyncfed.rng import Streams

_FORESEEN = 10**7  # steps, at most, that are drawn to know when the last ends


@recalled()
@dataclass(frozen=True, eq=False)
class Steps:
    """Steps of clients, in columns."""

    client: IntArray
    step: IntArray
    started: FloatArray
    ended: FloatArray
    elapsed: FloatArray  # since the client's step before began; 0 for its first
    since: FloatArray  # the client knows nothing of what was before; -inf where it never forgot
    reborn: BoolArray  # whether it is the first after that
    leaving: BoolArray  # whether nothing is computed and everything handed over

    def __len__(self) -> int:
        return len(self.client)

    def at(self, places: IntArray | BoolArray | slice) -> Steps:
        return Steps(*(getattr(self, column.name)[places] for column in fields(self)))


def joined_steps(some: list[Steps]) -> Steps:
    return Steps(*(np.concatenate([getattr(one, column.name) for one in some]) for column in fields(Steps)))


def no_steps() -> Steps:
    nothing, numbers, flags = np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.bool_)
    return Steps(nothing, nothing, numbers, numbers, numbers, numbers, flags, flags)


@recalled(
    given=(
        "_streams", "_compute", "_factors", "_horizon", "_attendance", "_table", "_period", "_pace", "_n",
        "_end", "_hands_over", "_back",
    )
)  # fmt: skip
class Paces:
    """The clocks of n clients over one part."""

    def __init__(
        self,
        streams: Streams,
        compute: Distribution | Table,
        factors: FloatArray,
        *,
        started_at: FloatArray,
        first_step: int,
        steps: int,
        horizon: float | None,
        attendance: Attendance | None,
        hands_over: bool,
        back: int = 0,
    ) -> None:
        self._streams, self._compute, self._factors, self._back = streams, compute, factors, back
        self._horizon = np.inf if horizon is None else horizon
        n = self._n = len(factors)
        self._end = first_step + steps
        self._hands_over = hands_over
        if isinstance(compute, Table):
            longest = max(map(len, compute.rows))
            self._table = np.array([np.resize(row, longest) for row in compute.rows])
            self._period = np.array([len(row) for row in compute.rows], dtype=np.int64)
            mean = np.array([np.mean(row) for row in compute.rows])
        else:
            mean = np.full(n, compute.mean)
        self._pace = 1.0 / (mean * factors)
        self.left = np.full(n, np.inf)  # when each makes its last step, or goes for good
        self.hollow = np.full(n, np.inf)  # since when those who have nothing wait for a message
        self._next = np.full(n, first_step, dtype=np.int64)
        self._start = started_at.astype(np.float64) if steps else np.full(n, np.inf)
        self._since = np.full(n, -np.inf)
        self._reborn = np.zeros(n, dtype=np.bool_)
        self._crashed = np.full(n, -np.inf)  # when those who have nothing lost it
        self._before = np.full(n, np.nan)  # when the last step of each began
        self._ahead = no_steps()  # drawn, and not asked for yet; by (start, client)
        self._until = -np.inf  # all that begin before that are drawn
        self._begins = float(started_at.max())  # the last of them
        self._refused = -np.inf  # when the last step would have begun that the horizon cuts
        self._attendance = attendance if steps else None
        if self._attendance is not None:
            self._arrive(self._attendance)

    def going_on(self, now: float) -> bool:
        """Whether anybody is at the beginning of a step, then or later."""
        return bool(len(self._ahead)) or bool(np.isfinite(self._start).any()) or self._refused >= now

    def empty(self, now: float) -> BoolArray:
        """Who has nothing at that time: it has crashed, or has not come yet, and has not begun since."""
        nothing: BoolArray = self._reborn & (self._crashed <= now)
        return nothing

    def latest_end(self) -> float:
        """When the part is over, or a little later; infinite where that is not known beforehand: where
        clients come and go, or have very many steps before them.
        """
        if self._attendance is not None:
            return np.inf
        if self._horizon < np.inf:
            return max(self._horizon, self._begins)
        going = np.flatnonzero(np.isfinite(self._start))
        ends, number = self._start[going], self._next[going]
        if int((self._end - number).sum()) > _FORESEEN:
            return np.inf
        some = max(1, 65_536 // max(1, len(going)))  # steps of each at a time
        for first in range(int(number.min(initial=self._end)), self._end, some):
            steps = np.arange(first, min(first + some, self._end))
            ahead = np.flatnonzero(steps >= number[:, None])
            row = ahead // len(steps)
            takes = self._takes(going[row], steps[ahead % len(steps)])
            ends += np.bincount(row, takes, minlength=len(going))
        known = float(self.left[np.isfinite(self.left)].max(initial=self._begins))
        return max(known, float(ends.max(initial=known))) * (1 + 1e-6)  # for sums are rounded

    def wake(self, client: int, time: float) -> None:
        """A message has reached one who has nothing: it begins from that."""
        self._start[client], self.hollow[client] = time, np.inf
        self._until = min(self._until, time)

    def window(self, before: float, most: int, *, singly: bool) -> tuple[Steps, float]:
        """The next steps by (start, client), and the time before which they are all: `before`, or less where
        there are more than so many, or where somebody is back with nothing. `singly`: none begins after
        another of them has ended.
        """
        while self._until < before and (going := np.isfinite(self._start)).any():
            if int(np.searchsorted(self._ahead.started, self._until)) > most:
                break
            reach = (most + 1) / float(self._pace[going].sum())
            self._draw(min(before, max(self._until, float(self._start[going].min())) + reach))
        if not np.isfinite(self._start).any():
            self._until = np.inf
        until = min(before, self._until)
        ahead = self._ahead
        if len(ahead) > most:
            until = min(until, float(ahead.started[most]))
        if not singly:
            until = min(until, float(self.hollow.min()))
        elif len(ahead):
            until = min(until, float(ahead.ended[: _before(ahead, until)].min(initial=np.inf)))
        count = _before(ahead, until)
        self._ahead = ahead.at(slice(count, None))
        return ahead.at(slice(count)), until

    # --- drawing -------------------------------------------------------------------------------------

    def _draw(self, before: float) -> None:
        """All steps that begin before that time."""
        bunches = [self._ahead]
        begin = np.flatnonzero(self._start < before)
        while len(begin):
            bunches.append(self._begin(begin))
            begin = begin[self._start[begin] < before]
        steps = joined_steps(bunches)
        self._ahead = steps.at(np.lexsort((steps.client, ~steps.leaving, steps.started)))
        self._until = max(self._until, before)

    def _begin(self, clients: IntArray) -> Steps:
        """The next step of each."""
        number, started = self._next[clients], self._start[clients]
        ended = np.maximum(started + self._takes(clients, number), np.nextafter(started, np.inf))
        leaving = np.zeros(len(clients), dtype=np.bool_)
        if self._attendance is not None:
            made = self._while_there(self._attendance, clients, started, ended, leaving)
        else:
            made = np.ones(len(clients), dtype=np.bool_)
        beyond = made & (ended > self._horizon)
        if beyond.any():
            made &= ~beyond
            self._refused = max(self._refused, float(started[beyond].max()))
            self._start[clients[beyond]] = np.inf
        clients, number, leaving = clients[made], number[made], leaving[made]
        started, ended = started[made], ended[made]
        before = self._before[clients]
        elapsed = np.where(np.isnan(before), 0.0, started - before)
        steps = Steps(
            clients, number, started, ended, elapsed, self._since[clients], self._reborn[clients], leaving
        )
        last = (number + 1 == self._end) | leaving
        self._start[clients] = np.where(last, np.inf, ended)
        self.left[clients[last]] = ended[last]
        self._next[clients], self._before[clients], self._reborn[clients] = number + 1, started, False
        return steps

    def _takes(self, clients: IntArray, steps: IntArray) -> FloatArray:
        compute, steps = self._compute, steps - self._back
        if isinstance(compute, Table):
            drawn: FloatArray = self._table[clients, steps % self._period[clients]]
        elif isinstance(compute, Constant):
            drawn = np.full(len(clients), compute.value)
        else:
            drawn = compute.quantile(self._streams.uniforms_at("compute", steps, clients, self._n))
        return drawn * self._factors[clients]

    # --- coming and going ----------------------------------------------------------------------------

    def _arrive(self, attendance: Attendance) -> None:
        """Those who are not there at the beginning."""
        for client, start in enumerate(self._start.tolist()):
            there = attendance.uptimes.next_on(client, start)
            if there > start and attendance.crashes:
                self._forget(client, there)
            else:
                self._start[client] = there
            if there == np.inf:
                self.left[client] = -np.inf

    def _forget(self, client: int, back: float) -> None:
        """It has nothing, is there again at that time (or never), and waits for a message."""
        self._start[client], self._since[client], self._reborn[client] = np.inf, back, True
        self.hollow[client] = back
        self._before[client] = np.nan

    def _while_there(
        self,
        attendance: Attendance,
        clients: IntArray,
        started: FloatArray,
        ended: FloatArray,
        leaving: BoolArray,
    ) -> BoolArray:
        """Stretch steps over absences, or lose them; which of them are made at all."""
        uptimes, made = attendance.uptimes, np.ones(len(clients), dtype=np.bool_)
        for at, client in enumerate(clients.tolist()):
            now, takes = float(started[at]), float(ended[at] - started[at])
            end = float(ended[at])
            while (off := uptimes.next_off(client, now)) <= end:
                back = uptimes.next_on(client, off)
                if back == np.inf:
                    self._start[client], self.left[client] = np.inf, off
                    made[at] = leaving[at] = self._hands_over
                    started[at] = ended[at] = end = off
                    break
                if attendance.crashes:
                    self._forget(client, back)
                    self._crashed[client] = off
                    made[at] = False
                    break
                takes -= off - now
                now, end = back, back + max(0.0, takes)
            if made[at] and not leaving[at]:
                ended[at] = end
        return made


def _before(steps: Steps, time: float) -> int:
    """How many of these begin before a time. Who leaves at that time does so first, as one who sends does."""
    leaving = steps.leaving[: np.searchsorted(steps.started, time, side="right")]
    begun = int(np.searchsorted(steps.started, time))
    return begun + int(leaving[begun:].sum())
