"""A server's rounds once more, slowly: a queue of events, one message and one client at a time.

Nothing is planned ahead: what happens at a time is decided at that time. At one instant works end before
requests come, and requests before answers.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from asyncfed.network import Table
from asyncfed.network.links import Network
from asyncfed.network.schedules.asked import Ask
from asyncfed.network.server import Server
from asyncfed.network.waves import Status
from asyncfed.rng import Streams


class Message(NamedTuple):
    """A row of the trace; None where the status leaves a column empty."""

    step: int
    sender: int
    receiver: int
    status: Status
    sent_at: float
    arrived_at: float | None
    absorbed_step: int | None
    weight: float | None
    bytes: int
    phase: str
    kind: str
    staleness: int | None = None


class Step(NamedTuple):
    client: int
    step: int
    started_at: float
    ended_at: float
    absorbed: int
    phase: str


class Recording:
    """A recorder that broadcasts, empties what the status rules out, and keeps."""

    def __init__(self) -> None:
        self.messages_: list[Message] = []
        self.steps_: list[Step] = []

    def messages(self, *, phase: str, kind: str, **columns: Any) -> None:
        for values in zip(*(a.tolist() for a in np.broadcast_arrays(*columns.values())), strict=True):
            row = dict(zip(columns, values, strict=True))
            row["status"] = status = Status(row["status"])
            if status in (Status.LOST, Status.LINK_DOWN):
                row["arrived_at"] = None
            if status != Status.DELIVERED:
                row["absorbed_step"] = None
            if status == Status.LINK_DOWN:
                row["bytes"] = 0
            if status == Status.LINK_DOWN or math.isnan(row["weight"]):
                row["weight"] = None
            if row.get("staleness", -1) < 0:
                row["staleness"] = None
            self.messages_.append(Message(**row, phase=phase, kind=kind))

    def steps(self, *, phase: str, **columns: Any) -> None:
        for values in zip(*(a.tolist() for a in np.broadcast_arrays(*columns.values())), strict=True):
            self.steps_.append(Step(**dict(zip(columns, values, strict=True)), phase=phase))


_ORDER = {"done": 0, "request": 1, "reach": 2, "answer": 3}


@dataclass(eq=False)
class _Job:
    round: int
    attempt: int
    client: int
    ask: Ask
    sends: bool
    goes: bool
    versions: dict[str, int]
    here: bool = False  # whether the request has come


@dataclass
class _Letter:
    job: _Job
    sent: float
    arrives: float
    importance: float


@dataclass
class Closed:
    """What came of a round: whose answers, of which round, with which weights."""

    now: float
    used: dict[tuple[int, int], float]  # by (round, client)
    worked: list[int]  # works ended by each client


@dataclass
class SlowServer:
    network: Network
    seed: int
    server: Server
    compute: Any  # None in lockstep
    factors: list[float]
    now: float = 0.0
    round: int = 0
    attempt: int = 0
    rows: list[Message] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        network = self.network
        assert network.server is not None
        self.hub = network.server
        self.streams = Streams(self.seed)
        pairs = list(zip(network.senders.tolist(), network.receivers.tolist(), strict=True))
        self.edge = {pair: e for e, pair in enumerate(pairs)}
        self.free: dict[int, float] = {}
        self.leaving: dict[int, float] = {}  # until when each node's uplink, and its downlink, is busy
        self.taking: dict[int, float] = {}
        self.last: dict[int, float] = {}
        clients = range(network.n - 1)
        self.at_work: dict[int, _Job | None] = dict.fromkeys(clients)
        self.queue: dict[int, list[_Job]] = {client: [] for client in clients}  # in the order of sending
        self.seen = dict.fromkeys(clients, -1)  # the newest attempt whose request has come
        self.events: list[tuple[float, int, int, int, str, Any]] = []
        self.order = itertools.count()
        self.arrived: dict[int, dict[int, _Letter]] = {}  # of open rounds, by client
        self.shelf: list[_Letter] = []  # came too late, and not used so far
        self.closed: set[int] = set()
        self.ended = math.inf
        self.version: dict[str, int] = {}  # the round in which a variable last changed, from 1 on
        self.known: dict[tuple[int, str], int] = {}

    # --- the network ---

    def is_up(self, e: int) -> bool:
        a, b = int(self.network.senders[e]), int(self.network.receivers[e])
        which = e if self.network.directed else self.edge[min(a, b), max(a, b)]
        drawn = self.streams.uniforms("links", self.attempt, which, which + 1)[0]
        return bool(drawn < self.network.probability[e])

    def is_lost(self, e: int) -> bool:
        return bool(self.streams.uniforms("loss", self.attempt, e, e + 1)[0] < self.network.loss[e])

    def latency(self, e: int, attempt: int) -> float:
        drawn = self.streams.uniforms("latency", attempt, e, e + 1)
        return float(self.network.latency[self.network.latency_of[e]].quantile(drawn)[0])

    def transfer(self, e: int, at: float, size: int, attempt: int, gets_through: bool) -> float:
        if self.compute is None:
            return at
        sender = int(self.network.senders[e])
        at = self.shared(self.leaving, sender, at, size / float(self.network.uplink[sender]))
        self.free[e] = max(at, self.free.get(e, -math.inf)) + size / float(self.network.bandwidth[e])
        arrives = self.free[e] + self.latency(e, attempt)
        if self.network.ordered[e]:
            arrives = max(arrives, self.last.get(e, -math.inf))
        if gets_through:
            self.last[e] = arrives
        return arrives

    def take_in(self, node: int, at: float, size: int) -> float:
        """A message has reached a node."""
        if self.compute is None:
            return at
        return self.shared(self.taking, node, at, size / float(self.network.downlink[node]))

    def shared(self, busy: dict[int, float], node: int, at: float, takes: float) -> float:
        limited = self.network.uplink if busy is self.leaving else self.network.downlink
        if math.isinf(limited[node]):
            return at
        busy[node] = max(at, busy.get(node, -math.inf)) + takes
        return busy[node]

    def duration(self, job: _Job) -> float:
        if self.compute is None:
            return 1.0
        client = job.client
        if isinstance(self.compute, Table):
            row = self.compute.rows[client]
            drawn = row[job.attempt % len(row)]
        else:
            uniform = self.streams.uniforms("compute", job.attempt, client, client + 1)
            drawn = float(self.compute.quantile(uniform)[0])
        work = float(job.ask.work[job.ask.clients.tolist().index(client)])
        return drawn * self.factors[client] * work

    # --- events ---

    def push(self, time: float, what: str, value: Any) -> None:
        tie = value.job.client if what == "reach" else 0
        heapq.heappush(self.events, (time, _ORDER[what], tie, next(self.order), what, value))

    def happen(self) -> tuple[float, str, Any]:
        time, _, _, _, what, value = heapq.heappop(self.events)
        if what == "request":
            self.come(value)
            self.go_on(value.client, time)
        elif what == "done":
            self.at_work[value.client] = None
            self.answer(value, time)
            self.go_on(value.client, time)
        elif what == "reach":
            value.arrives = self.take_in(self.hub, time, value.job.ask.answer_bytes)
            self.push(value.arrives, "answer", value)
        elif value.job.round in self.closed:
            self.shelf.append(value)
        else:
            self.arrived[value.job.round][value.job.client] = value
        return time, what, value

    def come(self, job: _Job) -> None:
        """A request has reached its client."""
        job.here = True
        if self.server.requests == "all":
            return
        if job.attempt < self.seen[job.client]:
            self.queue[job.client].remove(job)
            return
        self.seen[job.client] = job.attempt
        queue = self.queue[job.client]
        self.queue[job.client] = [one for one in queue if one.attempt >= job.attempt or not one.here]

    def go_on(self, client: int, time: float) -> None:
        """Begin the next work, where there is one; after the run's end only where all are worked off."""
        queue = self.queue[client]
        if self.server.requests == "newest":
            queue = [job for job in queue if job.here]
        if self.at_work[client] or not queue or not queue[0].here:
            return
        if time > self.ended and self.server.requests == "newest":
            return
        job = queue[0]
        self.queue[client].remove(job)
        self.at_work[client] = job
        ends = time + self.duration(job)
        self.steps.append(Step(client, job.round, time, ends, 1, job.ask.phase))
        self.push(ends, "done", job)

    def answer(self, job: _Job, time: float) -> None:
        e = self.edge[job.client, self.hub]
        if not job.sends:
            return self.note(job, Status.LINK_DOWN, time, None, None, None)
        arrives = self.transfer(e, time, job.ask.answer_bytes, job.attempt, job.goes)
        if not job.goes:
            return self.note(job, Status.LOST, time, None, None, None)
        importance = float(job.ask.importance[job.ask.clients.tolist().index(job.client)])
        return self.push(arrives, "reach", _Letter(job, time, arrives, importance))

    def note(
        self,
        job: _Job,
        status: Status,
        sent: float,
        arrives: float | None,
        absorbed: int | None,
        weight: float | None,
        staleness: int | None = None,
    ) -> None:
        size = 0 if status == Status.LINK_DOWN else job.ask.answer_bytes
        self.rows.append(
            Message(
                job.round, job.client, self.hub, status, sent, arrives, absorbed, weight, size,
                job.ask.phase, job.ask.kind, staleness,
            )
        )  # fmt: skip

    # --- rounds ---

    def one_round(self, ask: Ask) -> Closed | None:
        """None where the answers needed do not come."""
        self.arrived[self.round] = {}
        here = self.arrived[self.round]
        self.hopes: set[int] = set()
        needed = self.server.needed(len(ask.clients))
        sizes = {
            client: sum(
                size
                for name, size in ask.reads.items()
                if self.known.get((client, name), -1) != self.version.get(name, 0)
            )
            for client in ask.clients.tolist()
        }
        for _ in range(self.server.attempts):
            self.ask(ask, [client for client in ask.clients.tolist() if client not in here], sizes)
            self.wait(ask, needed)
            self.attempt += 1
            if len(here) >= needed:
                return self.close(ask)
        self.shelf.extend(here.values())
        self.finish(gave_up=True)
        return None

    def ask(self, ask: Ask, clients: list[int], sizes: dict[int, int]) -> None:
        for client in clients:
            e, size = self.edge[self.hub, client], sizes[client]
            status = Status.LINK_DOWN
            arrives: float | None = None
            if self.is_up(e):
                status = Status.LOST if self.is_lost(e) else Status.DELIVERED
                arrives = self.transfer(e, self.now, size, self.attempt, status == Status.DELIVERED)
                if status == Status.DELIVERED:
                    arrives = self.take_in(client, arrives, size)
            delivered = status == Status.DELIVERED
            self.rows.append(
                Message(
                    self.round, self.hub, client, status, self.now,
                    arrives if delivered else None, self.round if delivered else None,
                    None if status == Status.LINK_DOWN else 1.0,
                    0 if status == Status.LINK_DOWN else size, ask.phase, "request",
                )
            )  # fmt: skip
            if delivered and client not in self.hopes:
                back = self.edge[client, self.hub]
                sends = self.is_up(back)
                goes = sends and not self.is_lost(back)
                versions = {name: self.version.get(name, 0) for name in ask.reads}
                job = _Job(self.round, self.attempt, client, ask, sends, goes, versions)
                self.queue[client].append(job)
                assert arrives is not None
                self.push(arrives, "request", job)
                if goes:
                    self.hopes.add(client)

    def wait(self, ask: Ask, needed: int) -> None:
        here, began = self.arrived[self.round], self.now
        enough = needed if self.server.quorum is not None else len(ask.clients)
        last = math.inf if self.server.deadline is None else began + self.server.deadline
        last_answer, idle = None, began

        def mine(value: Any) -> bool:
            job = value if isinstance(value, _Job) else value.job
            return bool(job.round == self.round and job.attempt == self.attempt)

        def over() -> bool:
            if len(here) >= enough:
                return True
            if math.isfinite(last):
                return False
            if self.hopes - set(here):
                return False
            waiting = (job for jobs in self.queue.values() for job in jobs)  # behind a client's older work
            under_way = (job for job in self.at_work.values() if job)
            return last_answer is not None or not any(map(mine, itertools.chain(under_way, waiting)))

        while self.events and self.events[0][0] <= last:
            if over() and self.events[0][0] > self.now:
                break
            self.now, what, value = self.happen()
            if what == "answer" and value.job.round == self.round:
                last_answer = self.now
            if mine(value):
                idle = self.now
        if len(here) >= enough:
            assert last_answer is not None
            self.now = last_answer
        elif math.isfinite(last):
            self.now = last
        elif self.compute is None:
            self.now = began + 1.0
        else:
            self.now = last_answer if last_answer is not None else idle

    def close(self, ask: Ask) -> Closed:
        here = self.arrived.pop(self.round)
        self.closed.add(self.round)
        older: dict[int, _Letter] = {}
        forgotten: list[_Letter] = []
        for letter in sorted(self.shelf, key=lambda letter: letter.job.round):
            if letter.job.ask.series != ask.series or self.server.late == "drop":
                continue
            if letter.job.client in older:
                forgotten.append(older.pop(letter.job.client))
            if letter.job.client in here:
                forgotten.append(letter)
            else:
                older[letter.job.client] = letter
        used = [*here.values(), *older.values()]
        total = sum(letter.importance for letter in used)
        for letter in used:
            share = letter.importance / total
            stale = self.round - letter.job.round or None
            self.note(letter.job, Status.DELIVERED, letter.sent, letter.arrives, self.round, share, stale)
        for letter in forgotten:
            self.note(letter.job, Status.LATE, letter.sent, letter.arrives, None, None)
        for letter in (*used, *forgotten):
            for name, version in letter.job.versions.items():
                key = letter.job.client, name
                self.known[key] = max(version, self.known.get(key, -1))
        gone = [*older.values(), *forgotten]
        self.shelf = [letter for letter in self.shelf if not any(letter is other for other in gone)]
        self.steps.append(Step(self.hub, self.round, self.now, self.now, len(used), ask.phase))
        self.round += 1
        self.version.update(dict.fromkeys(ask.writes, self.round))
        worked = [
            sum(step.client == client and step.ended_at <= self.now for step in self.steps)
            for client in range(self.hub)
        ]
        return Closed(
            self.now, {(one.job.round, one.job.client): one.importance / total for one in used}, worked
        )

    def finish(self, gave_up: bool = False) -> None:
        self.ended = self.now
        self.closed.add(self.round)
        while self.events:
            self.happen()
        for letter in self.shelf:
            held = self.server.late == "next" or (gave_up and letter.job.round == self.round)
            status = Status.IN_FLIGHT if held and letter.arrives > self.ended else Status.LATE
            self.note(letter.job, status, letter.sent, letter.arrives, None, None)
        self.shelf = []
