"""The rounds of a server: what it sends, who answers, and what has arrived when it stops waiting.

A server is a node with links like any other. In a *round* it sends each client it asks a request, the client
works on it and answers, and the server averages the answers it has when it stops waiting. All of it follows
from the network, the timing and the seed, without a single model value.

    waiting     for everyone asked; or for a quorum; or until a deadline after the requests were sent
    repeating   where fewer answers came than are needed (a quorum, or at least one), those who have not
                answered are asked again, with links drawn anew, up to `attempts` times
    too late    an answer that comes after the round has closed is dropped, or held for the next round of its
                kind that closes after it has come: there it is averaged with the others (it does not count
                for the quorum), unless one that its client made later is there as well

Without a deadline the server knows when nothing more will come: a lost message holds nobody up, and an
attempt whose requests all fail takes no time. Messages on a link arrive in the order in which they were sent.
A client works on its requests in that order, and on each for its compute time times the number of local
steps; one that repeats a request whose answer is going to come changes nothing. In lockstep a round (each
attempt) takes one unit of time and nothing is late.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from asyncfed.errors import QuorumError
from asyncfed.network.distributions import Constant, Distribution, Table
from asyncfed.network.links import BoolArray, FloatArray, IntArray, Network
from asyncfed.network.server import Server, clients_of, server_links
from asyncfed.network.waves import Recorder, Status
from asyncfed.rng import Streams

REQUEST = "request"  # kind of what the server sends


@dataclass(frozen=True, eq=False)
class Ask:
    """A round, as the network sees it. Arrays are over the clients asked."""

    phase: str
    kind: str
    clients: IntArray
    request_bytes: IntArray
    answer_bytes: int
    work: FloatArray  # local steps of each
    importance: FloatArray  # what the answer of each counts, before they are made to add up to 1
    series: str = ""  # late answers go to the next round of this name, by default that of the kind


@dataclass(frozen=True, eq=False)
class Exchange:
    """What came of a round: the answers that are averaged, and those to be kept for later.

    An answer is known by (round, client), the round being the one it was made in.
    """

    round: int
    clients: IntArray  # whose answers of this round are averaged now
    weights: FloatArray
    held: IntArray  # whose answers of this round may be averaged in a later one
    older: tuple[tuple[int, int, float], ...]  # (round, client, weight) of answers held until now
    forgotten: tuple[tuple[int, int], ...]  # answers held until now that nobody will use


@dataclass(slots=True)
class _Late:
    """An answer that missed its round."""

    round: int
    client: int
    sent: float
    arrives: float
    bytes: int
    phase: str
    kind: str
    importance: float


@dataclass(slots=True)
class _Answers:
    """Of one round, by client: when each answer was sent and arrives (never, while infinite)."""

    sent: FloatArray
    arrives: FloatArray


class ServerTimeline:
    """The rounds of one run, one after another.

    `compute` is None in lockstep; a table of it has a row, and `factors` an entry, for each client.
    """

    def __init__(
        self,
        network: Network,
        streams: Streams,
        recorder: Recorder,
        server: Server,
        *,
        compute: Distribution | Table | None,
        factors: FloatArray,
    ) -> None:
        self._network, self._streams, self._recorder, self._server = network, streams, recorder, server
        self._compute = compute
        self._nodes = clients_of(network)
        self._down, self._up = server_links(network)
        self._factors = factors
        self._busy = np.full(network.edges, -np.inf)  # until when each link is
        self._newest = np.full(network.edges, -np.inf)  # when the last message on each arrives
        self._working = np.full(len(self._nodes), -np.inf)  # until when each client is
        self._late: dict[str, list[_Late]] = {}
        self.worked = np.zeros(len(self._nodes), dtype=np.int64)  # rounds that each client has
        self.now = 0.0
        self._attempt = 0  # counts them over the whole run: what links, losses and durations are drawn by
        self.round = 0

    def exchange(self, ask: Ask) -> Exchange:
        """Ask, wait and close one round."""
        n = len(self._nodes)
        answers = _Answers(np.full(n, np.nan), np.full(n, np.inf))
        asked = np.zeros(n, dtype=np.bool_)
        asked[ask.clients] = True
        importance = np.zeros(n)
        importance[ask.clients] = ask.importance
        needed = self._server.needed(len(ask.clients))
        for _attempt in range(self._server.attempts):
            missing = np.flatnonzero(asked & ~(answers.arrives <= self.now))
            idle_at = self._ask(ask, missing, answers)
            self.now = self._closing_time(answers, len(ask.clients), needed, idle_at)
            here = np.flatnonzero(answers.arrives <= self.now)
            self._attempt += 1
            if len(here) >= needed:
                break
        else:
            self._late.setdefault("", []).extend(self._letters(ask, answers, importance, asked))
            self.finish()
            raise QuorumError(
                ask.phase, ask.kind, self.round, len(here), needed, len(ask.clients), self._server.attempts
            )
        return self._close(ask, answers, here, importance)

    def finish(self) -> None:
        """What nobody has used when the run ends was late, or is in flight for ever."""
        for letter in itertools.chain(*self._late.values()):
            status = Status.LATE if letter.arrives <= self.now else Status.IN_FLIGHT
            self._record_late(letter, status, -1, np.nan)
        self._late = {}

    # --- one attempt -----------------------------------------------------------------------------------

    def _ask(self, ask: Ask, clients: IntArray, answers: _Answers) -> float:
        """Send requests to `clients` and let them answer; returns when the last of it has happened."""
        network, now = self._network, self.now
        up = network.up(self._streams, self._attempt)
        lost = network.lost(self._streams, self._attempt)
        place = np.searchsorted(ask.clients, clients)
        reached, started = self._send(
            self._down[clients],
            up,
            lost,
            np.full(len(clients), now),
            ask.request_bytes[place],
            ask.phase,
            REQUEST,
        )
        again = np.isfinite(answers.arrives[clients])  # at work on it already, or its answer is under way
        new = reached & ~again
        workers, started = clients[new], started[new]
        begun = np.maximum(started, self._working[workers])
        done = begun + self._durations(workers) * ask.work[place[new]]
        if self._compute is None:
            done = np.full(len(workers), now + 1.0)
        self._working[workers] = done
        self.worked[workers] += 1
        if len(workers):
            self._recorder.steps(
                client=self._nodes[workers], step=self.round, started_at=begun, ended_at=done,
                absorbed=1, phase=ask.phase,
            )  # fmt: skip
        edges = self._up[workers]
        goes = up[edges] & ~lost[edges]
        arrives = self._times(edges, up, lost, done, np.full(len(workers), ask.answer_bytes))
        answers.sent[workers[goes]] = done[goes]
        answers.arrives[workers[goes]] = arrives[goes]
        if not goes.all():
            failed = ~goes
            self._recorder.messages(
                sender=self._nodes[workers[failed]], receiver=self._network.server,
                status=np.where(up[edges[failed]], np.uint8(Status.LOST), np.uint8(Status.LINK_DOWN)),
                step=self.round, sent_at=done[failed], arrived_at=np.nan, absorbed_step=-1, weight=np.nan,
                bytes=ask.answer_bytes, phase=ask.phase, kind=ask.kind,
            )  # fmt: skip
        if self._compute is None:
            return now + 1.0
        return float(max(now, started.max(initial=now), done.max(initial=now)))

    def _send(
        self,
        edges: IntArray,
        up: BoolArray,
        lost: BoolArray,
        at: FloatArray,
        size: IntArray,
        phase: str,
        kind: str,
    ) -> tuple[BoolArray, FloatArray]:
        """Requests: which arrive, and when."""
        reached = up[edges] & ~lost[edges]
        arrives = self._times(edges, up, lost, at, size)
        status = np.where(up[edges], np.where(lost[edges], Status.LOST, Status.DELIVERED), Status.LINK_DOWN)
        if len(edges):
            self._recorder.messages(
                sender=self._network.server, receiver=self._network.receivers[edges],
                status=status.astype(np.uint8), step=self.round, sent_at=at, arrived_at=arrives,
                absorbed_step=self.round, weight=1.0, bytes=size, phase=phase, kind=kind,
            )  # fmt: skip
        return reached, arrives

    def _times(
        self, edges: IntArray, up: BoolArray, lost: BoolArray, at: FloatArray, size: IntArray
    ) -> FloatArray:
        """When messages handed to `edges` at times `at` arrive: a link sends one at a time, and in order."""
        if self._compute is None:
            return at
        network = self._network
        leaves = np.maximum(at, self._busy[edges]) + size / network.bandwidth[edges]
        self._busy[edges[up[edges]]] = leaves[up[edges]]
        latency = network.latencies(self._streams, self._attempt, 0, network.edges)
        arrives: FloatArray = np.maximum(leaves + latency[edges], self._newest[edges])
        goes = up[edges] & ~lost[edges]
        self._newest[edges[goes]] = arrives[goes]
        return arrives

    def _durations(self, clients: IntArray) -> FloatArray:
        """What one local step of each takes."""
        compute, nodes, step = self._compute, self._nodes[clients], self._attempt
        if compute is None:
            return np.ones(len(clients))
        if isinstance(compute, Table):
            rows = [compute.rows[client] for client in clients.tolist()]
            drawn = np.array([row[step % len(row)] for row in rows])
        elif isinstance(compute, Constant):
            drawn = np.full(len(clients), compute.value)
        else:
            drawn = compute.quantile(self._streams.uniforms("compute", step, 0, self._network.n)[nodes])
        return np.asarray(drawn * self._factors[clients], dtype=np.float64)

    def _closing_time(self, answers: _Answers, asked: int, needed: int, idle_at: float) -> float:
        coming = np.sort(answers.arrives[np.isfinite(answers.arrives)])
        enough = asked if self._server.quorum is None else needed
        last = np.inf if self._server.deadline is None else self.now + self._server.deadline
        if len(coming) >= enough:
            return float(max(self.now, min(coming[enough - 1], last)))
        if self._server.deadline is not None:  # who did not answer may still do so, for all the server knows
            return float(last)
        return float(coming[-1] if len(coming) and coming[-1] > self.now else idle_at)

    # --- closing ---------------------------------------------------------------------------------------

    def _close(self, ask: Ask, answers: _Answers, here: IntArray, importance: FloatArray) -> Exchange:
        older, forgotten = self._take_late(ask.series or ask.kind, here)
        total = importance[here].sum() + sum(letter.importance for letter in older)
        weights = importance[here] / total
        nodes, server = self._nodes, self._network.server
        self._recorder.messages(
            sender=nodes[here], receiver=server, status=int(Status.DELIVERED), step=self.round,
            sent_at=answers.sent[here], arrived_at=answers.arrives[here], absorbed_step=self.round,
            weight=weights, bytes=ask.answer_bytes, phase=ask.phase, kind=ask.kind,
        )  # fmt: skip
        for letter in older:
            share = letter.importance / total
            self._record_late(letter, Status.DELIVERED, self.round, share)
        for letter in forgotten:
            self._record_late(letter, Status.LATE, -1, np.nan)
        self._recorder.steps(
            client=server, step=self.round, started_at=np.array([self.now]), ended_at=self.now,
            absorbed=len(here) + len(older), phase=ask.phase,
        )  # fmt: skip
        behind = np.isfinite(answers.arrives) & (answers.arrives > self.now)
        late = self._letters(ask, answers, importance, behind)
        hold = self._server.late == "next"
        if hold:
            self._late.setdefault(ask.series or ask.kind, []).extend(late)
        else:
            for letter in late:
                self._record_late(letter, Status.LATE, -1, np.nan)
        result = Exchange(
            self.round,
            here,
            weights,
            np.flatnonzero(behind & hold),
            tuple((letter.round, letter.client, letter.importance / total) for letter in older),
            tuple((letter.round, letter.client) for letter in forgotten),
        )
        self.round += 1
        return result

    def _letters(self, ask: Ask, answers: _Answers, importance: FloatArray, which: BoolArray) -> list[_Late]:
        """The answers of a round, where there are any, as letters."""
        return [
            _Late(
                self.round, client, float(answers.sent[client]), float(answers.arrives[client]),
                ask.answer_bytes, ask.phase, ask.kind, float(importance[client]),
            )
            for client in np.flatnonzero(which & np.isfinite(answers.arrives)).tolist()
        ]  # fmt: skip

    def _take_late(self, series: str, here: IntArray) -> tuple[list[_Late], list[_Late]]:
        """Of the answers held from earlier rounds of a series: those that count now, and those that a newer
        one of the same client has made worthless.
        """
        held = self._late.pop(series, [])
        waiting = [letter for letter in held if letter.arrives > self.now]
        if waiting:
            self._late[series] = waiting
        newest: dict[int, _Late] = {}
        worthless: list[_Late] = []
        fresh = set(here.tolist())
        for letter in held:
            if letter.arrives > self.now:
                continue
            if letter.client in fresh:
                worthless.append(letter)
                continue
            if letter.client in newest:
                worthless.append(newest[letter.client])
            newest[letter.client] = letter
        return list(newest.values()), worthless

    def _record_late(self, letter: _Late, status: Status, absorbed: int, share: float) -> None:
        self._recorder.messages(
            sender=np.array([self._nodes[letter.client]]), receiver=self._network.server, status=int(status),
            step=letter.round, sent_at=letter.sent, arrived_at=letter.arrives, absorbed_step=absorbed,
            weight=share, bytes=letter.bytes, phase=letter.phase, kind=letter.kind,
        )  # fmt: skip
