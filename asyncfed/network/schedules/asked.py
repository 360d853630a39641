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
    replacing   a client works on one request at a time; one that it has not begun when a newer one comes is
                forgotten (and so is one that a newer one has overtaken); or it works off all of them, in the
                order in which they were sent, where the server says so

Without a deadline the server knows when nothing more will come: a lost message holds nobody up, and an
attempt whose requests all fail takes no time. A client works on each request for its compute time times the
number of local steps; one that repeats a request whose answer is going to come changes nothing. In lockstep a
round (each attempt) takes one unit of time and nothing is late.

Clients that are not always there (`presence`) are asked while they are; where nobody is, the server waits. A
request that reaches a client which is away is lost, and so is one that its downlink has taken in then. A work
goes on only while its client is there: who pauses answers later; who crashes (also with requests that wait)
or leaves for good never does, and the server knows. In lockstep who is not there one unit later does not
answer.

Requests share the server's uplink in the order of the clients' numbers, answers share its downlink in the
order in which they reach it: one that is long on its way holds nobody up before it is there. A client takes
in requests in the order in which they were sent, where its downlink has a rate.

What a client has not begun when a round closes is not decided, for newer requests may come: it waits, and
what is known of its answer is a forecast, right as long as none does. So nothing begins after the run's end.

What a request carries is in `versions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from asyncfed.errors import QuorumError, RunError
from asyncfed.network.distributions import Distribution, Table
from asyncfed.network.links import BoolArray, FloatArray, IntArray
from asyncfed.network.presence import Attendance
from asyncfed.network.schedules.attended import Attended
from asyncfed.network.schedules.serving import REQUEST, Ended, Pace, commons
from asyncfed.network.schedules.versions import Versions
from asyncfed.network.server import Server, server_links
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


@recalled()
@dataclass(frozen=True, eq=False)
class Ask:
    """A round, as the network sees it. Arrays are over the clients asked, who stand in order."""

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
    normalised: bool = True  # whether weights add up to 1, also of stale answers that count less
    samples: IntArray = field(default_factory=lambda: NO_NODES)  # training samples of each
    adds: Mapping[str, IntArray] = field(default_factory=dict)  # what the work of each adds to its counts


@recalled()
@dataclass(slots=True)
class _Work:
    """A client's work on a request that the round it belongs to did not wait for."""

    ask: Ask
    round: int
    attempt: int
    client: int
    versions: dict[str, int]
    importance: float
    reached: float
    takes: float
    reborn: bool = False  # whether its client has crashed since the work before
    done: float = np.nan  # this and what follows once it is begun
    arrives: float = np.nan  # infinite where the answer gets lost
    payload: int = -1

    @property
    def key(self) -> tuple[int, int]:
        """Of its answer, at the server's downlink."""
        return self.client, self.attempt


@recalled()
@dataclass(slots=True)
class _Attempt:
    """What came of asking once, over those who set to work."""

    number: int
    clients: IntArray
    reached: FloatArray
    takes: FloatArray
    begun: FloatArray
    done: FloatArray
    up: BoolArray
    goes: BoolArray
    reaches: FloatArray  # the server, before its downlink; infinite where the answer gets lost
    arrives: FloatArray
    void: BoolArray  # works that never end, for their clients crash or leave; `done` is when they do
    reborn: BoolArray  # whose client has crashed since the work before

    def only(self, some: BoolArray) -> _Attempt:
        return _Attempt(
            self.number, self.clients[some], self.reached[some], self.takes[some], self.begun[some],
            self.done[some], self.up[some], self.goes[some], self.reaches[some], self.arrives[some],
            self.void[some], self.reborn[some],
        )  # fmt: skip


@recalled(given=("_server", "_pace", "_down", "_up", "n", "_node"))
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
        attendance: Attendance | None = None,
    ) -> None:
        network = wire.network
        self._wire, self._server = wire, server
        self._pace = None if compute is None else Pace(compute, factors, streams)
        self._down, self._up = server_links(network)
        self.n = n = network.n - 1
        self._works = Attended(n, attendance, lockstep=compute is None)
        self._node = n  # the server stands last
        self._working = np.full(n, -np.inf)  # until when each client is
        self._waiting: dict[int, list[_Work]] = {}  # by client: not begun, so a newer one may replace them
        self._begun: list[_Attempt | _Work] = []  # to be computed; of each client in the order of its works
        self._late: dict[str, list[_Work]] = {}
        self._dropped: list[_Work] = []  # late ones that have not been taken in, so that it is not known when
        shared = compute is not None and bool(np.isfinite(network.downlink[n]))
        self._intake = Intake(float(network.downlink[n])) if shared else None
        self._versions = Versions(n)
        self._next_payload = 0
        self._ended = Ended(n)
        self.now = 0.0
        self._attempt = 0  # counts them over the whole run: what links, losses and durations are drawn by
        self.round = 0

    def alone(self, part: int, writes: tuple[str, ...]) -> Wave:
        """The server does something by itself, in no time: it begins, or begins again."""
        return self._server_wave(part, (), writes, NO_NODES)

    def one_round(self, ask: Ask) -> Iterator[Wave]:
        """Ask, wait and close."""
        n = self.n
        asked = np.zeros(n, dtype=np.bool_)
        asked[ask.clients] = True
        arrives = np.full(n, np.inf)
        attempts = np.full(n, -1, dtype=np.int64)  # in which the request was sent that each answers
        place = np.zeros(n, dtype=np.int64)
        place[ask.clients] = np.arange(len(ask.clients))
        importance = ask.importance[place]  # of every client; of those not asked it means nothing
        self._versions.forgotten(self._works.crashed_since_asked(ask.clients, self.now))
        sizes = self._versions.news(ask.reads, ask.clients)
        needed = min(self._server.needed(len(ask.clients)), len(ask.clients))  # fewer may be there
        here = NO_NODES
        for _ in range(self._server.attempts):
            missing = np.flatnonzero(asked & ~(arrives <= self.now))
            back = self._works.next_there(missing, self.now)
            if not np.isfinite(back):
                break
            self.now = back
            attempt, idle_at = self._ask(ask, missing, place[missing], sizes, arrives)
            arrives[attempt.clients] = np.where(attempt.goes, attempt.arrives, arrives[attempt.clients])
            if self._intake is not None:
                attempts[attempt.clients[attempt.goes]] = attempt.number
                self._foresee(self._intake, ask, attempt, attempts, arrives)
            self.now = self._closing_time(arrives, len(ask.clients), needed, idle_at)
            self._attempt += 1
            self._settle(ask, attempt, importance)
            if self._intake is not None:
                self._take_in(self._intake)
            here = np.flatnonzero(arrives <= self.now)
            if len(here) >= needed:
                break
        if len(here) < needed:
            self._give_up(ask, importance)
            raise QuorumError(
                ask.phase, ask.kind, self.round, len(here), needed, len(ask.clients), self._server.attempts
            )
        yield from self._close(ask, here, importance)

    def wait_for(self, clients: IntArray) -> BoolArray:
        """Wait until at least one of these clients is there; returns who is then, of all."""
        back = self._works.next_there(clients, self.now)
        if not np.isfinite(back):
            raise RunError(
                f"at time {self.now:g} none of the {len(clients)} clients that may be asked is there, and "
                "none will come any more; let some stay, ask for fewer rounds, or let more participate"
            )
        self.now = back
        return self._works.there(np.arange(self.n, dtype=np.int64), self.now)

    def parts_wanted(self) -> set[int]:
        """The parts whose works are not all handed out yet."""
        return {work.ask.part for works in self._waiting.values() for work in works}

    def snapshot(self, *, final: bool) -> Snapshot:
        """Everybody with the server's variables of now. The final one ends the run."""
        held = [*self._dropped, *(work for works in self._late.values() for work in works)]
        # Of those that are here already: whether a round will use them, or they were late, is not known yet.
        unrecorded = Unrecorded(on_the_way=len(held), bytes=sum(work.ask.answer_bytes for work in held))
        everyone = Absorption(np.arange(self.n, dtype=np.int64), commons(self._versions.now))
        worked, counts = self._ended.by(self.now)
        return Snapshot(
            everyone, self.now, worked, final, unrecorded=unrecorded, rounds=self.round, counts=counts
        )

    def finish(self) -> None:
        """What nobody has used when the run ends was late, or is in flight for ever."""
        if self._intake is not None:
            self._take_in(self._intake, for_ever=True)
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
        fates, last = self._requests(clients, edges, size)
        if len(edges):
            self._wire.record(
                self._node, clients, fates.status, step=self.round, sent_at=now, arrived_at=fates.arrives,
                absorbed_step=self.round, weight=1.0, bytes=size, phase=ask.phase, kind=REQUEST,
            )  # fmt: skip
        new = fates.goes & ~np.isfinite(arrives[clients])  # else at work on it already, or it has answered
        workers, reached = clients[new], fates.arrives[new]
        begun = np.maximum(reached, self._working[workers])
        if self._pace is None:
            begun, takes = np.full(len(workers), now), np.ones(len(workers))
        else:
            takes = self._pace.durations(workers, self._attempt) * ask.work[place[new]]
        done, void = self._works.ends(workers, reached, begun, takes)
        up_edges = self._up[workers]
        before = self._wire.state(up_edges)
        for at in self._behind_others(workers):
            begun[at], done[at], void[at] = self._look_ahead(
                ask, int(workers[at]), float(reached[at]), float(takes[at])
            )
        answers = self._answers(up_edges, self._attempt, done, void, ask.answer_bytes)
        idle_at = now + 1.0
        if self._pace is not None:
            idle_at = float(max(last, reached.max(initial=now), done.max(initial=now)))
            if self._replaces and len(workers):
                # Until it begins, a work may be replaced, and then it will not have used the link.
                self._wire.restore(up_edges, before)
        found = np.where(answers.goes, answers.arrives, np.inf)
        attempt = _Attempt(
            self._attempt, workers, reached, takes, begun, done, answers.up, answers.goes, found, found,
            void, np.zeros(len(workers), dtype=np.bool_),
        )  # fmt: skip
        return attempt, idle_at

    def _requests(self, clients: IntArray, edges: IntArray, size: IntArray) -> tuple[Fates, float]:
        """What becomes of requests sent now: none is sent to who is away, and one that comes then is lost;
        also when the last of these has come.
        """
        at = np.full(len(clients), self.now)
        if self._works.always:
            sent = self._wire.send(edges, self._attempt, at, size)
            return self._wire.take_in(edges, sent, size), self.now
        there = self._works.there(clients, self.now)
        asked, edges, size = clients[there], edges[there], size[there]
        sent = self._wire.send(edges, self._attempt, at[there], size)
        met = self._met(asked, sent)
        taken = self._wire.take_in(edges, Fates(sent.up, met, sent.arrives), size)
        met = self._met(asked, taken)
        last = float(taken.arrives[sent.goes & ~met].max(initial=self.now))
        up, goes, arrives = np.zeros_like(there), np.zeros_like(there), np.full(len(clients), np.nan)
        up[there], goes[there], arrives[there] = sent.up, met, taken.arrives
        return Fates(up, goes, arrives), last

    def _met(self, clients: IntArray, requests: Fates) -> BoolArray:
        """Which of the requests that get through find their clients there."""
        met = requests.goes.copy()
        met[met] = self._works.there(clients[met], requests.arrives[met])
        return met

    def _answers(self, edges: IntArray, attempt: int, done: FloatArray, void: BoolArray, size: int) -> Fates:
        """What becomes of answers that are sent when works are done."""
        if not void.any():
            return self._wire.send(edges, attempt, done, size)
        sent = self._wire.send(edges[~void], attempt, done[~void], size)
        up, goes, arrives = np.zeros_like(void), np.zeros_like(void), np.full(len(void), np.inf)
        up[~void], goes[~void], arrives[~void] = sent.up, sent.goes, sent.arrives
        return Fates(up, goes, arrives)

    def _foresee(
        self, intake: Intake, ask: Ask, attempt: _Attempt, attempts: IntArray, arrives: FloatArray
    ) -> None:
        """When the answers that will reach the server are taken in, if no newer requests come: those of this
        round, where each client answers the request of one of the attempts.
        """
        goes = attempt.goes
        answers = zip(attempt.clients[goes].tolist(), attempt.reaches[goes].tolist(), strict=True)
        coming = {(client, attempt.number): (reaches, ask.answer_bytes) for client, reaches in answers}
        for client, works in self._waiting.items():
            newer = [
                _Work(
                    ask, self.round, attempt.number, client, {}, 0.0,
                    float(attempt.reached[at]), float(attempt.takes[at]),
                )
                for at in np.flatnonzero(attempt.clients == client).tolist()
            ]  # fmt: skip
            edge = self._up[[client]]
            before = self._wire.state(edge)
            for work, _, done, void in self._in_turn([*works, *newer]):
                fate = self._answers(
                    edge, work.attempt, np.array([done]), np.array([void]), work.ask.answer_bytes
                )
                if fate.goes[0]:
                    coming[work.key] = float(fate.arrives[0]), work.ask.answer_bytes
            self._wire.restore(edge, before)
        taken = intake.arrivals(coming)
        for client in np.flatnonzero(np.isfinite(arrives) & (arrives > self.now)).tolist():
            arrives[client] = taken.get((client, int(attempts[client])), arrives[client])
        attempt.arrives = np.where(goes, arrives[attempt.clients], np.inf)

    def _take_in(self, intake: Intake, *, for_ever: bool = False) -> None:
        """What has reached the server by now is taken in at times that nothing changes any more; at the end
        of the run all that is under way.
        """
        taken = intake.settle(np.inf if for_ever else self.now)
        if not taken:
            return
        for one in self._begun:
            if isinstance(one, _Work):
                one.arrives = taken.get(one.key, one.arrives)
            else:
                keys = ((client, one.number) for client in one.clients.tolist())
                one.arrives = np.array(
                    [taken.get(key, arrives) for key, arrives in zip(keys, one.arrives.tolist(), strict=True)]
                )
        for works in self._late.values():
            for work in works:
                work.arrives = taken.get(work.key, work.arrives)
        dropped, self._dropped = self._dropped, []
        for work in dropped:
            if work.key in taken:
                work.arrives = taken[work.key]
                self._record_answer(work, Status.LATE, -1, np.nan)
            else:
                self._dropped.append(work)

    @property
    def _replaces(self) -> bool:
        return self._pace is not None and self._server.requests == "newest"

    def _behind_others(self, clients: IntArray) -> list[int]:
        """Places of those for whom older requests wait."""
        if not self._waiting:
            return []
        return [at for at, client in enumerate(clients.tolist()) if client in self._waiting]

    def _look_ahead(self, ask: Ask, client: int, reached: float, takes: float) -> tuple[float, float, bool]:
        """When a client would begin and end a new work behind those that wait, and whether it would never end
        it; they would use the link before it.
        """
        new = _Work(ask, self.round, self._attempt, client, {}, 0.0, reached, takes)
        for work, begun, done, void in self._in_turn([*self._waiting[client], new]):
            if work is new:
                return begun, done, void
            if not void:
                self._wire.send(self._up[[client]], work.attempt, np.array([done]), work.ask.answer_bytes)
        raise AssertionError("the newest request is never forgotten")

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
        if self._replaces:
            at_once = attempt.begun <= self.now
            at_once[self._behind_others(attempt.clients)] = False
            for at in np.flatnonzero(~at_once).tolist():
                work = self._work(ask, attempt, at, importance)
                self._waiting.setdefault(work.client, []).append(work)
            for client in list(self._waiting):
                self._go_on(client)
            if not at_once.all():
                attempt = attempt.only(at_once)
            self._answers(
                self._up[attempt.clients], attempt.number, attempt.done, attempt.void, ask.answer_bytes
            )
        if len(attempt.clients):
            attempt = self._set_to_work(ask, self.round, attempt)
        if len(attempt.clients):
            self._begun.append(attempt)

    def _go_on(self, client: int) -> None:
        """Begin what a client begins by now of the works that wait for it, and forget what it never will."""
        waiting = self._waiting.pop(client)
        for work, begun, done, void in self._in_turn(waiting):
            if begun > self.now:
                break
            waiting = [other for other in waiting if other.attempt > work.attempt]
            self._begin(work, begun, done, void)
        here = [work.attempt for work in waiting if work.reached < self._working[client]]
        waiting = [work for work in waiting if work.attempt >= max(here, default=0)]
        if waiting:
            self._waiting[client] = waiting

    def _in_turn(self, works: list[_Work]) -> Iterator[tuple[_Work, float, float, bool]]:
        """Which of the works that wait for a client it begins, when, when it is done with each or (if that is
        never) stops, and which of these it is; if no newer ones come. What is older than a work that is begun
        is forgotten.
        """
        free = float(self._working[works[0].client])
        while works:
            here = [work for work in works if work.reached < free]
            if here:
                next_one = max(here, key=lambda work: work.attempt)
            else:
                next_one = min(works, key=lambda work: (work.reached, work.attempt))
            begun = max(free, next_one.reached)
            done, void = self._works.end(next_one.client, next_one.reached, begun, next_one.takes)
            yield next_one, begun, done, void
            free = done
            works = [work for work in works if work.attempt > next_one.attempt]

    def _begin(self, work: _Work, begun: float, end: float, void: bool) -> None:
        """A work that waited is begun, and its answer will be sent: its round has closed without it, or will
        find it among its answers.
        """
        client, ask = np.array([work.client]), work.ask
        done, stops = np.array([end]), np.array([void])
        fate = self._answers(self._up[client], work.attempt, done, stops, ask.answer_bytes)
        work.done, work.arrives = float(done[0]), float(fate.arrives[0]) if fate.goes[0] else np.inf
        made = self._set_to_work(
            ask, work.round,
            _Attempt(
                work.attempt, client, np.array([work.reached]), np.array([work.takes]), np.array([begun]),
                done, fate.up, fate.goes, fate.arrives, fate.arrives, stops, np.zeros(1, dtype=np.bool_),
            ),
        )  # fmt: skip
        if len(made.clients):
            work.reborn = bool(made.reborn[0])
            self._begun.append(work)

    def _set_to_work(self, ask: Ask, round: int, attempt: _Attempt) -> _Attempt:
        """These works are begun; returns those that are ended some time."""
        self._working[attempt.clients] = attempt.done
        if not self._works.always:
            attempt.reborn = self._works.reborn(
                attempt.clients, attempt.reached, attempt.begun, attempt.done, attempt.void
            )
            attempt = attempt.only(~attempt.void)
        clients, done, goes = attempt.clients, attempt.done, attempt.goes
        place = np.searchsorted(ask.clients, clients)
        self._ended.add(clients, done, {name: each[place] for name, each in ask.adds.items()})
        if self._intake is not None:
            for at in np.flatnonzero(goes).tolist():
                key = int(clients[at]), attempt.number
                self._intake.add(key, float(attempt.reaches[at]), ask.answer_bytes)
        self._wire.record_steps(
            clients, step=round, started_at=attempt.begun, ended_at=done, absorbed=1, phase=ask.phase
        )
        if not goes.all():
            failed = ~goes
            self._wire.record(
                clients[failed], self._node,
                np.where(attempt.up[failed], np.uint8(Status.LOST), np.uint8(Status.LINK_DOWN)),
                step=round, sent_at=done[failed], arrived_at=np.nan, absorbed_step=-1, weight=np.nan,
                bytes=ask.answer_bytes, phase=ask.phase, kind=ask.kind,
            )  # fmt: skip
        return attempt

    def _work(self, ask: Ask, attempt: _Attempt, at: int, importance: FloatArray) -> _Work:
        client = int(attempt.clients[at])
        return _Work(
            ask, self.round, attempt.number, client, self._versions.of(ask.reads), float(importance[client]),
            float(attempt.reached[at]), float(attempt.takes[at]), bool(attempt.reborn[at]),
            float(attempt.done[at]), float(attempt.arrives[at]),
        )  # fmt: skip

    def _give_up(self, ask: Ask, importance: FloatArray) -> None:
        """For want of a quorum: what is under way is late."""
        works: list[_Work] = []
        for one in self._begun:
            if isinstance(one, _Work):
                if not np.isfinite(one.arrives):
                    continue
                if one.round == self.round:
                    works.append(one)
                else:
                    self._put_aside(one)
            else:
                works += [self._work(ask, one, at, importance) for at in np.flatnonzero(one.goes).tolist()]
        self._late.setdefault("", []).extend(works)
        self.finish()

    # --- closing -------------------------------------------------------------------------------------

    def _all_here(self, ask: Ask, attempt: _Attempt, importance: FloatArray) -> Iterator[Wave]:
        """The plain case: everybody who worked has answered in time, and nothing older is left."""
        clients = attempt.clients
        serials = self._serials(len(clients))
        weights = importance / importance.sum()
        self._wire.record(
            clients, self._node, int(Status.DELIVERED), step=self.round, sent_at=attempt.done,
            arrived_at=attempt.arrives, absorbed_step=self.round, weight=weights, bytes=ask.answer_bytes,
            phase=ask.phase, kind=ask.kind,
        )  # fmt: skip
        self._record_closed(ask, len(clients))
        versions = self._versions.of(ask.reads)
        self._versions.answered(ask.reads, clients)
        yield self._clients_wave(ask.part, self.round, clients, serials, versions, attempt.reborn)
        channel = Sums(ask.answers, np.array([0, len(serials)]), serials, weights, clients)
        yield self._server_wave(ask.part, (channel,), ask.writes, serials)
        self.round += 1

    def _record_closed(self, ask: Ask, absorbed: int) -> None:
        self._wire.record_steps(
            self._node, step=self.round, started_at=np.array([self.now]), ended_at=self.now,
            absorbed=absorbed, phase=ask.phase,
        )  # fmt: skip

    def _close(self, ask: Ask, here: IntArray, importance: FloatArray) -> Iterator[Wave]:
        series = ask.series
        begun, self._begun = self._begun, []
        if len(begun) == 1 and series not in self._late:
            (alone,) = begun
            if isinstance(alone, _Attempt) and len(alone.clients) == len(here) and alone.goes.all():
                yield from self._all_here(ask, alone, importance[here])
                return
        # Of those whose answers are here.
        payload = np.full(self.n, -1, dtype=np.int64)
        sent = np.full(self.n, np.nan)
        arrives = np.full(self.n, np.nan)
        waves: list[Wave] = []
        unused: list[int] = []
        for one in begun:
            if isinstance(one, _Work):
                used = one.round == self.round and one.arrives <= self.now
                waves += self._wave_of_one(one, used, unused)
                if used:
                    payload[one.client], sent[one.client] = one.payload, one.done
                    arrives[one.client] = one.arrives
            else:
                waves += self._wave_of_many(ask, one, importance, payload, unused)
                mine = one.goes & (one.arrives <= self.now)
                sent[one.clients[mine]], arrives[one.clients[mine]] = one.done[mine], one.arrives[mine]
        older, worthless = self._take_late(series, here)
        total = importance[here].sum() + sum(work.importance for work in older)
        weights = importance[here] / total
        self._wire.record(
            here, self._node, int(Status.DELIVERED), step=self.round, sent_at=sent[here],
            arrived_at=arrives[here], absorbed_step=self.round, weight=weights, bytes=ask.answer_bytes,
            phase=ask.phase, kind=ask.kind,
        )  # fmt: skip
        for work in older:
            stale = self.round - work.round
            self._record_answer(work, Status.DELIVERED, self.round, work.importance / total, stale)
        for work in worthless:
            self._record_answer(work, Status.LATE, -1, np.nan)
        self._record_closed(ask, len(here) + len(older))
        self._versions.answered(ask.reads, here)
        for work in (*older, *worthless):
            self._versions.answered_late(work.versions, work.client)
        sources = np.concatenate([payload[here], np.array([work.payload for work in older], dtype=np.int64)])
        shares = np.concatenate([weights, np.array([work.importance / total for work in older])])
        senders = np.concatenate([here, np.array([work.client for work in older], dtype=np.int64)])
        channel = Sums(ask.answers, np.array([0, len(sources)]), sources, shares, senders)
        unused += [work.payload for work in worthless]
        yield from waves
        over = np.array(sorted((*sources.tolist(), *unused)), dtype=np.int64)
        yield self._server_wave(ask.part, (channel,), ask.writes, over)
        self.round += 1

    def _wave_of_many(
        self, ask: Ask, attempt: _Attempt, importance: FloatArray, payload: IntArray, unused: list[int]
    ) -> Iterator[Wave]:
        """Works that did not have to wait; those that matter (the others only where clients remember)."""
        hold = self._server.late == "next"
        late = attempt.goes & (attempt.arrives > self.now)
        used = attempt.goes & ~late
        wanted = np.ones(len(used), dtype=np.bool_) if ask.remembers else used | (late & hold)
        serials = np.full(len(used), -1, dtype=np.int64)
        serials[wanted] = self._serials(int(wanted.sum()))
        payload[attempt.clients[used]] = serials[used]
        unused += serials[wanted & ~used & ~(late & hold)].tolist()
        for at in np.flatnonzero(late).tolist():
            work = self._work(ask, attempt, at, importance)
            work.payload = int(serials[at])
            self._put_aside(work)
        self._works.owe(attempt.clients[attempt.reborn & ~wanted])
        if wanted.any():
            versions = self._versions.of(ask.reads)
            yield self._clients_wave(
                ask.part,
                self.round,
                attempt.clients[wanted],
                serials[wanted],
                versions,
                attempt.reborn[wanted],
            )

    def _wave_of_one(self, work: _Work, used: bool, unused: list[int]) -> Iterator[Wave]:
        """A work of this or an earlier round that had waited and is begun by now."""
        late = bool(np.isfinite(work.arrives)) and not used
        held = late and self._server.late == "next"
        if used or held or work.ask.remembers:
            serial = self._serials(1)
            work.payload = int(serial[0])
            client = np.array([work.client])
            reborn = np.array([work.reborn])
            yield self._clients_wave(work.ask.part, work.round, client, serial, work.versions, reborn)
            if not (used or held):
                unused.append(work.payload)
        elif work.reborn:
            self._works.owe(np.array([work.client]))
        if late:
            self._put_aside(work)

    def _put_aside(self, work: _Work) -> None:
        """An answer that missed its round."""
        if self._server.late == "next":
            self._late.setdefault(work.ask.series, []).append(work)
        elif self._intake is not None and self._intake.awaits(work.key):
            self._dropped.append(work)
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

    # --- payloads and waves --------------------------------------------------------------------------

    def _serials(self, count: int) -> IntArray:
        first = self._next_payload
        self._next_payload += count
        return np.arange(first, first + count, dtype=np.int64)

    def _clients_wave(
        self,
        part: int,
        round: int,
        clients: IntArray,
        emits: IntArray,
        versions: Mapping[str, int],
        reborn: BoolArray,
    ) -> Wave:
        absorption = Absorption(clients, commons(versions))
        steps = np.full(len(clients), round)
        again = self._works.paid(clients, reborn)
        return Wave(absorption, steps, emits, NO_NODES, self.now, part, readers=1, reborn=again)

    def _server_wave(
        self, part: int, channels: tuple[Channel, ...], writes: tuple[str, ...], over: IntArray
    ) -> Wave:
        emits = self._serials(1)
        waiting = (work for works in self._waiting.values() for work in works)
        stale = self._versions.written(writes, int(emits[0]), (work.versions for work in waiting))
        released = np.append(over, sorted(stale)).astype(np.int64) if stale else over
        node = np.array([self._node], dtype=np.int64)
        return Wave(Absorption(node, channels), np.array([self.round]), emits, released, self.now, part)

    # --- the trace -----------------------------------------------------------------------------------

    def _record_answer(
        self, work: _Work, status: Status, absorbed: int, share: float, staleness: int = -1
    ) -> None:
        self._wire.record(
            np.array([work.client]), self._node, int(status), step=work.round, sent_at=work.done,
            arrived_at=work.arrives, absorbed_step=absorbed, weight=share, bytes=work.ask.answer_bytes,
            phase=work.ask.phase, kind=work.ask.kind, staleness=staleness,
        )  # fmt: skip
