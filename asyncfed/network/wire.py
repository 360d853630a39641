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
from asyncfed.recall import recalled
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


@recalled(given=("network", "_streams", "_recorder", "_instant", "_back", "_all_ordered", "_any_ordered"))
class Wire:
    """The links of one network, over one part among peers or a whole run with a server. Draws are those of
    the step `back` steps before.
    """

    def __init__(
        self, network: Network, streams: Streams, recorder: Recorder, *, instant: bool, back: int = 0
    ) -> None:
        self.network, self._streams, self._recorder, self._instant = network, streams, recorder, instant
        self._back = back
        self._busy = np.full(network.edges, -np.inf)  # until when each link is
        self._newest = np.full(network.edges, -np.inf)  # when the last message on each arrives
        self._leaving = np.full(network.n, -np.inf)  # until when each node's uplink is busy
        self._taking = np.full(network.n, -np.inf)  # until when each node's downlink is
        self._attempt = -1
        self._links_up = self._arriving = np.zeros(0, dtype=np.bool_)
        self._all_ordered, self._any_ordered = bool(network.ordered.all()), bool(network.ordered.any())

    def everybody(self, step: int, at: float) -> tuple[BoolArray, BoolArray]:
        """All edges at once: which links are up at a step and a time, and which of their messages arrive."""
        drawn = step - self._back
        up = self.network.up(self._streams, drawn, at)
        if self.network.lossless:
            return up, up
        return up, up & ~self.network.lost(self._streams, drawn)

    def up_of(self, edges: IntArray, steps: IntArray, at: FloatArray) -> BoolArray:
        """Which of these links are up, each at a step of its sender and a time."""
        return self.network.up_of(self._streams, edges, steps - self._back, at)

    def send_many(
        self, edges: IntArray, steps: IntArray, up: BoolArray, at: FloatArray, size: int, turn: IntArray
    ) -> Fates:
        """A message on each edge that is `up`, handed over at times `at`. A sender may send repeatedly:
        `turn` counts how often it has before, in the order of time.
        """
        network, drawn = self.network, steps - self._back
        goes = up if network.lossless else up & ~network.lost_of(self._streams, edges, drawn)
        if self._instant:
            return Fates(up, goes, at)
        latency = network.latencies_of(self._streams, edges, drawn)
        if network.prompt:  # nothing waits, and nothing overtakes
            return Fates(up, goes, at + latency)
        arrives = np.empty(len(edges))
        for number in range(int(turn.max(initial=-1)) + 1):
            now = np.flatnonzero(turn == number)
            arrives[now] = self._arrivals(edges[now], up[now], goes[now], at[now], size, latency[now])
        return Fates(up, goes, arrives)

    def send(self, edges: IntArray, attempt: int, at: FloatArray, size: IntArray | int) -> Fates:
        """A message on each of some edges, handed over at times `at`."""
        if not self.network.independent:
            steps = np.full(len(edges), attempt)
            up = self.network.up_of(self._streams, edges, steps, at)
            goes = up & ~self.network.lost_of(self._streams, edges, steps)
        else:
            if attempt != self._attempt:  # requests and answers of an attempt look at the same draw
                self._attempt, (self._links_up, self._arriving) = attempt, self.everybody(attempt, 0.0)
            up = self._links_up[edges]
            goes = up if self._arriving is self._links_up else self._arriving[edges]
        if self._instant:
            return Fates(up, goes, at)
        latency = self.network.latencies_of(self._streams, edges, np.full(len(edges), attempt))
        return Fates(up, goes, self._arrivals(edges, up, goes, at, size, latency))

    @property
    def shares_downlinks(self) -> bool:
        """Whether messages have to be taken in."""
        return self.network.shares_downlinks and not self._instant

    def take_in(
        self, edges: IntArray, fates: Fates, size: IntArray | int, *, foreseen: bool = False
    ) -> Fates:
        """The same messages when their receivers' downlinks have taken them in; to each receiver they must
        come in the order in which they are to be taken, over the calls too. What is only `foreseen` is
        forgotten.
        """
        network = self.network
        if not self.shares_downlinks:
            return fates
        goes = np.flatnonzero(fates.goes)
        here, arrives = edges[goes], fates.arrives.copy()
        arrives[goes], busy = downlink_arrives(
            fates.arrives[goes], network.senders[here], network.receivers[here],
            np.broadcast_to(size, edges.shape)[goes], network.downlink, self._taking,
        )  # fmt: skip
        if not foreseen:
            self._taking = busy
        return Fates(fates.up, fates.goes, arrives)

    def state(self, edges: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """What these links and their senders' uplinks remember of the messages before, for `restore`."""
        return self._busy[edges], self._newest[edges], self._leaving[self.network.senders[edges]]

    def restore(self, edges: IntArray, state: tuple[FloatArray, FloatArray, FloatArray]) -> None:
        """Take back what was sent on these links since: it was planned, and may not happen."""
        self._busy[edges], self._newest[edges], self._leaving[self.network.senders[edges]] = state

    def _arrivals(
        self,
        edges: IntArray,
        up: BoolArray,
        goes: BoolArray,
        at: FloatArray,
        size: IntArray | int,
        latency: FloatArray,
    ) -> FloatArray:
        network = self.network
        if network.shares_uplinks:
            at = self._out_of_uplinks(edges, up, at, size)
        leaves: FloatArray = np.maximum(at, self._busy[edges]) + size / network.bandwidth[edges]
        self._busy[edges] = np.where(up, leaves, self._busy[edges])
        arrives: FloatArray = leaves + latency
        if self._any_ordered:
            newest = self._newest[edges]
            behind = np.maximum(arrives, newest)
            arrives = behind if self._all_ordered else np.where(network.ordered[edges], behind, arrives)
            self._newest[edges] = np.where(goes, np.maximum(arrives, newest), newest)
        return arrives

    def _out_of_uplinks(
        self, edges: IntArray, up: BoolArray, at: FloatArray, size: IntArray | int
    ) -> FloatArray:
        network, sent, leaves = self.network, np.flatnonzero(up), at.copy()
        leaves[sent], self._leaving = uplink_leaves(
            at[sent], network.senders[edges[sent]], network.receivers[edges[sent]],
            np.broadcast_to(size, up.shape)[sent], network.uplink, self._leaving,
        )  # fmt: skip
        return leaves

    # --- the trace -----------------------------------------------------------------------------------

    def record(self, sender: Any, receiver: Any, status: Any, **row: Any) -> None:
        """Write down messages whose fate is known; `row` are the other columns of `Recorder.messages`."""
        self._recorder.messages(sender=sender, receiver=receiver, status=status, **row)

    def record_steps(self, client: Any, **row: Any) -> None:
        """Write down steps, which frame the messages."""
        self._recorder.steps(client=client, **row)
