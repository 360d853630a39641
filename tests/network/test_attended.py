"""A server's rounds with clients that come and go: laws over random presences, and cases done by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfed.errors import RunError
from asyncfed.network import GivenPresence, Lockstep, VirtualTime
from asyncfed.network.server import Server
from asyncfed.network.waves import Status
from asyncfed.rng import Streams
from tests.network.slow_server import Recording
from tests.network.test_server import Setting, ask_of, law, play, settings_of
from topologies import star, with_links

Table = dict[int, list[tuple[float, float]]]


@st.composite
def presences(draw: st.DrawFn, clients: int) -> Table:
    table: Table = {}
    for client in draw(st.sets(st.integers(0, clients - 1))):
        bounds = sorted(draw(st.sets(st.integers(0, 40), max_size=10)))
        pairs = [(a / 2, b / 2) for a, b in zip(bounds[::2], bounds[1::2], strict=False)]
        if draw(st.booleans()):
            pairs.append((bounds[-1] / 2 + 0.5 if bounds else 0.0, math.inf))
        table[client] = pairs
    return table


@st.composite
def attended(draw: st.DrawFn) -> tuple[Setting, Table]:
    setting = draw(settings_of())
    table = draw(presences(len(setting.graph) - 1))
    absence = draw(st.sampled_from(["pause", "crash"]))
    timing: Any = replace(setting.timing, presence=GivenPresence(table, absence=absence))
    if isinstance(timing, VirtualTime):
        timing = replace(timing, compute=1.0)
    return replace(setting, timing=timing), table


def on(table: Table, client: int, time: float) -> bool:
    return client not in table or any(a <= time < b for a, b in table[client])


def time_on(table: Table, client: int, begin: float, end: float) -> float:
    if client not in table:
        return end - begin
    return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in table[client])


@law
@given(settings_of())
def test_who_is_always_there_makes_no_difference(setting: Setting) -> None:
    """To the bit: every row, every average, every work."""
    everyone = GivenPresence.of(lambda client: [(0, math.inf)], len(setting.graph) - 1, absence="crash")
    plain, attended = play(setting), play(replace(setting, timing=replace(setting.timing, presence=everyone)))
    assert attended.messages == plain.messages
    assert attended.steps == plain.steps
    assert attended.used == plain.used
    assert attended.worked == plain.worked
    assert attended.closed_at == plain.closed_at


@law
@given(attended())
def test_nobody_sends_or_absorbs_or_works_while_it_is_away(case: tuple[Setting, Table]) -> None:
    setting, table = case
    hub, timing = len(setting.graph) - 1, setting.timing
    played = play(setting)
    for row in played.messages:
        if row.sender == hub:
            if row.status != Status.LINK_DOWN:
                assert on(table, row.receiver, row.sent_at)
            if row.status == Status.DELIVERED:
                assert row.arrived_at is not None
                assert on(table, row.receiver, row.arrived_at)
        else:
            assert on(table, row.sender, row.sent_at)
    crashes = isinstance(timing.presence, GivenPresence) and timing.presence.absence == "crash"
    for step in played.steps:
        if step.client == hub:
            continue
        assert on(table, step.client, step.started_at)
        assert on(table, step.client, step.ended_at)
        worked = time_on(table, step.client, step.started_at, step.ended_at)
        if crashes:
            assert worked == pytest.approx(step.ended_at - step.started_at)
        if isinstance(timing, VirtualTime):
            ask = setting.asks[step.step]
            factor = 3.0 if timing.factors and step.client == 0 else 1.0
            takes = factor * ask.work[ask.clients.tolist().index(step.client)]
            assert worked == pytest.approx(takes)
    for number, used in enumerate(played.used):
        assert sum(used.values()) == pytest.approx(1.0)
        assert {client for _, client in used} <= set(setting.asks[number].clients.tolist()) or (
            setting.server.late == "next"
        )


def test_who_is_away_one_time_more_changes_no_draw_of_the_others() -> None:
    """Every row of the others, their times included, is the same; only what their answers weigh is not."""
    graph = with_links(star(8, up=0.9, down=0.9), loss=0.05)
    asks = tuple(ask_of(list(range(8))) for _ in range(20))
    for timing, server in (
        (Lockstep(), Server(attempts=1)),
        (VirtualTime("exponential(1)", latency="exponential(0.3)"), Server(attempts=1, deadline=5.0)),
    ):
        found = []
        for away in ({3: [(4.0, 8.0)]}, {3: [(4.0, 8.0)], 1: [(0.0, 2.5), (6.5, math.inf)]}):
            presence = GivenPresence(away)  # type: ignore[arg-type]
            played = play(Setting(graph, replace(timing, presence=presence), server, asks, seed=5))
            assert len(played.closed_at) == 20
            rows = [row._replace(weight=None) for row in played.messages]
            found.append([row for row in rows if not {row.sender, row.receiver} & {1, 3}])
        assert found[0] == found[1]
        assert len({row.status for row in found[0]}) >= 3


# ---- by hand


def played_by_hand(presence: GivenPresence, rounds: int = 1, **more: Any) -> Any:
    """Two clients; a step takes 4 and 1, a message 0.5."""
    timing = VirtualTime(compute=1.0, factors={0: 4.0}, latency=0.5, presence=presence)
    server = Server(**more)
    return play(Setting(star(2), timing, server, tuple(ask_of([0, 1]) for _ in range(rounds)), 0))


def answers(played: Any) -> dict[tuple[int, int], tuple[float, str]]:
    return {
        (row.step, row.sender): (row.sent_at, row.status.name) for row in played.messages if row.sender != 2
    }


def test_who_pauses_in_the_middle_of_its_work_answers_later() -> None:
    """It works from 0.5 to 2 and from 5 to 7.5; the round waits for it until 8."""
    played = played_by_hand(GivenPresence({0: [(0, 2), (5, 9)]}))
    assert answers(played) == {(0, 0): (7.5, "DELIVERED"), (0, 1): (1.5, "DELIVERED")}
    assert played.closed_at == [8.0]


def test_who_is_done_at_the_instant_it_leaves_sends_when_it_is_back() -> None:
    played = played_by_hand(GivenPresence({0: [(0, 4.5), (6, 9)]}))
    assert answers(played)[0, 0] == (6.0, "DELIVERED")


@pytest.mark.parametrize("table", [{0: [(0, 2), (5, 9)]}, {0: [(0, 2)]}])
def test_who_crashes_never_answers_and_nobody_waits_for_it(table: Table) -> None:
    played = played_by_hand(GivenPresence(table, absence="crash"))  # type: ignore[arg-type]
    assert answers(played) == {(0, 1): (1.5, "DELIVERED")}
    assert [step.client for step in played.steps] == [1, 2]
    assert played.closed_at == [2.0]


def test_who_leaves_for_good_never_answers() -> None:
    played = played_by_hand(GivenPresence({0: [(0, 2)]}))
    assert answers(played) == {(0, 1): (1.5, "DELIVERED")}


def test_a_request_that_comes_while_its_client_is_away_is_lost() -> None:
    played = played_by_hand(GivenPresence({0: [(0, 0.25), (3, 20)]}), rounds=2)
    requests = {(row.step, row.receiver): row.status.name for row in played.messages if row.sender == 2}
    assert requests == {
        (0, 0): "LOST", (0, 1): "DELIVERED", (1, 0): "LINK_DOWN", (1, 1): "DELIVERED"
    }  # fmt: skip
    assert played.closed_at == [2.0, 4.0]


def test_where_all_who_are_missing_are_away_the_server_waits_until_one_is_back() -> None:
    """Both leave before their requests come; client 0 is back at 3, and is asked again."""
    played = played_by_hand(GivenPresence({0: [(0, 0.25), (3, 20)], 1: [(0, 0.25)]}))
    sent = [(row.sent_at, row.receiver, row.status.name) for row in played.messages if row.sender == 2]
    assert sent == [(0.0, 0, "LOST"), (0.0, 1, "LOST"), (3.0, 0, "DELIVERED"), (3.0, 1, "LINK_DOWN")]
    assert played.closed_at == [8.0]


def test_a_request_waits_for_the_servers_uplink_and_an_answer_that_never_comes_takes_no_downlink() -> None:
    """Requests of 8 bytes leave at 0.5 and 1 and come 0.5 later; answers are sent at 2 and 1.75, reach the
    server at 2.5 and 2.25, and each takes 1 to be taken in.
    """
    graph = star(2)
    graph.nodes[graph.graph["server"]].update(uplink=16.0, downlink=8.0)
    both = {(0, 0): (2.0, "DELIVERED"), (0, 1): (1.75, "DELIVERED")}
    for there, expected, requests, closed in (
        ([(0.0, 9.0)], both, "DELIVERED", 4.25),
        ([(0.0, 1.625), (3.0, 9.0)], {(0, 0): (2.0, "DELIVERED")}, "DELIVERED", 3.5),
        ([(0.0, 1.25), (3.0, 9.0)], {(0, 0): (2.0, "DELIVERED")}, "LOST", 3.5),
    ):
        presence = GivenPresence({1: there}, absence="crash")
        timing = VirtualTime(compute=1.0, factors={1: 0.25}, latency=0.5, presence=presence)
        played = play(Setting(graph, timing, Server(), (ask_of([0, 1]),), 0))
        assert answers(played) == expected
        assert [row.status.name for row in played.messages if row.receiver == 1] == [requests]
        assert played.closed_at == [closed]


@pytest.mark.parametrize(
    ("there", "status", "closed"),
    [
        ([(0.0, 9.0)], "DELIVERED", 5.0),
        ([(0.0, 1.0), (2.0, 9.0)], "LOST", 3.0),  # when it reaches its client, at 1
        ([(0.0, 2.0), (4.0, 9.0)], "LOST", 3.0),  # when it has been taken in, at 3
    ],
)
def test_a_request_finds_its_client_when_it_reaches_it_and_when_it_has_been_taken_in(
    there: list[tuple[float, float]], status: str, closed: float
) -> None:
    """8 bytes at 4 per unit into client 1. The answer of client 0 is there at 3."""
    graph = star(2)
    graph.nodes[1]["downlink"] = 4.0
    timing = VirtualTime(compute=1.0, latency=1.0, presence=GivenPresence({1: there}))
    played = play(Setting(graph, timing, Server(), (ask_of([0, 1]),), 0))
    assert [row.status.name for row in played.messages if row.receiver == 1] == [status]
    assert played.closed_at == [closed]


@law
@given(attended())
def test_a_servers_downlink_takes_in_one_answer_at_a_time(case: tuple[Setting, Table]) -> None:
    setting, _ = case
    rate = setting.graph.nodes[setting.graph.graph["server"]].get("downlink", math.inf)
    hub, timing = len(setting.graph) - 1, setting.timing
    came = [
        (row.arrived_at, row.bytes)
        for row in play(setting).messages
        if row.receiver == hub and row.arrived_at is not None
    ]
    if isinstance(timing, VirtualTime):
        for (before, _), (after, size) in pairwise(sorted(came)):
            assert after >= before + size / rate - 1e-9


def schedule_of(timing: Any, clients: int = 3) -> Any:
    return timing.with_server(timing.network(star(clients)), Streams(0), Recording(), Server())


def test_where_nobody_is_there_the_server_waits() -> None:
    presence = GivenPresence({0: [(2.5, 9)], 1: [(4, 6)], 2: []})
    virtual, lockstep = schedule_of(VirtualTime(presence=presence)), schedule_of(Lockstep(presence=presence))
    everyone = np.arange(3)
    assert virtual.wait_for(everyone).tolist() == [True, False, False]
    assert virtual.now == 2.5
    assert lockstep.wait_for(everyone).tolist() == [True, False, False]
    assert lockstep.now == 3.0
    assert lockstep.wait_for(np.array([1, 2])).tolist() == [True, True, False]
    assert lockstep.now == 4.0
    with pytest.raises(RunError, match=r"at time 4 none of the 1 clients .* and none will come any more"):
        lockstep.wait_for(np.array([2]))


def test_a_fraction_is_one_of_all_as_far_as_so_many_are_there() -> None:
    there = np.array([True, False, True, True, False, True])
    everyone = np.ones(6, dtype=np.bool_)
    for iteration in range(50):
        before = Server(0.5).draw(Streams(1), iteration, 0, 6, iteration, everyone)
        found = Server(0.5).draw(Streams(1), iteration, 0, 6, iteration, there)
        assert len(found) == 3
        assert there[found].all()
        assert set(before[there[before]]) <= set(found)  # whoever is there and was drawn is asked
        assert Server(0.9).draw(Streams(1), iteration, 0, 6, iteration, there).tolist() == [0, 2, 3, 5]
    assert Server([1, 2, 5]).draw(Streams(1), 0, 0, 6, 0, there).tolist() == [2, 5]


def test_who_has_crashed_is_sent_everything_again() -> None:
    """The server's variables did not change, but a client that lost them must get them; one that paused has
    them still.
    """
    asks = tuple(replace(ask_of([0, 1]), writes=()) for _ in range(4))
    for absence, sizes in (("pause", [8, 0, 0]), ("crash", [8, 0, 8])):
        presence = GivenPresence({0: [(0, 2.5), (2.75, 9)]}, absence=absence)  # type: ignore[arg-type]
        played = play(Setting(star(2), Lockstep(presence=presence), Server(), asks, 0))
        rows = [row for row in played.messages if (row.sender, row.receiver) == (2, 0)]
        delivered = [row.bytes for row in rows if row.step != 2]
        assert delivered == sizes
