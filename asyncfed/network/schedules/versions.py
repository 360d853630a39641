"""What a server's variables are, and who has them: the bytes that a request must carry.

Every variable of the server has a version: the payload in which it last changed. A request carries what the
client is not known to have, and it is known to have what it has answered to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from asyncfed.network.links import IntArray
from asyncfed.recall import recalled


@recalled()
class Versions:
    """Of one server with n clients."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.now: dict[str, int] = {}
        self._known: dict[str, IntArray] = {}  # by variable: which version each client is known to have
        self._readable: set[int] = set()  # payloads that may still be read

    def of(self, names: Iterable[str]) -> dict[str, int]:
        return {name: self.now[name] for name in names}

    def news(self, sizes: Mapping[str, int], clients: IntArray) -> IntArray:
        """Bytes of what each of the clients does not have, of variables of these sizes."""
        total = np.zeros(len(clients), dtype=np.int64)
        for name, size in sizes.items():
            if name not in self._known:
                self._known[name] = np.full(self._n, -1, dtype=np.int64)
            total += size * (self._known[name][clients] != self.now[name])
        return total

    def forgotten(self, clients: IntArray) -> None:
        """These have lost all they had."""
        for known in self._known.values():
            known[clients] = -1

    def answered(self, names: Iterable[str], clients: IntArray) -> None:
        """To a request of now."""
        for name in names:
            self._known[name][clients] = self.now[name]

    def answered_late(self, versions: Mapping[str, int], client: int) -> None:
        """To a request of an earlier round, when these were the versions."""
        for name, version in versions.items():
            self._known[name][client] = max(int(self._known[name][client]), version)

    def written(
        self, names: Iterable[str], payload: int, waited_for: Iterable[Mapping[str, int]]
    ) -> set[int]:
        """These changed with that payload; returns the payloads that are then read no more, except for those
        that somebody who has not begun will read.
        """
        for name in names:
            self.now[name] = payload
        wanted = set(self.now.values()).union(*(versions.values() for versions in waited_for))
        stale = self._readable - wanted
        self._readable = (self._readable & wanted) | {payload}
        return stale
