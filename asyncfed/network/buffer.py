"""A server that does not wait for everybody: it moves when K answers are in, and whoever has answered goes on
at once; the rest is in `schedules.buffered`.

An answer is as *stale* as the server has moved often between its request and its use. The network knows that,
so what a stale answer counts is decided here, by a decay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability, Words
from asyncfed.errors import ScenarioError
from asyncfed.network.links import BoolArray, FloatArray, IntArray, Network
from asyncfed.network.server import Server, server_links
from asyncfed.registry import register
from asyncfed.rng import Streams

Share = Annotated[
    PositiveInt | Probability, Words("a whole number, at least 1, or a fraction in (0, 1] of all clients")
]


@runtime_checkable
class Decay(Protocol):
    """What an answer counts that is so many moves stale."""

    def factor(self, staleness: IntArray) -> FloatArray: ...


@register("option")
@dataclass(frozen=True)
class NoDecay:
    """1, however stale."""

    def factor(self, staleness: IntArray) -> FloatArray:
        return np.ones(len(staleness))


@register("option")
@dataclass(frozen=True)
class PolynomialDecay:
    """(1 + s)^−power (Xie et al. 2019)."""

    power: NonNegativeFloat = 0.5

    def factor(self, staleness: IntArray) -> FloatArray:
        return np.asarray((1.0 + staleness) ** -float(self.power))


@register("option")
@dataclass(frozen=True)
class HingeDecay:
    """1 up to s = `until`, then 1 / (slope · (s − until) + 1) (Xie et al. 2019)."""

    slope: NonNegativeFloat = 10.0
    until: NonNegativeFloat = 4.0

    def factor(self, staleness: IntArray) -> FloatArray:
        return np.asarray(1.0 / (self.slope * np.maximum(staleness - self.until, 0.0) + 1.0))


@register("option")
@dataclass(frozen=True)
class Buffered:
    """How a server asks that does not wait.

    Parameters
    ----------
    size
        K: it moves when that many answers are in. A whole number, or a fraction in (0, 1] of all clients.
    at_work
        How many clients may be at work at once: a whole number, or a fraction of all. By default all.
    asks
        Who is asked when a place is free: "fresh", a uniform draw among those not at work; "weighted", one
        drawn by numbers of training samples; or "same", the one that gave up the place.
    weighted
        Whether an answer counts as much as its client has training samples; by default all count the same.
    decay
        What a stale answer counts: `NoDecay()`, `PolynomialDecay(power)` or `HingeDecay(slope, until)`.
    max_staleness
        The most moves that an answer may be stale; None for any number.
    too_stale
        What is done about that: "drop" refuses an answer that is staler, and its client is asked again; with
        "wait" the server does not move while somebody at work would thereby become too stale.
    attempts
        How often a free place is tried to be filled at one time; the run ends with an error where nobody is
        at work after that, or where so many answers in a row got lost for each place.
    """

    size: Share = 10
    at_work: Share = 1.0
    asks: Literal["same", "fresh", "weighted"] = "fresh"
    weighted: bool = False
    decay: Annotated[Decay, Words("NoDecay(), PolynomialDecay(…) or HingeDecay(…)")] = field(
        default_factory=NoDecay
    )
    max_staleness: NonNegativeInt | None = None
    too_stale: Literal["drop", "wait"] = "drop"
    attempts: PositiveInt = 100

    def check(self, network: Network, lockstep: bool) -> None:
        """Refuse a network without a server, clients it cannot talk with, and more places than clients."""
        server_links(network)
        clients = network.n - 1
        if self.places(clients) > clients:
            raise ScenarioError(
                f"at_work is {self.at_work}, and there are {clients} clients; nobody works on two requests "
                f"at once, so give at most {clients}"
            )

    def on(self, network: Network) -> Buffered:
        """It names no clients."""
        return self

    def may_ask(self, clients: int, turn: int) -> IntArray:
        """Whoever is free may be asked."""
        return np.arange(clients, dtype=np.int64)

    def draw(
        self, streams: Streams, iteration: int, cohort: int, clients: int, turn: int, there: BoolArray
    ) -> IntArray:
        """The same: who is asked when is decided as the run goes."""
        return self.may_ask(clients, turn)

    def needed(self, clients: int) -> int:
        """K."""
        return _share(self.size, clients)

    def places(self, clients: int) -> int:
        """How many may be at work at once."""
        return _share(self.at_work, clients)


AnyServer: TypeAlias = Server | Buffered


def _share(value: float, clients: int) -> int:
    return value if isinstance(value, int) else max(1, int(np.ceil(value * clients - 1e-9)))
