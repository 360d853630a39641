"""Virtual time: every client at its own pace, every message with its own delay.

A client starts its next step when its last one is done. At the start it absorbs whatever has arrived by then
(nothing, or several messages of one sender); then it computes for as long as its distribution says; at the
end it sends. Which links are up is drawn per send and known to the sender (it shares among the links it has);
a loss on the way is not. A client that has made all of its steps has left: nobody sends to it any more (a
push-sum sender would bleed to death), but what was on its way still reaches it.

Everything happens in the order (time, kind, client), a total order, in which sending comes before looking and
looking before starting, so that a message without delay is absorbed by a step that starts at the same
instant. One pass over a heap decides everything. The steps of a window of this order are then grouped into
waves by depth: a step stands one deeper than the deepest step it absorbs from. The window bounds how far
ahead fast clients may run. A step that has not ended when somebody looks is handed out after the look: until
it ends, its client is judged by what the step began from.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

import numpy as np

from asyncfed.network.distributions import Constant, Distribution, Table
from asyncfed.network.expectations import Tally
from asyncfed.network.links import BoolArray, FloatArray, IntArray
from asyncfed.network.serials import SerialTable
from asyncfed.network.waves import Absorption, Conversation, Snapshot, Status, Sums, Unrecorded, Wave
from asyncfed.network.weights import Mixing
from asyncfed.network.wire import Wire
from asyncfed.rng import Streams

_SEND, _LOOK, _START = 0, 1, 2

# A message on its way, or waiting in the receiver's mailbox; a tuple, for there are very many:
# (sender, step, arrives, payload, sent, edge, a weight by each of the sender's shares).
_Letter: TypeAlias = tuple[int, int, float, int, float, int, tuple[float, ...]]
# What a step takes in: payloads, their senders, and their weights by each of the shares.
_Absorbed: TypeAlias = tuple[IntArray, IntArray, tuple[FloatArray, ...]]


@dataclass(slots=True)
class _Event:
    """A client step that has been decided but not yet handed out."""

    client: int
    step: int
    serial: int
    depth: int
    absorbed: _Absorbed
    messages: int
    started: float
    ended: float
    elapsed: float  # since its client began the step before; 0 for its first


class PacedSchedule:
    """Waves and snapshots of an asynchronous part."""

    def __init__(
        self,
        wire: Wire,
        mixing: Mixing,
        streams: Streams,
        talk: Conversation,
        snapshot_every: float,
        *,
        compute: Distribution | Table,
        factors: FloatArray,
        horizon: float | None,
        tally: Tally | None = None,
    ) -> None:
        self._wire, self._mixing, self._streams, self._tally = wire, mixing, streams, tally
        self._talk, self._every = talk, snapshot_every
        self._compute, self._factors, self._horizon = compute, factors, horizon
        network = self._network = wire.network
        n = network.n
        self._window = max(64, 2 * n)
        self._mailbox: list[list[_Letter]] = [[] for _ in range(n)]
        # Each client's last payload and the share of it that it holds (all of it until it sends).
        whole = tuple(1.0 for _ in mixing)
        self._whole = whole
        self._own: list[tuple[int, tuple[float, ...]] | None] = [None] * n
        self._at_work: list[_Event | None] = [None] * n
        self._left = np.full(n, np.inf)  # when each client made its last step
        self._done = np.full(n, talk.first_step, dtype=np.int64)  # steps begun
        self._began = [talk.started_at] * n  # when each client began its latest step
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
        next_look = end = talk.started_at
        if queue:
            heapq.heappush(queue, (talk.started_at, _LOOK, 0))
        while len(queue) > 1:
            now, kind, client = heapq.heappop(queue)
            if kind == _LOOK:
                if self._horizon is None or now < self._horizon:  # at the horizon comes the final one
                    yield from self._flush(now)
                    yield self._snapshot(now, final=False)
                looks += 1
                next_look = talk.started_at + looks * self._every
                heapq.heappush(queue, (next_look, _LOOK, 0))
            elif kind == _START:
                step = int(self._done[client])
                ended = now + self._duration(client, step)
                if self._horizon is not None and ended > self._horizon:
                    continue
                if len(self._events) >= self._window and self._events[-1].started < now:
                    yield from self._flush(next_look)
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
        yield from self._flush(np.inf)
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

    # --- starting and absorbing ----------------------------------------------------------------------

    def _start(self, client: int, step: int, now: float, ended: float) -> None:
        letters = self._take_arrived(client, now)
        if self._tally is not None and self._all_here(client, now):
            self._tally.stepped(client)
            self._tally.absorbed(client, np.array([letter[5] for letter in letters], dtype=np.int64))
        absorbed = self._absorb(client, letters)
        sources, payloads = absorbed[0], self._payloads
        depth = 1 + max(self._floor, int(payloads.get("depth", sources).max(initial=0)))
        self._record_arrived(client, step, letters, Status.DELIVERED)
        pending = payloads.get("pending", sources) - 1
        last_use = np.maximum(payloads.get("last_use", sources), depth)
        payloads.set("pending", sources, pending)
        payloads.set("last_use", sources, last_use)
        over = pending == 0
        if over.any():
            self._freed.extend(zip(last_use[over].tolist(), sources[over].tolist(), strict=True))
            payloads.forget(sources[over])
        serial = self._next_serial
        self._next_serial += 1
        payloads.add(np.array([serial]), pending=1, depth=depth, last_use=depth)
        self._own[client] = (serial, self._whole)
        elapsed = now - self._began[client]
        self._began[client] = now
        event = _Event(client, step, serial, depth, absorbed, len(letters), now, ended, elapsed)
        self._events.append(event)
        self._at_work[client] = event
        self._done[client] = step + 1

    def _take_arrived(self, client: int, now: float) -> list[_Letter]:
        box = self._mailbox[client]
        arrived = [letter for letter in box if letter[2] <= now]
        self._mailbox[client] = (
            [letter for letter in box if letter[2] > now] if len(arrived) < len(box) else []
        )
        arrived.sort()  # by sender, then step
        return arrived

    def _all_here(self, client: int, now: float) -> bool:
        """Whether none of those it sends to has left: what it sees after that says nothing of its links."""
        lo, hi = int(self._network.first[client]), int(self._network.first[client + 1])
        return bool((self._left[self._network.receivers[lo:hi]] >= now).all())

    def _absorb(self, client: int, letters: list[_Letter]) -> _Absorbed:
        """In the order of senders, the client's own payload among them."""
        own = self._own[client]
        serials = [letter[3] for letter in letters]
        senders = [letter[0] for letter in letters]
        place = -1
        if own is not None:
            place = bisect_left(senders, client)
            serials.insert(place, own[0])
            senders.insert(place, client)
        weights = []
        for channel, (_, shares) in enumerate(self._mixing):
            if shares.by_receiver:
                column = [shares.of_receiver(len(letters))] * len(serials)
            else:
                column = [letter[6][channel] for letter in letters]
                if own is not None:
                    column.insert(place, own[1][channel])
            weights.append(np.array(column, dtype=np.float64))
        return np.array(serials, dtype=np.int64), np.array(senders, dtype=np.int64), tuple(weights)

    # --- sending -------------------------------------------------------------------------------------

    def _send(self, client: int, step: int, now: float) -> None:
        network, talk = self._network, self._talk
        self._at_work[client] = None
        lo, hi = int(network.first[client]), int(network.first[client + 1])
        receivers = network.receivers[lo:hi]
        present: BoolArray = self._left[receivers] >= now
        up = self._wire.up_from(client, step) & present
        shared = [
            (up.astype(np.float64), 1.0) if shares.by_receiver else shares.of_sender(client, up)
            for _, shares in self._mixing
        ]
        weights = shared[0][0]
        if self._tally is not None and present.all():
            self._tally.sent(client, weights, shared[0][1])
        own = self._own[client]
        assert own is not None, "who sends has made a step"
        serial = own[0]
        self._own[client] = (serial, tuple(kept for _, kept in shared))
        if hi == lo:
            return
        fates = self._wire.send_from(client, step, up, now, talk.message_bytes)
        going = np.flatnonzero(fates.goes)
        self._payloads.set("pending", np.array([serial]), 1 + len(going))
        letters = zip(
            repeat(client),
            repeat(step),
            fates.arrives[going].tolist(),
            repeat(serial),
            repeat(now),
            (lo + going).tolist(),
            zip(*(own_weights[going].tolist() for own_weights, _ in shared), strict=True),
            strict=False,
        )
        mailbox = self._mailbox
        for receiver, letter in zip(receivers[going].tolist(), letters, strict=False):
            mailbox[receiver].append(letter)
        failed = np.flatnonzero(~fates.goes & present)
        if len(failed):
            self._wire.record(
                client,
                receivers[failed],
                fates.status[failed],
                step=step,
                sent_at=now,
                arrived_at=np.nan,
                absorbed_step=-1,
                weight=0.0 if self._mixing[0][1].by_receiver else weights[failed],
                bytes=talk.message_bytes,
                phase=talk.phase,
                kind=talk.kind,
            )

    def _record_arrived(
        self, receiver: int, absorbed_step: int, letters: list[_Letter], status: Status
    ) -> None:
        if not letters:
            return
        senders, steps, arrives, _, sent, _, weights = zip(*letters, strict=True)
        first = self._mixing[0][1]
        if not first.by_receiver:
            weight = np.array([own[0] for own in weights])
        else:  # who has not received a message has not weighed it
            known = status == Status.DELIVERED
            weight = np.full(len(letters), first.of_receiver(len(letters)) if known else np.nan)
        self._wire.record(
            np.array(senders, dtype=np.int64),
            receiver,
            int(status),
            step=np.array(steps, dtype=np.int64),
            sent_at=np.array(sent),
            arrived_at=np.array(arrives),
            absorbed_step=absorbed_step,
            weight=weight,
            bytes=self._talk.message_bytes,
            phase=self._talk.phase,
            kind=self._talk.kind,
        )

    # --- handing out ---------------------------------------------------------------------------------

    def _flush(self, until: float) -> Iterator[Wave]:
        """The steps that have ended by then, as waves; the others wait."""
        events = [event for event in self._events if event.ended <= until]
        if not events:
            return
        waiting = [event for event in self._events if event.ended > until]
        self._wire.record_steps(
            np.array([e.client for e in events]),
            step=np.array([e.step for e in events]),
            started_at=np.array([e.started for e in events]),
            ended_at=np.array([e.ended for e in events]),
            absorbed=np.array([e.messages for e in events]),
            phase=self._talk.phase,
        )
        waves: dict[int, list[_Event]] = {}
        for event in events:
            waves.setdefault(event.depth, []).append(event)
        first, self._floor = self._floor + 1, max(waves)
        freed, self._freed = self._freed, []
        self._put_off(waiting, {serial for _, serial in freed})
        needed = {serial for event in waiting for serial in event.absorbed[0].tolist()}
        released: dict[int, list[int]] = {}
        for depth, serial in freed:
            if serial in needed:
                self._freed.append((self._floor + 1, serial))
            else:
                released.setdefault(min(max(depth, first), self._floor), []).append(serial)
        self._events = waiting
        for depth in sorted(waves):
            wave = sorted(waves[depth], key=lambda event: event.client)
            yield Wave(
                self._absorption([e.client for e in wave], [e.absorbed for e in wave]),
                np.array([e.step for e in wave], dtype=np.int64),
                np.array([e.serial for e in wave], dtype=np.int64),
                np.array(sorted(released.get(depth, [])), dtype=np.int64),
                max(e.started for e in wave),
                self._talk.part,
                elapsed=np.array([e.elapsed for e in wave]),
            )

    def _put_off(self, waiting: list[_Event], freed: set[int]) -> None:
        """Steps that come after the waves handed out now stand deeper than all of these. (They need nothing
        of one another: none of them has ended, so none has sent.)
        """
        depth = self._floor + 1
        for event in waiting:
            event.depth = depth
            self._payloads.set("depth", np.array([event.serial]), depth)
            self._payloads.set("last_use", np.array([event.serial]), depth)
            held = np.array([s for s in event.absorbed[0].tolist() if s not in freed], dtype=np.int64)
            self._payloads.set("last_use", held, depth)

    def _snapshot(self, time: float, *, final: bool) -> Snapshot:
        """What everybody is to be judged by. The final one really absorbs: the rest is in flight for ever."""
        n = self._network.n
        absorbed: list[_Absorbed] = []
        arrived = 0
        for client in range(n):
            event = self._at_work[client]
            if final:
                letters = self._take_arrived(client, time)
                self._record_arrived(client, int(self._done[client]), letters, Status.DELIVERED)
                self._record_arrived(client, -1, self._mailbox[client], Status.IN_FLIGHT)
            else:
                letters = sorted(letter for letter in self._mailbox[client] if letter[2] <= time)
                arrived += len(letters)
            absorbed.append(self._absorb(client, letters) if event is None else event.absorbed)
        unrecorded = Unrecorded()
        if not final:
            all_letters = sum(map(len, self._mailbox))
            unrecorded = Unrecorded(arrived, all_letters - arrived, all_letters * self._talk.message_bytes)
        ended = self._done - np.array([event is not None for event in self._at_work])
        absorption = self._absorption(list(range(n)), absorbed)
        return Snapshot(absorption, time, ended, final, self._talk.part, unrecorded)

    def _absorption(self, clients: list[int], absorbed: list[_Absorbed]) -> Absorption:
        indptr = np.concatenate([[0], np.cumsum([len(own[0]) for own in absorbed])]).astype(np.int64)
        sources, senders = (np.concatenate([own[column] for own in absorbed]) for column in (0, 1))
        channels = tuple(
            Sums(names, indptr, sources, np.concatenate([own[2][place] for own in absorbed]), senders)
            for place, (names, _) in enumerate(self._mixing)
        )
        return Absorption(np.array(clients, dtype=np.int64), channels)
