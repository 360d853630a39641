"""A server among its clients: whom it asks, and how long it waits; the rest is in `schedules.asked`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np

from asyncfed.checks import PositiveFloat, PositiveInt, Probability, Words
from asyncfed.errors import ScenarioError, TopologyError
from asyncfed.network.links import BoolArray, IntArray, Network
from asyncfed.network.names import plain_name
from asyncfed.registry import register
from asyncfed.rng import Streams

Participation = Annotated[
    Probability | Sequence[int | str] | Sequence[Sequence[int | str]],
    Words("a fraction in (0, 1], a list of clients, or a list of such lists"),
]
Quorum = Annotated[
    PositiveInt | Probability | None,
    Words("a whole number of answers, at least 1, or a fraction in (0, 1] of those asked, or None for all"),
]


@register("option")
@dataclass(frozen=True)
class Server:
    """How the server asks and waits.

    Parameters
    ----------
    participation
        Which clients it asks: a fraction C in (0, 1] of all, drawn anew as often as the method says; or the
        names or numbers of some clients, always the same; or a list of such sets, taken in turn at every
        draw.
    weighted
        Whether an answer counts as much as its client has training samples; by default all count the same.
    quorum
        Close a round as soon as that many answers are there: a whole number, or a fraction of those asked.
        None waits for everyone. (Where fewer clients are there to be asked, all of them are enough.)
    deadline
        Close a round that long (in virtual time) after its requests were sent, with whatever is there.
    late
        What becomes of answers that come too late: "drop", or "next" to hold them for the next round of their
        kind.
    attempts
        How often those who did not answer are asked in one round before the run ends with an error.
    requests
        What a client does with a request that it has not begun when a newer one comes: "newest" forgets the
        older one, "all" works off one after the other.
    """

    participation: Participation = 1.0
    weighted: bool = False
    quorum: Quorum = None
    deadline: PositiveFloat | None = None
    late: Literal["drop", "next"] = "drop"
    attempts: PositiveInt = 100
    requests: Literal["newest", "all"] = "newest"

    def __post_init__(self) -> None:
        if isinstance(self.participation, tuple):
            object.__setattr__(self, "participation", _plain_names(self.participation))
        for some in self._sets():
            if not some:
                raise ScenarioError("participation names no clients; give at least one in every set")
            if len(set(some)) < len(some):
                raise ScenarioError(f"participation {list(some)} names a client twice; name each once")

    def check(self, network: Network, lockstep: bool) -> None:
        """Refuse a network without a server, clients it cannot talk with, and what can never be met."""
        clients = _clients(network)
        if lockstep and self.deadline is not None:
            raise ScenarioError(
                f"a deadline of {self.deadline} needs virtual time, for in lockstep every answer comes in "
                "the same unit of time; give the scenario timing=VirtualTime(…), or leave the deadline out"
            )
        sets = self.on(network)._sets()
        fewest = min(map(len, sets)) if sets else self._count(clients)
        if self.quorum is not None and self._needed(fewest) > fewest:
            raise ScenarioError(
                f"a quorum of {self.quorum} answers cannot be met where {fewest} clients are asked; lower "
                "the quorum or raise the participation"
            )
        server_links(network)

    def on(self, network: Network) -> Server:
        """The same with the numbers of the clients that it names."""
        if not isinstance(self.participation, tuple):
            return self
        clients = network.names.first(network.n - 1)
        sets = [[clients.number(one, "participation") for one in some] for some in self._sets()]
        return replace(self, participation=sets)

    def may_ask(self, clients: int, turn: int) -> IntArray:
        """Those among whom draw number `turn` of the run is made."""
        sets = self._sets()
        if sets:
            return np.array(sorted(sets[turn % len(sets)]), dtype=np.int64)
        return np.arange(clients, dtype=np.int64)

    def ever_asks_all(self, clients: int) -> bool:
        """Whether some draw is of everybody, where everybody is there."""
        sets = self._sets()
        return max(map(len, sets)) == clients if sets else self._count(clients) == clients

    def draw(
        self, streams: Streams, iteration: int, cohort: int, clients: int, turn: int, there: BoolArray
    ) -> IntArray:
        """Draw number `cohort` of an outer iteration, number `turn` of the run: the clients that are asked,
        in order, of those who are there. A fraction is one of all clients, as far as so many are there.
        """
        among = self.may_ask(clients, turn)
        count = clients if self._sets() else self._count(clients)
        if count == clients:
            return among[there[among]]
        order = np.argsort(streams.uniforms("participation", iteration, 0, clients, lane=cohort))
        return np.sort(order[there[order]][:count]).astype(np.int64)

    def needed(self, asked: int) -> int:
        """Answers without which a round cannot be closed."""
        return 1 if self.quorum is None else self._needed(asked)

    def _needed(self, asked: int) -> int:
        assert self.quorum is not None
        if isinstance(self.quorum, int):
            return self.quorum
        return max(1, int(np.ceil(self.quorum * asked - 1e-9)))

    def _count(self, clients: int) -> int:
        assert not isinstance(self.participation, Sequence)
        return max(1, int(self.participation * clients + 0.5))

    def _sets(self) -> tuple[tuple[Any, ...], ...]:
        given: Any = self.participation
        if not isinstance(given, tuple):
            return ()
        return given if given and isinstance(given[0], tuple) else (given,)


def _plain_names(some: tuple[Any, ...]) -> tuple[Any, ...]:
    """Clients as a scenario keeps them, in sets or not."""
    return tuple(_plain_names(one) if isinstance(one, tuple) else plain_name(one) for one in some)


def _clients(network: Network) -> int:
    if network.server is None:
        raise TopologyError(
            "the method needs a server, and the topology has none; use topologies.star(clients), or say "
            "which node of your graph it is with graph.graph['server'] = node"
        )
    return network.n - 1


def server_links(network: Network) -> tuple[IntArray, IntArray]:
    """For every client the edge from the server (which stands last) to it, and the edge back."""
    server = _clients(network)
    nodes = np.arange(server, dtype=np.int64)
    code = network.senders * network.n + network.receivers
    found = []
    for wanted, way in (
        (server * network.n + nodes, "from the server to"),
        (nodes * network.n + server, "to the server from"),
    ):
        place = np.minimum(np.searchsorted(code, wanted), max(0, len(code) - 1))
        missing = nodes if not len(code) else nodes[code[place] != wanted]
        if len(missing):
            raise TopologyError(
                f"there is no link {way} client {network.names[int(missing[0])]} ({len(missing)} such "
                "clients in all); a server needs a link to and from every client: use topologies.star(…)"
            )
        found.append(place.astype(np.int64))
    return found[0], found[1]
