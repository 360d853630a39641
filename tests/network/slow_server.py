"""A server's rounds once more, slowly: a queue of events, one message and one client at a time."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from asyncfed.network import Table
from asyncfed.network.links import Network
from asyncfed.network.server import Server
from asyncfed.network.server_timeline import Ask
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
            self.messages_.append(Message(**row, phase=phase, kind=kind))

    def steps(self, *, phase: str, **columns: Any) -> None:
        for values in zip(*(a.tolist() for a in np.broadcast_arrays(*columns.values())), strict=True):
            self.steps_.append(Step(**dict(zip(columns, values, strict=True)), phase=phase))


@dataclass
class _Job:
    round: int
    attempt: int
    client: int
    goes: bool
    ask: Ask


@dataclass
class _Letter:
    job: _Job
    sent: float
    arrives: float
    importance: float


@dataclass
class _Closed:
    """What came of a round: whose answers with which weights, and those of earlier rounds."""

    now: float
    fresh: dict[int, float]
    older: dict[tuple[int, int], float]
    held: list[int]
    forgotten: list[tuple[int, int]]


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
        self.streams = Streams(self.seed)
        self.nodes = [node for node in range(network.n) if node != network.server]
        pairs = list(zip(network.senders.tolist(), network.receivers.tolist(), strict=True))
        self.edge = {pair: e for e, pair in enumerate(pairs)}
        self.free: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.queue: dict[int, list[_Job]] = {client: [] for client in range(len(self.nodes))}
        self.events: list[tuple[float, int, str, Any]] = []
        self.order = itertools.count()
        self.arrived: dict[int, dict[int, _Letter]] = {}  # of open rounds, by client
        self.shelf: list[_Letter] = []  # came too late, and not used so far
        self.closed: set[int] = set()

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
        self.free[e] = max(at, self.free.get(e, -math.inf)) + size / float(self.network.bandwidth[e])
        arrives = max(self.free[e] + self.latency(e, attempt), self.last.get(e, -math.inf))
        if gets_through:
            self.last[e] = arrives
        return arrives

    def duration(self, job: _Job) -> float:
        if self.compute is None:
            return 1.0
        client, node = job.client, self.nodes[job.client]
        if isinstance(self.compute, Table):
            row = self.compute.rows[client]
            drawn = row[job.attempt % len(row)]
        else:
            drawn = float(
                self.compute.quantile(self.streams.uniforms("compute", job.attempt, node, node + 1))[0]
            )
        work = float(job.ask.work[job.ask.clients.tolist().index(client)])
        return drawn * self.factors[client] * work

    # --- events ---

    def push(self, time: float, what: str, value: Any) -> None:
        heapq.heappush(self.events, (time, next(self.order), what, value))

    def happen(self) -> tuple[float, str, Any]:
        time, _, what, value = heapq.heappop(self.events)
        if what == "request":
            self.queue[value.client].append(value)
            if len(self.queue[value.client]) == 1:
                self.begin(value, time)
        elif what == "done":
            self.queue[value.client].pop(0)
            self.answer(value, time)
            if self.queue[value.client]:
                self.begin(self.queue[value.client][0], time)
        elif value.job.round in self.closed:
            self.shelf.append(value)
        else:
            self.arrived[value.job.round][value.job.client] = value
        return time, what, value

    def begin(self, job: _Job, time: float) -> None:
        ends = time + self.duration(job)
        self.steps.append(Step(self.nodes[job.client], job.round, time, ends, 1, job.ask.phase))
        self.push(ends, "done", job)

    def answer(self, job: _Job, time: float) -> None:
        e = self.edge[self.nodes[job.client], self.network.server]
        sends, goes = self.sends[job.attempt, job.client]
        if not sends:
            return self.note(job, Status.LINK_DOWN, time, None, None, None)
        arrives = self.transfer(e, time, job.ask.answer_bytes, job.attempt, goes)
        if not goes:
            return self.note(job, Status.LOST, time, None, None, None)
        importance = float(job.ask.importance[job.ask.clients.tolist().index(job.client)])
        return self.push(arrives, "answer", _Letter(job, time, arrives, importance))

    def note(
        self,
        job: _Job,
        status: Status,
        sent: float,
        arrives: float | None,
        absorbed: int | None,
        weight: float | None,
    ) -> None:
        assert self.network.server is not None
        size = 0 if status == Status.LINK_DOWN else job.ask.answer_bytes
        self.rows.append(
            Message(
                job.round, self.nodes[job.client], self.network.server, status, sent, arrives, absorbed,
                weight, size, job.ask.phase, job.ask.kind,
            )
        )  # fmt: skip

    # --- rounds ---

    def exchange(self, ask: Ask) -> _Closed | None:
        """None where the answers needed do not come."""
        self.arrived[self.round] = {}
        here = self.arrived[self.round]
        self.hopes: set[int] = set()
        needed = self.server.needed(len(ask.clients))
        for _ in range(self.server.attempts):
            self.ask(ask, [client for client in ask.clients.tolist() if client not in here])
            self.wait(ask, needed)
            self.attempt += 1
            if len(here) >= needed:
                return self.close(ask)
        self.shelf.extend(here.values())
        self.finish(IN_FLIGHT=True)
        return None

    def ask(self, ask: Ask, clients: list[int]) -> None:
        assert self.network.server is not None
        self.sends = getattr(self, "sends", {})
        for client in clients:
            e = self.edge[self.network.server, self.nodes[client]]
            size = int(ask.request_bytes[ask.clients.tolist().index(client)])
            status = Status.LINK_DOWN
            arrives: float | None = None
            if self.is_up(e):
                status = Status.LOST if self.is_lost(e) else Status.DELIVERED
                arrives = self.transfer(e, self.now, size, self.attempt, status == Status.DELIVERED)
            delivered = status == Status.DELIVERED
            self.rows.append(
                Message(
                    self.round, self.network.server, self.nodes[client], status, self.now,
                    arrives if delivered else None, self.round if delivered else None,
                    None if status == Status.LINK_DOWN else 1.0,
                    0 if status == Status.LINK_DOWN else size, ask.phase, "request",
                )
            )  # fmt: skip
            if delivered and client not in self.hopes:
                back = self.edge[self.nodes[client], self.network.server]
                sends = self.is_up(back)
                goes = sends and not self.is_lost(back)
                self.sends[self.attempt, client] = sends, goes
                assert arrives is not None
                self.push(arrives, "request", _Job(self.round, self.attempt, client, goes, ask))
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
            under_way = (event[3] for event in self.events)
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

    def close(self, ask: Ask) -> _Closed:
        assert self.network.server is not None
        here = self.arrived.pop(self.round)
        self.closed.add(self.round)
        older: dict[int, _Letter] = {}
        forgotten: list[_Letter] = []
        for letter in sorted(self.shelf, key=lambda letter: letter.job.round):
            if letter.job.ask.kind != ask.kind or self.server.late == "drop":
                continue
            if letter.job.client in older:
                forgotten.append(older.pop(letter.job.client))
            if letter.job.client in here:
                forgotten.append(letter)
            else:
                older[letter.job.client] = letter
        total = sum(letter.importance for letter in [*here.values(), *older.values()])
        for letter in [*here.values(), *older.values()]:
            share = letter.importance / total
            self.note(letter.job, Status.DELIVERED, letter.sent, letter.arrives, self.round, share)
        for letter in forgotten:
            self.note(letter.job, Status.LATE, letter.sent, letter.arrives, None, None)
        gone = [*older.values(), *forgotten]
        self.shelf = [letter for letter in self.shelf if not any(letter is other for other in gone)]
        used = len(here) + len(older)
        self.steps.append(Step(self.network.server, self.round, self.now, self.now, used, ask.phase))
        held = sorted(self.hopes - set(here)) if self.server.late == "next" else []
        self.round += 1
        return _Closed(
            self.now,
            {client: here[client].importance / total for client in sorted(here)},
            {(x.job.round, x.job.client): x.importance / total for x in older.values()},
            held,
            sorted((x.job.round, x.job.client) for x in forgotten),
        )

    def finish(self, IN_FLIGHT: bool = False) -> None:
        ended = self.now
        self.closed.add(self.round)
        while self.events:
            self.happen()
        for letter in self.shelf:
            held = self.server.late == "next" or (IN_FLIGHT and letter.job.round == self.round)
            status = Status.IN_FLIGHT if held and letter.arrives > ended else Status.LATE
            self.note(letter.job, status, letter.sent, letter.arrives, None, None)
        self.shelf = []
        self.now = ended
