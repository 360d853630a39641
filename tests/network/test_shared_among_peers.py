"""Shared up- and downlinks among peers: against a slow queue of events, and by hand.

In the slow loop nothing is planned ahead: what happens at a time is decided at that time. At one instant
steps end and send, then messages reach their receivers and are taken in, and then steps begin.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed.network.distributions import Table
from asyncfed.network.presence import GivenPresence
from asyncfed.network.timing import Lockstep, VirtualTime
from asyncfed.network.waves import Status
from asyncfed.rng import Streams
from tests.network.played import Setting, play, settings_of, with_shared_links

law = settings(max_examples=200, deadline=None, derandomize=True)
END, REACH, TAKEN_IN, BEGIN = range(4)


@dataclass
class _Message:
    sender: int
    receiver: int
    step: int
    sent: float
    arrives: float = math.nan
    absorbed: int = -1
    carries: list[_Message] = field(default_factory=list)


class SlowPeers:
    """Client by client, message by message."""

    def __init__(self, setting: Setting) -> None:
        assert isinstance(setting.timing, VirtualTime)
        self.setting, self.timing = setting, setting.timing
        self.network, self.streams = setting.timing.network(setting.graph), Streams(setting.seed)
        self.events: list[tuple[float, int, int, int, Any]] = []
        self.order = itertools.count()
        self.until: dict[tuple[str, int], float] = {}  # when each uplink, link and downlink is free again
        self.newest: dict[int, float] = {}
        self.here: dict[int, list[_Message]] = defaultdict(list)
        self.waits: dict[int, list[_Message]] = defaultdict(list)  # lost on a link
        self.left: dict[int, float] = {}
        self.begun = dict.fromkeys(range(self.network.n), setting.first_step)
        self.rows: list[tuple[Any, ...]] = []
        self.last = setting.started_at

    def run(self) -> list[tuple[Any, ...]]:
        for client in range(self.network.n):
            self.push(self.setting.started_at, BEGIN, client, client)
        while self.events:
            time, what, _, _, value = heapq.heappop(self.events)
            (self.end, self.reach, self.taken_in, self.begin)[what](time, value)
        end = self.last if self.timing.horizon is None else self.timing.horizon
        for client, messages in self.here.items():
            for message in messages:
                here = message.arrives <= end
                self.note(message, Status.DELIVERED if here else Status.IN_FLIGHT, self.begun[client])
        for messages in self.waits.values():
            for message in messages:
                self.row(message, Status.LOST, None, None)
        return sorted(self.rows)

    def push(self, time: float, what: int, tie: int, value: Any) -> None:
        heapq.heappush(self.events, (time, what, tie, next(self.order), value))

    def queue(self, what: str, which: int, at: float, rate: float) -> float:
        if math.isinf(rate):
            return at
        over = max(at, self.until.get((what, which), -math.inf)) + self.setting.message_bytes / rate
        self.until[what, which] = over
        return over

    def drawn(self, stream: str, step: int, place: int) -> np.ndarray:
        return self.streams.uniforms(stream, step, place, place + 1)

    # --- what happens ---

    def begin(self, now: float, client: int) -> None:
        step = self.begun[client]
        if step == self.setting.first_step + self.setting.steps:
            return
        if isinstance(self.timing.compute, Table):
            row = self.timing.compute.rows[client]
            takes = row[step % len(row)]
        else:
            takes = float(self.timing.compute.quantile(self.drawn("compute", step, client))[0])
        end = now + takes * dict(self.timing.factors).get(client, 1.0)
        if self.timing.horizon is not None and end > self.timing.horizon:
            return
        for message in self.here.pop(client, []):
            self.note(message, Status.DELIVERED, step)
        self.begun[client], self.last = step + 1, max(self.last, end)
        self.push(end, END, client, (client, step))
        if step + 1 == self.setting.first_step + self.setting.steps:
            self.left[client] = end

    def end(self, now: float, step_of: tuple[int, int]) -> None:
        client, step = step_of
        network = self.network
        for edge in np.flatnonzero(network.senders == client).tolist():
            receiver = int(network.receivers[edge])
            if self.left.get(receiver, math.inf) < now:
                continue
            message = _Message(client, receiver, step, now)
            if not self.drawn("links", step, int(network.draw[edge]))[0] < network.probability[edge]:
                self.row(message, Status.LINK_DOWN, None, None)
                continue
            at = self.queue("uplink", client, now, float(network.uplink[client]))
            at = self.queue("link", edge, at, float(network.bandwidth[edge]))
            if self.drawn("loss", step, edge)[0] < network.loss[edge]:
                if self.setting.recovers:
                    self.waits[edge].append(message)
                else:
                    self.row(message, Status.LOST, None, None)
                continue
            latency = network.latency[network.latency_of[edge]]
            at += float(latency.quantile(self.drawn("latency", step, edge))[0])
            if network.ordered[edge]:
                at = self.newest[edge] = max(at, self.newest.get(edge, -math.inf))
            message.carries = self.waits.pop(edge, [])
            self.push(at, REACH, client, message)
        self.push(now, BEGIN, client, client)

    def reach(self, now: float, message: _Message) -> None:
        rate = float(self.network.downlink[message.receiver])
        message.arrives = self.queue("downlink", message.receiver, now, rate)
        self.push(message.arrives, TAKEN_IN, message.sender, message)

    def taken_in(self, now: float, message: _Message) -> None:
        self.here[message.receiver].append(message)

    # --- the trace ---

    def note(self, message: _Message, status: Status, step: int) -> None:
        taken = status == Status.DELIVERED
        self.row(message, status, message.arrives, step if taken else None)
        for carried in message.carries:
            self.row(carried, Status.CARRIED if taken else status, message.arrives, step if taken else None)

    def row(self, message: _Message, status: Status, arrives: float | None, step: int | None) -> None:
        self.rows.append(
            (message.sender, message.receiver, message.step, status, message.sent, arrives, step)
        )


@law
@given(settings_of(timing="virtual"), st.integers(0, 99), st.booleans())
def test_every_message_is_that_of_a_slow_event_loop(setting: Setting, seed: int, recovers: bool) -> None:
    setting = replace(setting, graph=with_shared_links(setting.graph, seed), recovers=recovers)
    found = sorted(
        (row.sender, row.receiver, row.step, row.status, row.sent_at, row.arrived_at, row.absorbed_step)
        for row in play(setting).rows
    )
    assert found == SlowPeers(setting).run()


def inward(*latencies: float, downlink: float = 16.0) -> nx.DiGraph:
    """All send to the last node, each over a link of its own latency; it sends to node 0 and hears slowly."""
    graph = nx.DiGraph()
    last = len(latencies)
    graph.add_nodes_from(range(last + 1))
    for node, latency in enumerate(latencies):
        graph.add_edge(node, last, probability=1.0, latency=latency)
    graph.add_edge(last, 0, probability=1.0, latency=0.0)
    graph.nodes[last]["downlink"] = downlink
    return graph


def to_the_last(timing: VirtualTime, **more: Any) -> dict[tuple[int, int], tuple[Any, ...]]:
    """What is sent to node 3 at 1 and 2: by (step, sender)."""
    played = play(Setting(inward(0.25, 0.25, 0.125), timing, steps=3, message_bytes=8), **more)
    return {
        (row.step, row.sender): (row.status.name, row.arrived_at, row.absorbed_step)
        for row in played.rows
        if row.receiver == 3 and row.step < 2
    }


def test_by_hand_messages_are_taken_in_one_by_one_in_the_order_in_which_they_reach_a_peer() -> None:
    """8 bytes at 16 per unit take 0.5. Of what all send at 1, that of node 2 is there first, at 1.125; those
    of 0 and 1 reach node 3 at 1.25, and the smaller goes first. What they send at 2 waits for these.
    """
    assert to_the_last(VirtualTime(compute=1.0)) == {
        (0, 2): ("DELIVERED", 1.625, 2), (0, 0): ("DELIVERED", 2.125, 3), (0, 1): ("DELIVERED", 2.625, 3),
        (1, 2): ("IN_FLIGHT", 3.125, None),
        (1, 0): ("IN_FLIGHT", 3.625, None), (1, 1): ("IN_FLIGHT", 4.125, None),
    }  # fmt: skip
    lockstep = play(Setting(inward(0.25, 0.25, 0.125), Lockstep(), steps=3, message_bytes=8))
    assert all(row.arrived_at == row.sent_at for row in lockstep.rows), "in lockstep it plays no part"


def test_by_hand_what_comes_while_a_peer_is_away_takes_nothing_of_its_downlink() -> None:
    """Node 3 pauses from 1.1875 to 1.5: what reached it before is taken in all the same, at 1.625; what
    reaches it at 1.25 is lost, or comes with what follows it on its link, in no time of its own.
    """
    timing = VirtualTime(compute=1.0, presence=GivenPresence({3: [(0.0, 1.1875), (1.5, np.inf)]}))
    later: dict[tuple[int, int], tuple[Any, ...]] = {
        (1, 2): ("DELIVERED", 2.625, 3), (1, 0): ("DELIVERED", 3.125, 3), (1, 1): ("IN_FLIGHT", 3.625, None),
    }  # fmt: skip
    first = {(0, 2): ("DELIVERED", 1.625, 2)}
    lost = {(0, 0): ("LOST", None, None), (0, 1): ("LOST", None, None)}
    carried = {(0, 0): ("CARRIED", 3.125, 3), (0, 1): ("IN_FLIGHT", 3.625, None)}
    assert to_the_last(timing) == later | first | lost
    assert to_the_last(timing, recovers=True) == later | first | carried


def test_by_hand_what_a_downlink_has_taken_in_is_lost_with_one_who_crashes_or_leaves() -> None:
    """What reaches node 3 at 1.125 has been taken in at 1.625, when it is back already, or not yet."""
    for back, absence, expected in (
        (1.5, "crash", ("DELIVERED", 1.625, 1)),  # it has nothing, and begins from that
        (1.75, "crash", ("LOST", None, None)),
        (1.75, "pause", ("DELIVERED", 1.625, 2)),
        (np.inf, "pause", ("LOST", None, None)),
    ):
        there = [(0.0, 1.1875), *([(back, np.inf)] if back < np.inf else [])]
        presence = GivenPresence({3: there}, absence=absence)
        assert to_the_last(VirtualTime(compute=1.0, presence=presence))[0, 2] == expected


def test_by_hand_who_comes_back_with_nothing_begins_when_its_first_message_has_been_taken_in() -> None:
    """Node 3 crashes at 0.5 and is back at 0.75. What reaches it at 1.125 arrives at 1.625."""
    presence = GivenPresence({3: [(0.0, 0.5), (0.75, np.inf)]}, absence="crash")
    timing = VirtualTime(compute=1.0, presence=presence)
    setting = Setting(inward(0.25, 0.25, 0.125), timing, steps=3, message_bytes=8, snapshot_every=0.875)
    played = play(setting)
    steps = [(row.step, row.started_at) for row in played.step_rows if row.client == 3]
    assert steps == [(0, 1.625), (1, 2.625), (2, 3.625)]
    looks = {look.time: look.absorption.empty.tolist() for look in played.snapshots}
    assert (looks[0.875], looks[1.75]) == ([3], [])
