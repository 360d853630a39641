"""The rounds of a server: what it sends, who answers, and what has arrived when it stops waiting.

A server is a node with links like any other. In a *round* it sends each client it asks a request, the client
works on it and answers, and the server takes in the answers it has when it stops waiting. So a round is two
waves: the clients absorb the server's payload, the server absorbs theirs, weighed.

    waiting     for everyone asked; or for a quorum; or until a deadline after the requests were sent
    repeating   where fewer answers came than are needed (a quorum, or at least one), those who have not
                answered are asked again, with links drawn anew, up to `attempts` times
    too late    an answer that comes after the round has closed is dropped, or held for the next round of its
                series that closes after it has come: there it counts with the others (but not for the
                quorum), unless one that its client made later is there as well
    replacing   a client works on one request after the other; one that it has not begun when a newer one
                comes is replaced by it (or not, where the server says so)

Without a deadline the server knows when nothing more will come: a lost message holds nobody up, and an
attempt whose requests all fail takes no time. A client works on each request for its compute time times the
number of local steps; one that repeats a request whose answer is going to come changes nothing. In lockstep a
round (each attempt) takes one unit of time and nothing is late.

Every variable of the server has a version: the payload in which it last changed. A request carries what the
client is not known to have, and it is known to have what it has answered to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from asyncfed.errors import QuorumError
from asyncfed.network.distributions import Constant, Distribution, Table
from asyncfed.network.links import BoolArray, FloatArray, IntArray
from asyncfed.network.server import Server, server_links
from asyncfed.network.waves import (
    NO_NODES,
    Absorption,
    Channel,
    Common,
    Snapshot,
    Status,
    Sums,
    Unrecorded,
    Wave,
)
from asyncfed.network.wire import Wire
from asyncfed.rng import Streams

REQUEST = "request"  # kind of what the server sends


@dataclass(frozen=True, eq=False)
class Ask:
    """A round, as the network sees it. Arrays are over the clients asked."""

    part: int
    phase: str
    kind: str
    clients: IntArray
    reads: Mapping[str, int]  # what the clients read of the server's variables, and the bytes of each
    answers: tuple[str, ...]
    answer_bytes: int
    writes: tuple[str, ...]  # which of the server's variables change
    work: FloatArray  # local steps of each
    importance: FloatArray  # what the answer of each counts, before they are made to add up to 1
    series: str  # late answers go to the next round of this name
    remembers: bool = False  # whether clients keep something, so that work whose answer is lost matters too


@dataclass(slots=True)
class _Work:
    """A client's work on a request that the round it belongs to did not wait for."""

    ask: Ask
    round: int
    attempt: int
    client: int
    versions: dict[str, int]
    importance: float
    begun: float
    done: float
    arrives: float  # infinite where the answer gets lost
    payload: int = -1


@dataclass(slots=True)
class _Attempt:
    """What came of asking once, over those who set to work."""

    number: int
    clients: IntArray
    begun: FloatArray
    done: FloatArray
    up: BoolArray
    goes: BoolArray
    arrives: FloatArray  # infinite where the answer gets lost


class AskedSchedule:
    """The rounds of one run, one after another.

    `compute` is None in lockstep; a table of it has a row, and `factors` an entry, for each client.
    """

    def __init__(
        self,
        wire: Wire,
        streams: Streams,
        server: Server,
        *,
        compute: Distribution | Table | None,
        factors: FloatArray,
    ) -> None:
        network = wire.network
        self._wire, self._streams, self._server = wire, streams, server
        self._compute, self._factors = compute, factors
        self._down, self._up = server_links(network)
        self.n = n = network.n - 1
        self._node = n  # the server stands last
        self._working = np.full(n, -np.inf)  # until when each client is
        self._queued: dict[int, _Work] = {}  # by client: not begun, so it may be replaced
        self._late: dict[str, list[_Work]] = {}
        self._due: list[_Work] = []  # begun, and to be computed
        self._version: dict[str, int] = {}
        self._known: dict[str, IntArray] = {}
        self._boards: set[int] = set()  # payloads of the server that may still be read
        self._next_payload = 0
        self.worked = np.zeros(n, dtype=np.int64)  # rounds that each client has
        self.now = 0.0
        self._attempt = 0  # counts them over the whole run: what links, losses and durations are drawn by
        self.round = 0

    def alone(self, part: int, writes: tuple[str, ...]) -> Wave:
        """The server does something by itself, in no time: it begins, or begins again."""
        return self._server_wave(part, (), writes, [])

    def one_round(self, ask: Ask) -> Iterator[Wave]:
        """Ask, wait and close."""
        n = self.n
        asked = np.zeros(n, dtype=np.bool_)
        asked[ask.clients] = True
        arrives = np.full(n, np.inf)
        place = np.zeros(n, dtype=np.int64)
        place[ask.clients] = np.arange(len(ask.clients))
        importance = ask.importance[place]  # of every client; of those not asked it means nothing
        sizes = self._request_bytes(ask)
        needed = self._server.needed(len(ask.clients))
        attempts: list[_Attempt] = []
        for _ in range(self._server.attempts):
            missing = np.flatnonzero(asked & ~(arrives <= self.now))
            attempt, idle_at = self._ask(ask, missing, place[missing], sizes, arrives)
            attempts.append(attempt)
            arrives[attempt.clients] = np.where(attempt.goes, attempt.arrives, arrives[attempt.clients])
            self.now = self._closing_time(arrives, len(ask.clients), needed, idle_at)
            self._attempt += 1
            self._settle(ask, attempt, importance)
            here = np.flatnonzero(arrives <= self.now)
            if len(here) >= needed:
                break
        else:
            self._give_up(ask, attempts, importance)
            raise QuorumError(
                ask.phase, ask.kind, self.round, len(here), needed, len(ask.clients), self._server.attempts
            )
        yield from self._close(ask, attempts, here, importance)

    def parts_wanted(self) -> set[int]:
        """The parts whose works are not all handed out yet."""
        return {work.ask.part for work in self._queued.values()}

    def snapshot(self, *, final: bool) -> Snapshot:
        """Everybody with the server's variables of now. The final one ends the run."""
        held = [work for works in self._late.values() for work in works]
        # Of those that are here already: whether a round will use them, or they were late, is not known yet.
        unrecorded = Unrecorded(on_the_way=len(held), bytes=sum(work.ask.answer_bytes for work in held))
        everyone = Absorption(np.arange(self.n, dtype=np.int64), self._commons(self._version))
        return Snapshot(
            everyone, self.now, self.worked.copy(), final, unrecorded=unrecorded, rounds=self.round
        )

    def finish(self) -> None:
        """What nobody has used when the run ends was late, or is in flight for ever."""
        for works in self._late.values():
            for work in works:
                status = Status.LATE if work.arrives <= self.now else Status.IN_FLIGHT
                self._record_answer(work, status, -1, np.nan)
        self._late = {}

    # --- one attempt ---------------------------------------------------------------------------------

    def _ask(
        self, ask: Ask, clients: IntArray, place: IntArray, sizes: IntArray, arrives: FloatArray
    ) -> tuple[_Attempt, float]:
        """Send requests to `clients`, who set to work; also returns when the last of it has happened."""
        now = self.now
        edges = self._down[clients]
        size = sizes[place]
        fates = self._wire.send(edges, self._attempt, np.full(len(clients), now), size)
        if len(edges):
            self._wire.record(
                self._node, clients, fates.status, step=self.round, sent_at=now, arrived_at=fates.arrives,
                absorbed_step=self.round, weight=1.0, bytes=size, phase=ask.phase, kind=REQUEST,
            )  # fmt: skip
        new = fates.goes & ~np.isfinite(arrives[clients])  # else at work on it already, or it has answered
        workers, reached = clients[new], fates.arrives[new]
        if self._queued:
            self._replace(workers, reached)
        begun = np.maximum(reached, self._working[workers])
        if self._compute is None:
            done = np.full(len(workers), now + 1.0)
        else:
            done = begun + self._durations(workers) * ask.work[place[new]]
        up_edges = self._up[workers]
        before = self._wire.state(up_edges)
        answers = self._wire.send(up_edges, self._attempt, done, ask.answer_bytes)
        idle_at = now + 1.0
        if self._compute is not None:
            idle_at = float(max(now, reached.max(initial=now), done.max(initial=now)))
            if self._server.requests == "newest" and len(workers):
                # Until it begins, a work may be replaced, and then it will not have used the link.
                self._wire.restore(up_edges, before)
        found = np.where(answers.goes, answers.arrives, np.inf)
        return _Attempt(self._attempt, workers, begun, done, answers.up, answers.goes, found), idle_at

    def _durations(self, clients: IntArray) -> FloatArray:
        """What one local step of each takes."""
        compute, step = self._compute, self._attempt
        if isinstance(compute, Table):
            rows = [compute.rows[client] for client in clients.tolist()]
            drawn = np.array([row[step % len(row)] for row in rows])
        elif isinstance(compute, Constant):
            drawn = np.full(len(clients), compute.value)
        else:
            assert compute is not None, "in lockstep nobody asks"
            drawn = compute.quantile(self._streams.uniforms("compute", step, 0, self.n + 1)[clients])
        return np.asarray(drawn * self._factors[clients], dtype=np.float64)

    def _closing_time(self, arrives: FloatArray, asked: int, needed: int, idle_at: float) -> float:
        coming = np.sort(arrives[np.isfinite(arrives)])
        enough = asked if self._server.quorum is None else needed
        last = np.inf if self._server.deadline is None else self.now + self._server.deadline
        if len(coming) >= enough:
            return float(max(self.now, min(coming[enough - 1], last)))
        if self._server.deadline is not None:  # who did not answer may still do so, for all the server knows
            return float(last)
        return float(coming[-1] if len(coming) and coming[-1] > self.now else idle_at)

    # --- works that are begun, and works that wait ----------------------------------------------------

    def _settle(self, ask: Ask, attempt: _Attempt, importance: FloatArray) -> None:
        """What was begun by now has happened; what was not waits, and may be replaced."""
        begun = attempt.begun <= self.now
        if self._compute is None or self._server.requests == "all":
            begun = np.ones(len(begun), dtype=np.bool_)
        elif not begun.all():
            for at in np.flatnonzero(~begun).tolist():
                self._queued[int(attempt.clients[at])] = self._work(ask, attempt, at, importance)
        if self._compute is not None and self._server.requests == "newest":
            for client in [c for c, work in self._queued.items() if work.begun <= self.now]:
                self._begin(self._queued.pop(client))
            edges = self._up[attempt.clients[begun]]
            self._wire.send(edges, attempt.number, attempt.done[begun], ask.answer_bytes)
        clients, done = attempt.clients[begun], attempt.done[begun]
        self._working[clients] = done
        self.worked[clients] += 1
        if len(clients):
            self._wire.record_steps(
                clients, step=self.round, started_at=attempt.begun[begun], ended_at=done, absorbed=1,
                phase=ask.phase,
            )  # fmt: skip
        self._record_failed(ask, self.round, clients, done, attempt.up[begun], attempt.goes[begun])
        attempt.clients, attempt.begun, attempt.done = clients, attempt.begun[begun], done
        attempt.up, attempt.goes, attempt.arrives = (
            attempt.up[begun], attempt.goes[begun], attempt.arrives[begun]
        )  # fmt: skip

    def _replace(self, clients: IntArray, reached: FloatArray) -> None:
        """Newer requests have reached these clients: what they have not begun by then they never will."""
        for client, at in zip(clients.tolist(), reached.tolist(), strict=True):
            work = self._queued.pop(client, None)
            if work is not None and work.begun <= at:
                self._begin(work)

    def _begin(self, work: _Work) -> None:
        """A work that waited is begun, and its answer will be sent; its round has closed without it, or will
        find it among its answers.
        """
        client, ask = np.array([work.client]), work.ask
        fate = self._wire.send(self._up[client], work.attempt, np.array([work.done]), ask.answer_bytes)
        self._working[work.client] = work.done
        self.worked[work.client] += 1
        self._wire.record_steps(
            client, step=work.round, started_at=work.begun, ended_at=work.done, absorbed=1, phase=ask.phase
        )
        self._record_failed(ask, work.round, client, np.array([work.done]), fate.up, fate.goes)
        self._due.append(work)

    def _work(self, ask: Ask, attempt: _Attempt, at: int, importance: FloatArray) -> _Work:
        client = int(attempt.clients[at])
        return _Work(
            ask, self.round, attempt.number, client, self._versions(ask), float(importance[client]),
            float(attempt.begun[at]), float(attempt.done[at]), float(attempt.arrives[at]),
        )  # fmt: skip

    def _give_up(self, ask: Ask, attempts: list[_Attempt], importance: FloatArray) -> None:
        """For want of a quorum: what is under way is late."""
        works = [
            self._work(ask, attempt, at, importance)
            for attempt in attempts
            for at in np.flatnonzero(attempt.goes).tolist()
        ]
        works += [work for work in self._due if np.isfinite(work.arrives)]
        self._late.setdefault("", []).extend(works)
        self.finish()

    # --- closing -------------------------------------------------------------------------------------

    def _close(
        self, ask: Ask, attempts: list[_Attempt], here: IntArray, importance: FloatArray
    ) -> Iterator[Wave]:
        hold, series = self._server.late == "next", ask.series
        # The works to be computed, by attempt (only the last one's, unless clients remember).
        payload = np.full(self.n, -1, dtype=np.int64)
        sent = np.full(self.n, np.nan)
        arrives = np.full(self.n, np.nan)
        waves: list[Wave] = []
        unused: list[int] = []
        for attempt in attempts:
            late = attempt.goes & (attempt.arrives > self.now)
            used = attempt.goes & ~late
            wanted = np.ones(len(used), dtype=np.bool_) if ask.remembers else used | (late & hold)
            chosen = np.flatnonzero(wanted)
            clients = attempt.clients[chosen]
            serials = self._serials(len(clients))
            if len(clients):
                waves.append(self._clients_wave(ask.part, self.round, clients, serials, self._versions(ask)))
            mine = attempt.clients[used]
            payload[mine] = serials[used[chosen]]
            sent[mine], arrives[mine] = attempt.done[used], attempt.arrives[used]
            unused += serials[~used[chosen] & ~(late[chosen] & hold)].tolist()
            if late.any():
                number = dict(zip(clients.tolist(), serials.tolist(), strict=True))
                for at in np.flatnonzero(late).tolist():
                    work = self._work(ask, attempt, at, importance)
                    work.payload = number.get(work.client, -1)
                    self._put_aside(work, series, hold)
        waves += self._due_waves(payload, sent, arrives, unused, here, hold)
        older, worthless = self._take_late(series, here)
        total = importance[here].sum() + sum(work.importance for work in older)
        weights = importance[here] / total
        self._wire.record(
            here, self._node, int(Status.DELIVERED), step=self.round, sent_at=sent[here],
            arrived_at=arrives[here], absorbed_step=self.round, weight=weights, bytes=ask.answer_bytes,
            phase=ask.phase, kind=ask.kind,
        )  # fmt: skip
        for work in older:
            self._record_answer(work, Status.DELIVERED, self.round, work.importance / total)
        for work in worthless:
            self._record_answer(work, Status.LATE, -1, np.nan)
        self._wire.record_steps(
            self._node, step=self.round, started_at=np.array([self.now]), ended_at=self.now,
            absorbed=len(here) + len(older), phase=ask.phase,
        )  # fmt: skip
        self._learn(ask, here, (*older, *worthless))
        sources = np.concatenate([payload[here], np.array([work.payload for work in older], dtype=np.int64)])
        shares = np.concatenate([weights, np.array([work.importance / total for work in older])])
        senders = np.concatenate([here, np.array([work.client for work in older], dtype=np.int64)])
        channel = Sums(ask.answers, np.array([0, len(sources)]), sources, shares, senders)
        unused += [work.payload for work in worthless]
        yield from waves
        yield self._server_wave(ask.part, (channel,), ask.writes, [*sources.tolist(), *unused])
        self.round += 1

    def _due_waves(
        self,
        payload: IntArray,
        sent: FloatArray,
        arrives: FloatArray,
        unused: list[int],
        here: IntArray,
        hold: bool,
    ) -> Iterator[Wave]:
        """Works of this or earlier rounds that had waited and are begun by now, each in a wave of its own."""
        due, self._due = self._due, []
        for work in due:
            of_this = work.round == self.round
            used = of_this and work.arrives <= self.now and payload[work.client] < 0 and work.client in here
            goes = bool(np.isfinite(work.arrives))
            if used or work.ask.remembers or (goes and hold):
                serial = self._serials(1)
                work.payload = int(serial[0])
                client = np.array([work.client])
                yield self._clients_wave(work.ask.part, work.round, client, serial, work.versions)
                if not used and not (goes and hold):
                    unused.append(work.payload)
            if used:
                payload[work.client], sent[work.client] = work.payload, work.done
                arrives[work.client] = work.arrives
            elif goes:
                self._put_aside(work, work.ask.series, hold)

    def _put_aside(self, work: _Work, series: str, hold: bool) -> None:
        """An answer that missed its round."""
        if hold:
            self._late.setdefault(series, []).append(work)
        else:
            self._record_answer(work, Status.LATE, -1, np.nan)

    def _take_late(self, series: str, here: IntArray) -> tuple[list[_Work], list[_Work]]:
        """Of the answers held from earlier rounds of a series: those that count now, and those that a newer
        one of the same client has made worthless.
        """
        held = self._late.pop(series, [])
        waiting = [work for work in held if work.arrives > self.now]
        if waiting:
            self._late[series] = waiting
        newest: dict[int, _Work] = {}
        worthless: list[_Work] = []
        fresh = set(here.tolist())
        for work in held:
            if work.arrives > self.now:
                continue
            if work.client in fresh:
                worthless.append(work)
                continue
            if work.client in newest:
                worthless.append(newest[work.client])
            newest[work.client] = work
        return list(newest.values()), worthless

    def _learn(self, ask: Ask, here: IntArray, late: tuple[_Work, ...]) -> None:
        """A client that has answered has what it was sent."""
        for name in ask.reads:
            self._known[name][here] = self._version[name]
        for work in late:
            for name, version in work.versions.items():
                self._known[name][work.client] = max(int(self._known[name][work.client]), version)

    # --- payloads and waves --------------------------------------------------------------------------

    def _request_bytes(self, ask: Ask) -> IntArray:
        total = np.zeros(len(ask.clients), dtype=np.int64)
        for name, size in ask.reads.items():
            if name not in self._known:
                self._known[name] = np.full(self.n, -1, dtype=np.int64)
            total += size * (self._known[name][ask.clients] != self._version[name])
        return total

    def _versions(self, ask: Ask) -> dict[str, int]:
        return {name: self._version[name] for name in ask.reads}

    def _serials(self, count: int) -> IntArray:
        first = self._next_payload
        self._next_payload += count
        return np.arange(first, first + count, dtype=np.int64)

    def _clients_wave(
        self, part: int, round: int, clients: IntArray, emits: IntArray, versions: Mapping[str, int]
    ) -> Wave:
        absorption = Absorption(clients, self._commons(versions))
        return Wave(absorption, np.full(len(clients), round), emits, NO_NODES, self.now, part, readers=1)

    def _commons(self, versions: Mapping[str, int]) -> tuple[Channel, ...]:
        """The server's variables, those of one payload together."""
        names: dict[int, tuple[str, ...]] = {}
        for name, source in versions.items():
            names[source] = (*names.get(source, ()), name)
        return tuple(Common(some, source) for source, some in names.items())

    def _server_wave(
        self, part: int, channels: tuple[Channel, ...], writes: tuple[str, ...], used: list[int]
    ) -> Wave:
        emits = self._serials(1)
        for name in writes:
            self._version[name] = int(emits[0])
        wanted = set(self._version.values())
        for work in self._queued.values():
            wanted.update(work.versions.values())
        stale = self._boards - wanted
        self._boards = (self._boards & wanted) | {int(emits[0])}
        released = np.array(sorted((*used, *stale)), dtype=np.int64)
        node = np.array([self._node], dtype=np.int64)
        return Wave(
            Absorption(node, channels), np.array([self.round]), emits, released, self.now, part,
        )  # fmt: skip

    # --- the trace -----------------------------------------------------------------------------------

    def _record_answer(self, work: _Work, status: Status, absorbed: int, share: float) -> None:
        self._wire.record(
            np.array([work.client]), self._node, int(status), step=work.round, sent_at=work.done,
            arrived_at=work.arrives, absorbed_step=absorbed, weight=share, bytes=work.ask.answer_bytes,
            phase=work.ask.phase, kind=work.ask.kind,
        )  # fmt: skip

    def _record_failed(
        self, ask: Ask, round: int, clients: IntArray, done: FloatArray, up: BoolArray, goes: BoolArray
    ) -> None:
        if goes.all():
            return
        failed = ~goes
        self._wire.record(
            clients[failed], self._node,
            np.where(up[failed], np.uint8(Status.LOST), np.uint8(Status.LINK_DOWN)),
            step=round, sent_at=done[failed], arrived_at=np.nan, absorbed_step=-1, weight=np.nan,
            bytes=ask.answer_bytes, phase=ask.phase, kind=ask.kind,
        )  # fmt: skip
