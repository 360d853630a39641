"""Virtual time: every client at its own pace, every message with its own delay.

A client starts its next step when its last one is done. At the start it absorbs whatever has arrived by then
(nothing, or several messages of one sender); then it computes for as long as its distribution says; at the
end it sends. Which links are up is drawn per send and known to the sender (it shares among the links it has);
a loss on the way is not. A link carries one message at a time: a message waits until the one before it has
left, takes bytes / bandwidth to be put on the wire, and then its latency. A client that has made all of its
steps has left: nobody sends to it any more (a push-sum sender would bleed to death), but what was on its way
still reaches it.

Everything happens in the order (time, kind, client), a total order, in which sending comes before looking and
looking before starting, so that a message without delay is absorbed by a step that starts at the same
instant. One pass over a heap decides everything. The steps of a window of this order are then grouped into
waves by depth: a step stands one deeper than the deepest step it absorbs from. The window bounds how far
ahead fast clients may run.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from asyncfed.network.distributions import Constant, Distribution, Table
from asyncfed.network.expectations import Tally
from asyncfed.network.links import FloatArray, IntArray, Network
from asyncfed.network.serials import SerialTable
from asyncfed.network.waves import Absorption, Conversation, Recorder, Snapshot, Status, Wave
from asyncfed.network.weights import Shares
from asyncfed.rng import Streams

_SEND, _LOOK, _START = 0, 1, 2


@dataclass(slots=True)
class _Letter:
    """A message on its way, or waiting in the receiver's mailbox."""

    arrives: float
    edge: int
    sender: int
    step: int
    serial: int
    weight: float
    sent: float


@dataclass(slots=True)
class _Event:
    """A client step that has been decided but not yet handed out."""

    client: int
    step: int
    serial: int
    depth: int
    sources: IntArray
    weights: FloatArray
    started: float
    ended: float


class VirtualTimeline:
    """Waves and snapshots of an asynchronous phase."""

    def __init__(
        self,
        network: Network,
        shares: Shares,
        streams: Streams,
        talk: Conversation,
        recorder: Recorder,
        snapshot_every: float,
        *,
        compute: Distribution | Table,
        factors: FloatArray,
        horizon: float | None,
        tally: Tally | None = None,
    ) -> None:
        self._network, self._shares, self._streams, self._tally = network, shares, streams, tally
        self._talk, self._recorder, self._every = talk, recorder, snapshot_every
        self._compute, self._factors, self._horizon = compute, factors, horizon
        n = network.n
        self._window = max(64, 2 * n)
        self._mailbox: list[list[_Letter]] = [[] for _ in range(n)]
        # Each client's last payload and the share of it that it holds: all of it until it sends.
        self._own: list[tuple[int, float] | None] = [None] * n
        self._left = np.full(n, np.inf)  # when each client made its last step
        self._done = np.full(n, talk.first_step, dtype=np.int64)
        self._busy_until = np.full(network.edges, -np.inf)
        # Of each payload: absorptions to come (the sender's own included), the depth of the step that emitted
        # it, and of the deepest one that absorbs it.
        self._payloads = SerialTable("pending", "depth", "last_use")
        self._next_serial = talk.first_step * n
        self._floor = 0
        self._events: list[_Event] = []
        self._freed: list[tuple[int, int]] = []  # (wave depth, payload)

    def __iter__(self) -> Iterator[Wave | Snapshot]:
        talk = self._talk
        clients = range(self._network.n) if talk.steps else ()
        queue = [(talk.started_at, _START, client) for client in clients]
        looks = 0
        end = talk.started_at
        if queue:
            heapq.heappush(queue, (talk.started_at, _LOOK, 0))
        while len(queue) > 1:
            now, kind, client = heapq.heappop(queue)
            if kind == _LOOK:
                if self._horizon is None or now < self._horizon:  # at the horizon comes the final one
                    yield from self._flush()
                    yield self._snapshot(now, final=False)
                looks += 1
                heapq.heappush(queue, (talk.started_at + looks * self._every, _LOOK, 0))
            elif kind == _START:
                step = int(self._done[client])
                ended = now + self._duration(client, step)
                if self._horizon is not None and ended > self._horizon:
                    continue
                if len(self._events) >= self._window and self._events[-1].started < now:
                    yield from self._flush()
                self._start(client, step, now, ended)
                end = max(end, ended)
                heapq.heappush(queue, (ended, _SEND, client))
            else:
                step = int(self._done[client]) - 1
                last = step + 1 == talk.first_step + talk.steps
                if last:
                    self._left[client] = now
                self._send(client, step, now)
                if not last:
                    heapq.heappush(queue, (now, _START, client))
        yield from self._flush()
        yield self._snapshot(end if self._horizon is None else self._horizon, final=True)

    def _duration(self, client: int, step: int) -> float:
        compute = self._compute
        if isinstance(compute, Table):
            row = compute.rows[client]
            drawn = row[step % len(row)]
        elif isinstance(compute, Constant):
            drawn = compute.value
        else:
            drawn = float(compute.quantile(self._streams.uniforms("compute", step, client, client + 1))[0])
        return drawn * float(self._factors[client])

    def _start(self, client: int, step: int, now: float, ended: float) -> None:
        letters = self._take_arrived(client, now)
        if self._tally is not None and self._all_here(client, now):
            self._tally.stepped(client)
            self._tally.absorbed(client, np.array([letter.edge for letter in letters], dtype=np.int64))
        sources, weights = self._absorb(client, letters)
        payloads = self._payloads
        depth = 1 + max(self._floor, int(payloads.get("depth", sources).max(initial=0)))
        self._record_delivered(client, step, letters)
        pending = payloads.get("pending", sources) - 1
        last_use = np.maximum(payloads.get("last_use", sources), depth)
        payloads.set("pending", sources, pending)
        payloads.set("last_use", sources, last_use)
        over = pending == 0
        self._freed.extend(zip(last_use[over].tolist(), sources[over].tolist(), strict=True))
        payloads.forget(sources[over])
        serial = self._next_serial
        self._next_serial += 1
        payloads.add(np.array([serial]), pending=1, depth=depth, last_use=depth)
        self._own[client] = (serial, 1.0)
        self._events.append(_Event(client, step, serial, depth, sources, weights, now, ended))
        self._done[client] = step + 1

    def _take_arrived(self, client: int, now: float) -> list[_Letter]:
        box = self._mailbox[client]
        arrived = [letter for letter in box if letter.arrives <= now]
        if len(arrived) < len(box):
            self._mailbox[client] = [letter for letter in box if letter.arrives > now]
        else:
            self._mailbox[client] = []
        arrived.sort(key=lambda letter: (letter.sender, letter.step))
        return arrived

    def _all_here(self, client: int, now: float) -> bool:
        """Whether none of those it sends to has left: what it sees after that says nothing of its links."""
        lo, hi = int(self._network.first[client]), int(self._network.first[client + 1])
        return bool((self._left[self._network.receivers[lo:hi]] >= now).all())

    def _absorb(self, client: int, letters: list[_Letter]) -> tuple[IntArray, FloatArray]:
        own = self._own[client]
        if own is None:
            return (
                np.array([letter.serial for letter in letters], dtype=np.int64),
                np.array([letter.weight for letter in letters]),
            )
        place = sum(letter.sender < client for letter in letters)
        serials = [letter.serial for letter in letters]
        weights = [letter.weight for letter in letters]
        serials.insert(place, own[0])
        weights.insert(place, own[1])
        return np.array(serials, dtype=np.int64), np.array(weights)

    def _send(self, client: int, step: int, now: float) -> None:
        network, streams = self._network, self._streams
        lo, hi = int(network.first[client]), int(network.first[client + 1])
        receivers = network.receivers[lo:hi]
        present = self._left[receivers] >= now
        up = network.up_from(streams, client, step) & present
        weights, kept = self._shares.of_sender(client, up)
        if self._tally is not None and present.all():
            self._tally.sent(client, weights, kept)
        serial, _ = self._own[client] or (0, 0.0)
        self._own[client] = (serial, kept)
        if hi == lo:
            return
        lost = up & network.lost(streams, step, lo, hi)
        going = np.flatnonzero(up & ~lost)
        self._payloads.set("pending", np.array([serial]), 1 + len(going))
        edges = lo + np.flatnonzero(up)
        leaves = (
            np.maximum(now, self._busy_until[edges]) + self._talk.message_bytes / network.bandwidth[edges]
        )
        self._busy_until[edges] = leaves
        arrivals = np.full(hi - lo, np.nan)
        arrivals[up] = leaves + network.latencies(streams, step, lo, hi)[up]
        for at, receiver, arrives, weight in zip(
            going.tolist(),
            receivers[going].tolist(),
            arrivals[going].tolist(),
            weights[going].tolist(),
            strict=True,
        ):
            self._mailbox[receiver].append(_Letter(arrives, lo + at, client, step, serial, weight, now))
        failed = np.flatnonzero((~up | lost) & present)
        if len(failed):
            sent = up[failed]
            self._recorder.messages(
                sender=client,
                receiver=receivers[failed],
                status=np.where(sent, np.uint8(Status.LOST), np.uint8(Status.LINK_DOWN)),
                step=step,
                sent_at=now,
                arrived_at=np.nan,
                absorbed_step=-1,
                weight=weights[failed],
                bytes=self._talk.message_bytes,
                phase=self._talk.phase,
                kind=self._talk.kind,
            )

    def _record_delivered(
        self, receiver: int, absorbed_step: int, letters: list[_Letter], status: Status = Status.DELIVERED
    ) -> None:
        if not letters:
            return
        self._recorder.messages(
            sender=np.array([letter.sender for letter in letters], dtype=np.int64),
            receiver=receiver,
            status=int(status),
            step=np.array([letter.step for letter in letters], dtype=np.int64),
            sent_at=np.array([letter.sent for letter in letters]),
            arrived_at=np.array([letter.arrives for letter in letters]),
            absorbed_step=absorbed_step,
            weight=np.array([letter.weight for letter in letters]),
            bytes=self._talk.message_bytes,
            phase=self._talk.phase,
            kind=self._talk.kind,
        )

    def _flush(self) -> Iterator[Wave]:
        events = self._events
        if not events:
            return
        self._recorder.steps(
            client=np.array([e.client for e in events]),
            step=np.array([e.step for e in events]),
            started_at=np.array([e.started for e in events]),
            ended_at=np.array([e.ended for e in events]),
            absorbed=np.array([len(e.sources) - (e.step > self._talk.first_step) for e in events]),
            phase=self._talk.phase,
        )
        released: dict[int, list[int]] = {}
        first = self._floor + 1
        for depth, serial in self._freed:
            released.setdefault(max(depth, first), []).append(serial)
        waves: dict[int, list[_Event]] = {}
        for event in events:
            waves.setdefault(event.depth, []).append(event)
        self._floor = max(waves)
        self._events, self._freed = [], []
        for depth in sorted(waves):
            wave = sorted(waves[depth], key=lambda event: event.client)
            yield Wave(
                _stack([e.client for e in wave], [e.sources for e in wave], [e.weights for e in wave]),
                np.array([e.step for e in wave], dtype=np.int64),
                np.array([e.serial for e in wave], dtype=np.int64),
                np.array(sorted(released.get(depth, [])), dtype=np.int64),
                max(e.started for e in wave),
            )

    def _snapshot(self, time: float, *, final: bool) -> Snapshot:
        """What everybody would absorb now. The final one really does: the rest is in flight for ever."""
        n = self._network.n
        absorbed: list[tuple[IntArray, FloatArray]] = []
        for client in range(n):
            if final:
                letters = self._take_arrived(client, time)
                self._record_delivered(client, int(self._done[client]), letters)
                self._record_delivered(client, -1, self._mailbox[client], Status.IN_FLIGHT)
            else:
                letters = sorted(
                    (letter for letter in self._mailbox[client] if letter.arrives <= time),
                    key=lambda letter: (letter.sender, letter.step),
                )
            absorbed.append(self._absorb(client, letters))
        absorption = _stack(list(range(n)), [s for s, _ in absorbed], [w for _, w in absorbed])
        waiting = 0 if final else sum(len(s) for s, _ in absorbed) - sum(own is not None for own in self._own)
        on_the_way = 0 if final else sum(len(box) for box in self._mailbox) - waiting
        return Snapshot(absorption, time, self._done.copy(), final, waiting, on_the_way)


def _stack(clients: list[int], sources: list[IntArray], weights: list[FloatArray]) -> Absorption:
    indptr = np.concatenate([[0], np.cumsum([len(s) for s in sources])]).astype(np.int64)
    return Absorption(
        np.array(clients, dtype=np.int64),
        indptr,
        np.concatenate(sources) if sources else np.zeros(0, dtype=np.int64),
        np.concatenate(weights) if weights else np.zeros(0),
    )
