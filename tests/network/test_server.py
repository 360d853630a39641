"""A server's rounds against a slow event loop, and the laws they obey."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncfed.errors import QuorumError, ScenarioError, TopologyError
from asyncfed.network import Lockstep, VirtualTime
from asyncfed.network.links import Network
from asyncfed.network.schedules.asked import Ask, AskedSchedule
from asyncfed.network.server import Server
from asyncfed.network.waves import Common, Snapshot, Status, Sums, Wave
from asyncfed.rng import Streams
from tests.network.drawn import assert_rows_alike, stars
from tests.network.slow_server import Message, Recording, SlowServer
from topologies import star

law = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Setting:
    graph: nx.Graph
    timing: Lockstep | VirtualTime
    server: Server
    asks: tuple[Ask, ...]
    seed: int

    def __repr__(self) -> str:
        marks = list(self.graph.edges(data=True))
        return f"{type(self.graph).__name__} {marks}\n{self.timing}\n{self.server}\n{self.asks}\n{self.seed}"


@dataclass(frozen=True)
class Played:
    """A run, and what its waves said: answers are named by (round, client)."""

    used: list[dict[tuple[int, int], float]]  # the answers that each round averages, with their weights
    worked: list[tuple[int, int]]  # the works that are computed, in the order of the waves
    closed_at: list[float]
    looks: list[tuple[Snapshot, int, int]]  # after each round, with the messages recorded and their bytes
    messages: list[Message]
    steps: list[Any]
    failure: QuorumError | None


class Executed:
    """Executes waves with names for values: whatever is absorbed must be there, and be the right thing."""

    def __init__(self, asks: tuple[Ask, ...], server: int) -> None:
        self.asks, self.server = asks, server
        self.alive: dict[int, tuple[int, int]] = {}  # serial → (round, node)
        self.used: list[dict[tuple[int, int], float]] = []
        self.worked: list[tuple[int, int]] = []

    def version(self, name: str, number: int) -> int:
        """The round that last changed a variable before round `number`; -1 for the opening."""
        return max((r for r in range(number) if name in self.asks[r].writes), default=-1)

    def read(self, channels: Any, names: Any, number: int) -> None:
        brought = {name: channel.source for channel in channels for name in channel.names}
        assert set(brought) == set(names)
        for channel in channels:
            assert isinstance(channel, Common)
        for name, source in brought.items():
            assert self.alive[source] == (self.version(name, number), self.server)

    def run(self, wave: Wave, number: int) -> None:
        nodes, rounds = wave.absorption.nodes.tolist(), wave.steps.tolist()
        if nodes == [self.server]:
            used = {}
            for channel in wave.absorption.channels:
                assert isinstance(channel, Sums)
                assert channel.names == self.asks[number].answers
                assert channel.indptr.tolist() == [0, len(channel.sources)]
                triples = zip(
                    channel.sources.tolist(), channel.senders.tolist(), channel.weights.tolist(), strict=True
                )
                for source, sender, weight in triples:
                    assert self.alive[source][1] == sender
                    used[self.alive[source]] = weight
                assert len(used) == len(channel.sources)
            if wave.absorption.channels:
                self.used.append(used)
        else:
            assert len(set(rounds)) == 1
            assert wave.part == self.asks[rounds[0]].part
            self.read(wave.absorption.channels, self.asks[rounds[0]].reads, rounds[0])
            self.worked += zip(rounds, nodes, strict=True)
        for serial, node in zip(wave.emits.tolist(), nodes, strict=True):
            assert serial not in self.alive
            self.alive[serial] = number if node == self.server else rounds[0], node
        for serial in wave.released.tolist():
            del self.alive[serial]

    def look(self, snapshot: Snapshot, number: int) -> None:
        self.read(snapshot.absorption.channels, VARIABLES, number)


VARIABLES = ("x", "y", "z")


def play(setting: Setting) -> Played:
    network = setting.timing.network(setting.graph)
    recording = Recording()
    schedule = setting.timing.with_server(network, Streams(setting.seed), recording, setting.server)
    executed = Executed(setting.asks, network.n - 1)
    executed.run(schedule.alone(0, VARIABLES), -1)
    closed_at, failure = [], None
    looks: list[tuple[Snapshot, int, int]] = []
    parts = {ask.part for ask in setting.asks}
    try:
        for number, ask in enumerate(setting.asks):
            for wave in schedule.one_round(ask):
                executed.run(wave, number)
            closed_at.append(schedule.now)
            look = schedule.snapshot(final=ask is setting.asks[-1])
            executed.look(look, number + 1)
            looks.append((look, len(recording.messages_), sum(row.bytes for row in recording.messages_)))
            assert schedule.parts_wanted() <= parts
        schedule.finish()
    except QuorumError as error:
        failure = error
    return Played(
        executed.used, executed.worked, closed_at, looks, recording.messages_, recording.steps_, failure
    )  # fmt: skip


def ask_of(
    clients: list[int],
    kind: str = "y",
    work: float = 1.0,
    request: int = 8,
    answer: int = 8,
    part: int = 1,
    remembers: bool = False,
) -> Ask:
    """A round that changes all that it sends."""
    k = len(clients)
    return Ask(
        part, "inner", kind, np.array(clients), {"x": request}, ("a",), answer, ("x",), np.full(k, work),
        np.ones(k), kind, remembers,
    )  # fmt: skip


@st.composite
def settings_of(draw: st.DrawFn, late: str | None = None) -> Setting:
    graph, timing = draw(stars())
    clients = len(graph) - 1
    if draw(st.booleans()):  # nodes whose links share something
        for node in graph:
            for mark in ("uplink", "downlink"):
                if draw(st.booleans()):
                    graph.nodes[node][mark] = draw(st.sampled_from([math.inf, 10.0, 2.5]))
    virtual = isinstance(timing, VirtualTime)
    server = Server(
        quorum=draw(st.sampled_from([None, 1, 0.5, 0.8])),
        deadline=draw(st.sampled_from([None, 1.5, 4.0])) if virtual else None,
        late=late or draw(st.sampled_from(["drop", "next"])),  # type: ignore[arg-type]
        attempts=draw(st.sampled_from([1, 3, 30])),
        requests=draw(st.sampled_from(["newest", "newest", "all"])),  # type: ignore[arg-type]
    )
    sizes = st.sampled_from([0, 4, 10])
    asks = []
    remembers = draw(st.booleans())
    for number in range(draw(st.integers(1, 9))):
        asked = sorted(draw(st.sets(st.integers(0, clients - 1), min_size=1)))
        k = len(asked)
        asks.append(
            Ask(
                part=number + 1,
                phase=draw(st.sampled_from(["inner", "outer"])),
                kind=draw(st.sampled_from("pq")),
                clients=np.array(asked),
                reads={name: draw(sizes) for name in draw(st.sets(st.sampled_from(VARIABLES)))},
                answers=("a", "b"),
                answer_bytes=draw(sizes),
                writes=tuple(sorted(draw(st.sets(st.sampled_from(VARIABLES))))),
                work=np.array([draw(st.sampled_from([1.0, 2.0, 5.0])) for _ in range(k)]),
                importance=np.array([draw(st.sampled_from([1.0, 3.0, 10.0])) for _ in range(k)]),
                series=draw(st.sampled_from("st")),
                remembers=remembers,
            )
        )
    return Setting(graph, timing, server, tuple(asks), draw(st.integers(0, 10_000)))


@settings(law, max_examples=250)
@given(settings_of())
def test_every_row_and_every_average_is_that_of_a_slow_event_loop(setting: Setting) -> None:
    network = setting.timing.network(setting.graph)
    clients, timing = network.n - 1, setting.timing
    compute = timing.compute if isinstance(timing, VirtualTime) else None
    factors = [1.0] * clients
    if isinstance(timing, VirtualTime) and timing.factors:
        factors[0] = 3.0
    slow = SlowServer(network, setting.seed, setting.server, compute, factors)
    played = play(setting)
    for place, ask in enumerate(setting.asks):
        expected = slow.one_round(ask)
        if expected is None:
            assert played.failure is not None
            assert len(played.used) == place
            break
        assert math.isclose(played.closed_at[place], expected.now)
        assert played.used[place] == pytest.approx(expected.used)
        assert played.looks[place][0].steps.tolist() == expected.worked
    else:
        assert played.failure is None
        slow.finish()
    assert_rows_alike(played.messages, slow.rows)
    assert_rows_alike(played.steps, slow.steps)


@law
@given(settings_of())
def test_works_are_computed_where_they_count_or_are_remembered_and_in_their_order(setting: Setting) -> None:
    played = play(setting)
    server = len(setting.graph) - 1
    steps = sorted((row for row in played.steps if row.client != server), key=lambda row: row.started_at)
    closed = len(played.closed_at)
    begun = [(row.step, row.client) for row in steps if row.step < closed]
    worked = [key for key in played.worked if key[0] < closed]
    if setting.asks[0].remembers and played.failure is None:
        assert sorted(worked) == sorted(begun)
    used = {key for some in played.used for key in some}
    assert used <= set(worked)
    assert not Counter(worked) - Counter(begun)
    for client in range(server):
        mine = [number for number, who in worked if who == client]
        order = iter([number for number, who in begun if who == client])
        assert all(number in order for number in mine), "each one's in the order in which it began them"
    if setting.server.late == "drop" and not setting.asks[0].remembers:
        assert set(worked) == used, "what is dropped is not computed"


@law
@given(settings_of())
def test_a_look_knows_what_the_trace_does_not_hold_yet(setting: Setting) -> None:
    """As many messages and bytes are added by the end of the run as the last look said."""
    played = play(setting)
    if played.failure is not None:
        return
    look, recorded, size = played.looks[-1]
    assert look.final
    assert look.rounds == len(setting.asks)
    held = played.messages[recorded:]
    assert {row.status for row in held} <= {
        Status.LATE,
        Status.IN_FLIGHT,
    }  # so none of them counts as arrived
    assert (look.unrecorded.arrived, look.unrecorded.on_the_way) == (0, len(held))
    assert sum(row.bytes for row in played.messages) == size + look.unrecorded.bytes


@law
@given(settings_of("next"))
def test_a_late_answer_counts_once_at_most_and_never_beside_a_newer_one(setting: Setting) -> None:
    played = play(setting)
    counted: Counter[tuple[int, int]] = Counter()
    newest: dict[tuple[str, int], int] = {}  # of every series and client, the newest round used
    for now, used in enumerate(played.used):
        series = setting.asks[now].series
        assert len({client for _, client in used}) == len(used)
        counted.update(used.keys())
        for number, client in used:
            assert setting.asks[number].series == series
            assert number > newest.get((series, client), -1)
            newest[series, client] = number
    assert set(counted.values()) <= {1}
    rows = [row for row in played.messages if row.kind != "request" and row.status == Status.DELIVERED]
    assert {(row.step, row.sender) for row in rows} == set(counted)


@law
@given(settings_of())
def test_no_client_begins_anything_after_the_end_of_a_run(setting: Setting) -> None:
    played = play(setting)
    if setting.server.requests == "newest" and played.failure is None:
        assert all(row.started_at <= played.closed_at[-1] for row in played.steps)


@law
@given(settings_of())
def test_a_deadline_is_kept_by_every_attempt(setting: Setting) -> None:
    played = play(setting)
    if setting.server.deadline is None:
        return
    for number, closed_at in enumerate(played.closed_at):
        sent = [row.sent_at for row in played.messages if row.kind == "request" and row.step == number]
        assert closed_at <= max(sent) + setting.server.deadline + 1e-9
        assert len(set(sent)) <= setting.server.attempts


@law
@given(settings_of())
def test_messages_on_an_ordered_link_arrive_in_the_order_they_were_sent(setting: Setting) -> None:
    network = setting.timing.network(setting.graph)
    edges = zip(network.senders.tolist(), network.receivers.tolist(), network.ordered.tolist(), strict=True)
    ordered = {(a, b) for a, b, keeps in edges if keeps}
    by_link: dict[tuple[int, int], list[Message]] = {}
    for row in play(setting).messages:
        if row.arrived_at is not None and (row.sender, row.receiver) in ordered:
            by_link.setdefault((row.sender, row.receiver), []).append(row)
    for rows in by_link.values():
        arrivals = [row.arrived_at for row in sorted(rows, key=lambda row: (row.sent_at, row.step))]
        assert arrivals == sorted(arrivals)  # type: ignore[type-var]


# --- by hand ---------------------------------------------------------------------------------------------


def schedule_of(graph: nx.Graph, timing: Any, server: Server, seed: int = 0) -> tuple[AskedSchedule, Any]:
    recording = Recording()
    schedule = timing.with_server(timing.network(graph), Streams(seed), recording, server)
    schedule.alone(0, VARIABLES)
    return schedule, recording


def play_by_hand(graph: nx.Graph, timing: Any, server: Server, *asks: Ask) -> Played:
    return play(Setting(graph, timing, server, asks, seed=0))


def works_of(played: Played, client: int) -> list[tuple[int, float, float]]:
    """(round, started, ended), in the order of time."""
    mine = [(row.started_at, row.step, row.ended_at) for row in played.steps if row.client == client]
    return [(step, started, ended) for started, step, ended in sorted(mine)]


def answers_of(played: Played, client: int) -> list[tuple[int, str, float | None]]:
    mine = [row for row in played.messages if row.sender == client]
    return [(row.step, row.status.name, row.arrived_at) for row in sorted(mine, key=lambda row: row.sent_at)]


def test_by_hand_latency_bandwidth_and_work() -> None:
    """Request: 20 bytes at 10 per unit, then 0.5 on the way; 3 steps of 2; the answer likewise with 5."""
    timing = VirtualTime(compute=2.0, latency=0.5, bandwidth=10.0)
    played = play_by_hand(star(1), timing, Server(), ask_of([0], work=3.0, request=20, answer=5))
    assert played.closed_at == [pytest.approx(2.5 + 6.0 + 1.0)]
    assert played.used == [{(0, 0): 1.0}]
    request, answer = played.messages
    assert (request.sent_at, request.arrived_at, request.bytes) == (0.0, 2.5, 20)
    assert (answer.sent_at, answer.arrived_at, answer.bytes) == (8.5, 9.5, 5)
    assert (answer.status, answer.absorbed_step, answer.weight) == (Status.DELIVERED, 0, 1.0)


def test_by_hand_links_of_a_server_share_what_goes_out_and_comes_in() -> None:
    """20 bytes out at 10 per unit, one client after the other; 10 bytes in at 5. A step of client 2 takes 10:
    its answer holds nobody up before it is there (at 16), and then it does.
    """
    graph = star(3)
    graph.nodes[3].update(uplink=10.0, downlink=5.0)
    graph.nodes[2]["compute"] = 10.0
    asks = [ask_of(clients, request=20, answer=10) for clients in ([0, 1, 2], [0, 1], [0, 1])]
    for late in ("drop", "next"):
        played = play_by_hand(graph, VirtualTime(), Server(quorum=2, late=late), *asks)  # type: ignore[arg-type]
        requests = sorted((row for row in played.messages if row.kind == "request"), key=lambda row: row.step)
        assert [row.arrived_at for row in requests] == [2.0, 4.0, 6.0, 9.0, 11.0, 16.0, 18.0]
        assert works_of(played, 2) == [(0, 6.0, 16.0)]
        assert [time for *_, time in answers_of(played, 0)] == [5.0, 12.0, 20.0]
        assert [time for *_, time in answers_of(played, 1)] == [7.0, 14.0, 22.0]
        assert answers_of(played, 2) == [(0, "LATE" if late == "drop" else "DELIVERED", 18.0)]
        assert played.closed_at == [7.0, 14.0, 22.0]


def test_by_hand_a_clients_own_uplink_and_downlink() -> None:
    """20 bytes in at 8 per unit, a step of 1, 10 bytes out at 2."""
    graph = star(2)
    graph.nodes[0].update(uplink=2.0, downlink=8.0)
    played = play_by_hand(graph, VirtualTime(), Server(), ask_of([0, 1], request=20, answer=10))
    assert works_of(played, 0) == [(0, 2.5, 3.5)]
    assert [answers_of(played, client)[0][2] for client in (0, 1)] == [8.5, 1.0]


def test_a_server_takes_no_time_and_cannot_be_slow() -> None:
    graph = star(2)
    graph.nodes[2]["compute"] = 3.0
    with pytest.raises(ScenarioError, match="compute of node 2 is 3, but that is the server"):
        play_by_hand(graph, VirtualTime(), Server(), ask_of([0]))


STRAGGLER = VirtualTime(compute=1.0, factors={1: 5.0})


def test_by_hand_requests_do_not_pile_up_at_a_straggler_behind_a_quorum() -> None:
    """Client 1 takes 5 where the others take 1; of three, two close a round, so one closes at 1, 2, 3, …
    Its first answer comes at 5, in the round that closes then (number 4). By then requests 1 to 4 have come,
    and it begins the newest, which it answers at 10: in the run of 12 rounds that is round 9. Then it begins
    request 9, and when the run ends at 12 it is still at it.
    """
    server = Server(quorum=2, late="next")
    played = play_by_hand(star(3), STRAGGLER, server, *(ask_of([0, 1, 2]) for _ in range(12)))
    assert played.closed_at == [float(t) for t in range(1, 13)]
    assert works_of(played, 1) == [(0, 0.0, 5.0), (4, 5.0, 10.0), (9, 10.0, 15.0)]
    assert answers_of(played, 1) == [(0, "DELIVERED", 5.0), (4, "DELIVERED", 10.0), (9, "IN_FLIGHT", 15.0)]
    older = {now: key for now, used in enumerate(played.used) for key in used if key[0] < now}
    assert older == {4: (0, 1), 9: (4, 1)}
    assert played.used[4] == pytest.approx({(4, 0): 1 / 3, (4, 2): 1 / 3, (0, 1): 1 / 3})
    requests = [row for row in played.messages if row.kind == "request" and row.receiver == 1]
    assert len(requests) == 12, "it is asked all the same"
    look, _, _ = played.looks[-1]
    assert look.steps.tolist() == [12, 2, 12]
    assert (look.unrecorded.arrived, look.unrecorded.on_the_way, look.unrecorded.bytes) == (0, 1, 8)


def test_by_hand_where_all_requests_are_worked_off_they_pile_up() -> None:
    """The same with 6 rounds: request k is begun at 5k, whatever has come since."""
    server = Server(quorum=2, late="next", requests="all")
    played = play_by_hand(star(3), STRAGGLER, server, *(ask_of([0, 1, 2]) for _ in range(6)))
    assert played.closed_at[-1] == 6.0
    assert works_of(played, 1) == [(k, 5.0 * k, 5.0 * k + 5.0) for k in range(6)]
    assert answers_of(played, 1) == [
        (0, "DELIVERED", 5.0),
        *((k, "IN_FLIGHT", 5.0 * k + 5.0) for k in range(1, 6)),
    ]
    assert played.looks[-1][0].steps.tolist() == [6, 1, 6]


def test_by_hand_a_work_that_waited_is_done_where_nobody_asks_again() -> None:
    """Client 1 is asked in rounds 0 and 1 only: it begins request 1 at 5 and answers at 10, and its answer
    counts in the round that closes then. What it reads is the server's as of round 1.
    """
    asks = [ask_of([0, 1, 2], part=1), ask_of([0, 1, 2], part=2), *(ask_of([0, 2]) for _ in range(9))]
    played = play_by_hand(star(3), STRAGGLER, Server(quorum=2, late="next"), *asks)
    assert works_of(played, 1) == [(0, 0.0, 5.0), (1, 5.0, 10.0)]
    older = {now: key for now, used in enumerate(played.used) for key in used if key[0] < now}
    assert older == {4: (0, 1), 9: (1, 1)}


def test_by_hand_what_a_newer_request_comes_too_late_to_replace() -> None:
    """Links take 3. Client 1 works 4 on request 0, from 3 to 7. Round 0 closes at 7 by the answer of client 0
    (sent at 4); request 1 comes at 10, when client 1 is free, and request 2 at 17, when it is again.
    """
    timing = VirtualTime(compute=1.0, factors={1: 4.0}, latency=3.0)
    played = play_by_hand(star(2), timing, Server(quorum=1, late="next"), *(ask_of([0, 1]) for _ in range(3)))
    assert played.closed_at == [7.0, 14.0, 21.0]
    assert works_of(played, 1) == [(0, 3.0, 7.0), (1, 10.0, 14.0), (2, 17.0, 21.0)]
    # Twice as slow: request 1 comes at 10, while it is at request 0 (3 to 11), and is begun before 2 comes.
    timing = VirtualTime(compute=1.0, factors={1: 8.0}, latency=3.0)
    played = play_by_hand(star(2), timing, Server(quorum=1, late="next"), *(ask_of([0, 1]) for _ in range(3)))
    assert works_of(played, 1) == [(0, 3.0, 11.0), (1, 11.0, 19.0), (2, 19.0, 27.0)]


def test_by_hand_what_no_newer_request_replaces_is_not_begun_after_the_run_either() -> None:
    """Client 1 is at request 0 until 5, and request 1 waits. Request 2, sent at 2, takes until 12 to come,
    too late to replace it; but the run is over at 3.
    """
    graph = star(2)
    graph.edges[2, 1]["bandwidth"] = 100.0
    asks = ask_of([0, 1], request=0), ask_of([0, 1], request=0), ask_of([0, 1], request=1000)
    played = play_by_hand(graph, STRAGGLER, Server(quorum=1), *asks)
    assert [row.arrived_at for row in played.messages if row.receiver == 1] == [0.0, 1.0, 12.0]
    assert played.closed_at == [1.0, 2.0, 3.0]
    assert works_of(played, 1) == [(0, 0.0, 5.0)]
    longer = play_by_hand(graph, STRAGGLER, Server(quorum=1), *asks, ask_of([0], work=3.0))
    assert works_of(longer, 1) == [(0, 0.0, 5.0), (1, 5.0, 10.0)], "at 6 it is at request 1"


@pytest.mark.parametrize(("ordered", "worked"), [(False, [1]), (True, [0, 1])])
def test_a_request_that_a_newer_one_has_overtaken_is_forgotten(ordered: bool, worked: list[int]) -> None:
    """To client 1 request 0 takes more than 9, and request 1 (sent at 1) less than 1 if it may overtake."""
    graph = star(2)
    graph.edges[2, 1].update(ordered=ordered, latency="uniform(0, 10)")
    timing = VirtualTime(compute=1.0)
    network = timing.network(graph)
    to_client_1 = edges_of(network).index((2, 1))

    def takes(seed: int, attempt: int) -> float:
        return float(
            network.latencies_of(Streams(seed), np.arange(network.edges), np.full(network.edges, attempt))[
                to_client_1
            ]
        )

    seed = next(seed for seed in range(1000) if takes(seed, 0) > 9 and takes(seed, 1) < 1)
    asks = ask_of([0, 1]), ask_of([0, 1]), ask_of([0], work=20.0)
    played = play(Setting(graph, timing, Server(quorum=1), asks, seed))
    assert [step for step, _, _ in works_of(played, 1)] == worked


def edges_of(network: Network) -> list[tuple[int, int]]:
    return list(zip(network.senders.tolist(), network.receivers.tolist(), strict=True))


def test_by_hand_late_answers_of_works_that_waited_are_in_the_order_they_were_made() -> None:
    """Client 1 works 5 on request 0, 5 on request 1 (sent at 1), and 5 on request 5, sent at 5.25 as the
    round before takes 0.25 longer. Rounds 2 to 4 do not ask it. When a round at last closes at 30, both its
    answers (10 and 15) are there, and the newer counts.
    """
    asks = [
        *(ask_of([0, 1]) for _ in range(2)),
        ask_of([0], work=4.25),
        ask_of([0, 1]),
        ask_of([0], work=22.75, kind="other"),
        ask_of([0]),
    ]
    played = play_by_hand(star(2), STRAGGLER, Server(quorum=1, late="next"), *asks)
    assert played.closed_at == [1.0, 2.0, 6.25, 7.25, 30.0, 31.0]
    assert works_of(played, 1) == [(0, 0.0, 5.0), (1, 5.0, 10.0), (3, 10.0, 15.0)]
    assert set(played.used[2]) == {(2, 0), (0, 1)}
    assert set(played.used[5]) == {(5, 0), (3, 1)}
    assert answers_of(played, 1)[1] == (1, "LATE", 10.0)


def test_by_hand_a_deadline_drops_or_holds() -> None:
    """With 3 to wait, client 1 (5 per answer) misses every round. It begins request 0 at 0, 1 (sent at 3) at
    5, 3 (sent at 9) at 10, and at 15 the run is over.
    """
    for late, used in (("drop", []), ("next", [(1, 0), (3, 1), (4, 3)])):
        server = Server(deadline=3.0, late=late)  # type: ignore[arg-type]
        played = play_by_hand(
            star(2), VirtualTime(compute=1.0, factors=(1.0, 5.0)), server, *(ask_of([0, 1]) for _ in range(5))
        )
        assert played.closed_at[-1] == 15.0
        assert works_of(played, 1)[:3] == [(0, 0.0, 5.0), (1, 5.0, 10.0), (3, 10.0, 15.0)]
        assert [(n, k) for n, some in enumerate(played.used) for k, c in some if c == 1] == used
        dropped = [row for row in played.messages if row.status == Status.LATE]
        assert len(dropped) == (4 if late == "drop" else 0)


def test_by_hand_who_is_asked_again_while_at_work_goes_on_with_it() -> None:
    """A deadline of 2 and a quorum of 2: client 1, who takes 5, is asked at 0, 2 and 4 and answers once."""
    server = Server(quorum=2, deadline=2.0, attempts=3)
    played = play_by_hand(star(2), STRAGGLER, server, ask_of([0, 1]))
    requests = [(row.receiver, row.sent_at) for row in played.messages if row.kind == "request"]
    assert sorted(requests) == [(0, 0.0), (1, 0.0), (1, 2.0), (1, 4.0)]
    assert works_of(played, 1) == [(0, 0.0, 5.0)]
    assert played.closed_at == [5.0]


def test_a_newer_answer_makes_a_held_one_worthless() -> None:
    """Client 1 answers requests 0 and 1 by the time round 1 closes."""
    timing, server = VirtualTime(compute=1.0, factors={1: 2.0}), Server(quorum=1, late="next")
    played = play_by_hand(star(2), timing, server, ask_of([0, 1]), ask_of([1]))
    assert played.closed_at == [1.0, 4.0]
    assert played.used[1] == {(1, 1): 1.0}
    dropped = [row for row in played.messages if row.status == Status.LATE]
    assert [(row.step, row.arrived_at, row.absorbed_step) for row in dropped] == [(0, 2.0, None)]


def test_answers_are_held_for_their_own_series() -> None:
    timing, server = VirtualTime(compute=1.0, factors={1: 2.5}), Server(quorum=1, late="next")
    asks = ask_of([0, 1], "q"), ask_of([0], "y", work=5.0), ask_of([0], "q")  # client 1 answers at 2.5
    played = play_by_hand(star(2), timing, server, *asks)
    assert played.used == [{(0, 0): 1.0}, {(1, 0): 1.0}, {(2, 0): 0.5, (0, 1): 0.5}]


def test_in_lockstep_every_attempt_takes_a_unit_of_time() -> None:
    for seed in range(20):
        server = Server(quorum=4, attempts=1000)
        schedule, recorded = schedule_of(star(4, up=0.3, down=0.5), Lockstep(), server, seed)
        list(schedule.one_round(ask_of([0, 1, 2, 3])))
        requests = [row for row in recorded.messages_ if row.kind == "request"]
        attempts = {row.sent_at for row in requests}
        assert attempts == set(map(float, range(int(schedule.now))))
        asked = Counter(row.sent_at for row in requests)
        answered = Counter(row.arrived_at for row in recorded.messages_ if row.status == 0 and row.sender < 4)
        for at in range(1, int(schedule.now)):  # those who have not answered are asked again
            assert asked[float(at)] == 4 - sum(answered[float(t)] for t in range(1, at + 1))


@pytest.mark.parametrize("timing", [Lockstep(), VirtualTime(compute="exponential(1.0)", latency=0.3)])
def test_links_that_are_hardly_ever_up_hold_nobody_for_ever(timing: Lockstep | VirtualTime) -> None:
    asks = [ask_of([0, 1, 2, 3, 4]) for _ in range(5)]
    played = play_by_hand(star(5, up=0.05, down=0.05), timing, Server(attempts=100_000), *asks)
    assert all(played.used)
    assert math.isfinite(played.closed_at[-1])
    requests = [row for row in played.messages if row.kind == "request"]
    assert len(requests) > 500
    down = sum(row.status == Status.LINK_DOWN for row in requests) / len(requests)
    assert down == pytest.approx(0.95, abs=0.03)


def test_what_came_of_a_round_that_failed_is_recorded_too() -> None:
    timing = VirtualTime(compute=1.0, factors={1: 10.0})
    played = play_by_hand(star(2), timing, Server(quorum=2, deadline=2.0, attempts=3), ask_of([0, 1]))
    words = r"round 0 \(inner, y\) got 1 of the 2 answers .* 2 clients 3 times"
    with pytest.raises(QuorumError, match=words):
        raise played.failure or AssertionError
    requests = [row for row in played.messages if row.kind == "request"]
    assert Counter(row.receiver for row in requests) == {0: 1, 1: 3}
    answers = {row.sender: (row.status.name, row.arrived_at) for row in played.messages if row.sender < 2}
    assert answers == {0: ("LATE", 1.0), 1: ("IN_FLIGHT", 10.0)}


@pytest.mark.parametrize("hub", [0, 1, 3, "hub"])
def test_a_factor_slows_the_client_of_that_number_wherever_the_graph_has_its_server(hub: Any) -> None:
    """One numbering for people: the client that takes 10 is number 1 in factors, trace, answers and looks."""
    nodes: list[Any] = (
        [*range(hub), hub, *range(hub + 1, 4)] if isinstance(hub, int) else ["hub", "c", 7, "a"]
    )
    graph = nx.Graph(server=hub)
    graph.add_nodes_from(nodes)
    graph.add_edges_from(((hub, node) for node in nodes if node != hub), probability=1.0)
    timing = VirtualTime(compute=1.0, factors={1: 10.0})
    played = play_by_hand(graph, timing, Server(quorum=2), ask_of([0, 1, 2]))
    assert [works_of(played, client) for client in range(3)] == [[(0, 0.0, d)] for d in (1.0, 10.0, 1.0)]
    assert set(played.used[0]) == {(0, 0), (0, 2)}
    assert played.looks[0][0].steps.tolist() == [1, 0, 1]
    assert {row.receiver for row in played.messages if row.kind != "request"} == {3}
    assert {row.sender for row in played.messages if row.kind == "request"} == {3}
    with pytest.raises(ScenarioError, match="names client 3; the clients are "):
        play_by_hand(graph, VirtualTime(factors={3: 2.0}), Server(), ask_of([0]))


# --- whom it asks ----------------------------------------------------------------------------------------


def drawn(server: Server, iteration: int = 0, cohort: int = 0, clients: int = 10, seed: int = 0) -> list[int]:
    everyone = np.ones(clients, dtype=np.bool_)
    return server.draw(Streams(seed), iteration, cohort, clients, iteration, everyone).tolist()


@pytest.mark.parametrize(("fraction", "count"), [(0.01, 1), (0.25, 3), (0.24, 2), (0.5, 5), (1.0, 10)])
def test_a_fraction_asks_so_many_different_clients(fraction: float, count: int) -> None:
    asked = drawn(Server(fraction))
    assert len(asked) == len(set(asked)) == count
    assert asked == sorted(asked)
    assert set(asked) <= set(range(10))


def test_every_draw_is_its_own_and_the_same_again() -> None:
    server = Server(0.3)
    draws = {
        (k, c, s): tuple(drawn(server, k, c, seed=s)) for k in range(20) for c in range(3) for s in (0, 1)
    }
    assert draws == {key: tuple(drawn(server, key[0], key[1], seed=key[2])) for key in draws}
    assert len(set(draws.values())) > 60  # of 120 possible
    asked = Counter(client for draw in draws.values() for client in draw)
    expected, spread = 0.3 * len(draws), math.sqrt(len(draws) * 0.3 * 0.7)
    assert all(abs(asked[client] - expected) < 4 * spread for client in range(10))


def test_sets_of_clients_are_taken_as_they_are_or_in_turn() -> None:
    assert [drawn(Server([4, 1]), k) for k in range(3)] == [[1, 4]] * 3
    assert [drawn(Server([[0], [5, 2], (1, 3)]), k) for k in range(4)] == [[0], [2, 5], [1, 3], [0]]


@pytest.mark.parametrize(
    "given",
    [0, 0.0, -0.1, 1.01, 2, True, "half", float("nan"), [], [[]], [[0], []], [0.5], [[0], 1], [1, 1], None],
)
def test_participation_that_makes_no_sense_is_refused(given: Any) -> None:
    with pytest.raises(ScenarioError, match="participation"):
        Server(given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("quorum", value) for value in (0, -1, 0.0, 1.5, float("nan"), True, "all", [1])),
        *(("deadline", value) for value in (0, -1.0, float("inf"), float("nan"), "soon")),
        *(("late", value) for value in ("keep", None, True)),
        *(("requests", value) for value in ("oldest", None, 1)),
        *(("attempts", value) for value in (0, -3, 1.5, "many", None, True)),
    ],
)
def test_other_values_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ScenarioError, match=f"{name} is "):
        Server(**{name: value})


def test_what_can_never_be_met_is_refused_before_a_run() -> None:
    network = Lockstep().network(star(10))
    for server, words in (
        (Server(quorum=11), "quorum of 11 answers cannot be met where 10 clients are asked"),
        (Server(0.5, quorum=6), "quorum of 6 answers cannot be met where 5"),
        (Server([[0, 1, 2], [3]], quorum=2), "where 1 clients are asked"),
        (Server([3, 10]), "names client 10; the clients are 0 to 9"),
        (Server([-1]), "names client -1"),
        (Server(deadline=2.0), "deadline of 2.0 needs virtual time"),
    ):
        with pytest.raises(ScenarioError, match=words):
            server.check(network, lockstep=True)
    Server(0.5, quorum=5).check(network, lockstep=True)
    Server(0.5, quorum=1.0, deadline=1.0).check(network, lockstep=False)


@pytest.mark.parametrize(("quorum", "needed"), [(None, 1), (3, 3), (0.5, 3), (0.2, 1), (1.0, 5), (0.6, 3)])
def test_the_answers_needed_of_five(quorum: float | None, needed: int) -> None:
    assert Server(quorum=quorum).needed(5) == needed


@pytest.mark.parametrize("missing", [("hub", "b"), ("b", "hub")])
def test_a_missing_link_is_refused_naming_the_client(missing: tuple[str, str]) -> None:
    graph = nx.DiGraph(server="hub")
    for node in "abc":
        graph.add_edge(node, "hub", probability=1.0)
        graph.add_edge("hub", node, probability=1.0)
    Server().check(Lockstep().network(graph), lockstep=True)
    graph.remove_edge(*missing)
    with pytest.raises(TopologyError, match=r"there is no link .* client b \(1 such clients"):
        Server().check(Lockstep().network(graph), lockstep=True)
    graph.remove_edges_from(list(graph.edges))
    with pytest.raises(TopologyError, match=r"client a \(3 such clients in all\)"):
        Server().check(Lockstep().network(graph), lockstep=True)


def test_a_graph_without_a_server_is_refused() -> None:
    graph = star(3)
    del graph.graph["server"]
    with pytest.raises(TopologyError, match="needs a server, and the topology has none"):
        Server().check(Lockstep().network(graph), lockstep=True)
