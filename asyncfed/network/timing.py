"""The two timing models, as values a scenario names; each opens schedules on a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from asyncfed.checks import Capacity, LossProbability, Words
from asyncfed.errors import ScenarioError
from asyncfed.network.buffer import AnyServer, Buffered
from asyncfed.network.distributions import (
    Constant,
    Distribution,
    Duration,
    PositiveTime,
    Table,
    as_distribution,
)
from asyncfed.network.expectations import Tally
from asyncfed.network.links import FloatArray, Network, compile_network
from asyncfed.network.names import plain_name
from asyncfed.network.presence import Attendance, Presence
from asyncfed.network.schedules.asked import AskedSchedule
from asyncfed.network.schedules.buffered import BufferedSchedule
from asyncfed.network.schedules.lockstep import LockstepSchedule
from asyncfed.network.schedules.paced import PacedSchedule
from asyncfed.network.uptimes import WholeSteps
from asyncfed.network.waves import Conversation, Recorder, Schedule
from asyncfed.network.weights import Mixing
from asyncfed.network.wire import Wire
from asyncfed.registry import register
from asyncfed.rng import Streams

if TYPE_CHECKING:
    import networkx as nx


AnyPresence = Annotated[
    Presence | None,
    Words("GivenPresence(…), DrawnPresence(…), PresenceFile(…), or None where everybody is always there"),
]
RunningSums = Annotated[bool | None, Words("True, False, or None for methods whose sums need them")]
Factors = Annotated[
    Mapping[int | str, PositiveTime] | Sequence[PositiveTime],
    Words("a mapping from client to factor, finite and above 0, or one such factor for each client"),
]

# Of each run, by its randomness, the presence of so many clients: all its parts look at the same.
_OPENED: WeakKeyDictionary[Streams, dict[int, Attendance]] = WeakKeyDictionary()


@register("timing")
@dataclass(frozen=True)
class Lockstep:
    """The papers' model. A step is the unit of time.

    A topology's latencies and bandwidths, and how fast its nodes are, play no part; its losses do. `loss` is
    for edges that carry none of their own. `presence` says when clients are there, if they are not always; it
    is looked at at whole steps. `running_sums` are those of `VirtualTime`.
    """

    loss: LossProbability = 0.0
    presence: AnyPresence = None
    running_sums: RunningSums = None
    barrier: ClassVar[bool] = True  # a round is everybody's

    def network(self, graph: nx.Graph) -> Network:
        return compile_network(graph, loss=self.loss, whole_steps=True)

    def snapshot_interval(self, steps: int, network: Network, samples: FloatArray | None = None) -> float:
        return max(1, round(steps / 20))

    def pace(self, network: Network, clients: int, samples: FloatArray | None = None) -> FloatArray:
        """Steps per unit of time of each of the clients, whose steps go over so many samples each."""
        return np.ones(clients)

    def among_peers(
        self,
        network: Network,
        mixing: Mixing,
        streams: Streams,
        talk: Conversation,
        recorder: Recorder,
        snapshot_every: float,
        tally: Tally | None = None,
    ) -> Schedule:
        """One part of a method among peers."""
        wire = Wire(network, streams, recorder, instant=True, back=talk.back)
        attendance = self.attendance(network, network.n, streams)
        if attendance is None and (network.lossless or not talk.recovers):
            return LockstepSchedule(wire, mixing, talk, snapshot_every, tally=tally)
        # Not every wave is everybody, or of one round: virtual time in which a step lasts one unit.
        if attendance is not None:
            attendance = replace(attendance, uptimes=WholeSteps(attendance.uptimes))
        return PacedSchedule(
            wire, mixing, streams, talk, max(1, round(snapshot_every)), compute=Constant(1.0),
            factors=np.ones(network.n), horizon=None, attendance=attendance, tally=tally,
        )  # fmt: skip

    def with_server(
        self, network: Network, streams: Streams, recorder: Recorder, server: AnyServer
    ) -> ServerSchedule:
        """All rounds of a method with a server."""
        wire = Wire(network, streams, recorder, instant=True)
        attendance = self.attendance(network, network.n - 1, streams)
        return _serving(wire, streams, server, None, np.ones(network.n - 1), attendance)

    def attendance(self, network: Network, clients: int, streams: Streams) -> Attendance | None:
        """When the clients are there; None where all always are."""
        return _attendance(self.presence, network, clients, streams)


@register("timing")
@dataclass(frozen=True)
class VirtualTime:
    """Every client at its own pace.

    Parameters
    ----------
    compute
        How long a step takes: a number, a distribution (`Exponential(1.0)` or the text "exponential(1.0)"),
        or a `Table`.
    factors
        How many times slower some clients are: a mapping from client (its name, or its number) to factor, or
        one factor per client, beside what a topology's nodes say of themselves (`compute`). (A server is no
        client and takes no time.)
    per
        What the compute time is of: a "step", or a "sample": then a step takes as many times longer as it has
        samples in its minibatch, and a client's work for a server as it goes over samples.
    latency, bandwidth, loss
        For edges that carry none of their own; bandwidth in bytes per unit of time.
    ordered
        Whether messages on a link arrive in the order in which they were sent, as on a TCP connection, or may
        overtake one another; for edges that do not say so themselves.
    horizon
        The virtual time at which the run ends; without it every client makes all of its steps.
    presence
        When clients are there, if they are not always.
    running_sums
        Whether what is lost on a link comes with the next message that gets through, among peers: by default
        (None) for methods whose sums are wrong otherwise, as those of push-sum are.
    barrier
        Whether all clients wait for the slowest between the parts of a method among peers (PDBO's inner steps
        and its hypergradient, say). Without, each goes on when it is through itself: messages of a part wait
        for those who are not there yet, and those that come to one who is through are late. Clients are then
        judged at the ends of parts only.
    """

    compute: Duration | Table = 1.0
    factors: Factors = field(default_factory=dict)
    latency: Duration = 0.0
    bandwidth: Capacity = float("inf")
    loss: LossProbability = 0.0
    horizon: PositiveTime | None = None
    ordered: bool = True
    per: Literal["step", "sample"] = "step"
    presence: AnyPresence = None
    running_sums: RunningSums = None
    barrier: bool = True

    def __post_init__(self) -> None:
        compute = self.compute if isinstance(self.compute, Table) else as_distribution(self.compute)
        if compute.mean <= 0:
            raise ScenarioError(
                f"a compute time of {compute} must be above 0, or a client would make all its steps at once"
            )
        object.__setattr__(self, "compute", compute)
        object.__setattr__(self, "latency", as_distribution(self.latency))
        if isinstance(self.factors, Mapping):
            named = {plain_name(client): factor for client, factor in self.factors.items()}
            object.__setattr__(self, "factors", named)

    def network(self, graph: nx.Graph) -> Network:
        network = compile_network(
            graph, latency=self.latency, bandwidth=self.bandwidth, loss=self.loss, ordered=self.ordered
        )
        if network.server is None:  # with a server it depends on the method whether that is a client too
            self.pace(network, network.n)  # refuses what does not fit the clients
        return network

    def snapshot_interval(self, steps: int, network: Network, samples: FloatArray | None = None) -> float:
        assert not isinstance(self.compute, (str, float, int))
        if self.horizon is not None:
            return self.horizon / 20
        factors = self._factor_array(network, network.n, samples)
        usual, slowest = float(np.median(factors)), float(factors.max())
        # With stragglers most clients finish early in the run: look twice as often.
        return steps * self.compute.mean * (usual / 20 if slowest <= usual else slowest / 40)

    def pace(self, network: Network, clients: int, samples: FloatArray | None = None) -> FloatArray:
        """Mean steps per unit of time of each of the clients."""
        assert not isinstance(self.compute, (str, float, int))
        factors = self._factor_array(network, clients, samples)
        if not isinstance(self.compute, Table):
            return 1.0 / (self.compute.mean * factors)
        if len(self.compute.rows) != clients:
            raise ScenarioError(
                f"the compute-time table has {len(self.compute.rows)} rows, but there are {clients} "
                "clients; give one row each"
            )
        return 1.0 / (np.array([np.mean(row) for row in self.compute.rows]) * factors)

    def among_peers(
        self,
        network: Network,
        mixing: Mixing,
        streams: Streams,
        talk: Conversation,
        recorder: Recorder,
        snapshot_every: float,
        tally: Tally | None = None,
    ) -> Schedule:
        assert not isinstance(self.compute, (str, float, int))
        factors = self._factor_array(network, network.n, talk.samples)
        return PacedSchedule(
            Wire(network, streams, recorder, instant=False, back=talk.back), mixing, streams, talk,
            snapshot_every, compute=self.compute, factors=factors, horizon=self.horizon,
            attendance=self.attendance(network, network.n, streams), tally=tally,
        )  # fmt: skip

    def with_server(
        self, network: Network, streams: Streams, recorder: Recorder, server: AnyServer
    ) -> ServerSchedule:
        assert not isinstance(self.compute, (str, float, int))
        if network.compute[-1] != 1:
            raise ScenarioError(
                f"compute of node {network.labels[-1]} is {network.compute[-1]:g}, but that is the server, "
                "which takes no time; leave it out"
            )
        wire = Wire(network, streams, recorder, instant=False)
        factors = self._factor_array(network, network.n - 1)
        attendance = self.attendance(network, network.n - 1, streams)
        return _serving(wire, streams, server, self.compute, factors, attendance)

    def attendance(self, network: Network, clients: int, streams: Streams) -> Attendance | None:
        return _attendance(self.presence, network, clients, streams)

    def _factor_array(self, network: Network, n: int, samples: FloatArray | None = None) -> FloatArray:
        """How many times longer than the compute time a step of each client takes."""
        if not isinstance(self.factors, Mapping) and len(self.factors) != n:
            raise ScenarioError(
                f"{len(self.factors)} compute-time factors are given for {n} clients; "
                "give one each, or a mapping for some"
            )
        array = np.ones(n)
        if isinstance(self.factors, Mapping):
            clients = network.names.first(n)
            for client, factor in self.factors.items():
                array[clients.number(client, "a compute-time factor")] = factor
        else:
            array[:] = self.factors
        array *= network.compute[:n]
        if self.per == "sample" and samples is not None:
            array *= samples
        return array


def _serving(
    wire: Wire,
    streams: Streams,
    server: AnyServer,
    compute: Distribution | Table | None,
    factors: FloatArray,
    attendance: Attendance | None,
) -> ServerSchedule:
    if isinstance(server, Buffered):
        return BufferedSchedule(
            wire, streams, server, compute=compute, factors=factors, attendance=attendance
        )
    return AskedSchedule(wire, streams, server, compute=compute, factors=factors, attendance=attendance)


def _attendance(
    presence: Presence | None, network: Network, clients: int, streams: Streams
) -> Attendance | None:
    if presence is None:
        return None
    opened = _OPENED.setdefault(streams, {})
    if clients not in opened:
        opened[clients] = presence.attend(network.names.first(clients), streams)
    return opened[clients]


ServerSchedule: TypeAlias = AskedSchedule | BufferedSchedule
Timing: TypeAlias = Lockstep | VirtualTime
