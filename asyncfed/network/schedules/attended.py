"""The works of clients that come and go: when they end, and what a crash makes of them."""

from __future__ import annotations

import math

import numpy as np

from asyncfed.errors import RunError
from asyncfed.network.links import BoolArray, FloatArray, IntArray
from asyncfed.network.presence import Attendance
from asyncfed.network.waves import NO_NODES
from asyncfed.recall import recalled

_TRIES = 100_000


@recalled(given=("_attendance", "_lockstep"))
class Attended:
    """Of n clients; without an attendance they are always there, and nothing of this costs anything."""

    def __init__(self, n: int, attendance: Attendance | None, *, lockstep: bool) -> None:
        self._attendance, self._lockstep = attendance, lockstep
        # Of each client, by which its crashes are seen: when it was last asked, and last had a state.
        self._asked, self._lived = np.full(n, np.nan), np.full(n, np.nan)
        self._owed = np.zeros(n, dtype=np.bool_)

    @property
    def always(self) -> bool:
        return self._attendance is None

    def there(self, clients: IntArray, times: FloatArray | float) -> BoolArray:
        if self._attendance is None:
            return np.ones(len(clients), dtype=np.bool_)
        return self._attendance.uptimes.on(clients, times)

    def next_there(self, clients: IntArray, now: float) -> float:
        """When the first of these clients is there: now, or later, or never; in lockstep at whole units."""
        if self._attendance is None:
            return now
        uptimes, at = self._attendance.uptimes, now
        for _ in range(_TRIES):
            if uptimes.on(clients, at).any():
                return at
            at = min((uptimes.next_on(client, at) for client in clients.tolist()), default=math.inf)
            if not (self._lockstep and math.isfinite(at)):
                return at
            at = now + math.ceil(at - now)
        raise RunError(
            f"no client is there at any of {_TRIES} units of time from {now:g} on; in lockstep the server "
            "looks at whole units only: let clients be there for longer, or use virtual time"
        )

    def end(self, client: int, reached: float, begun: float, takes: float) -> tuple[float, bool]:
        """When a work that reached its client then and is begun then is done, and whether it never is: then
        the time is that at which its client crashes or leaves.
        """
        if self._attendance is None:
            return begun + takes, False
        uptimes = self._attendance.uptimes
        if self._attendance.crashes:
            off = uptimes.next_off(client, reached)
            return (begun + takes, False) if begun + takes < off else (off, True)
        if self._lockstep:
            done = begun + takes
            return done, not uptimes.on(np.array([client]), done)[0]
        at = uptimes.next_on(client, begun)
        while math.isfinite(at):
            off = uptimes.next_off(client, at)
            if at + takes < off:
                return at + takes, False
            takes -= off - at
            at = uptimes.next_on(client, off)
            begun = off
        return begun, True

    def ends(
        self, clients: IntArray, reached: FloatArray, begun: FloatArray, takes: FloatArray
    ) -> tuple[FloatArray, BoolArray]:
        """The same of many."""
        if self._attendance is None:
            return begun + takes, np.zeros(len(clients), dtype=np.bool_)
        rows = zip(clients.tolist(), reached.tolist(), begun.tolist(), takes.tolist(), strict=True)
        found = [self.end(*row) for row in rows]
        return np.array([done for done, _ in found]), np.array([void for _, void in found], dtype=np.bool_)

    def reborn(
        self, clients: IntArray, reached: FloatArray, begun: FloatArray, done: FloatArray, void: BoolArray
    ) -> BoolArray:
        """Whose client has crashed since the work before, of works that are begun; in the order of time."""
        assert self._attendance is not None
        found = np.zeros(len(clients), dtype=np.bool_)
        if self._attendance.crashes:
            for place, client in enumerate(clients.tolist()):
                found[place] = self._crashed(client, float(self._lived[client]), float(begun[place]))
            self._lived[clients] = np.where(void, reached, done)
        return found

    def owe(self, clients: IntArray) -> None:
        """These were reborn with a work that nobody needs: the next one is to begin with nothing."""
        self._owed[clients] = True

    def paid(self, clients: IntArray, reborn: BoolArray) -> IntArray:
        """Those of clients whose works are computed now that begin with nothing."""
        if self._attendance is None or not self._attendance.crashes:
            return NO_NODES
        found = clients[reborn | self._owed[clients]]
        self._owed[found] = False
        return found

    def crashed_since_asked(self, clients: IntArray, now: float) -> IntArray:
        """Of clients that are asked now: who has crashed since it was asked before."""
        if self._attendance is None or not self._attendance.crashes:
            return NO_NODES
        before = self._asked[clients].tolist()
        crashed = [self._crashed(c, seen, now) for c, seen in zip(clients.tolist(), before, strict=True)]
        self._asked[clients] = now
        return clients[np.array(crashed, dtype=np.bool_)]

    def _crashed(self, client: int, since: float, until: float) -> bool:
        assert self._attendance is not None
        return not math.isnan(since) and self._attendance.uptimes.next_off(client, since) <= until
