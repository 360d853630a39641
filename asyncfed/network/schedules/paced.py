"""Virtual time: every client at its own pace, every message with its own delay.

A client starts its next step when its last one is done. At the start it absorbs whatever has arrived by then
(nothing, or several messages of one sender); then it computes for as long as its distribution says; at the
end it sends. Which links are up is drawn per send and known to the sender (it shares among the links it has);
a loss on the way is not. A client that has made all of its steps has left: nobody sends to it any more (a
push-sum sender would bleed to death), but what was on its way still reaches it. Where clients do not wait for
one another between parts, each begins at a time of its own: what comes before is absorbed by its first step,
and what comes when it is through is late.

Everything happens in the order (time, kind, client), a total order, in which sending comes before looking and
looking before starting, so that a message without delay is absorbed by a step that starts at the same
instant. Nobody's clock waits for a message (`paces`), so there is no queue of events: the steps of a whole
window of time are drawn, then all that they send, and then every message is given to the first step of its
receiver that starts after it has arrived. The window bounds how far ahead fast clients may run. Only while
somebody waits for a first message, because it has come back with nothing, a window ends with the first
sending.

Where receivers' downlinks are shared, a message that reaches one waits for those that reached it before. What
reaches somebody within a window is known at the window's end, and so is when it arrives in the end. Whether a
receiver that comes and goes is there is looked at when a message reaches it, before it waits. Who is away
when it has been taken in has it when it is back, unless it has crashed or left for good: then it is lost.

What arrives when all is over is absorbed by nobody. Where links are offered more than they carry that is much
of what is sent: so where there are many payloads (`_MANY`), those are forgotten, and the messages recorded as
in flight, as soon as it is known.

Steps are handed out as waves, by depth: a step stands one deeper than the deepest step it absorbs from. A
step that has not ended when somebody looks is handed out after the look: until it ends, its client is judged
by what the step began from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from asyncfed.network.distributions import Distribution, Table
from asyncfed.network.expectations import Tally
from asyncfed.network.links import BoolArray, FloatArray, IntArray
from asyncfed.network.presence import Attendance
from asyncfed.network.schedules.handing_out import Absorbed, Decided, HandingOut, in_rows
from asyncfed.network.schedules.mail import (
    Downlinks,
    Letters,
    Mailbox,
    RunningSums,
    joined_letters,
    no_letters,
)
from asyncfed.network.schedules.paces import Paces, Steps, joined_steps, no_steps
from asyncfed.network.waves import Conversation, Snapshot, Status, Unrecorded, Wave
from asyncfed.network.weights import Mixing, Sends
from asyncfed.network.wire import Wire
from asyncfed.recall import recalled
from asyncfed.rng import Streams

_MANY = 16  # payloads of each client, from which on those that nobody will absorb are forgotten at once


@recalled(
    given=(
        "_mixing", "_tally", "_talk", "_every", "_horizon", "_attendance", "_network", "_window", "_waits",
        "_started",
    )
)  # fmt: skip
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
        attendance: Attendance | None = None,
        tally: Tally | None = None,
    ) -> None:
        self._wire, self._mixing, self._tally = wire, mixing, tally
        self._talk, self._every, self._horizon = talk, snapshot_every, horizon
        self._attendance = attendance
        network = self._network = wire.network
        n = network.n
        self._window = max(64, 2 * n)
        self._waits = np.ndim(talk.started_at) == 0  # whether all begin, and end, together
        self._started = np.broadcast_to(np.asarray(talk.started_at, dtype=np.float64), n)
        hands_over = attendance is not None and attendance.hands_over and talk.conserves
        self._paces = Paces(
            streams, compute, factors, started_at=self._started, first_step=talk.first_step,
            steps=talk.steps, horizon=horizon, attendance=attendance, hands_over=hands_over, back=talk.back,
        )  # fmt: skip
        self._handing_out = HandingOut(talk.first_step * n, talk.part, tuple(names for names, _ in mixing))
        self._mailbox = Mailbox(len(mixing))
        self._downlinks = Downlinks(wire, talk.message_bytes, len(mixing)) if wire.shares_downlinks else None
        self._running_sums = RunningSums(len(mixing)) if talk.recovers else None
        # Each client's last payload, and the share of it that it holds by each of the weights.
        self._own = np.full(n, -1, dtype=np.int64)
        self._kept = np.ones((n, len(mixing)))
        self._begun = np.full(n, talk.first_step, dtype=np.int64)  # steps
        self._at_work = no_steps()  # those that have not ended, and what they will emit
        self._its_payload = np.zeros(0, dtype=np.int64)
        self._end = float(self._started.max())  # of the last step
        self._latest: float | None = None  # until when something may be absorbed, once that is asked
        self._now = -np.inf  # up to when all is decided
        self._looks = 0  # that were taken
        self.rests = False  # whether it could be put down after what it has yielded last

    def __iter__(self) -> Iterator[Wave | Snapshot]:
        horizon = np.inf if self._horizon is None else self._horizon
        while self._going_on():
            if self._now >= self._next_look:
                self._looks += 1
                self.rests = False
                if self._now < horizon:  # at the horizon comes the final one
                    yield self._snapshot(self._now, final=False)
            self._decide(self._next_look)
            yield from self._flush(self._next_look)
        self._put(no_letters(len(self._mixing)), np.inf)
        for wave in self._flush(np.inf):
            self.rests = False
            yield wave
        yield self._snapshot(self._end if self._horizon is None else self._horizon, final=True)

    @property
    def _next_look(self) -> float:
        return float(self._started.min()) + self._looks * self._every

    def _going_on(self) -> bool:
        """Whether a step is to begin, or to end."""
        return bool(len(self._at_work)) or self._paces.going_on(self._now) or self._next_waking() < np.inf

    # --- a window of time ----------------------------------------------------------------------------

    def _decide(self, before: float) -> None:
        """What begins before a time, and what is sent by then; or before an earlier time."""
        paces, at_work = self._paces, self._at_work
        waking = self._next_waking() if paces.hollow.min() <= self._now else None
        if waking is not None:  # what is sent may wake somebody: no further than to the next sending
            before = min(before, waking, float(at_work.ended.min(initial=np.inf)))
        new, until = paces.window(before, self._window, singly=waking is not None)
        emits = self._handing_out.number(len(new))
        steps = joined_steps([at_work, new])
        order = np.lexsort((steps.started, steps.client))
        steps, payload = steps.at(order), np.concatenate([self._its_payload, emits])[order]
        first = np.diff(steps.client, prepend=-1) != 0  # of its client's steps
        sending = np.flatnonzero(steps.ended <= until)
        kept = np.ones((len(order), len(self._mixing)))
        sent, kept[sending] = self._send(steps.at(sending), payload[sending])
        own, share = np.roll(payload, 1), np.roll(kept, 1, axis=0)  # of the step before
        own[first], share[first] = self._own[steps.client[first]], self._kept[steps.client[first]]
        forgotten = steps.reborn & (order >= len(at_work)) & (own >= 0)
        self._handing_out.lost(own[forgotten])
        own[forgotten] = -1
        last = np.append(first[1:], True) if len(first) else first
        self._own[steps.client[last]] = payload[last]
        self._kept[steps.client[last]] = kept[last]
        self._kept[steps.client[last & steps.leaving]] = 1.0  # to be judged by
        self._begun[new.client] = np.maximum(self._begun[new.client], new.step + 1)
        place = np.argsort(order)[len(at_work) :]
        self._put(sent, until)
        self._absorb(new, emits, own[place], share[place], until)
        working = np.flatnonzero(steps.ended > until)
        self._at_work, self._its_payload = steps.at(working), payload[working]
        if len(new):
            self._end = max(self._end, float(new.ended.max()))
        if waking is not None and waking <= until:
            self._wake(waking)
        self._now = until

    def _next_waking(self) -> float:
        """When a message reaches somebody who has nothing, as far as is known."""
        return min((float(some.arrives.min(initial=np.inf)) for some in self._waking()), default=np.inf)

    def _wake(self, now: float) -> None:
        whom = [letters.receiver[letters.arrives == now] for letters in self._waking()]
        for client in np.unique(np.concatenate(whom)).tolist():
            self._paces.wake(client, now)

    def _waking(self) -> list[Letters]:
        """Messages to those who have nothing and wait."""
        hollow = self._paces.hollow
        if not np.isfinite(hollow).any():
            return []
        pieces = [*self._mailbox.pieces()]
        if self._downlinks is not None:
            coming = self._downlinks.foreseen(np.inf)
            pieces.append(coming.at(~self._lost_at_the_door(coming)))
        return [some.at(some.arrives >= hollow[some.receiver]) for some in pieces]

    # --- sending -------------------------------------------------------------------------------------

    def _send(self, steps: Steps, serials: IntArray) -> tuple[Letters, FloatArray]:
        """Messages of steps that have ended, those of a client in order: what gets through, and the shares
        that senders keep.
        """
        network, talk = self._network, self._talk
        sends = Sends.by(network, steps.client)
        of, edges, at, step = sends.of, sends.edges, steps.ended[sends.of], steps.step[sends.of]
        receivers = network.receivers[edges]
        here = self._paces.left[receivers] >= at
        up = self._wire.up_of(edges, step, at) & here
        if self._attendance is not None:
            up &= self._attendance.uptimes.on(receivers, at)
        weights, kept = np.empty((len(edges), len(self._mixing))), np.empty((len(steps), len(self._mixing)))
        for channel, (_, shares) in enumerate(self._mixing):
            if shares.by_receiver:
                weights[:, channel], kept[:, channel] = up, 1.0
            else:
                weights[:, channel], kept[:, channel] = shares.of_senders(sends, up)
        if steps.leaving.any():
            self._hand_over(steps, sends, up, weights, kept)
        if self._tally is not None:
            self._count_sent(steps, sends, weights[:, 0], kept[:, 0])
        turn = _turns(steps.client)[of]
        fates = self._wire.send_many(edges, step, up, at, talk.message_bytes, turn)
        goes = fates.goes
        if self._attendance is not None:
            goes = goes & self._attendance.uptimes.on(receivers, fates.arrives)
        letters = Letters(
            steps.client[of], receivers, edges, step, serials[of], at, fates.arrives,
            np.zeros(len(edges), dtype=np.bool_), weights, serials[of],
        )  # fmt: skip
        self._record(letters.at(here & ~up), int(Status.LINK_DOWN), -1)
        if self._running_sums is None:
            self._record(letters.at(up & ~goes), int(Status.LOST), -1)
            self._handing_out.sent(serials, np.bincount(of[goes], minlength=len(steps)))
            return letters.at(goes), kept
        self._handing_out.sent(serials, np.bincount(of[up], minlength=len(steps)))
        sent = np.flatnonzero(up)
        carried, forgotten = self._running_sums.carry(letters.at(sent), goes[sent], steps.since[of[sent]])
        self._lose(forgotten)
        return joined_letters([letters.at(goes), carried]), kept

    def _hand_over(
        self, steps: Steps, sends: Sends, up: BoolArray, weights: FloatArray, kept: FloatArray
    ) -> None:
        """Who leaves for good gives everything to those it reaches, all the same; reaching nobody, it is lost
        with all it holds.
        """
        reached = sends.sums(up)
        goes = steps.leaving & (reached > 0)
        going = goes[sends.of]
        weights[going] = (up[going] / reached[sends.of[going]])[:, None]
        kept[goes] = 0.0

    def _count_sent(self, steps: Steps, sends: Sends, weights: FloatArray, kept: FloatArray) -> None:
        assert self._tally is not None
        counted = self._first_to_leave[steps.client] >= steps.ended
        if counted.all():
            self._tally.sent(sends, weights, kept)
        else:
            some = Sends.by(self._network, steps.client[counted])
            self._tally.sent(some, weights[counted[sends.of]], kept[counted])

    @property
    def _first_to_leave(self) -> FloatArray:
        """When the first of those whom each client sends to leaves: what it sees after that says nothing of
        its links.
        """
        network, left = self._network, np.full(self._network.n, np.inf)
        np.minimum.at(left, network.senders, self._paces.left[network.receivers])
        return left

    # --- taking in -----------------------------------------------------------------------------------

    def _put(self, sent: Letters, until: float) -> None:
        """Into the mailbox with what was sent; where downlinks are shared, with what reaches them by then."""
        if self._downlinks is not None:
            sent = self._downlinks.settle(self._given_up(sent), until)
            lost = self._lost_at_the_door(sent)
            if lost.any():
                self._lose(sent.at(lost))
                sent = sent.at(~lost)
        sent = self._given_up(sent)
        over = sent.serial < 0
        if over.any():
            self._record(sent.at(over), int(Status.IN_FLIGHT), -1)
            sent = sent.at(~over)
        self._mailbox.put(sent, until)

    def _given_up(self, letters: Letters) -> Letters:
        """The same, where there are many payloads without those (-1) of what arrives when all is over."""
        if self._handing_out.payloads <= _MANY * self._network.n:
            return letters
        if self._latest is None:
            self._latest = self._paces.latest_end()
        never = (letters.arrives > self._latest) & (letters.serial >= 0)
        if not never.any():
            return letters
        self._handing_out.lost(letters.serial[never])
        return replace(letters, serial=np.where(never, -1, letters.serial))

    def _lost_at_the_door(self, letters: Letters) -> BoolArray:
        """Which have been taken in when their receivers have crashed, or left for good."""
        lost = np.zeros(len(letters), dtype=np.bool_)
        if self._attendance is None:
            return lost
        uptimes, crashes = self._attendance.uptimes, self._attendance.crashes
        away = np.flatnonzero(~uptimes.on(letters.receiver, letters.arrives))
        whom_and_when = zip(letters.receiver[away].tolist(), letters.arrives[away].tolist(), strict=True)
        lost[away] = [crashes or uptimes.next_on(*one) == np.inf for one in whom_and_when]
        return lost

    # --- absorbing -----------------------------------------------------------------------------------

    def _absorb(self, steps: Steps, emits: IntArray, own: IntArray, share: FloatArray, until: float) -> None:
        """Give every message to the first step of its receiver that starts after it has arrived."""
        place = _first_after(steps, self._mailbox.look(until), until)
        letters, place = self._mailbox.take(place >= 0), place[place >= 0]
        self._mailbox.shelve(self._paces.left[self._mailbox.here.receiver] <= until)
        if not len(steps):
            return
        gone = letters.arrives < steps.since[place]  # it reached one who has forgotten it since
        if gone.any():
            self._lose(letters.at(gone))
            letters, place = letters.at(~gone), place[~gone]
        messages = np.bincount(place[~letters.carried], minlength=len(steps))
        if self._tally is not None:
            counted = self._first_to_leave[steps.client] >= steps.started
            number = np.cumsum(counted) - 1
            seen = counted[place] & ~letters.carried
            self._tally.stepped(steps.client[counted], letters.edge[seen], number[place[seen]])
        absorbed = self._together(steps.client, steps.step, own, share, letters, place, messages)
        self._record(letters, _arrived(letters), steps.step[place], messages[place])
        self._handing_out.decide(Decided(steps, emits, messages, absorbed))

    def _together(
        self,
        clients: IntArray,
        steps: IntArray,
        own: IntArray,
        share: FloatArray,
        letters: Letters,
        place: IntArray,
        messages: IntArray,
    ) -> Absorbed:
        """What clients take in, in the order of senders and of their steps, each its own payload too."""
        have = np.flatnonzero(own >= 0)
        row = np.concatenate([place, have])
        weights = np.concatenate([letters.weights, share[have]])
        carried = np.concatenate([letters.carried, np.zeros(len(have), dtype=np.bool_)])
        for channel, (_, shares) in enumerate(self._mixing):
            if shares.by_receiver:
                weights[:, channel] = np.where(carried, 0.0, shares.of_receiver(messages)[row])
        sources, senders = (
            np.concatenate([letters.serial, own[have]]),
            np.concatenate([letters.sender, clients[have]]),
        )
        order = np.lexsort((np.concatenate([letters.step, steps[have] - 1]), senders))
        return in_rows(len(clients), row[order], sources[order], senders[order], weights[order])

    # --- handing out and looking ---------------------------------------------------------------------

    def _flush(self, until: float) -> Iterator[Wave]:
        """The steps that have ended by then, as waves."""
        out, waves = self._handing_out.flush(until)
        if waves:
            steps = out.steps
            self._wire.record_steps(
                steps.client, step=steps.step, started_at=steps.started, ended_at=steps.ended,
                absorbed=out.messages, phase=self._talk.phase,
            )  # fmt: skip
        for place, wave in enumerate(waves):
            self.rests = place == len(waves) - 1
            yield wave

    def _snapshot(self, time: float, *, final: bool) -> Snapshot:
        """What everybody is to be judged by. The final one really absorbs: the rest is in flight for ever."""
        n, box = self._network.n, self._mailbox.all() if final else self._mailbox.by(time)
        if self._downlinks is not None:
            box = joined_letters([box, self._downlinks.foreseen(time)])
        waiting = self._handing_out.waiting
        idle = np.ones(n, dtype=np.bool_)
        idle[waiting.steps.client] = False
        empty = self._paces.empty(time)
        ends = np.full(n, time)
        if final and not self._waits:
            ends = np.where(np.isfinite(self._paces.left), self._paces.left, self._started)
        arrived = (box.arrives <= ends[box.receiver]) & idle[box.receiver] & ~empty[box.receiver]
        letters = box.at(arrived)
        messages = np.bincount(letters.receiver[~letters.carried], minlength=n)
        own = np.where(idle & ~empty, self._own, -1)
        everyone = np.arange(n)
        absorbed = self._together(everyone, self._begun, own, self._kept, letters, letters.receiver, messages)
        if len(waiting.emits):
            absorbed = _both(absorbed, waiting.absorbed, waiting.steps.client)
        ended = self._begun - ~idle
        unrecorded = Unrecorded()
        if final:
            self._record(
                letters, _arrived(letters), self._begun[letters.receiver], messages[letters.receiver]
            )
            rest = box.at(~arrived)
            gone, here = rest.arrives <= ends[rest.receiver], rest.arrives <= time
            self._record(rest.at(gone), int(Status.LOST), -1)  # it reached one who has forgotten it since
            self._record(rest.at(~gone & here), int(Status.LATE), -1)
            self._record(rest.at(~here), int(Status.IN_FLIGHT), -1)
            if self._running_sums is not None:
                self._record(self._running_sums.waiting, int(Status.LOST), -1)
        else:
            come = int(np.count_nonzero((box.arrives <= time) & ~box.carried))
            waits = 0 if self._running_sums is None else len(self._running_sums.waiting)
            under_way = 0 if self._downlinks is None else len(self._downlinks)
            sent = len(self._mailbox) + under_way + waits
            unrecorded = Unrecorded(come, sent - come, sent * self._talk.message_bytes)
        absorption = absorbed.absorption(everyone, tuple(names for names, _ in self._mixing))
        absorption = replace(absorption, empty=np.flatnonzero(empty))
        return Snapshot(
            absorption, time, ended, final, self._talk.part, unrecorded, ends=None if self._waits else ends
        )

    # --- the trace -----------------------------------------------------------------------------------

    def _lose(self, letters: Letters) -> None:
        """Messages that somebody was to absorb, and nobody will."""
        self._handing_out.lost(letters.serial)
        self._record(letters, int(Status.LOST), -1)

    def _record(
        self, letters: Letters, status: Any, absorbed_step: IntArray | int, messages: IntArray | None = None
    ) -> None:
        """`messages`: how many their receivers took in with each."""
        if not len(letters):
            return
        first = self._mixing[0][1]
        weight = letters.weights[:, 0]
        if first.by_receiver:  # who has not received a message has not weighed it
            if messages is not None:
                weight = first.of_receiver(messages)
            else:
                weight = np.full(len(letters), np.nan if status == Status.IN_FLIGHT else 0.0)
        self._wire.record(
            letters.sender, letters.receiver, status, step=letters.step, sent_at=letters.sent,
            arrived_at=letters.arrives, absorbed_step=absorbed_step, weight=weight,
            bytes=self._talk.message_bytes, phase=self._talk.phase, kind=self._talk.kind,
        )  # fmt: skip


def _arrived(letters: Letters) -> Any:
    return np.where(letters.carried, np.uint8(Status.CARRIED), np.uint8(Status.DELIVERED))


def _turns(clients: IntArray) -> IntArray:
    """How often each client stands before; clients stand sorted."""
    first = np.flatnonzero(np.diff(clients, prepend=-1))
    return np.arange(len(clients)) - np.repeat(first, np.diff(first, append=len(clients)))


def _first_after(steps: Steps, letters: Letters, until: float) -> IntArray:
    """Of each message the place of the step that absorbs it; -1 where that is not among these."""
    place = np.full(len(letters), -1, dtype=np.int64)
    some = np.flatnonzero(letters.arrives < until)
    if not len(steps) or not len(some):
        return place
    order = np.lexsort((steps.started, steps.client))
    times = np.concatenate([steps.started[order], letters.arrives[some]])
    _, rank = np.unique(times, return_inverse=True)
    clients, width = steps.client[order], int(rank.max()) + 1
    found = np.searchsorted(
        clients * width + rank[: len(order)], letters.receiver[some] * width + rank[len(order) :]
    )
    found[found == len(order)] = 0
    there = (clients[found] == letters.receiver[some]) & (
        steps.started[order[found]] >= letters.arrives[some]
    )
    place[some[there]] = order[found[there]]
    return place


def _both(idle: Absorbed, at_work: Absorbed, clients: IntArray) -> Absorbed:
    """What all clients stand on: those at work on what their step began from."""
    return in_rows(
        len(idle.indptr) - 1,
        np.concatenate([idle.row_of, clients[at_work.row_of]]),
        np.concatenate([idle.sources, at_work.sources]),
        np.concatenate([idle.senders, at_work.senders]),
        np.concatenate([idle.weights, at_work.weights]),
    )
