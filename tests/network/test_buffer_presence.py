"""A server that does not wait, with clients that come and go: against a slow event loop, laws over random
presences, and cases done by hand.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed.network import GivenPresence, Lockstep, Table, VirtualTime
from asyncfed.network.buffer import Buffered
from asyncfed.network.waves import Status
from tests.network.drawn import assert_rows_alike
from tests.network.slow_buffer import SlowBuffer
from tests.network.test_attended import Table as Times
from tests.network.test_attended import on, presences, time_on
from tests.network.test_buffer import Played, Setting, answers, ask_of, law, play, settings_of
from topologies import star, with_links


@st.composite
def comings(draw: st.DrawFn) -> tuple[Setting, Times]:
    setting = draw(settings_of())
    table = draw(presences(len(setting.graph) - 1))
    absence = draw(st.sampled_from(["pause", "crash"]))
    timing: Any = Lockstep(loss=setting.timing.loss) if draw(st.booleans()) else setting.timing
    timing = replace(timing, presence=GivenPresence(table, absence=absence))
    return replace(setting, timing=timing), table


def crashes(setting: Setting) -> bool:
    return isinstance(setting.timing.presence, GivenPresence) and setting.timing.presence.absence == "crash"


def slow_of(setting: Setting, table: Times) -> SlowBuffer:
    network, timing = setting.timing.network(setting.graph), setting.timing
    compute = timing.compute if isinstance(timing, VirtualTime) else None
    factors = [1.0] * (network.n - 1)
    if isinstance(timing, VirtualTime) and timing.factors:
        factors[0] = 3.0
    return SlowBuffer(network, setting.seed, setting.server, compute, factors, table, crashes(setting))


@settings(law, max_examples=120)
@given(comings())
def test_every_row_and_every_move_is_that_of_a_slow_event_loop(case: tuple[Setting, Times]) -> None:
    setting, table = case
    slow, played = slow_of(setting, table), play(setting)
    for place, ask in enumerate(setting.asks):
        expected = slow.one_round(ask)
        if expected is None:
            assert played.failure is not None
            assert len(played.used) == place
            break
        assert played.moved_at[place] == pytest.approx(expected.now)
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
@given(settings_of(), st.sampled_from(["pause", "crash"]))
def test_who_is_always_there_makes_no_difference(setting: Setting, absence: Any) -> None:
    """To the bit: every row, every move, every work."""
    everyone = GivenPresence.of(lambda client: [(0, math.inf)], len(setting.graph) - 1, absence=absence)
    plain, attended = play(setting), play(replace(setting, timing=replace(setting.timing, presence=everyone)))
    assert attended.messages == plain.messages
    assert attended.steps == plain.steps
    assert (attended.used, attended.moved_at) == (plain.used, plain.moved_at)
    assert str(attended.failure) == str(plain.failure)


@law
@given(comings())
def test_nobody_is_asked_works_answers_or_absorbs_while_it_is_away(case: tuple[Setting, Times]) -> None:
    setting, table = case
    hub, timing = len(setting.graph) - 1, setting.timing
    played = play(setting)
    for row in played.messages:
        assert on(table, row.receiver if row.sender == hub else row.sender, row.sent_at)
        if row.sender == hub and row.status == Status.DELIVERED:
            assert row.arrived_at is not None
            assert on(table, row.receiver, row.arrived_at)
    for step in played.steps:
        if step.client == hub:
            continue
        assert on(table, step.client, step.started_at)
        assert on(table, step.client, step.ended_at)
        worked = time_on(table, step.client, step.started_at, step.ended_at)
        if crashes(setting):
            assert worked == pytest.approx(step.ended_at - step.started_at)
        if isinstance(timing, VirtualTime) and timing.compute == VirtualTime(1.0).compute:
            factor = 3.0 if timing.factors and step.client == 0 else 1.0
            assert worked == pytest.approx(factor * setting.asks[step.step].work[step.client])
    if isinstance(timing, Lockstep):
        assert all(time == int(time) for time in played.moved_at)


@law
@given(comings())
def test_nobody_has_two_requests_at_once_and_places_are_never_exceeded(case: tuple[Setting, Times]) -> None:
    """A request that comes holds a place until its answer does, or would; where its client crashes or leaves
    at work, until then.
    """
    setting, table = case
    hub = len(setting.graph) - 1
    played = play(setting)
    came = defaultdict(list)  # by client and time of sending: when answers came
    for row in played.messages:
        if row.sender != hub:
            came[row.sender, row.step].append((row.sent_at, row.arrived_at or row.sent_at))
    works = defaultdict(list)
    for step in played.steps:
        works[step.client].append((step.started_at, step.ended_at, step.step))
    held: list[tuple[int, float, float]] = []
    for row in played.messages:
        if row.sender != hub or row.status != Status.DELIVERED:
            continue
        assert row.arrived_at is not None
        done = [(end, number) for begin, end, number in works[row.receiver] if begin == row.arrived_at]
        if done:
            ((end, number),) = done
            until = next(arrives for sent, arrives in came[row.receiver, number] if sent == end)
        elif isinstance(setting.timing, Lockstep):
            until = row.sent_at + 1.0
        else:
            gone = [b for _, b in table[row.receiver] if b > row.arrived_at]
            until = gone[0 if crashes(setting) else -1]
        held.append((row.receiver, row.sent_at, until))
    for client, begin, _ in held:
        assert sum(a <= begin < b for _, a, b in held) <= setting.server.places(hub)
        assert sum(a <= begin < b for who, a, b in held if who == client) <= 1


@law
@given(comings())
def test_a_look_knows_what_the_trace_does_not_hold_yet(case: tuple[Setting, Times]) -> None:
    setting, _ = case
    played = play(setting)
    if played.failure is not None:
        return
    look, recorded, size = played.looks[-1]
    held = played.messages[recorded:]
    assert look.unrecorded.on_the_way == len(held)
    early = [row for row in played.messages[:recorded] if (row.arrived_at or 0.0) > look.time]
    assert look.unrecorded.early == len(early)
    assert sum(row.bytes for row in played.messages) == size + look.unrecorded.bytes


def test_one_more_who_is_away_changes_no_draw_of_the_others() -> None:
    """The j-th request of a client, its answer and its work fare as they did, whenever that is now."""
    graph = with_links(star(6, up=0.9, down=0.8), loss=0.1)
    asks = tuple(ask_of(6, k + 1) for k in range(25))
    timing = VirtualTime("exponential(1)", latency="exponential(0.3)", ordered=False)
    fates = []
    for away in ({3: [(4.0, 8.0)]}, {3: [(4.0, 8.0)], 1: [(0.0, 2.5), (6.5, math.inf)]}):
        presence = GivenPresence(away)  # type: ignore[arg-type]
        played = play(Setting(graph, replace(timing, presence=presence), Buffered(3), asks, seed=5))
        assert played.failure is None
        mine: dict[int, list[Any]] = defaultdict(list)
        for row in sorted(played.messages, key=lambda row: row.sent_at):
            if row.sender == 6 and row.receiver not in away:
                travels = None if row.arrived_at is None else round(row.arrived_at - row.sent_at, 9)
                mine[row.receiver].append((row.status, travels))
        took: dict[int, list[float]] = defaultdict(list)
        for step in sorted(played.steps, key=lambda step: step.started_at):
            if step.client not in away:
                took[step.client].append(round(step.ended_at - step.started_at, 9))
        fates.append((mine, took))
    for before, after in zip(*fates, strict=True):
        for client in (0, 2, 4, 5):
            both = min(len(before[client]), len(after[client]))
            assert both > 5
            assert before[client][:both] == after[client][:both]
    assert len(Counter(status for status, _ in fates[0][0][0])) >= 2


# --- by hand -------------------------------------------------------------------------------------------


def by_hand(table: Times, server: Buffered, moves: int, absence: Any = "pause", **more: Any) -> Played:
    """Two clients: a work takes 2 and 3, a message nothing, unless it is said otherwise."""
    presence = GivenPresence(table, absence=absence)  # type: ignore[arg-type]
    timing = VirtualTime(Table([[2.0], [3.0]]), presence=presence, **more)
    return play(Setting(star(2), timing, server, tuple(ask_of(2, k + 1) for k in range(moves))))


def requests(played: Played, client: int) -> list[tuple[float, str]]:
    rows = [row for row in played.messages if row.receiver == client]
    return sorted((row.sent_at, row.status.name) for row in rows)


def test_who_pauses_answers_later_and_is_asked_again_at_once() -> None:
    """Client 0 works from 0 to 1 and from 5 to 6; then, always there, from 6 to 8. Client 1 moves it at 3."""
    played = by_hand({0: [(0, 1), (5, math.inf)]}, Buffered(1), 4)
    assert played.moved_at == [3.0, 6.0, 6.0, 8.0]
    assert answers(played, 0)[:2] == [(0, 6.0, 1, "DELIVERED"), (2, 8.0, 3, "DELIVERED")]
    assert requests(played, 0)[:2] == [(0.0, "DELIVERED"), (6.0, "DELIVERED")]


def test_who_crashes_frees_its_place_and_brings_nothing() -> None:
    """One place of two clients: 0 is asked first and crashes at 1; then 1 is asked, who answers at 4."""
    table: Times = {0: [(0, 1), (2, 3.5)], 1: [(0.5, 20)]}
    played = by_hand(table, Buffered(1, at_work=1), 2, "crash")
    assert requests(played, 0)[0] == (0.0, "DELIVERED")
    assert requests(played, 1)[0] == (1.0, "DELIVERED")
    assert answers(played, 0) == []
    assert played.moved_at == [4.0, 7.0]
    assert [(step.client, step.started_at, step.ended_at) for step in played.steps if step.client < 2] == [
        (1, 1.0, 4.0),
        (1, 4.0, 7.0),
    ]


def test_in_lockstep_a_crash_takes_its_unit_of_time_like_all_others() -> None:
    presence = GivenPresence({0: [(0, 0.5), (6, 9)], 1: [(0.25, 9)]}, absence="crash")
    setting = Setting(star(2), Lockstep(presence=presence), Buffered(1, at_work=1), (ask_of(2), ask_of(2)))
    played = play(setting)
    assert (requests(played, 0)[0], requests(played, 1)[0]) == ((0.0, "DELIVERED"), (1.0, "DELIVERED"))
    assert played.moved_at == [2.0, 3.0]


def test_a_request_that_finds_nobody_is_lost_and_holds_its_place_until_then() -> None:
    """Requests take 2. The one to client 0 comes at 2, when that has left; the one to 1 is at work from 2."""
    played = by_hand({0: [(0, 1), (4, 20)]}, Buffered(2), 1, latency=2.0)
    assert requests(played, 0) == [(0.0, "LOST"), (4.0, "DELIVERED")]
    assert answers(played, 1)[0] == (0, 7.0, 0, "DELIVERED")
    assert answers(played, 0) == [(0, 10.0, 0, "DELIVERED")]
    assert played.moved_at == [10.0]


def test_who_comes_gets_a_place_that_nobody_could_take() -> None:
    played = by_hand({0: [(1.5, 20)], 1: [(2.5, 20)]}, Buffered(1), 2)
    assert requests(played, 0)[0] == (1.5, "DELIVERED")
    assert requests(played, 1)[0] == (2.5, "DELIVERED")
    assert played.moved_at == [3.5, 5.5]


def test_the_same_one_is_asked_when_it_is_back_and_another_meanwhile() -> None:
    """One place, a message takes 0.5. The answer of 0 comes at 3, when 0 has left: 1 is asked, and at 7 0."""
    table: Times = {0: [(0, 2.75), (5, 20)], 1: [(1, 20)]}
    played = by_hand(table, Buffered(1, at_work=1, asks="same"), 3, latency=0.5)
    assert requests(played, 0) == [(0.0, "DELIVERED"), (7.0, "DELIVERED")]
    assert requests(played, 1) == [(3.0, "DELIVERED")]
    assert played.moved_at == [3.0, 7.0, 10.0]


def test_a_request_whose_work_never_ends_is_on_its_way_all_the_same() -> None:
    """Client 0 hears at 5 and crashes at 6; the server has moved at 3 with client 1, which hears at once."""
    graph = with_links(star(2), latency=lambda a, b: 5.0 if (a, b) == (2, 0) else 0.0)
    presence = GivenPresence({0: [(0, 6)]}, absence="crash")
    timing = VirtualTime(Table([[2.0], [3.0]]), presence=presence)
    played = play(Setting(graph, timing, Buffered(1), (ask_of(2),)))
    assert played.moved_at == [3.0]
    assert requests(played, 0) == [(0.0, "DELIVERED")]
    assert played.looks[0][0].unrecorded.early == 1


def test_who_has_crashed_is_sent_everything_again() -> None:
    """It is asked at 0, 2 and 4, and if it crashed at 4.5 once more at 4.75."""
    asks = tuple(replace(ask_of(1, k + 1), writes=()) for k in range(3))
    for absence, sizes in (("pause", [8, 0, 0]), ("crash", [8, 0, 0, 8])):
        presence = GivenPresence({0: [(0, 4.5), (4.75, 20)]}, absence=absence)  # type: ignore[arg-type]
        played = play(Setting(star(1), VirtualTime(2.0, presence=presence), Buffered(1), asks))
        assert [row.bytes for row in played.messages if row.receiver == 0] == sizes


def test_where_nobody_is_there_any_more_the_run_ends_with_an_error() -> None:
    played = by_hand({0: [(0, 3)], 1: [(0, 3.5)]}, Buffered(1), 9)
    assert played.moved_at == [2.0, 3.0]
    assert str(played.failure).startswith(
        "at time 3.5 round 2 (inner, y) has 0 of the 1 answers it needs, nobody is at work, and none of the 2"
    )
    never = by_hand({0: [], 1: []}, Buffered(1), 1)
    assert "at time 0 round 0" in str(never.failure)
