"""The wire: what becomes of a message that is handed to a link at a time.

One file for all schedules, and the only writer of message rows in the trace. A message handed to a link

    is not sent     where the link is down (drawn per send; the sender knows) or the other end has left
    waits           until the message before it has left: a link carries one at a time
    takes           bytes / bandwidth to be put on the wire, and then the link's latency
    is lost         by the link's loss probability (nobody knows)
    keeps its order behind the messages sent before it on the same link, as on a TCP connection, unless the
                    link is declared `ordered=False`: then it may overtake

In lockstep a message arrives as soon as it is sent, whatever latency and bandwidth the link declares. All
draws are addressed by (the sender's step or the server's attempt, edge).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncfed.network.links import BoolArray, FloatArray, IntArray, Network
from asyncfed.network.waves import Recorder, Status
from asyncfed.rng import Streams


@dataclass(frozen=True, eq=False)
class Fates:
    """Of messages handed to some edges, in their order; `arrives` means something only where it `goes`."""

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

    def state(self, edges: IntArray) -> tuple[FloatArray, FloatArray]:
        """What these links remember of the messages before, for `restore`."""
        return self._busy[edges], self._newest[edges]

    def restore(self, edges: IntArray, state: tuple[FloatArray, FloatArray]) -> None:
        """Take back what was sent on these links since: it was planned, and may not happen."""
        self._busy[edges], self._newest[edges] = state

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
        leaves: FloatArray = np.maximum(at, self._busy[edges]) + size / network.bandwidth[edges]
        self._busy[edges] = np.where(up, leaves, self._busy[edges])
        if isinstance(edges, slice):
            latency = network.latencies(self._streams, row, edges.start, edges.stop)
        else:
            latency = network.latencies_at(self._streams, row, edges)
        arrives: FloatArray = leaves + latency
        if self._any_ordered:
            newest = self._newest[edges]
            behind = np.maximum(arrives, newest)
            arrives = behind if self._all_ordered else np.where(network.ordered[edges], behind, arrives)
            self._newest[edges] = np.where(goes, np.maximum(arrives, newest), newest)
        return arrives

    # --- the trace -----------------------------------------------------------------------------------

    def record(self, sender: Any, receiver: Any, status: Any, **row: Any) -> None:
        """Write down messages whose fate is known; `row` are the other columns of `Recorder.messages`."""
        self._recorder.messages(sender=sender, receiver=receiver, status=status, **row)

    def record_steps(self, client: Any, **row: Any) -> None:
        """Write down steps, which frame the messages."""
        self._recorder.steps(client=client, **row)
