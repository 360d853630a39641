"""A server that does not wait against a slow event loop, and the laws it obeys."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncfed.errors import RunError, ScenarioError, TopologyError
from asyncfed.network import Lockstep, Table, VirtualTime
from asyncfed.network.buffer import Buffered, HingeDecay, NoDecay, PolynomialDecay
from asyncfed.network.schedules.asked import Ask
from asyncfed.network.schedules.buffered import BufferedSchedule
from asyncfed.network.waves import Common, Snapshot, Status, Sums, Wave
from asyncfed.rng import Streams
from tests.network.drawn import assert_rows_alike, stars
from tests.network.slow_buffer import SlowBuffer
from tests.network.slow_server import Message, Recording
from topologies import ring, star

law = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
VARIABLES = ("x", "y", "z")


@dataclass(frozen=True)
class Setting:
    graph: nx.Graph
    timing: Lockstep | VirtualTime
    server: Buffered
    asks: tuple[Ask, ...]
    seed: int = 0

    def __repr__(self) -> str:
        marks = list(self.graph.edges(data=True))
        return f"{type(self.graph).__name__} {marks}\n{self.timing}\n{self.server}\n{self.asks}\n{self.seed}"


@dataclass(frozen=True)
class Played:
    used: list[Counter[tuple[int, int, float]]]  # of each move: (round, client, weight)
    moved_at: list[float]
    looks: list[tuple[Snapshot, int, int]]  # after each move, with the messages recorded and their bytes
    messages: list[Message]
    steps: list[Any]
    failure: RunError | None


def play(setting: Setting) -> Played:
    """Executes waves with names for values: whatever is absorbed must be there, and be the right thing."""
    network = setting.timing.network(setting.graph)
    hub, recording = network.n - 1, Recording()
    schedule = setting.timing.with_server(network, Streams(setting.seed), recording, setting.server)
    assert isinstance(schedule, BufferedSchedule)
    opening = schedule.alone(0, VARIABLES)
    alive = {int(opening.emits[0]): (-1, hub)}
    newest = dict.fromkeys(VARIABLES, int(opening.emits[0]))
    used: list[Counter[tuple[int, int, float]]] = []
    turns: dict[tuple[int, int], int] = {}
    moved_at: list[float] = []
    looks: list[tuple[Snapshot, int, int]] = []
    failure = None

    def reads(wave: Wave | Snapshot, names: Any) -> None:
        brought = {}
        for channel in wave.absorption.channels:
            assert isinstance(channel, Common)
            brought |= dict.fromkeys(channel.names, channel.source)
        assert brought == {name: newest[name] for name in names}
        assert set(brought.values()) <= set(alive)

    def run(wave: Wave, ask: Ask, number: int) -> None:
        nodes = wave.absorption.nodes.tolist()
        assert nodes == sorted(set(nodes))
        assert wave.steps.tolist() == [number] * len(nodes)
        assert wave.part == ask.part
        for serial, node in zip(wave.emits.tolist(), nodes, strict=True):
            assert serial not in alive
            alive[serial] = number, node
        if nodes != [hub]:
            reads(wave, ask.reads)
            before = [turns.get((number, node), -1) for node in nodes]
            assert all(turn < wave.turn for turn in before), (
                "a client's works in order, each with its own turn"
            )
            if ask.remembers:
                assert all(turn == wave.turn - 1 for turn in before), "and none left out"
            turns.update(((number, node), wave.turn) for node in nodes)
        else:
            (channel,) = wave.absorption.channels
            assert isinstance(channel, Sums)
            assert channel.names == ask.answers
            columns = channel.sources, channel.senders, channel.weights
            taken = list(zip(*(column.tolist() for column in columns), strict=True))
            assert len({source for source, _, _ in taken}) == len(taken)
            assert all(alive[source][1] == sender for source, sender, _ in taken)
            used.append(Counter((*alive[source], weight) for source, _, weight in taken))
            newest.update(dict.fromkeys(ask.writes, int(wave.emits[0])))
        for serial in wave.released.tolist():
            del alive[serial]

    try:
        for number, ask in enumerate(setting.asks):
            for wave in schedule.one_round(ask):
                run(wave, ask, number)
            moved_at.append(schedule.now)
            look = schedule.snapshot(final=ask is setting.asks[-1])
            reads(look, VARIABLES)
            looks.append((look, len(recording.messages_), sum(row.bytes for row in recording.messages_)))
            assert not schedule.parts_wanted()
            rows = sum(node != hub for _, node in alive.values())
            assert rows == look.unrecorded.on_the_way, "what nobody will absorb is released"
        schedule.finish()
    except RunError as error:
        failure = error
    return Played(used, moved_at, looks, recording.messages_, recording.steps_, failure)


@st.composite
def settings_of(draw: st.DrawFn) -> Setting:
    graph, timing = draw(stars())
    clients = len(graph) - 1
    asks_next: Any = draw(st.sampled_from(["same", "fresh", "weighted"]))
    too_stale: Any = draw(st.sampled_from(["drop", "wait"]))
    server = Buffered(
        size=draw(st.sampled_from([1, 2, 4, 0.5, 1.0])),
        at_work=draw(st.one_of(st.just(1.0), st.integers(1, clients))),
        asks=asks_next,
        decay=draw(st.sampled_from([NoDecay(), PolynomialDecay(0.5), HingeDecay(2.0, 1.0)])),
        max_staleness=draw(st.sampled_from([None, 0, 1, 3])),
        too_stale=too_stale,
        attempts=draw(st.sampled_from([1, 3, 30])),
    )
    sizes = st.sampled_from([0, 4, 10])
    remembers, kinds = draw(st.booleans()), draw(st.integers(1, 2))
    samples = np.array([draw(st.integers(1, 9)) for _ in range(clients)])
    asks = tuple(
        Ask(
            part=number + 1,
            phase=draw(st.sampled_from(["inner", "outer"])),
            kind=draw(st.sampled_from("pq")),
            clients=np.arange(clients),
            reads={name: draw(sizes) for name in draw(st.sets(st.sampled_from(VARIABLES)))},
            answers=("a", "b"),
            answer_bytes=draw(sizes),
            writes=tuple(sorted(draw(st.sets(st.sampled_from(VARIABLES))))),
            work=np.array([draw(st.sampled_from([1.0, 2.0, 5.0])) for _ in range(clients)]),
            importance=np.array([draw(st.sampled_from([1.0, 3.0, 10.0])) for _ in range(clients)]),
            series="st"[number % kinds],
            remembers=remembers,
            normalised=draw(st.booleans()),
            samples=samples,
        )
        for number in range(draw(st.integers(1, 9)))
    )
    return Setting(graph, timing, server, asks, draw(st.integers(0, 10_000)))


@settings(law, max_examples=200)
@given(settings_of())
def test_every_row_and_every_move_is_that_of_a_slow_event_loop(setting: Setting) -> None:
    network, timing = setting.timing.network(setting.graph), setting.timing
    compute = timing.compute if isinstance(timing, VirtualTime) else None
    factors = [1.0] * (network.n - 1)
    if isinstance(timing, VirtualTime) and timing.factors:
        factors[0] = 3.0
    slow = SlowBuffer(network, setting.seed, setting.server, compute, factors)
    played = play(setting)
    for place, ask in enumerate(setting.asks):
        expected = slow.one_round(ask)
        if expected is None:
            assert played.failure is not None
            assert len(played.used) == place
            break
        assert played.moved_at[place] == expected.now
        found = sorted(played.used[place].elements())
        wanted = sorted((round, client, weight) for round, client, _, weight in expected.used)
        assert [one[:2] for one in found] == [one[:2] for one in wanted]
        assert [one[2] for one in found] == pytest.approx([one[2] for one in wanted])
        assert played.looks[place][0].steps.tolist() == expected.worked
    else:
        assert played.failure is None
        slow.finish()
    assert_rows_alike(played.messages, slow.rows)
    assert_rows_alike(played.steps, slow.steps)


@law
@given(settings_of())
def test_nobody_is_asked_while_at_work_and_no_more_than_the_places_are(setting: Setting) -> None:
    played = play(setting)
    hub = len(setting.graph) - 1
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    requests: dict[int, list[float]] = defaultdict(list)
    for row in played.messages:
        if row.sender == hub and row.status == Status.DELIVERED:
            requests[row.receiver].append(row.sent_at)
        elif row.sender != hub:
            spans[row.sender].append((row.sent_at, row.arrived_at or row.sent_at))
    works = []
    for client in range(hub):
        asked, answered = sorted(requests[client]), sorted(spans[client])
        assert len(asked) == len(answered)
        works += [(begins, ends) for begins, (_, ends) in zip(asked, answered, strict=True)]
        for (_, came), later in zip(answered, asked[1:], strict=False):
            assert came <= later
    for begins, _ in works:
        assert sum(start <= begins < end for start, end in works) <= setting.server.places(hub)


@law
@given(settings_of())
def test_staleness_stays_within_its_limit(setting: Setting) -> None:
    played = play(setting)
    for row in played.messages:
        if row.status == Status.DELIVERED and row.kind != "request":
            assert row.absorbed_step is not None
            assert row.staleness == row.absorbed_step - row.step
            if setting.server.max_staleness is not None:
                assert row.staleness <= setting.server.max_staleness
    waits = setting.server.too_stale == "wait" and len({ask.series for ask in setting.asks}) == 1
    if waits and played.failure is None:
        assert all(row.staleness is None for row in played.messages if row.status == Status.LATE)


@law
@given(settings_of())
def test_a_look_knows_what_the_trace_does_not_hold_yet(setting: Setting) -> None:
    played = play(setting)
    if played.failure is not None:
        return
    look, recorded, size = played.looks[-1]
    assert (look.final, look.rounds) == (True, len(setting.asks))
    held = played.messages[recorded:]
    assert {row.status for row in held} <= {Status.LATE, Status.IN_FLIGHT}
    assert (look.unrecorded.arrived, look.unrecorded.on_the_way) == (0, len(held))
    early = [row for row in played.messages[:recorded] if (row.arrived_at or 0.0) > look.time]
    assert look.unrecorded.early == len(early)
    assert sum(row.bytes for row in played.messages) == size + look.unrecorded.bytes


# --- by hand -------------------------------------------------------------------------------------------


def ask_of(clients: int, part: int = 1, series: str = "s", samples: list[int] | None = None) -> Ask:
    return Ask(
        part, "inner", "y", np.arange(clients), {"x": 8}, ("a",), 8, ("x",), np.ones(clients),
        np.ones(clients), series, samples=np.array(samples or [1] * clients),
    )  # fmt: skip


def answers(played: Played, client: int) -> list[tuple[Any, ...]]:
    """(round of the request, came at, used in, status) of a client."""
    rows = [row for row in played.messages if row.sender == client]
    return [
        (row.step, row.arrived_at, row.absorbed_step, row.status.name)
        for row in sorted(rows, key=lambda row: row.sent_at)
    ]


def uneven(server: Buffered, moves: int) -> Played:
    """Two clients: one takes 1 and the other 3.5."""
    timing = VirtualTime(Table([[1.0], [3.5]]))
    return play(Setting(star(2), timing, server, tuple(ask_of(2, k + 1) for k in range(moves))))


def test_one_answer_moves_it_and_the_slow_one_is_stale() -> None:
    played = uneven(Buffered(1), 6)
    assert played.moved_at == [1.0, 2.0, 3.0, 3.5, 4.0, 5.0]
    assert answers(played, 1)[0] == (0, 3.5, 3, "DELIVERED")
    assert [row.staleness for row in played.messages if row.sender == 1] == [3, None]
    assert [row.staleness for row in played.messages if row.sender == 0] == [0, 0, 0, 1, 0]


def test_what_is_too_stale_is_refused_and_its_client_asked_again() -> None:
    played = uneven(Buffered(1, max_staleness=2), 6)
    assert played.moved_at == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert answers(played, 1)[0] == (0, 3.5, None, "LATE")
    asked = [(row.step, row.sent_at) for row in played.messages if row.receiver == 1]
    assert asked == [(0, 0.0), (3, 3.5)]


def test_or_waited_for_and_counts_in_the_very_move() -> None:
    played = uneven(Buffered(1, max_staleness=2, too_stale="wait"), 4)
    assert played.moved_at == [1.0, 2.0, 3.5, 4.0]
    assert answers(played, 1)[0] == (0, 3.5, 2, "DELIVERED")
    assert [len(used) for used in played.used] == [1, 1, 2, 1], "the one at 3.0, and beside it the one at 3.5"
    everybody = uneven(Buffered(1, max_staleness=0, too_stale="wait"), 2)
    assert everybody.moved_at == [3.5, 7.0]


def test_an_answer_of_another_series_waits_for_its_own() -> None:
    asks = tuple(ask_of(2, k + 1, series) for k, series in enumerate("abab"))
    played = play(Setting(star(2), VirtualTime(Table([[1.0], [2.5]])), Buffered(1), asks))
    # Client 1 is asked for a at time 0, and answers at 2.5, when b has been made at 2 and a is open again.
    assert played.moved_at == [1.0, 2.0, 2.5, 4.0]
    assert answers(played, 1)[0] == (0, 2.5, 2, "DELIVERED")
    assert answers(played, 0)[2] == (2, 3.0, None, "LATE"), "of series a, when b was open, and never used"


def test_a_draw_by_samples_asks_the_large_ones_more_often() -> None:
    server = Buffered(1, at_work=1, asks="weighted")
    asks = tuple(ask_of(3, k + 1, samples=[1, 2, 7]) for k in range(3000))
    asked = Counter(
        row.receiver for row in play(Setting(star(3), Lockstep(), server, asks)).messages if row.sender == 3
    )
    for client, share in enumerate((0.1, 0.2, 0.7)):
        error = math.sqrt(share * (1 - share) / 3000)
        assert abs(asked[client] / 3000 - share) < 4 * error


def test_the_same_ones_are_asked_again_where_that_is_said() -> None:
    timing = VirtualTime("exponential(1.0)")
    asks = tuple(ask_of(9, k + 1) for k in range(60))
    same, fresh = (
        {row.receiver for row in play(Setting(star(9), timing, server, asks)).messages if row.sender == 9}
        for server in (Buffered(1, at_work=3, asks="same"), Buffered(1, at_work=3))
    )
    assert len(same) == 3
    assert fresh == set(range(9))


def test_one_client_more_at_work_moves_nobody_elses_draws() -> None:
    """How long the works of a client take depends on nobody else."""

    def durations(places: int) -> list[float]:
        asks = tuple(ask_of(4, k + 1) for k in range(12))
        server = Buffered(1, at_work=places, asks="same")
        steps = play(Setting(star(4), VirtualTime("exponential(1.0)"), server, asks, seed=5)).steps
        took: dict[int, list[float]] = defaultdict(list)
        for row in steps:
            took[row.client].append(row.ended_at - row.started_at)
        return took[next(row.client for row in steps)]

    one, four = durations(1), durations(4)
    assert min(len(one), len(four)) > 2
    assert one[: len(four)] == pytest.approx(four[: len(one)])


def test_a_server_that_reaches_nobody_gives_up() -> None:
    dead = star(3, up=1.0, down=1e-9)
    with_error = play(Setting(dead, VirtualTime(1.0), Buffered(2, attempts=4), (ask_of(3),)))
    assert with_error.failure is not None
    assert "got 0 of the 2 answers" in str(with_error.failure)
    assert len(with_error.messages) == 4 * 3
    mute = play(Setting(star(3, up=1e-9), Lockstep(), Buffered(2, attempts=4), (ask_of(3),)))
    assert mute.failure is not None
    assert len(mute.messages) == 2 * 4 * 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"size": 0}, "Buffered: size is 0; it must be a whole number, at least 1, or a fraction in"),
        ({"size": 1.5}, "size is 1.5"),
        ({"at_work": True}, "at_work is True"),
        ({"at_work": 0.0}, "at_work is 0.0"),
        ({"asks": "slow"}, "'same', 'fresh' or 'weighted'"),
        ({"decay": 0.5}, "decay is 0.5; it must be NoDecay"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"max_staleness": 1.5}, "max_staleness is 1.5"),
        ({"too_stale": "late"}, "'drop' or 'wait'"),
        ({"attempts": 0}, "attempts is 0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        Buffered(**wrong)


def test_decays_and_networks_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        ScenarioError, match="PolynomialDecay: power is -1; it must be a finite number, at least 0"
    ):
        PolynomialDecay(-1)
    with pytest.raises(
        ScenarioError, match="HingeDecay: until is nan; it must be a finite number, at least 0"
    ):
        HingeDecay(1.0, float("nan"))
    with pytest.raises(ScenarioError, match="at_work is 4, and there are 3 clients"):
        Buffered(1, at_work=4).check(Lockstep().network(star(3)), True)
    with pytest.raises(TopologyError, match="needs a server"):
        Buffered(1).check(Lockstep().network(ring(3)), True)
