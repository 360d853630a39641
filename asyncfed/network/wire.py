"""The wire: what becomes of a message that is handed to a link at a time.

One file for all schedules, and the only writer of message rows in the trace. A message handed to a link

    is not sent     where the link is down (drawn per send; the sender knows) or the other end has left
    leaves          its sender's uplink, where that has a rate, behind the others that were handed to it
    waits           until the message before it has left: a link carries one at a time
    takes           bytes / bandwidth to be put on the wire, and then the link's latency
    is lost         by the link's loss probability (nobody knows)
    keeps its order behind the messages sent before it on the same link, as on a TCP connection, unless the
                    link is declared `ordered=False`: then it may overtake
    is taken in     by its receiver's downlink, where that has a rate, in the order in which messages reach it
                    (`sharing`): only the schedule knows that order, and so when a message arrives in the end

In lockstep a message arrives as soon as it is sent, whatever is declared of links and nodes. All
draws are addressed by (the sender's step or the server's attempt, edge).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncfed.network.links import BoolArray, FloatArray, IntArray, Network
from asyncfed.network.sharing import downlink_arrives, uplink_leaves
from asyncfed.network.waves import Recorder, Status
from asyncfed.rng import Streams


@dataclass(frozen=True, eq=False)
class Fates:
    """Of messages handed to some edges, in their order; `arrives` means something only where it `goes`. It is
    when they reach the receiver: its downlink comes after that.
    """

    up: BoolArray
    goes: BoolArray  # neither stopped by a link that is down nor lost
    arrives: FloatArray

    @property
    def status(self) -> Any:
        """As the trace has it, for what goes will be delivered."""
        if self.goes.all():
            return np.zeros(len(self.goes), dtype=np.uint8)
        down, lost = np.uint8(Status.LINK_DOWN), np.uint8(Status.LOST)
        return np.where(self.goes, np.uint8(Status.DELIVERED), np.where(self.up, lost, down))


class Wire:
    """The links of one network, over one part among peers or a whole run with a server."""

    def __init__(self, network: Network, streams: Streams, recorder: Recorder, *, instant: bool) -> None:
        self.network, self._streams, self._recorder, self._instant = network, streams, recorder, instant
        self._busy = np.full(network.edges, -np.inf)  # until when each link is
        self._newest = np.full(network.edges, -np.inf)  # when the last message on each arrives
        self._leaving = np.full(network.n, -np.inf)  # until when each node's uplink is busy
        self._taking = np.full(network.n, -np.inf)  # until when each node's downlink is
        self._attempt = -1
        self._links_up = self._arriving = np.zeros(0, dtype=np.bool_)
        self._all_ordered, self._any_ordered = bool(network.ordered.all()), bool(network.ordered.any())

    def everybody(self, step: int) -> tuple[BoolArray, BoolArray]:
        """All edges at once: which links are up at a step, and which of their messages arrive."""
        up = self.network.up(self._streams, step)
        if self.network.lossless:
            return up, up
        return up, up & ~self.network.lost(self._streams, step)

    def up_from(self, sender: int, step: int) -> BoolArray:
        """Which of a sender's links are up at its step."""
        return self.network.up_from(self._streams, sender, step)

    def send_from(self, sender: int, step: int, up: BoolArray, now: float, size: int) -> Fates:
        """One message to each receiver of a sender whose link is `up`."""
        network = self.network
        lo, hi = int(network.first[sender]), int(network.first[sender + 1])
        goes = up if network.lossless else up & ~network.lost(self._streams, step, lo, hi)
        return Fates(up, goes, self._arrivals(slice(lo, hi), up, goes, now, size, step))

    def send(self, edges: IntArray, attempt: int, at: FloatArray, size: IntArray | int) -> Fates:
        """A message on each of some edges, handed over at times `at`."""
        if attempt != self._attempt:  # requests and answers of an attempt look at the same draw
            self._attempt, (self._links_up, self._arriving) = attempt, self.everybody(attempt)
        up = self._links_up[edges]
        goes = up if self._arriving is self._links_up else self._arriving[edges]
        if self._instant:
            return Fates(up, goes, at)
        return Fates(up, goes, self._arrivals(edges, up, goes, at, size, attempt))

    def take_in(self, edges: IntArray, fates: Fates, size: IntArray | int) -> Fates:
        """The same messages when their receivers' downlinks have taken them in; to each receiver they must
        come in the order in which they are to be taken, over the calls too.
        """
        network = self.network
        if self._instant or not network.shares_downlinks:
            return fates
        goes = np.flatnonzero(fates.goes)
        here, arrives = edges[goes], fates.arrives.copy()
        arrives[goes], self._taking = downlink_arrives(
            fates.arrives[goes], network.senders[here], network.receivers[here],
            np.broadcast_to(size, edges.shape)[goes], network.downlink, self._taking,
        )  # fmt: skip
        return Fates(fates.up, fates.goes, arrives)

    def state(self, edges: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """What these links and their senders' uplinks remember of the messages before, for `restore`."""
        return self._busy[edges], self._newest[edges], self._leaving[self.network.senders[edges]]

    def restore(self, edges: IntArray, state: tuple[FloatArray, FloatArray, FloatArray]) -> None:
        """Take back what was sent on these links since: it was planned, and may not happen."""
        self._busy[edges], self._newest[edges], self._leaving[self.network.senders[edges]] = state

    def _arrivals(
        self,
        edges: IntArray | slice,
        up: BoolArray,
        goes: BoolArray,
        at: FloatArray | float,
        size: IntArray | int,
        row: int,
    ) -> FloatArray:
        network = self.network
        if network.shares_uplinks:
            at = self._out_of_uplinks(edges, up, at, size)
        leaves: FloatArray = np.maximum(at, self._busy[edges]) + size / network.bandwidth[edges]
        self._busy[edges] = np.where(up, leaves, self._busy[edges])
        if isinstance(edges, slice):
            latency = network.latencies(self._streams, row, edges.start, edges.stop)
        else:
            latency = network.latencies(self._streams, row, 0, network.edges)[edges]
        arrives: FloatArray = leaves + latency
        if self._any_ordered:
            newest = self._newest[edges]
            behind = np.maximum(arrives, newest)
            arrives = behind if self._all_ordered else np.where(network.ordered[edges], behind, arrives)
            self._newest[edges] = np.where(goes, np.maximum(arrives, newest), newest)
        return arrives

    def _out_of_uplinks(
        self, edges: IntArray | slice, up: BoolArray, at: FloatArray | float, size: IntArray | int
    ) -> FloatArray:
        network, sent = self.network, np.flatnonzero(up)
        senders, receivers = network.senders[edges][sent], network.receivers[edges][sent]
        leaves = np.broadcast_to(np.asarray(at, dtype=np.float64), up.shape).copy()
        leaves[sent], self._leaving = uplink_leaves(
            leaves[sent], senders, receivers, np.broadcast_to(size, up.shape)[sent], network.uplink,
            self._leaving,
        )  # fmt: skip
        return leaves

    # --- the trace -----------------------------------------------------------------------------------

    def record(self, sender: Any, receiver: Any, status: Any, **row: Any) -> None:
        """Write down messages whose fate is known; `row` are the other columns of `Recorder.messages`."""
        self._recorder.messages(sender=sender, receiver=receiver, status=status, **row)

    def record_steps(self, client: Any, **row: Any) -> None:
        """Write down steps, which frame the messages."""
        self._recorder.steps(client=client, **row)
