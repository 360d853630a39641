"""A server that does not wait once more, slowly: one event, one message and one client at a time.

Nothing is planned ahead. A request travels, its client works, the answer travels; all that happens at one
time is over before the server asks again. Clients may come and go: `there` has the intervals of those who do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from asyncfed.network import Table
from asyncfed.network.buffer import Buffered
from asyncfed.network.links import Network
from asyncfed.network.schedules.asked import Ask
from asyncfed.network.waves import Status
from asyncfed.rng import Streams
from tests.network.slow_server import Message, Step


@dataclass(eq=False)
class Job:
    """A request, and what comes of it."""

    number: int
    round: int
    client: int
    draw: int  # requests that the client was sent before
    ask: Ask
    read: dict[str, int]
    asked_at: float = math.nan
    sent: float = math.nan
    arrives: float = math.nan


@dataclass
class Moved:
    now: float
    used: list[tuple[int, int, int, float]]  # (round, client, number, weight)
    worked: list[int]


@dataclass
class SlowBuffer:
    network: Network
    seed: int
    server: Buffered
    compute: Any  # None in lockstep
    factors: list[float]
    there: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    crashes: bool = False
    now: float = 0.0
    round: int = 0
    requests: int = 0
    lost_in_a_row: int = 0
    rows: list[Message] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    events: list[tuple[float, str, Job]] = field(default_factory=list)
    at_work: dict[int, Job] = field(default_factory=dict)
    free_again: list[int] = field(default_factory=list)
    shelf: list[Job] = field(default_factory=list)  # answers that are here and were not used, in their order
    version: dict[str, int] = field(default_factory=dict)  # the moves after which a variable last changed
    # What clients have answered to: a version, and when they were asked.
    known: dict[tuple[int, str], tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        network = self.network
        assert network.server is not None
        self.hub = network.server
        self.streams = Streams(self.seed)
        pairs = zip(network.senders.tolist(), network.receivers.tolist(), strict=True)
        self.edge = {pair: e for e, pair in enumerate(pairs)}
        self.busy: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.asked = [0] * self.hub

    # --- the network ---

    def uniform(self, stream: str, row: int, place: int) -> float:
        return float(self.streams.uniforms(stream, row, place, place + 1)[0])

    def message(self, a: int, b: int, job: Job, size: int) -> tuple[Status, float]:
        """What becomes of a message sent now, and when it comes, or would."""
        e, network = self.edge[a, b], self.network
        which = e if network.directed else self.edge[min(a, b), max(a, b)]
        up = self.uniform("links", job.draw, which) < network.probability[e]
        lost = self.uniform("loss", job.draw, e) < network.loss[e]
        status = (Status.LOST if lost else Status.DELIVERED) if up else Status.LINK_DOWN
        if self.compute is None:
            return status, self.now
        leaves = max(self.now, self.busy.get(e, -math.inf)) + size / float(network.bandwidth[e])
        drawn = self.streams.uniforms("latency", job.draw, e, e + 1)
        arrives = leaves + float(network.latency[network.latency_of[e]].quantile(drawn)[0])
        if network.ordered[e]:
            arrives = max(arrives, self.last.get(e, -math.inf))
        if up:
            self.busy[e] = leaves
        if status == Status.DELIVERED:
            self.last[e] = max(arrives, self.last.get(e, -math.inf))
        return status, arrives

    def duration(self, job: Job) -> float:
        if self.compute is None:
            return 1.0
        if isinstance(self.compute, Table):
            row = self.compute.rows[job.client]
            drawn = row[job.draw % len(row)]
        else:
            uniforms = self.streams.uniforms("compute", job.draw, job.client, job.client + 1)
            drawn = float(self.compute.quantile(uniforms)[0])
        return drawn * self.factors[job.client] * float(job.ask.work[job.client])

    # --- coming and going ---

    def on(self, client: int, time: float) -> bool:
        return client not in self.there or any(a <= time < b for a, b in self.there[client])

    def stays(self, client: int, begin: float, end: float) -> bool:
        """All the time."""
        return client not in self.there or any(a <= begin and end < b for a, b in self.there[client])

    def work(self, job: Job) -> None:
        """It has reached its client; the work ends, or comes to nothing, at a time of its own."""
        client, takes = job.client, self.duration(job)
        ends: float | None = self.now + takes
        if self.crashes or self.compute is None:
            if not (self.stays(client, self.now, self.now + takes) or self.ends_there(client, takes)):
                ends = None
        elif client in self.there:
            ends = None
            for a, b in self.there[client]:
                begin = max(a, self.now)
                if begin < b and begin + takes < b:
                    ends = begin + takes
                    break
                takes -= max(0.0, b - begin)
        if ends is None:
            gone = [b for _, b in self.there[client] if b > self.now]
            over = self.now + 1.0 if self.compute is None else gone[0 if self.crashes else -1]
            self.events.append((over, "nothing", job))
            return
        self.steps.append(Step(client, job.round, self.now, ends, 1, job.ask.phase))
        self.events.append((ends, "done", job))

    def ends_there(self, client: int, takes: float) -> bool:
        """In lockstep one who pauses has worked if it is there at the end of its unit."""
        return not self.crashes and self.on(client, self.now + takes)

    def next_coming(self) -> float:
        """When one who is away now, and idle, is there, if there is a place for it."""
        away = [c for c in range(self.hub) if c not in self.at_work and not self.on(c, self.now)]
        if len(self.at_work) == self.server.places(self.hub):
            return math.inf
        if self.compute is None:
            units = (self.now + k for k in range(1, 100))
            return next((time for time in units if any(self.on(c, time) for c in away)), math.inf)
        return min((a for c in away for a, _ in self.there[c] if a > self.now), default=math.inf)

    # --- asking ---

    def choose(self, ask: Ask, taken: list[int]) -> int | None:
        """Whom request number `requests` goes to; None where nobody is idle and there."""
        idle = [c for c in range(self.hub) if c not in self.at_work and c not in taken]
        idle = [c for c in idle if self.on(c, self.now)]
        if not idle:
            return None
        again = [c for c in self.free_again if c in idle]
        if self.server.asks == "same" and again:
            self.free_again.remove(again[0])
            return again[0]
        u = self.uniform("asked", self.requests // 1024, self.requests % 1024)
        if self.server.asks != "weighted":
            return idle[int(u * len(idle))]
        total = sum(int(ask.samples[c]) for c in idle)
        below = 0
        for client in idle:
            below += int(ask.samples[client])
            if u * total < below:
                return client
        raise AssertionError

    def fill(self, ask: Ask) -> bool:
        """False where nobody can be reached."""
        here = sum(job.ask.series == ask.series for job in self.shelf)
        waits = self.server.too_stale == "wait" and here >= self.server.needed(self.hub)
        if waits and self.server.max_staleness == 0:
            return True
        for _ in range(self.server.attempts):
            jobs: list[Job] = []
            while len(self.at_work) + len(jobs) < self.server.places(self.hub):
                client = self.choose(ask, [job.client for job in jobs])
                if client is None:
                    break
                read = {name: self.version.get(name, -1) for name in ask.reads}
                jobs.append(Job(self.requests, self.round, client, self.asked[client], ask, read))
                self.requests += 1
            if not jobs:
                return True
            for job in jobs:
                self.request(job)
        return bool(self.at_work) or self.may_move(ask)

    def request(self, job: Job) -> None:
        ask, client = job.ask, job.client
        assert client not in self.at_work, "asked twice at once"
        self.asked[client] += 1
        job.asked_at = self.now
        size = sum(bytes for name, bytes in ask.reads.items() if not self.has(client, name, job.read[name]))
        status, arrives = self.message(self.hub, client, job, size)
        away = status == Status.DELIVERED and not self.on(client, arrives)
        if away:
            status = Status.LOST
            self.at_work[client] = job
            self.events.append((arrives, "nothing", job))
        there, down = status == Status.DELIVERED, status == Status.LINK_DOWN
        self.rows.append(
            Message(
                self.round, self.hub, client, status, self.now, arrives if there else None,
                self.round if there else None, None if down else 1.0, 0 if down else size, ask.phase,
                "request",
            )
        )  # fmt: skip
        if there:
            self.at_work[client] = job
            self.events.append((arrives, "reached", job))
        elif away:
            return
        elif self.compute is None:
            self.at_work[client] = job
            self.events.append((self.now + 1.0, "nothing", job))
        elif self.server.asks == "same":
            self.free_again.append(client)

    def has(self, client: int, name: str, version: int) -> bool:
        """One who has crashed since it was asked has forgotten what it answered to."""
        known, asked_at = self.known.get((client, name), (None, 0.0))
        return known == version and not (self.crashes and not self.stays(client, asked_at, self.now))

    # --- what happens ---

    def advance(self) -> bool:
        """To the next time at which a place becomes free or somebody comes for one, and all of that time;
        False if there is none.
        """
        over: list[tuple[Job, bool]] = []
        coming = self.next_coming()
        came = False
        while self.events or coming < math.inf:
            first = min((time for time, _, _ in self.events), default=math.inf)
            if over and first > self.now:
                break
            if coming < first:
                self.now, came = coming, True
                break
            self.now = first
            event = next(event for event in self.events if event[0] == first)
            self.events.remove(event)
            _, what, job = event
            if what == "reached":
                self.work(job)
            elif what == "done":
                self.answer(job)
            else:
                over.append((job, what == "answered"))
        for job, answered in sorted(over, key=lambda one: one[0].number):
            del self.at_work[job.client]
            self.free_again.append(job.client)
            self.lost_in_a_row = 0 if answered else self.lost_in_a_row + 1
            if answered:
                for name, version in job.read.items():
                    key = job.client, name
                    self.known[key] = max((version, job.asked_at), self.known.get(key, (version, 0.0)))
                self.take(job)
        limit = self.server.attempts * self.server.places(self.hub)
        return (came or bool(over)) and self.lost_in_a_row < limit

    def answer(self, job: Job) -> None:
        job.sent = self.now
        status, job.arrives = self.message(job.client, self.hub, job, job.ask.answer_bytes)
        if status == Status.DELIVERED:
            self.events.append((job.arrives, "answered", job))
            return
        self.note(job, status, None, None, None)
        self.events.append((job.arrives, "nothing", job))

    def take(self, job: Job) -> None:
        if self.stale(job, self.round):
            self.note(job, Status.LATE, None, None, self.round - job.round)
        else:
            self.shelf.append(job)

    def stale(self, job: Job, round: int) -> bool:
        return self.server.max_staleness is not None and round - job.round > self.server.max_staleness

    def note(
        self, job: Job, status: Status, absorbed: int | None, weight: float | None, staleness: int | None
    ) -> None:
        down, arrived = status == Status.LINK_DOWN, status not in (Status.LOST, Status.LINK_DOWN)
        self.rows.append(
            Message(
                job.round, job.client, self.hub, status, job.sent, job.arrives if arrived else None, absorbed,
                weight, 0 if down else job.ask.answer_bytes, job.ask.phase, job.ask.kind, staleness,
            )
        )  # fmt: skip

    # --- moves ---

    def may_move(self, ask: Ask) -> bool:
        here = [job for job in self.shelf if job.ask.series == ask.series]
        waits = self.server.too_stale == "wait" and any(
            job.ask.series == ask.series and self.stale(job, self.round + 1) for job in self.at_work.values()
        )
        return len(here) >= self.server.needed(self.hub) and not waits

    def one_round(self, ask: Ask) -> Moved | None:
        """None where not enough comes."""
        old = [job for job in self.shelf if job.ask.series == ask.series and self.stale(job, self.round)]
        for job in old:
            self.shelf.remove(job)
            self.note(job, Status.LATE, None, None, self.round - job.round)
        if not self.fill(ask):
            return self.finish()
        while not self.may_move(ask):
            if not self.advance() or not (self.may_move(ask) or self.fill(ask)):
                return self.finish()
        return self.move(ask)

    def move(self, ask: Ask) -> Moved:
        here = [job for job in self.shelf if job.ask.series == ask.series]
        used = here[: self.server.needed(self.hub)]
        if self.server.too_stale == "wait":
            used += [job for job in here if job not in used and self.stale(job, self.round + 1)]
        self.shelf = [job for job in self.shelf if job not in used]
        importance = [float(ask.importance[job.client]) for job in used]
        shares = [
            share * decayed(self.server.decay, self.round - job.round)
            for job, share in zip(used, importance, strict=True)
        ]
        total = sum(shares if ask.normalised else importance)
        weights = [share / total for share in shares]
        for job, weight in zip(used, weights, strict=True):
            self.note(job, Status.DELIVERED, self.round, weight, self.round - job.round)
        self.steps.append(Step(self.hub, self.round, self.now, self.now, len(used), ask.phase))
        self.version.update(dict.fromkeys(ask.writes, self.round))
        self.round += 1
        worked = [
            sum(step.client == client and step.ended_at <= self.now for step in self.steps)
            for client in range(self.hub)
        ]
        keys = [(job.round, job.client, job.number) for job in used]
        return Moved(self.now, [(*key, w) for key, w in zip(keys, weights, strict=True)], worked)

    def finish(self) -> None:
        """The run is over; whoever is at work goes on, and nobody hears of it."""
        ended = self.now
        for job in self.shelf:
            self.note(job, Status.LATE, None, None, None)
        while self.events:
            event = min(self.events, key=lambda event: event[0])
            self.events.remove(event)
            self.now, what, job = event
            if what == "reached":
                self.work(job)
            elif what == "done":
                self.answer(job)
            elif what == "answered":
                status = Status.LATE if job.arrives <= ended else Status.IN_FLIGHT
                self.note(job, status, None, None, None)


def decayed(decay: Any, s: int) -> float:
    """As the papers have it."""
    name = type(decay).__name__
    if name == "PolynomialDecay":
        return float((1 + s) ** -decay.power)
    if name == "HingeDecay":
        return 1.0 if s <= decay.until else 1.0 / (decay.slope * (s - decay.until) + 1.0)
    return 1.0
