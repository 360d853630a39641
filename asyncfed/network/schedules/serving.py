"""What the schedules of a server have in common: how long works take, which of them are over, and what a
board looks like to those who read it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from asyncfed.network.distributions import Constant, Distribution, Table
from asyncfed.network.links import FloatArray, IntArray
from asyncfed.network.waves import Channel, Common
from asyncfed.recall import recalled
from asyncfed.rng import Streams

REQUEST = "request"  # kind of what the server sends


class Pace:
    """What one local step of each of n clients takes; a table of `compute` has a row, and `factors` an entry,
    for each.
    """

    def __init__(self, compute: Distribution | Table, factors: FloatArray, streams: Streams) -> None:
        self._compute, self._factors, self._streams = compute, factors, streams

    def durations(self, clients: IntArray, number: int) -> FloatArray:
        """Of the steps for a request, or an attempt, with that number."""
        compute = self._compute
        if isinstance(compute, Table):
            rows = [compute.rows[client] for client in clients.tolist()]
            drawn = np.array([row[number % len(row)] for row in rows])
        elif isinstance(compute, Constant):
            drawn = np.full(len(clients), compute.value)
        else:
            uniforms = self._streams.uniforms("compute", number, 0, len(self._factors) + 1)
            drawn = compute.quantile(uniforms[clients])
        return np.asarray(drawn * self._factors[clients], dtype=np.float64)


@recalled()
class Ended:
    """How many works each of n clients has ended, and what these add up to."""

    def __init__(self, n: int) -> None:
        self._works = np.zeros(n, dtype=np.int64)  # at the last look
        self._counts: dict[str, IntArray] = {}
        self._after: list[tuple[IntArray, FloatArray, dict[str, IntArray]]] = []  # clients, times of others

    def add(self, clients: IntArray, done: FloatArray, adds: Mapping[str, IntArray]) -> None:
        """Works, when they end, and what each of them adds to which count of its client."""
        self._after.append((clients, done, dict(adds)))

    def by(self, now: float) -> tuple[IntArray, dict[str, IntArray]]:
        """Works, and counts by name; looks go forward in time."""
        after, self._after = self._after, []
        for clients, done, adds in after:
            over = done <= now
            np.add.at(self._works, clients[over], 1)
            for name, values in adds.items():
                total = self._counts.setdefault(name, np.zeros_like(self._works))
                np.add.at(total, clients[over], values[over])
            if not over.all():
                rest = {name: values[~over] for name, values in adds.items()}
                self._after.append((clients[~over], done[~over], rest))
        return self._works.copy(), {name: total.copy() for name, total in self._counts.items()}


def commons(versions: Mapping[str, int]) -> tuple[Channel, ...]:
    """The server's variables, those of one payload together."""
    names: dict[int, tuple[str, ...]] = {}
    for name, source in versions.items():
        names[source] = (*names.get(source, ()), name)
    return tuple(Common(some, source) for source, some in names.items())
