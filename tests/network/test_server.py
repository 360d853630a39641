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
from asyncfed.network import Lockstep, Table, VirtualTime
from asyncfed.network.server import Server
from asyncfed.network.server_timeline import Ask, Exchange, ServerTimeline
from asyncfed.network.waves import Status
from asyncfed.rng import Streams
from tests.network.slow_server import Message, Recording, SlowServer
from topologies import star

law = settings(
    max_examples=120,
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
    exchanges: list[Exchange]
    closed_at: list[float]
    messages: list[Message]
    steps: list[Any]
    failure: QuorumError | None


def play(setting: Setting) -> Played:
    network = setting.timing.network(setting.graph)
    recording = Recording()
    timeline = setting.timing.server_timeline(network, Streams(setting.seed), recording, setting.server)
    exchanges, closed_at, failure = [], [], None
    try:
        for ask in setting.asks:
            exchanges.append(timeline.exchange(ask))
            closed_at.append(timeline.now)
        timeline.finish()
    except QuorumError as error:
        failure = error
    return Played(exchanges, closed_at, recording.messages_, recording.steps_, failure)


def ask_of(clients: list[int], kind: str = "y", work: float = 1.0, request: int = 8, answer: int = 8) -> Ask:
    k = len(clients)
    return Ask(
        "inner", kind, np.array(clients), np.full(k, request), answer, np.full(k, work), np.ones(k)
    )  # fmt: skip


@st.composite
def settings_of(draw: st.DrawFn, late: str | None = None) -> Setting:
    clients = draw(st.integers(1, 5))
    hub = draw(st.integers(0, clients))
    directed = draw(st.booleans())
    graph: nx.Graph = nx.DiGraph() if directed else nx.Graph()
    graph.add_nodes_from(range(clients + 1))
    graph.graph["server"] = hub
    others = [node for node in range(clients + 1) if node != hub]
    extra = [(a, b) for a in others for b in others if a != b and (directed or a < b)]
    pairs = [(hub, node) for node in others] + [(node, hub) for node in others if directed]
    some = draw(st.lists(st.sampled_from(extra), unique=True, max_size=3)) if extra else []
    for a, b in pairs + some:
        marks: dict[str, Any] = {"probability": draw(st.sampled_from([1.0, 1.0, 0.8, 0.3]))}
        if draw(st.booleans()):
            marks["latency"] = draw(st.sampled_from([0.0, 0.7, "exponential(1.5)"]))
        if draw(st.booleans()):
            marks["loss"] = draw(st.sampled_from([0.0, 0.3]))
        if draw(st.booleans()):
            marks["bandwidth"] = draw(st.sampled_from([math.inf, 10.0, 3.0]))
        graph.add_edge(a, b, **marks)
    timing: Lockstep | VirtualTime = Lockstep(loss=draw(st.sampled_from([0.0, 0.2])))
    if draw(st.integers(0, 3)):
        table = Table(tuple((1.0, 0.5 + client, 2.0) for client in range(clients)))
        timing = VirtualTime(
            compute=draw(st.sampled_from([1.0, "exponential(1.0)", "uniform(0.5, 2.0)", table])),  # type: ignore[arg-type]
            factors={0: 3.0} if draw(st.booleans()) else {},
            latency=draw(st.sampled_from([0.0, 0.5, "exponential(2.0)"])),
            bandwidth=draw(st.sampled_from([math.inf, 20.0])),
            loss=draw(st.sampled_from([0.0, 0.2])),
        )
    virtual = isinstance(timing, VirtualTime)
    server = Server(
        quorum=draw(st.sampled_from([None, 1, 0.5, 0.8])),
        deadline=draw(st.sampled_from([None, 1.5, 4.0])) if virtual else None,
        late=late or draw(st.sampled_from(["drop", "next"])),  # type: ignore[arg-type]
        attempts=draw(st.sampled_from([1, 3, 30])),
    )
    sizes = st.sampled_from([0, 4, 10])
    asks = []
    for _ in range(draw(st.integers(1, 7))):
        asked = sorted(draw(st.sets(st.integers(0, clients - 1), min_size=1)))
        k = len(asked)
        asks.append(
            Ask(
                draw(st.sampled_from(["inner", "outer"])),
                draw(st.sampled_from("yx")),
                np.array(asked),
                np.array([draw(sizes) for _ in asked]),
                draw(sizes),
                np.array([draw(st.sampled_from([1.0, 2.0, 5.0])) for _ in range(k)]),
                np.array([draw(st.sampled_from([1.0, 3.0, 10.0])) for _ in range(k)]),
            )
        )
    return Setting(graph, timing, server, tuple(asks), draw(st.integers(0, 10_000)))


def assert_rows_alike(found: list[Any], expected: list[Any]) -> None:
    """As sets; times to rounding."""

    def sortable(row: Any) -> tuple[Any, ...]:
        return tuple(
            (value is not None, round(value, 6) if isinstance(value, float) else value)
            if value is not None
            else (False, 0)
            for value in row
        )

    assert len(found) == len(expected)
    for one, other in zip(sorted(found, key=sortable), sorted(expected, key=sortable), strict=True):
        assert type(one) is type(other)
        for name, a, b in zip(one._fields, one, other, strict=True):
            same = a == b or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b))
            assert same or (name == "weight" and a is not None and math.isclose(a, b)), (name, one, other)


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
        expected = slow.exchange(ask)
        if expected is None:
            assert played.failure is not None
            assert len(played.exchanges) == place
            break
        found = played.exchanges[place]
        assert math.isclose(played.closed_at[place], expected.now)
        assert found.round == place
        assert found.clients.tolist() == list(expected.fresh)
        np.testing.assert_allclose(found.weights, list(expected.fresh.values()))
        older = {(number, client): weight for number, client, weight in found.older}
        assert older == pytest.approx(expected.older)
        assert found.held.tolist() == expected.held
        assert sorted(found.forgotten) == expected.forgotten
    else:
        assert played.failure is None
        slow.finish()
    assert_rows_alike(played.messages, slow.rows)
    assert_rows_alike(played.steps, slow.steps)


@law
@given(settings_of())
def test_weights_add_up_to_one_and_are_in_proportion(setting: Setting) -> None:
    played = play(setting)
    importance = {
        (number, client): value
        for number, ask in enumerate(setting.asks)
        for client, value in zip(ask.clients.tolist(), ask.importance.tolist(), strict=True)
    }
    for exchange in played.exchanges:
        fresh = zip(exchange.clients.tolist(), exchange.weights.tolist(), strict=True)
        used = {(exchange.round, client): weight for client, weight in fresh}
        used |= {(number, client): weight for number, client, weight in exchange.older}
        assert math.fsum(used.values()) == pytest.approx(1.0)
        ratios = [weight / importance[key] for key, weight in used.items()]
        assert ratios == pytest.approx([ratios[0]] * len(ratios))


@law
@given(settings_of("next"))
def test_a_late_answer_counts_once_at_most_and_never_beside_a_newer_one(setting: Setting) -> None:
    played = play(setting)
    used: Counter[tuple[int, int]] = Counter()
    newest: dict[tuple[str, int], int] = {}  # of every kind and client, the newest round used
    for exchange in played.exchanges:
        kind = setting.asks[exchange.round].kind
        now = [(exchange.round, client) for client in exchange.clients.tolist()]
        now += [(number, client) for number, client, _ in exchange.older]
        assert len({client for _, client in now}) == len(now)
        used.update(now)
        for number, client in now:
            assert setting.asks[number].kind == kind
            assert number > newest.get((kind, client), -1)
            newest[kind, client] = number
    assert set(used.values()) <= {1}
    held = {(x.round, client) for x in played.exchanges for client in x.held.tolist()}
    older = {(number, client) for x in played.exchanges for number, client, _ in x.older}
    forgotten = {entry for x in played.exchanges for entry in x.forgotten}
    assert older | forgotten <= held
    assert not older & forgotten
    nodes = [node for node in setting.graph if node != setting.graph.graph["server"]]
    answers = [row for row in played.messages if row.kind != "request"]
    by_status = {
        status: {(row.step, nodes.index(row.sender)) for row in answers if row.status == status}
        for status in Status
    }
    assert {
        (row.step, nodes.index(row.sender)) for row in answers if (row.absorbed_step or 0) > row.step
    } == older
    assert forgotten <= by_status[Status.LATE]
    if played.failure is None:
        assert held - older == by_status[Status.LATE] | by_status[Status.IN_FLIGHT]


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
def test_messages_on_a_link_arrive_in_the_order_they_were_sent(setting: Setting) -> None:
    by_link: dict[tuple[int, int], list[Message]] = {}
    for row in play(setting).messages:
        if row.arrived_at is not None:
            by_link.setdefault((row.sender, row.receiver), []).append(row)
    for rows in by_link.values():
        arrivals = [row.arrived_at for row in sorted(rows, key=lambda row: (row.sent_at, row.step))]
        assert arrivals == sorted(arrivals)  # type: ignore[type-var]


# --- by hand ---------------------------------------------------------------------------------------------


def timeline_of(graph: nx.Graph, timing: Any, server: Server, seed: int = 0) -> tuple[ServerTimeline, Any]:
    recording = Recording()
    return timing.server_timeline(timing.network(graph), Streams(seed), recording, server), recording


def test_by_hand_latency_bandwidth_and_work() -> None:
    """Request: 20 bytes at 10 per unit, then 0.5 on the way; 3 steps of 2; the answer likewise with 5."""
    timing = VirtualTime(compute=2.0, latency=0.5, bandwidth=10.0)
    timeline, recorded = timeline_of(star(1), timing, Server())
    exchange = timeline.exchange(ask_of([0], work=3.0, request=20, answer=5))
    assert timeline.now == pytest.approx(2.5 + 6.0 + 1.0)
    assert exchange.weights.tolist() == [1.0]
    request, answer = recorded.messages_
    assert (request.sent_at, request.arrived_at, request.bytes) == (0.0, 2.5, 20)
    assert (answer.sent_at, answer.arrived_at, answer.bytes) == (8.5, 9.5, 5)
    assert (answer.status, answer.absorbed_step, answer.weight) == (Status.DELIVERED, 0, 1.0)


def test_by_hand_a_straggler_behind_a_quorum() -> None:
    """Client 1 takes 5 where the others take 1. Of three, two close a round: client 1's first answer comes
    at 5, in the round that closes then; asked all along, it works on its requests one after the other.
    """
    timing, server = VirtualTime(compute=1.0, factors={1: 5.0}), Server(quorum=2, late="next")
    timeline, recorded = timeline_of(star(3), timing, server)
    exchanges = [timeline.exchange(ask_of([0, 1, 2])) for _ in range(6)]
    timeline.finish()
    assert timeline.now == 6.0
    assert [x.clients.tolist() for x in exchanges] == [[0, 2]] * 6
    assert [x.held.tolist() for x in exchanges] == [[1]] * 6
    assert exchanges[4].older == ((0, 1, pytest.approx(1 / 3)),)
    assert [len(x.older) for x in exchanges] == [0, 0, 0, 0, 1, 0]
    mine = [row for row in recorded.messages_ if row.sender == 2]
    assert [(row.step, row.status.name, row.arrived_at) for row in sorted(mine)] == [
        (0, "DELIVERED", 5.0),
        *((number, "IN_FLIGHT", 5.0 * number + 5.0) for number in range(1, 6)),
    ]


def test_by_hand_a_deadline_drops_or_holds() -> None:
    """With 3 to wait, client 1 (5 per answer) misses every round; its answers come at 5, 10, …"""
    timing = VirtualTime(compute=1.0, factors=(1.0, 5.0))
    for late, used in (("drop", []), ("next", [(1, 0), (3, 1), (4, 2)])):
        timeline, recorded = timeline_of(star(2), timing, Server(deadline=3.0, late=late))  # type: ignore[arg-type]
        exchanges = [timeline.exchange(ask_of([0, 1])) for _ in range(5)]
        timeline.finish()
        assert timeline.now == 15.0
        found = [(x.round, number) for x in exchanges for number, _, _ in x.older]
        assert found == used
        late_rows = [row for row in recorded.messages_ if row.status == Status.LATE]
        assert len(late_rows) == (5 if late == "drop" else 0)


def test_a_newer_answer_makes_a_held_one_worthless() -> None:
    """Client 1 is asked in rounds 0 and 2 and answers both by the time round 2 closes."""
    timing, server = VirtualTime(compute=1.0, factors={1: 2.0}), Server(quorum=1, late="next")
    timeline, recorded = timeline_of(star(2), timing, server)
    timeline.exchange(ask_of([0, 1]))  # closes at 1; client 1 answers at 2
    last = timeline.exchange(ask_of([1]))  # which answers this at 4
    assert timeline.now == 4.0
    assert last.clients.tolist() == [1]
    assert (last.older, last.forgotten) == ((), ((0, 1),))
    dropped = [row for row in recorded.messages_ if row.status == Status.LATE]
    assert [(row.step, row.arrived_at, row.absorbed_step) for row in dropped] == [(0, 2.0, None)]


def test_answers_are_held_for_their_own_kind() -> None:
    timing, server = VirtualTime(compute=1.0, factors={1: 2.5}), Server(quorum=1, late="next")
    timeline, _ = timeline_of(star(2), timing, server)
    timeline.exchange(ask_of([0, 1], "q"))  # client 1 answers at 2.5
    assert timeline.exchange(ask_of([0], "y", work=5.0)).older == ()
    assert timeline.exchange(ask_of([0], "q")).older == ((0, 1, 0.5),)


def test_in_lockstep_every_attempt_takes_a_unit_of_time() -> None:
    for seed in range(20):
        server = Server(quorum=4, attempts=1000)
        timeline, recorded = timeline_of(star(4, up=0.3, down=0.5), Lockstep(), server, seed)
        timeline.exchange(ask_of([0, 1, 2, 3]))
        requests = [row for row in recorded.messages_ if row.kind == "request"]
        attempts = {row.sent_at for row in requests}
        assert attempts == set(map(float, range(int(timeline.now))))
        asked = Counter(row.sent_at for row in requests)
        answered = Counter(row.arrived_at for row in recorded.messages_ if row.status == 0 and row.sender)
        for at in range(1, int(timeline.now)):  # those who have not answered are asked again
            assert asked[float(at)] == 4 - sum(answered[float(t)] for t in range(1, at + 1))


@pytest.mark.parametrize("timing", [Lockstep(), VirtualTime(compute="exponential(1.0)", latency=0.3)])
def test_links_that_are_hardly_ever_up_hold_nobody_for_ever(timing: Lockstep | VirtualTime) -> None:
    graph = star(5, up=0.05, down=0.05)
    timeline, recorded = timeline_of(graph, timing, Server(attempts=100_000))
    for _ in range(5):
        exchange = timeline.exchange(ask_of([0, 1, 2, 3, 4]))
        assert len(exchange.clients) >= 1
    assert math.isfinite(timeline.now)
    requests = [row for row in recorded.messages_ if row.kind == "request"]
    assert len(requests) > 500
    down = sum(row.status == Status.LINK_DOWN for row in requests) / len(requests)
    assert down == pytest.approx(0.95, abs=0.03)


def test_what_came_of_a_round_that_failed_is_recorded_too() -> None:
    timing = VirtualTime(compute=1.0, factors={1: 10.0})
    timeline, recorded = timeline_of(star(2), timing, Server(quorum=2, deadline=2.0, attempts=3))
    with pytest.raises(
        QuorumError, match=r"round 0 \(inner, y\) got 1 of the 2 answers .* 2 clients 3 times"
    ):
        timeline.exchange(ask_of([0, 1]))
    requests = [row for row in recorded.messages_ if row.kind == "request"]
    assert Counter(row.receiver for row in requests) == {1: 1, 2: 3}
    answers = {row.sender: (row.status.name, row.arrived_at) for row in recorded.messages_ if row.sender}
    assert answers == {1: ("LATE", 1.0), 2: ("IN_FLIGHT", 10.0)}


# --- whom it asks ----------------------------------------------------------------------------------------


def drawn(server: Server, iteration: int = 0, cohort: int = 0, clients: int = 10, seed: int = 0) -> list[int]:
    return server.draw(Streams(seed), iteration, cohort, clients, iteration).tolist()


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
