"""A server that does not wait: it moves when K answers are in, and whoever is free is asked again at once.

A *move* is a round: the server takes in K answers, weighed, and sends what comes of it from then on. Asking
goes on all the time:

    places      so many clients may be at work. A place is free when its client's answer has come, or would
                have come, had it not got lost. Whoever is asked gets the request of the move that is open
                then, and nobody gets a second one while at work on a first
    failing     a request that does not reach its client leaves its place free, and it is filled again, with
                links drawn anew; after `attempts` tries at one time it waits until something else happens
    counting    an answer counts in the next move of its series, which may be a later one: it is as stale as
                the server has moved since the request. The first K by (arrival, number of the request) are
                used, the others wait for the next move. What comes at one time is all taken in before anybody
                is asked
    absence     only who is there is asked, and where nobody is free and there, the place waits. A request
                that reaches a client which is away is lost, and holds its place until then. Who pauses
                answers later; who crashes or leaves at work never does, and its place is free from then on
    too stale   an answer that is staler than allowed is refused ("drop"); or the server does not move while
                somebody at work would thereby become too stale to count ("wait"): it waits for that answer,
                which then counts in the very move, beside the K. (With max_staleness=0 nobody is asked while
                it waits, or it would do so for ever. And of a method with several kinds of rounds an answer
                may miss all rounds of its kind until it is too stale: then it is refused all the same)

All that is drawn of a request goes by how many requests its client was sent before, so that nobody's draws
depend on anybody else's; whom a free place goes to is drawn by the number of the request. In lockstep every
request takes a unit of time, whatever comes of it.

Values depend on the version of the board that a client read, so all who were asked during a move are computed
together when it ends, however late their answers come: a move is two waves, and some more where a client was
asked more than once during it.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncfed.errors import QuorumError, RunError
from asyncfed.network.buffer import Buffered
from asyncfed.network.distributions import Distribution, Table
from asyncfed.network.links import BoolArray, FloatArray, IntArray
from asyncfed.network.presence import Attendance
from asyncfed.network.schedules.asked import Ask
from asyncfed.network.schedules.attended import Attended
from asyncfed.network.schedules.serving import REQUEST, Ended, Pace, commons
from asyncfed.network.schedules.versions import Versions
from asyncfed.network.server import server_links
from asyncfed.network.sharing import Intake
from asyncfed.network.waves import (
    NO_NODES,
    Absorption,
    Channel,
    Snapshot,
    Status,
    Sums,
    Unrecorded,
    Wave,
)
from asyncfed.network.wire import Fates, Wire
from asyncfed.recall import recalled
from asyncfed.rng import Streams

_DRAWS = 1024  # uniforms that are drawn at once


@recalled()
@dataclass(slots=True, eq=False)
class _Work:
    """What holds a place: a client's work on a request, until its answer is in."""

    ask: Ask
    round: int  # of the request
    number: int
    client: int
    turn: int  # works of this client in the same round before it
    versions: Mapping[str, int]
    done: float
    arrives: float  # or would, where the answer gets lost
    goes: bool
    reborn: bool = False  # whether its client has crashed since the work before
    taken_in: bool = True  # whether `arrives` is that, or when it reaches a downlink that others share
    payload: int = -1


@recalled(
    given=("_streams", "_server", "_pace", "_down", "_up", "n", "_node", "_needed", "_places", "_waits")
)
class BufferedSchedule:
    """The moves of one run, one after another; `compute` is None in lockstep."""

    def __init__(
        self,
        wire: Wire,
        streams: Streams,
        server: Buffered,
        *,
        compute: Distribution | Table | None,
        factors: FloatArray,
        attendance: Attendance | None = None,
    ) -> None:
        network = wire.network
        self._wire, self._streams, self._server = wire, streams, server
        self._pace = None if compute is None else Pace(compute, factors, streams)
        self._down, self._up = server_links(network)
        self.n = n = network.n - 1
        self._node = n  # the server stands last
        self._attended = Attended(n, attendance, lockstep=compute is None)
        shared = compute is not None and bool(np.isfinite(network.downlink[n]))
        self._intake = Intake(float(network.downlink[n])) if shared else None
        self._needed, self._places = server.needed(n), server.places(n)
        self._waits = server.too_stale == "wait" and server.max_staleness is not None
        self._idle = list(range(n))  # in order
        self._leavers: list[int] = []  # those of them who gave up a place that is still free, in that order
        self._asked = np.zeros(n, dtype=np.int64)  # requests that each was sent
        self._requests = 0
        self._draws: tuple[int, list[float]] = (-1, [])
        self._under_way: list[tuple[float, int, _Work]] = []  # a heap
        self._held: dict[str, list[_Work]] = {}  # answers that are here, by series, in order
        self._useless = 0  # requests in a row that brought no answer
        self._versions = Versions(n)
        self._reads: Mapping[str, int] = {}  # what is read in the open move
        self._new: list[_Work] = []  # works begun in the open move
        self._turns: Counter[int] = Counter()  # by client: how many of them
        self._over: list[int] = []  # payloads that nobody absorbs any more
        self._next_payload = 0
        self._ended = Ended(n)
        self._requested: list[tuple[Any, ...]] = []  # rows for the trace, written when the move is made
        self._begun: list[tuple[IntArray, FloatArray, FloatArray]] = []
        self._arriving = np.zeros(0)  # when requests that are written down come, of those that had not yet
        self.now = 0.0
        self.round = 0

    def alone(self, part: int, writes: tuple[str, ...]) -> Wave:
        """The server does something by itself, in no time: it begins, or begins again."""
        return self._server_wave(part, (), writes, NO_NODES)

    def one_round(self, ask: Ask) -> Iterator[Wave]:
        """Ask whoever is free until enough answers are in, and move."""
        self._reads = self._versions.of(ask.reads)
        self._turns.clear()
        self._forget_stale(ask.series)
        self._fill(ask)
        while not self._may_move(ask):
            self._take_in(ask)
            if not self._may_move(ask):
                self._fill(ask)
        yield from self._move(ask)

    def wait_for(self, clients: IntArray) -> BoolArray:
        """Who may be asked in a round: anybody, when there is a place and the client is there."""
        return np.ones(self.n, dtype=np.bool_)

    def parts_wanted(self) -> set[int]:
        """The parts whose works are not all handed out yet: a move leaves none."""
        return set()

    def snapshot(self, *, final: bool) -> Snapshot:
        """Everybody with the server's variables of now. The final one ends the run."""
        unused = [*self._answers_under_way(), *self._answers_held()]
        self._arriving = self._arriving[self._arriving > self.now]
        size = sum(one.ask.answer_bytes for one in unused)
        unrecorded = Unrecorded(on_the_way=len(unused), bytes=size, early=len(self._arriving))
        everyone = Absorption(np.arange(self.n, dtype=np.int64), commons(self._versions.now))
        worked, counts = self._ended.by(self.now)
        return Snapshot(
            everyone, self.now, worked, final, unrecorded=unrecorded, rounds=self.round, counts=counts
        )

    def finish(self) -> None:
        """What nobody has used when the run ends was late, or is in flight for ever."""
        for work in self._answers_held():
            self._record_unused(work, Status.LATE)
        for work in self._answers_under_way():
            self._record_unused(work, Status.LATE if work.arrives <= self.now else Status.IN_FLIGHT)
        self._held, self._under_way = {}, []

    def _answers_held(self) -> Iterator[_Work]:
        return (work for works in self._held.values() for work in works)

    def _answers_under_way(self) -> Iterator[_Work]:
        return (work for _, _, work in sorted(self._under_way, key=lambda one: one[:2]) if work.goes)

    # --- asking --------------------------------------------------------------------------------------

    def _fill(self, ask: Ask) -> None:
        """Fill the free places, unless whoever is asked now would have to be waited for at once."""
        if self._server.max_staleness == 0 and self._waits and self._enough(ask):
            return
        for _ in range(self._server.attempts):
            free = self._places - len(self._under_way)
            idle = self._idle_and_there()
            chosen = [self._next_client(ask, idle) for _ in range(min(free, len(idle)))]
            if not chosen:
                break
            self._send(ask, np.array(chosen, dtype=np.int64))
        else:
            if not self._under_way and not self._may_move(ask):
                self._give_up(ask)

    def _idle_and_there(self) -> list[int]:
        """In order; the same list as that of the idle where everybody is always there."""
        if self._attended.always:
            return self._idle
        here = self._attended.there(np.array(self._idle, dtype=np.int64), self.now)
        return [client for client, there in zip(self._idle, here.tolist(), strict=True) if there]

    def _next_client(self, ask: Ask, idle: list[int]) -> int:
        """Whom of some the next request goes to, who is then no longer idle."""
        number = self._requests
        self._requests += 1
        again = next((c for c in self._leavers if c in idle), None) if self._server.asks == "same" else None
        if again is not None:
            self._leavers.remove(again)
            place = idle.index(again)
        elif self._server.asks == "weighted":
            shares = np.cumsum(ask.samples[idle])
            place = int(np.searchsorted(shares, self._uniform(number) * shares[-1], side="right"))
        else:
            place = int(self._uniform(number) * len(idle))
        client = idle.pop(place)
        if idle is not self._idle:
            self._idle.remove(client)
        return client

    def _uniform(self, number: int) -> float:
        block, place = divmod(number, _DRAWS)
        if block != self._draws[0]:
            self._draws = block, self._streams.uniforms("asked", block, 0, _DRAWS).tolist()
        return self._draws[1][place]

    def _send(self, ask: Ask, clients: IntArray) -> None:
        """The newest requests, those together that go by the same draws."""
        numbers = np.arange(self._requests - len(clients), self._requests)
        rows = self._asked[clients]
        self._asked[clients] += 1
        self._versions.forgotten(self._attended.crashed_since_asked(clients, self.now))
        sizes = self._versions.news(ask.reads, clients)
        if len(clients) == 1 or (rows == rows[0]).all():
            failed = self._request(ask, clients, numbers, int(rows[0]), sizes)
        else:
            failed = []
            for row in np.unique(rows).tolist():
                at = np.flatnonzero(rows == row)
                failed += self._request(ask, clients[at], numbers[at], row, sizes[at])
        for number, client in sorted(failed):
            self._fail(ask, client, number)

    def _request(
        self, ask: Ask, clients: IntArray, numbers: IntArray, row: int, sizes: IntArray
    ) -> list[tuple[int, int]]:
        """Requests that reach their clients set these to work; returns number and client of the others."""
        now = self.now
        fates = self._wire.send(self._down[clients], row, np.full(len(clients), now), sizes)
        fates = self._wire.take_in(self._down[clients], fates, sizes)
        reaches = fates.goes
        failed = list[tuple[int, int]]()
        if not reaches.all():
            failed = list(zip(numbers[~reaches].tolist(), clients[~reaches].tolist(), strict=True))
        if not self._attended.always:
            reaches = reaches & self._attended.there(clients, fates.arrives)
            for at in np.flatnonzero(fates.goes & ~reaches).tolist():
                self._hold(ask, int(clients[at]), int(numbers[at]), float(fates.arrives[at]))
        self._requested.append(
            (clients, Fates(fates.up, reaches, fates.arrives).status, now, fates.arrives, sizes)
        )
        if not reaches.all():
            clients, numbers = clients[reaches], numbers[reaches]
        reached = fates.arrives[reaches]
        done, void = self._works(ask, clients, reached, row)
        reborn = np.zeros(len(clients), dtype=np.bool_)
        if not self._attended.always:
            reborn = self._attended.reborn(clients, reached, reached, done, void)
            for at in np.flatnonzero(void).tolist():
                until = float(done[at]) if self._pace is not None else now + 1.0
                self._hold(ask, int(clients[at]), int(numbers[at]), until)
            clients, numbers, reached, done = clients[~void], numbers[~void], reached[~void], done[~void]
            reborn = reborn[~void]
        if not len(clients):
            return failed
        answers = self._wire.send(self._up[clients], row, done, ask.answer_bytes)
        self._begun.append((clients, reached, done))
        if not answers.goes.all():
            self._record_lost(ask, clients, done, answers.up, ~answers.goes)
        columns = clients, numbers, done, answers.arrives, answers.goes, reborn
        for client, number, ends, arrives, goes, new in zip(*(one.tolist() for one in columns), strict=True):
            turn = self._turns[client]
            self._turns[client] += 1
            at_once = self._intake is None or not goes
            work = _Work(
                ask, self.round, number, client, turn, self._reads, ends, arrives, goes, new, at_once
            )
            self._new.append(work)
            heapq.heappush(self._under_way, (arrives, number, work))
        return failed

    def _works(
        self, ask: Ask, clients: IntArray, reached: FloatArray, row: int
    ) -> tuple[FloatArray, BoolArray]:
        """When clients that a request has reached have done what it asks, and who never has: each begins at
        once, for nobody is asked while at work.
        """
        takes = np.ones(len(clients))
        if self._pace is not None:
            takes = self._pace.durations(clients, row) * ask.work[clients]
        return self._attended.ends(clients, reached, reached, takes)

    def _fail(self, ask: Ask, client: int, number: int) -> None:
        """The place is free again: at once, in lockstep after a unit of time like all others."""
        if self._pace is not None:
            self._leave(client)
            return
        self._hold(ask, client, number, self.now + 1.0)

    def _hold(self, ask: Ask, client: int, number: int, until: float) -> None:
        """A place is taken until then, and nothing comes of it."""
        nothing = _Work(ask, self.round, number, client, 0, {}, until, until, goes=False)
        heapq.heappush(self._under_way, (until, number, nothing))

    def _leave(self, client: int) -> None:
        insort(self._idle, client)
        if self._server.asks == "same":
            self._leavers.append(client)

    # --- taking in -----------------------------------------------------------------------------------

    def _take_in(self, ask: Ask) -> None:
        """All that happens at the next instant at which something does."""
        next_one = self._under_way[0][0] if self._under_way else np.inf
        coming = self._next_coming()
        if min(next_one, coming) == np.inf:
            self._nobody_comes(ask)
        self.now = min(next_one, coming)
        while self._under_way and self._under_way[0][0] == self.now:
            _, number, work = heapq.heappop(self._under_way)
            if not work.taken_in and self._intake is not None:  # one after the other, as they come
                self._intake.add((work.client, number), work.arrives, work.ask.answer_bytes)
                work.arrives = self._intake.settle(self.now)[work.client, number]
                work.taken_in = True
                heapq.heappush(self._under_way, (work.arrives, number, work))
                continue
            self._leave(work.client)
            if not work.goes:
                self._useless += 1
                continue
            self._useless = 0
            self._versions.answered_late(work.versions, work.client)
            if self._too_stale(work, self.round):
                self._refuse(work)
            else:
                self._held.setdefault(work.ask.series, []).append(work)
        if self._useless >= self._server.attempts * self._places:
            self._give_up(ask)

    def _next_coming(self) -> float:
        """When somebody is there again for whom there is a place."""
        if self._attended.always or len(self._under_way) == self._places or not self._idle:
            return np.inf
        away = np.array(self._idle, dtype=np.int64)
        away = away[~self._attended.there(away, self.now)]
        return self._attended.next_there(away, self.now) if len(away) else np.inf

    def _too_stale(self, work: _Work, round: int) -> bool:
        """To count in that round."""
        most = self._server.max_staleness
        return most is not None and round - work.round > most

    def _refuse(self, work: _Work) -> None:
        self._record_unused(work, Status.LATE, self.round - work.round)
        self._over.append(work.payload)

    def _forget_stale(self, series: str) -> None:
        """Answers that have waited for a round of their series too long."""
        if self._server.max_staleness is None or series not in self._held:
            return
        held = self._held[series]
        self._held[series] = [work for work in held if not self._too_stale(work, self.round)]
        for work in held:
            if self._too_stale(work, self.round):
                self._refuse(work)

    def _may_move(self, ask: Ask) -> bool:
        """Whether enough is in, and nobody would get too stale who has to be waited for."""
        return self._enough(ask) and not (
            self._waits
            and any(
                work.ask.series == ask.series and self._too_stale(work, self.round + 1)
                for _, _, work in self._under_way
            )
        )

    def _enough(self, ask: Ask) -> bool:
        return len(self._held.get(ask.series, ())) >= self._needed

    def _give_up(self, ask: Ask) -> None:
        """Nothing has come for too long."""
        self._write_down(ask)
        here = len(self._held.get(ask.series, ()))
        self.finish()
        raise QuorumError(
            ask.phase, ask.kind, self.round, here, self._needed, self._places, self._server.attempts
        )

    def _nobody_comes(self, ask: Ask) -> None:
        """Nobody is at work, and nobody who may be asked is there or will be."""
        self._write_down(ask)
        here = len(self._held.get(ask.series, ()))
        self.finish()
        raise RunError(
            f"at time {self.now:g} round {self.round} ({ask.phase}, {ask.kind}) has {here} of the "
            f"{self._needed} answers it needs, nobody is at work, and none of the {self.n} clients is there "
            "or will come any more; let some stay, or ask for fewer rounds"
        )

    # --- moving --------------------------------------------------------------------------------------

    def _move(self, ask: Ask) -> Iterator[Wave]:
        used = self._taken(ask.series)
        staleness = self.round - np.array([work.round for work in used], dtype=np.int64)
        senders = np.array([work.client for work in used], dtype=np.int64)
        importance = ask.importance[senders]
        shares = self._server.decay.factor(staleness) * importance
        weights = shares / (shares if ask.normalised else importance).sum()
        self._write_down(ask)
        self._record_used(used, senders, staleness, weights)
        self._wire.record_steps(
            self._node, step=self.round, started_at=np.array([self.now]), ended_at=self.now,
            absorbed=len(used), phase=ask.phase,
        )  # fmt: skip
        yield from self._clients_waves(ask)
        sources = np.array([work.payload for work in used], dtype=np.int64)
        channel = Sums(ask.answers, np.array([0, len(used)]), sources, weights, senders)
        over, self._over = np.sort(np.append(sources, self._over).astype(np.int64)), []
        yield self._server_wave(ask.part, (channel,), ask.writes, over)
        self.round += 1

    def _taken(self, series: str) -> list[_Work]:
        """The answers that count in this move, in the order of clients and requests."""
        held = self._held.pop(series)
        used, rest = held[: self._needed], held[self._needed :]
        if rest and self._waits:
            used += [work for work in rest if self._too_stale(work, self.round + 1)]
            rest = [work for work in rest if not self._too_stale(work, self.round + 1)]
        if rest:
            self._held[series] = rest
        used.sort(key=lambda work: (work.client, work.number))
        return used

    def _clients_waves(self, ask: Ask) -> Iterator[Wave]:
        """Those who were asked during this move; who was asked again, after that. What gets lost is computed
        only where clients remember something of it.
        """
        new, self._new = self._new, []
        turns: dict[int, list[_Work]] = {}
        for work in new:
            if work.goes or ask.remembers:
                turns.setdefault(work.turn, []).append(work)
            elif work.reborn:
                self._attended.owe(np.array([work.client]))
        for turn in sorted(turns):
            works = sorted(turns[turn], key=lambda work: work.client)
            serials = self._serials(len(works))
            for work, serial in zip(works, serials.tolist(), strict=True):
                work.payload = serial
                if not work.goes:
                    self._over.append(serial)
            clients = np.array([work.client for work in works], dtype=np.int64)
            reborn = self._attended.paid(clients, np.array([work.reborn for work in works], dtype=np.bool_))
            yield Wave(
                Absorption(clients, commons(self._reads)), np.full(len(works), self.round), serials, NO_NODES,
                self.now, ask.part, readers=1, turn=turn, reborn=reborn,
            )  # fmt: skip

    def _server_wave(
        self, part: int, channels: tuple[Channel, ...], writes: tuple[str, ...], over: IntArray
    ) -> Wave:
        emits = self._serials(1)
        stale = self._versions.written(writes, int(emits[0]), ())
        released = np.append(over, sorted(stale)).astype(np.int64) if stale else over
        node = np.array([self._node], dtype=np.int64)
        return Wave(Absorption(node, channels), np.array([self.round]), emits, released, self.now, part)

    def _serials(self, count: int) -> IntArray:
        first = self._next_payload
        self._next_payload += count
        return np.arange(first, first + count, dtype=np.int64)

    # --- the trace -----------------------------------------------------------------------------------

    def _write_down(self, ask: Ask) -> None:
        """The requests of the open move and the works on them, at once."""
        requested, self._requested = self._requested, []
        if requested:
            clients, status, sent, arrives, sizes = zip(*requested, strict=True)
            counts, came, fate = (
                [len(some) for some in clients],
                np.concatenate(arrives),
                np.concatenate(status),
            )
            self._wire.record(
                self._node, np.concatenate(clients), fate, step=self.round, sent_at=np.repeat(sent, counts),
                arrived_at=came, absorbed_step=self.round, weight=1.0, bytes=np.concatenate(sizes),
                phase=ask.phase, kind=REQUEST,
            )  # fmt: skip
            early = (came > self.now) & (fate == Status.DELIVERED)
            if early.any():
                self._arriving = np.append(self._arriving, came[early])
        begun, self._begun = self._begun, []
        if begun:
            workers, started, done = (np.concatenate(column) for column in zip(*begun, strict=True))
            self._ended.add(workers, done, {name: each[workers] for name, each in ask.adds.items()})
            self._wire.record_steps(
                workers, step=self.round, started_at=started, ended_at=done, absorbed=1, phase=ask.phase
            )

    def _record_used(
        self, used: list[_Work], senders: IntArray, staleness: IntArray, weights: FloatArray
    ) -> None:
        done, arrives = np.array([(work.done, work.arrives) for work in used]).T
        labels = [(work.ask.phase, work.ask.kind, work.ask.answer_bytes) for work in used]
        for label in dict.fromkeys(labels):
            phase, kind, size = label
            at = [place for place, one in enumerate(labels) if one == label]
            self._wire.record(
                senders[at], self._node, int(Status.DELIVERED), step=self.round - staleness[at],
                sent_at=done[at], arrived_at=arrives[at], absorbed_step=self.round, weight=weights[at],
                bytes=size, phase=phase, kind=kind, staleness=staleness[at],
            )  # fmt: skip

    def _record_lost(self, ask: Ask, clients: IntArray, done: FloatArray, up: Any, lost: Any) -> None:
        self._wire.record(
            clients[lost], self._node,
            np.where(up[lost], np.uint8(Status.LOST), np.uint8(Status.LINK_DOWN)),
            step=self.round, sent_at=done[lost], arrived_at=np.nan, absorbed_step=-1, weight=np.nan,
            bytes=ask.answer_bytes, phase=ask.phase, kind=ask.kind,
        )  # fmt: skip

    def _record_unused(self, work: _Work, status: Status, staleness: int = -1) -> None:
        self._wire.record(
            np.array([work.client]), self._node, int(status), step=work.round, sent_at=work.done,
            arrived_at=work.arrives, absorbed_step=-1, weight=np.nan, bytes=work.ask.answer_bytes,
            phase=work.ask.phase, kind=work.ask.kind, staleness=staleness,
        )  # fmt: skip
