"""Clients that come and go, and losses that are made up for, among peers: laws over random networks, and
small cases by hand.

Times of hand-made cases are small binary fractions, so that they are exact.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed.network.names import Names
from asyncfed.network.presence import DrawnPresence, GivenPresence
from asyncfed.network.timing import Lockstep, VirtualTime
from asyncfed.network.waves import Snapshot, Status, Wave
from asyncfed.rng import Streams
from tests.network.played import Played, Setting, entries, play, settings_of
from tests.network.test_schedules import waves_of

law = settings(max_examples=80, deadline=None, derandomize=True)
TAKEN = (Status.DELIVERED, Status.CARRIED)


@st.composite
def presences(draw: st.DrawFn, n: int) -> GivenPresence | DrawnPresence | None:
    more: dict[str, Any] = {
        "absence": draw(st.sampled_from(["pause", "crash"])),
        "leaving": draw(st.sampled_from(["hand over", "lost"])),
    }
    kind = draw(st.sampled_from(["none", "drawn", "given", "given"]))
    if kind == "none":
        return None
    if kind == "drawn":
        there, away = draw(st.sampled_from(["exponential(4)", "weibull(3, 0.7)"])), "exponential(1.5)"
        return DrawnPresence(there, away, **more)
    table = {}
    for client in range(n):
        bounds = sorted(draw(st.sets(st.sampled_from(np.arange(0, 14, 0.25).tolist()), max_size=5)))
        pairs = list(zip(bounds[::2], bounds[1::2], strict=False))
        if draw(st.booleans()):
            pairs.append((bounds[-1] + 1.0 if bounds else 0.0, np.inf))
        if client == 0 or pairs:
            table[client] = pairs if pairs else [(0.0, np.inf)]
    return GivenPresence(table, **more)


@st.composite
def comings(draw: st.DrawFn) -> Setting:
    """With presence, losses, and running sums or not."""
    setting = draw(settings_of())
    timing = replace(setting.timing, presence=draw(presences(len(setting.graph))))
    return replace(setting, timing=timing, recovers=draw(st.booleans()), pulled=False)


def there(setting: Setting, client: int, time: float) -> bool:
    presence = setting.timing.presence
    if presence is None:
        return True
    n = len(setting.graph)
    uptimes = presence.attend(Names(range(n)), Streams(setting.seed)).uptimes
    return bool(uptimes.on(np.array([client]), np.array([time]))[0])


def crashes(setting: Setting) -> bool:
    return setting.timing.presence is not None and setting.timing.presence.absence == "crash"


@law
@given(comings())
def test_a_wave_absorbs_only_what_is_there_and_releases_it_once(setting: Setting) -> None:
    alive: set[int] = set()
    for item in play(setting).items:
        for _, pairs in entries(item.absorption):
            assert {serial for serial, _ in pairs} <= alive
        if isinstance(item, Wave):
            alive |= set(item.emits.tolist())
            released = item.released.tolist()
            assert set(released) <= alive
            assert len(set(released)) == len(released)
            alive -= set(released)


@law
@given(comings())
def test_nobody_begins_sends_or_absorbs_while_it_is_away(setting: Setting) -> None:
    played = play(setting)
    leaving = {
        (client, step)
        for wave in played.waves
        if wave.leaving
        for client, step in zip(wave.absorption.nodes.tolist(), wave.steps.tolist(), strict=True)
    }
    for step in played.step_rows:
        last = (step.client, step.step) in leaving
        assert there(setting, step.client, step.started_at) != last
        assert there(setting, step.client, step.ended_at) != last
        assert (step.started_at == step.ended_at) == last
    for row in played.rows:
        if (row.sender, row.step) not in leaving:
            assert there(setting, row.sender, row.sent_at)
        if row.status != Status.LINK_DOWN:
            assert there(setting, row.receiver, row.sent_at)
        if row.status in TAKEN:
            assert row.arrived_at is not None
            # What a downlink takes in while its client pauses is there when it is back.
            waited = np.isfinite(played.network.downlink[row.receiver]) and not crashes(setting)
            assert waited or there(setting, row.receiver, row.arrived_at)


@law
@given(comings())
def test_mass_is_held_under_way_waiting_or_accounted_for(setting: Setting) -> None:
    """At every look: what clients hold, what no step has absorbed yet (under way, waiting for a carrier, or
    lost) and what was lost in crashes adds up to what there was.
    """
    played = play(setting)
    fresh = setting.first_step
    given_away: dict[tuple[int, int], float] = defaultdict(float)
    for row in played.rows:
        given_away[row.sender, row.step] += row.weight or 0.0
    steps = {(row.client, row.step): row for row in played.step_rows}
    omega: dict[tuple[int, int], float] = {}
    held = np.ones(played.network.n)  # by each client, of its last payload, or from the start
    if crashes(setting):
        held = np.array([float(there(setting, i, setting.started_at)) for i in range(played.network.n)])
    began = float(held.sum())
    last: dict[int, tuple[int, int]] = {}
    lost_in_crashes = 0.0
    for item in played.items:
        if isinstance(item, Wave):
            emitted = played.emitted
            for (client, pairs), step in zip(entries(item.absorption), item.steps.tolist(), strict=True):
                if client in item.reborn:
                    lost_in_crashes += _own(client, last, held, omega, given_away)
                    start = 0.0
                else:
                    start = held[client] if client not in last else 0.0
                omega[client, step] = start + sum(w * omega[emitted[serial]] for serial, w in pairs)
                last[client] = (client, step)
            continue
        total = lost_in_crashes
        for client in range(played.network.n):
            own = last.get(client)
            at_work = own is not None and steps[own].ended_at > item.time
            total += (
                omega[own] if own is not None and at_work else _own(client, last, held, omega, given_away)
            )
        for row in played.rows:
            if row.sent_at > item.time or row.weight is None or (row.sender, row.step) not in omega:
                continue
            taken = (row.receiver, row.absorbed_step)
            if row.status not in TAKEN or taken not in omega:
                total += row.weight * omega[row.sender, row.step]
        assert total == pytest.approx(began, abs=1e-9)
    assert fresh == setting.first_step


def _own(
    client: int,
    last: dict[int, tuple[int, int]],
    held: np.ndarray,
    omega: dict[tuple[int, int], float],
    given_away: dict[tuple[int, int], float],
) -> float:
    """What a client that has sent holds of its last payload; at first, what it began with."""
    if client not in last:
        return float(held[client])
    return omega[last[client]] * (1.0 - given_away[last[client]])


@law
@given(comings())
def test_looking_more_often_changes_nothing(setting: Setting) -> None:
    seldom, often = play(setting, snapshot_every=1000), play(setting, snapshot_every=1)
    assert sorted(map(repr, seldom.rows)) == sorted(map(repr, often.rows))
    assert sorted(seldom.step_rows) == sorted(often.step_rows)
    final = [played.absorbed(played.snapshots[-1].absorption) for played in (seldom, often)]
    assert final[0] == final[1]


@law
@given(comings())
def test_every_message_that_was_sent_has_a_row_or_is_counted(setting: Setting) -> None:
    played = play(setting)
    for item, recorded in zip(played.items, played.rows_before, strict=True):
        if isinstance(item, Snapshot):
            sent = [row for row in played.rows if row.sent_at <= item.time]
            assert recorded + item.unrecorded.arrived + item.unrecorded.on_the_way == len(sent)
    assert len({(row.sender, row.receiver, row.step) for row in played.rows}) == len(played.rows)


@law
@given(settings_of(), st.data())
def test_one_more_who_is_away_changes_nobody_elses_draws(setting: Setting, data: st.DataObject) -> None:
    n = len(setting.graph)
    other = data.draw(st.integers(0, n - 1))
    times = {"absence": data.draw(st.sampled_from(["pause", "crash"])), "leaving": "lost"}
    away = GivenPresence({other: [(0.0, 2.25), (5.5, np.inf)]}, **times)
    everybody = GivenPresence({other: [(0.0, np.inf)]}, **times)
    before, after = (
        play(setting, timing=replace(setting.timing, presence=presence)) for presence in (everybody, away)
    )
    clocks = [
        {(r.client, r.step): (r.started_at, r.ended_at) for r in played.step_rows if r.client != other}
        for played in (before, after)
    ]
    assert clocks[0] == clocks[1]
    drawn = [
        {
            (row.sender, row.receiver, row.step): (row.status == Status.LINK_DOWN, row.status == Status.LOST)
            for row in played.rows
            if other not in (row.sender, row.receiver)
        }
        for played in (before, after)
    ]
    if not isinstance(setting.timing, VirtualTime) or setting.timing.horizon is not None:
        both = drawn[0].keys() & drawn[1].keys()
        assert all(drawn[0][key] == drawn[1][key] for key in both)


# --- running sums ---


@law
@given(settings_of())
def test_without_losses_running_sums_change_nothing(setting: Setting) -> None:
    graph = setting.graph.copy()
    nx.set_edge_attributes(graph, 0.0, "loss")
    one, two = play(setting, graph=graph), play(setting, graph=graph, recovers=True)
    assert waves_of(one) == waves_of(two)
    assert sorted(one.rows) == sorted(two.rows)


@law
@given(settings_of())
def test_a_carried_message_comes_with_the_next_that_gets_through_on_its_link(setting: Setting) -> None:
    played = play(setting, recovers=True)
    by_edge: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for row in sorted(played.rows, key=lambda row: row.step):
        if row.status != Status.LINK_DOWN:
            by_edge[row.sender, row.receiver].append(row)
    for rows in by_edge.values():
        carrier: Any = None
        for row in reversed(rows):
            if row.status in (Status.DELIVERED, Status.IN_FLIGHT) and (
                carrier is None or row.arrived_at != carrier.arrived_at or row.status == Status.DELIVERED
            ):
                if _was_lost(played, row):
                    assert carrier is not None
                    assert (row.arrived_at, row.absorbed_step) == (carrier.arrived_at, carrier.absorbed_step)
                else:
                    carrier = row
            elif row.status == Status.CARRIED:
                assert carrier is not None
                assert (row.arrived_at, row.absorbed_step) == (carrier.arrived_at, carrier.absorbed_step)
            elif row.status == Status.LOST:
                assert carrier is None, "nothing got through after it"


def _was_lost(played: Played, row: Any) -> bool:
    network = played.network
    edge = np.flatnonzero((network.senders == row.sender) & (network.receivers == row.receiver))
    return bool(network.lost(Streams(played.setting.seed), row.step)[edge[0]])


def limit_of(played: Played, values: np.ndarray) -> np.ndarray:
    """Plain push-sum of one number each, executed from the waves: everybody's z/ω in the end."""
    payload: dict[int, np.ndarray] = {}
    start = {client: np.array([value, 1.0]) for client, value in enumerate(values.tolist())}
    for item in played.items:
        for place, (client, pairs) in enumerate(entries(item.absorption)):
            total = start.pop(client, np.zeros(2)) if isinstance(item, Wave) else np.zeros(2)
            total = total + sum((w * payload[serial] for serial, w in pairs), np.zeros(2))
            if isinstance(item, Wave):
                payload[int(item.emits[place])] = total
            elif item.final:
                start[client] = total
    final = np.array([start[client] for client in range(len(values))])
    return np.append(final[:, 0] / final[:, 1], final[:, 1].sum())


@pytest.mark.parametrize(
    "timing",
    [Lockstep(loss=0.6), VirtualTime("exponential(1)", latency="exponential(0.5)", loss=0.6)],
    ids=["lockstep", "virtual"],
)
def test_running_sums_reach_the_mean_under_sixty_percent_loss_and_plain_sums_do_not(timing: Any) -> None:
    """Mixing contracts by a constant factor a step, and 400 of them leave less than 1e-9. Plain sums lose all
    but nothing of their mass: what they agree on is a random point of the hull of where they began.
    """
    graph = nx.complete_graph(8, create_using=nx.DiGraph)
    nx.set_edge_attributes(graph, 0.7, "probability")
    values = np.arange(8.0) ** 2
    setting = Setting(graph, timing, steps=400, snapshot_every=1e9)
    summed = limit_of(play(setting, recovers=True), values)
    plain = limit_of(play(setting), values)
    assert summed[:8] == pytest.approx(np.full(8, values.mean()), abs=1e-9)
    assert plain[8] < 1e-30, "Σω of 8"
    assert np.abs(plain[:8] - values.mean()).max() > 1.0


# --- by hand ---


def ring_of_two(presence: GivenPresence, **options: Any) -> Played:
    graph = nx.DiGraph([(0, 1), (1, 0)])
    nx.set_edge_attributes(graph, 1.0, "probability")
    timing = VirtualTime(compute=1.0, presence=presence)
    return play(Setting(graph, timing, steps=6, snapshot_every=100.0), **options)


def test_a_pause_stretches_the_step_it_falls_into() -> None:
    played = ring_of_two(GivenPresence({1: [(0.0, 1.5), (4.0, np.inf)]}))
    mine = [(row.step, row.started_at, row.ended_at) for row in played.step_rows if row.client == 1]
    assert mine[:3] == [(0, 0.0, 1.0), (1, 1.0, 4.5), (2, 4.5, 5.5)]
    to_1 = [(row.step, row.status.name) for row in sorted(played.rows) if row.sender == 0]
    # 0 sends at 1, 2, 3, 4, 5, 6: while 1 is away there is no link.
    assert to_1[:4] == [(0, "DELIVERED"), (1, "LINK_DOWN"), (2, "LINK_DOWN"), (3, "DELIVERED")]


def test_a_message_that_reaches_an_absent_client_is_lost_or_carried() -> None:
    graph = nx.DiGraph()
    graph.add_edge(0, 1, probability=1.0, latency=0.75)
    graph.add_edge(1, 0, probability=1.0)
    presence = GivenPresence({1: [(0.0, 2.5), (3.0, np.inf)]})
    setting = Setting(graph, VirtualTime(compute=1.0, presence=presence), steps=5, snapshot_every=100.0)
    plain, summed = play(setting), play(setting, recovers=True)
    # 0 sends at 1, 2, 3, …; what it sent at 2 comes at 2.75, when 1 is away.
    assert [row.status.name for row in sorted(plain.rows) if row.sender == 0][:3] == [
        "DELIVERED",
        "LOST",
        "DELIVERED",
    ]
    rows = [row for row in sorted(summed.rows) if row.sender == 0]
    assert [row.status.name for row in rows[:3]] == ["DELIVERED", "CARRIED", "DELIVERED"]
    assert (rows[1].arrived_at, rows[1].absorbed_step) == (rows[2].arrived_at, rows[2].absorbed_step)


def test_who_crashes_comes_back_with_nothing_and_begins_with_the_first_message() -> None:
    played = ring_of_two(GivenPresence({1: [(0.0, 1.5), (3.25, np.inf)]}, absence="crash"))
    mine = [(row.step, row.started_at, row.ended_at) for row in played.step_rows if row.client == 1]
    # Its step from 1 to 2 is lost. 0 sends at 4, and that is what 1 begins from.
    assert mine[:3] == [(0, 0.0, 1.0), (1, 4.0, 5.0), (2, 5.0, 6.0)]
    reborn = [wave for wave in played.waves if len(wave.reborn)]
    (wave,) = reborn
    assert wave.reborn.tolist() == [1]
    assert played.absorbed(wave.absorption)[1] == [(0, 3, 0.5)], "nothing of its own, and nothing from before"
    lost = [(row.sender, row.step) for row in played.rows if row.status == Status.LOST]
    assert lost == [(0, 0)], "what had reached it before it crashed"
    look = play(played.setting, snapshot_every=2.0)
    assert [snapshot.absorption.empty.tolist() for snapshot in look.snapshots[:4]] == [[], [1], [1], []]


def test_who_is_woken_and_makes_no_step_any_more_has_nothing() -> None:
    """The message of time 4 wakes it, and its step would end after the horizon."""
    presence = GivenPresence({1: [(0.0, 1.5), (3.25, np.inf)]}, absence="crash")
    setting = ring_of_two(presence).setting
    played = play(setting, timing=VirtualTime(compute=1.0, presence=presence, horizon=4.5))
    final = played.snapshots[-1].absorption
    assert final.empty.tolist() == [1]
    assert played.absorbed(final)[1] == []


def test_who_leaves_for_good_hands_over_all_it_holds() -> None:
    graph = nx.complete_graph(3, create_using=nx.DiGraph)
    nx.set_edge_attributes(graph, 1.0, "probability")
    for leaving, expected in (("hand over", 3.0), ("lost", None)):
        presence = GivenPresence({2: [(0.0, 2.5)]}, leaving=leaving)
        setting = Setting(graph, VirtualTime(compute=1.0, presence=presence), steps=6, snapshot_every=100.0)
        played = play(setting)
        waves = [wave for wave in played.waves if wave.leaving]
        last = [row for row in played.rows if row.sender == 2 and row.sent_at == 2.5]
        if leaving == "hand over":
            (wave,) = waves
            assert wave.absorption.nodes.tolist() == [2]
            assert [(row.receiver, row.weight) for row in sorted(last)] == [(0, 0.5), (1, 0.5)]
        else:
            assert (waves, last) == ([], [])
        assert not [row for row in played.rows if row.receiver == 2 and row.sent_at > 2.5]
        if expected is not None:
            # All three began with 1, and the two that stay have all of it.
            final = limit_of(played, np.ones(3))
            stayed = sum(weight * mass for weight, mass in _held_in_the_end(played, (0, 1)))
            assert final[:2] == pytest.approx([1.0, 1.0])
            assert stayed == pytest.approx(expected)


def _held_in_the_end(played: Played, clients: tuple[int, ...]) -> list[tuple[float, float]]:
    """(weight, ω of the payload) of what some hold at the end."""
    omega: dict[int, float] = {}
    begun: set[int] = set()
    for wave in played.waves:
        for place, (client, pairs) in enumerate(entries(wave.absorption)):
            start = 0.0 if client in begun else 1.0
            begun.add(client)
            omega[int(wave.emits[place])] = start + sum(w * omega[serial] for serial, w in pairs)
    final = dict(entries(played.snapshots[-1].absorption))
    return [(weight, omega[serial]) for client in clients for serial, weight in final[client]]


def test_in_lockstep_presence_is_looked_at_at_whole_steps() -> None:
    graph = nx.complete_graph(3, create_using=nx.DiGraph)
    nx.set_edge_attributes(graph, 1.0, "probability")
    presence = GivenPresence({1: [(0.0, 2.2), (2.8, 4.4), (6.1, np.inf)]})
    played = play(Setting(graph, Lockstep(presence=presence), steps=5, snapshot_every=100.0))
    mine = [(row.started_at, row.ended_at) for row in played.step_rows if row.client == 1]
    # It is there at 0, 1, 2, 3, 4 and from 7 on: the step from 4 to 5 ends when it is back.
    assert mine == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 7)]
    assert {row.started_at for row in played.step_rows} == {0, 1, 2, 3, 4}
