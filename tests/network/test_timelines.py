"""Laws of both timing models, over random strongly connected networks and random everything else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncfed.network.timing import Lockstep, VirtualTime
from asyncfed.network.waves import Snapshot, Status, Wave
from asyncfed.rng import Streams
from tests.network.played import Played, Setting, StepRow, entries, given_weights, graphs, play, settings_of

law = settings(max_examples=80, deadline=None, derandomize=True)
UP = (Status.DELIVERED, Status.LOST, Status.IN_FLIGHT)


def steps_of(played: Played) -> dict[tuple[int, int], StepRow]:
    rows = {(row.client, row.step): row for row in played.step_rows}
    assert len(rows) == len(played.step_rows)
    return rows


@law
@given(settings_of())
def test_a_wave_absorbs_only_what_earlier_waves_emitted_and_nobody_has_released(setting: Setting) -> None:
    alive: set[int] = set()
    ever: set[int] = set()
    for item in play(setting).items:
        assert set(item.absorption.sources.tolist()) <= alive
        if isinstance(item, Wave):
            emits = item.emits.tolist()
            assert not ever & set(emits)
            alive |= set(emits)
            ever |= set(emits)
            released = item.released.tolist()
            assert len(set(released)) == len(released)
            assert set(released) <= alive
            alive -= set(released)


@law
@given(settings_of())
def test_payloads_are_kept_no_longer_than_somebody_may_still_want_them(setting: Setting) -> None:
    played = play(setting)
    last_use: dict[int, int] = {}
    released_at: dict[int, int] = {}
    for at, wave in enumerate(played.waves):
        last_use.update(dict.fromkeys(wave.absorption.sources.tolist(), at))
        released_at.update(dict.fromkeys(wave.released.tolist(), at))
    wanted = set(played.snapshots[-1].absorption.sources.tolist())
    emitted = played.emitted
    in_flight = {(row.sender, row.step) for row in played.rows if row.status == Status.IN_FLIGHT}
    for serial, sender_and_step in emitted.items():
        if serial not in wanted and sender_and_step not in in_flight:
            assert released_at[serial] == last_use[serial]


@law
@given(settings_of())
def test_nothing_is_absorbed_twice_by_the_same_client(setting: Setting) -> None:
    played = play(setting)
    taken: Counter[tuple[int, int]] = Counter()
    for item in [*played.waves, played.snapshots[-1]]:
        for client, pairs in entries(item.absorption):
            taken.update((client, serial) for serial, _ in pairs)
    assert set(taken.values()) <= {1}


@law
@given(settings_of())
def test_every_client_makes_its_steps_one_by_one_and_absorbs_its_own_last_payload(setting: Setting) -> None:
    played = play(setting)
    done = [setting.first_step] * played.network.n
    for item in played.items:
        if isinstance(item, Snapshot):
            assert item.steps.tolist() == done
        else:
            clients = item.absorption.clients.tolist()
            assert clients == sorted(set(clients))
            absorbed = played.absorbed(item.absorption)
            for client, step in zip(clients, item.steps.tolist(), strict=True):
                assert step == done[client]
                done[client] += 1
                own = [source for source in absorbed[client] if source[0] == client]
                assert [s for _, s, _ in own] == ([step - 1] if step > setting.first_step else [])
                keys = [(sender, sent) for sender, sent, _ in absorbed[client]]
                assert keys == sorted(keys), "a sum is taken in a fixed order"
                assert steps_of(played)[client, step].absorbed == len(keys) - len(own)
    if isinstance(setting.timing, Lockstep) or setting.timing.horizon is None:
        assert done == [setting.first_step + setting.steps] * played.network.n


@law
@given(settings_of())
def test_mass_is_conserved_while_messages_are_in_flight(setting: Setting) -> None:
    """Σω of the clients, of what is on its way and of what was lost is n, at every snapshot."""
    played = play(setting)
    omega: dict[tuple[int, int], float] = {}
    fresh = setting.first_step

    def total(client: int, begun: int, sources: list[tuple[int, int, float]]) -> float:
        return (1.0 if begun == fresh else 0.0) + sum(w * omega[sender, step] for sender, step, w in sources)

    for item in played.items:
        absorbed = played.absorbed(item.absorption)
        begun = dict(zip(item.absorption.clients.tolist(), item.steps.tolist(), strict=True))
        sums = {client: total(client, begun[client], absorbed[client]) for client in absorbed}
        if isinstance(item, Wave):
            omega.update({(client, begun[client]): sums[client] for client in sums})
            continue
        on_the_way = lost = 0.0
        for row in played.rows:
            if row.sent_at <= item.time and row.weight is not None:
                mass = row.weight * omega[row.sender, row.step]
                if row.status == Status.LOST:
                    lost += mass
                elif row.arrived_at is not None and row.arrived_at > item.time:
                    on_the_way += mass
        assert sum(sums.values()) + on_the_way + lost == pytest.approx(played.network.n, abs=1e-9)
        if not played.network.loss.any():
            assert lost == 0


@law
@given(settings_of())
def test_every_potential_message_has_exactly_one_row(setting: Setting) -> None:
    played = play(setting)
    steps = steps_of(played)
    last = setting.first_step + setting.steps - 1
    left = {client: row.ended_at for (client, step), row in steps.items() if step == last}
    expected = {
        (i, j, step): row.ended_at
        for (i, step), row in steps.items()
        for sender, j in zip(played.network.senders.tolist(), played.network.receivers.tolist(), strict=True)
        if sender == i and not left.get(j, np.inf) < row.ended_at
    }
    assert Counter((row.sender, row.receiver, row.step) for row in played.rows) == Counter(expected.keys())
    for row in played.rows:
        assert row.sent_at == expected[row.sender, row.receiver, row.step]


@law
@given(settings_of())
def test_the_status_of_a_message_is_what_the_draws_and_the_clocks_say(setting: Setting) -> None:
    played = play(setting)
    network, steps, streams = played.network, steps_of(played), Streams(setting.seed)
    at = {
        edge: e
        for e, edge in enumerate(zip(network.senders.tolist(), network.receivers.tolist(), strict=True))
    }
    end = played.snapshots[-1].time
    done = dict(enumerate(played.snapshots[-1].steps.tolist()))
    for row in played.rows:
        e = at[row.sender, row.receiver]
        up, lost = network.up(streams, row.step)[e], network.lost(streams, row.step)[e]
        assert (row.status == Status.LINK_DOWN) == (not up)
        assert (row.status == Status.LOST) == (up and lost)
        assert row.bytes == (setting.message_bytes if up else 0)
        assert up == (row.weight is not None and row.weight > 0)
        if row.status == Status.IN_FLIGHT:
            assert row.arrived_at is not None
            assert row.arrived_at > end
        if row.status == Status.DELIVERED:
            assert row.arrived_at is not None
            assert row.absorbed_step is not None
            assert row.sent_at <= row.arrived_at <= end
            if row.absorbed_step < done[row.receiver]:
                assert steps[row.receiver, row.absorbed_step].started_at >= row.arrived_at
            else:
                assert row.absorbed_step == done[row.receiver], "absorbed at the end"
            before = steps.get((row.receiver, row.absorbed_step - 1))
            assert before is None or before.started_at < row.arrived_at, "the first step after the arrival"


@law
@given(settings_of())
def test_the_trace_says_exactly_what_the_waves_absorb(setting: Setting) -> None:
    played = play(setting)
    said = Counter(
        (row.receiver, row.absorbed_step, row.sender, row.step, row.weight)
        for row in played.rows
        if row.status == Status.DELIVERED
    )
    done: Counter[tuple[object, ...]] = Counter()
    for item in [*played.waves, played.snapshots[-1]]:
        begun = dict(zip(item.absorption.clients.tolist(), item.steps.tolist(), strict=True))
        for client, sources in played.absorbed(item.absorption).items():
            done.update((client, begun[client], *source) for source in sources if source[0] != client)
    assert said == done


@law
@given(settings_of())
def test_snapshots_come_in_order_and_know_what_the_trace_does_not_hold_yet(setting: Setting) -> None:
    played = play(setting)
    snapshots = played.snapshots
    times = [snapshot.time for snapshot in snapshots]
    assert times == sorted(times)
    assert [snapshot.final for snapshot in snapshots] == [False] * (len(snapshots) - 1) + [True]
    assert played.items[-1] is snapshots[-1]
    if setting.steps:
        assert times[0] == setting.started_at
        every = (
            setting.snapshot_every
            if isinstance(setting.timing, VirtualTime)
            else max(1, round(setting.snapshot_every))
        )
        assert times[:-1] == [setting.started_at + k * every for k in range(len(times) - 1)]
    steps = steps_of(played)
    for item, recorded in zip(played.items, played.rows_before, strict=True):
        if not isinstance(item, Snapshot):
            continue
        sent = [row for row in played.rows if row.sent_at <= item.time]
        assert recorded + item.waiting + item.on_the_way == len(sent)
        if isinstance(setting.timing, Lockstep) or item.final:
            assert (item.waiting, item.on_the_way) == (0, 0)
            continue
        assert item.on_the_way == sum(
            row.arrived_at is not None and row.arrived_at > item.time for row in sent
        )
        waiting = 0
        for row in sent:
            if row.status == Status.DELIVERED and row.arrived_at is not None and row.arrived_at <= item.time:
                assert row.absorbed_step is not None
                absorber = steps.get((row.receiver, row.absorbed_step))
                waiting += absorber is None or absorber.started_at >= item.time
        assert item.waiting == waiting


@law
@given(settings_of())
def test_looking_more_often_changes_nothing(setting: Setting) -> None:
    seldom, often = play(setting, snapshot_every=1000), play(setting, snapshot_every=1)
    assert sorted(seldom.rows) == sorted(often.rows)
    assert sorted(seldom.step_rows) == sorted(often.step_rows)
    assert len(often.snapshots) >= len(seldom.snapshots)
    final = [played.absorbed(played.snapshots[-1].absorption) for played in (seldom, often)]
    assert final[0] == final[1]


@law
@given(settings_of())
def test_the_same_setting_gives_the_same_timeline_twice(setting: Setting) -> None:
    one, two = play(setting), play(setting)
    assert one.rows == two.rows
    assert one.step_rows == two.step_rows
    assert waves_of(one) == waves_of(two)


def waves_of(played: Played) -> list[object]:
    """Waves and snapshots with payloads named by (client, step)."""
    emitted = played.emitted
    return [
        (
            played.absorbed(item.absorption),
            item.steps.tolist(),
            [emitted[serial] for serial in item.emits.tolist()],
            sorted(emitted[serial] for serial in item.released.tolist()),
        )
        if isinstance(item, Wave)
        else (played.absorbed(item.absorption), item.steps.tolist(), item.time, item.final)
        for item in played.items
    ]


@law
@given(settings_of(timing="lockstep"), st.sampled_from([1, 2, 1000]))
def test_equal_clocks_without_delay_are_lockstep_exactly(setting: Setting, every: int) -> None:
    assert isinstance(setting.timing, Lockstep)
    virtual = VirtualTime(compute=1.0, latency=0.0, loss=setting.timing.loss)
    one, two = play(setting, snapshot_every=every), play(setting, snapshot_every=every, timing=virtual)
    assert waves_of(one) == waves_of(two)
    assert sorted(one.rows) == sorted(two.rows)
    assert sorted(one.step_rows) == sorted(two.step_rows)


@pytest.mark.parametrize(("n", "steps"), [(6, 40), (40, 12)])
def test_equal_clocks_without_delay_are_lockstep_exactly_over_many_windows(n: int, steps: int) -> None:
    graph = nx.gnp_random_graph(n, 0.3, seed=1, directed=True)
    nx.set_edge_attributes(graph, 0.5, "probability")
    lockstep = play(Setting(graph, Lockstep(loss=0.1), steps=steps, snapshot_every=1000))
    virtual = play(lockstep.setting, timing=VirtualTime(loss=0.1))
    assert waves_of(lockstep) == waves_of(virtual)
    assert sorted(lockstep.rows) == sorted(virtual.rows)


@law
@given(settings_of(timing="virtual"), st.data())
def test_a_straggler_slows_nobody_else_down(setting: Setting, data: st.DataObject) -> None:
    assert isinstance(setting.timing, VirtualTime)
    straggler = data.draw(st.integers(0, len(setting.graph) - 1))
    timing = replace(setting.timing, factors={**dict(setting.timing.factors), straggler: 1.0})
    slow = replace(timing, factors={**dict(timing.factors), straggler: 10.0})
    even, uneven = steps_of(play(setting, timing=timing)), steps_of(play(setting, timing=slow))
    times = [
        {key: (row.started_at, row.ended_at) for key, row in steps.items() if key[0] != straggler}
        for steps in (even, uneven)
    ]
    assert times[0] == times[1]
    if slow.horizon is None and setting.steps:
        first = setting.first_step
        one, ten = even[straggler, first], uneven[straggler, first]
        assert ten.ended_at - ten.started_at == pytest.approx(10 * (one.ended_at - one.started_at), rel=1e-9)


@law
@given(settings_of(timing="virtual"), st.data())
def test_another_clients_pace_leaves_every_link_draw_as_it_was(setting: Setting, data: st.DataObject) -> None:
    assert isinstance(setting.timing, VirtualTime)
    client = data.draw(st.integers(0, len(setting.graph) - 1))
    other = replace(setting.timing, factors={**dict(setting.timing.factors), client: 3.0})
    before, after = (
        {
            (row.sender, row.receiver, row.step): (row.status == Status.LINK_DOWN, row.status == Status.LOST)
            for row in played.rows
        }
        for played in (play(setting), play(setting, timing=other))
    )
    both = before.keys() & after.keys()
    assert [before[key] for key in sorted(both)] == [after[key] for key in sorted(both)]


@law
@given(settings_of(timing="virtual"), st.floats(0.05, 12))
def test_a_horizon_cuts_the_timeline_and_changes_nothing_before(setting: Setting, horizon: float) -> None:
    assert isinstance(setting.timing, VirtualTime)
    end = setting.started_at + horizon
    cut = play(setting, timing=replace(setting.timing, horizon=end))
    whole = play(setting, timing=replace(setting.timing, horizon=None))
    assert sorted(cut.step_rows) == sorted(row for row in whole.step_rows if row.ended_at <= end)
    assert cut.snapshots[-1].time == end
    sent = {(row.sender, row.receiver, row.step): row for row in whole.rows if row.sent_at <= end}
    assert {(row.sender, row.receiver, row.step) for row in cut.rows} == set(sent)
    for row in cut.rows:
        same = sent[row.sender, row.receiver, row.step]
        assert (row.weight, row.sent_at) == (same.weight, same.sent_at)
        if row.status != same.status:
            assert {row.status, same.status} == {Status.DELIVERED, Status.IN_FLIGHT}


@law
@given(graphs(), st.integers(0, 10_000), st.sampled_from([0.0, 0.4]), st.sampled_from([20.0, 200.0]))
def test_an_arrival_is_sending_waiting_putting_on_the_wire_and_latency(
    graph: nx.Graph, seed: int, loss: float, bandwidth: float
) -> None:
    """Recomputed edge by edge from the rows alone, for constant and for random latency."""
    assume(len(graph) > 1)
    for latency in ("constant(0.7)", "uniform(0.2, 1.9)"):
        timing = VirtualTime("exponential(1)", latency=latency, bandwidth=bandwidth, loss=loss)
        played = play(Setting(graph, timing, seed=seed, steps=6))
        network, streams = played.network, Streams(seed)
        on_the_wire = played.setting.message_bytes / bandwidth
        for e, (i, j) in enumerate(zip(network.senders.tolist(), network.receivers.tolist(), strict=True)):
            rows = sorted(
                (row for row in played.rows if (row.sender, row.receiver) == (i, j) and row.status in UP),
                key=lambda row: row.step,
            )
            free_at = -np.inf
            for row in rows:
                put_on = max(row.sent_at, free_at)  # the one before it has left
                free_at = put_on + on_the_wire
                if row.arrived_at is None:
                    continue
                u = streams.uniforms("latency", row.step, e, e + 1)[0]
                takes = 0.7 if latency.startswith("constant") else 0.2 + 1.7 * u
                assert row.arrived_at == pytest.approx(free_at + takes, rel=1e-12)
            if latency.startswith("constant"):
                arrivals = [row.arrived_at for row in rows if row.arrived_at is not None]
                assert (np.diff(arrivals) >= on_the_wire - 1e-9).all(), "one at a time, first in, first out"


def two(timing: VirtualTime, **options: Any) -> Setting:
    graph = nx.DiGraph()
    graph.add_edge(0, 1, probability=1.0)
    graph.add_edge(1, 0, probability=1.0)
    return replace(Setting(graph, timing), **options)


def test_a_slow_client_absorbs_several_messages_of_one_sender_and_a_fast_one_none() -> None:
    played = play(two(VirtualTime(compute=1.0, factors={1: 3.0}, latency=0.25), steps=4))
    absorbed = {
        (client, step): sources
        for wave in played.waves
        for (client, sources), step in zip(
            played.absorbed(wave.absorption).items(), wave.steps.tolist(), strict=True
        )
    }
    # Client 0 steps at 0, 1, 2, 3 and sends at 1, 2, 3, 4;
    # client 1 steps at 0, 3, 6, 9 and sends at 3, 6, 9, 12.
    half = 0.5
    assert absorbed[0, 0] == []
    assert absorbed[0, 1] == [(0, 0, half)]
    assert absorbed[0, 2] == [(0, 1, half)]
    assert absorbed[0, 3] == [(0, 2, half)], "what client 1 sends at 3 arrives at 3.25"
    assert absorbed[1, 1] == [(0, 0, half), (0, 1, half), (1, 0, half)]
    assert absorbed[1, 2] == [(0, 2, half), (0, 3, half), (1, 1, 1.0)], (
        "client 0 left at 4: nothing is sent to it"
    )
    assert absorbed[1, 3] == [(1, 2, 1.0)]
    final = played.snapshots[-1]
    assert final.time == 12.0
    assert played.absorbed(final.absorption) == {0: [(0, 3, half), (1, 0, half)], 1: [(1, 3, 1.0)]}
    assert [(row.step, row.status) for row in sorted(played.rows) if row.sender == 1] == [
        (0, Status.DELIVERED)
    ]


def test_a_message_that_arrives_at_the_instant_a_step_starts_is_absorbed_by_it() -> None:
    played = play(two(VirtualTime(compute=1.0, latency=1.0), steps=3))
    rows = {(row.sender, row.step): row for row in played.rows}
    assert rows[0, 0].absorbed_step == rows[1, 0].absorbed_step == 2
    assert (rows[0, 0].sent_at, rows[0, 0].arrived_at) == (1.0, 2.0)
    assert rows[0, 2].status == Status.IN_FLIGHT
    assert (rows[0, 2].sent_at, rows[0, 2].arrived_at) == (3.0, 4.0)


def test_messages_queue_on_a_narrow_link() -> None:
    timing = VirtualTime(
        compute=1.0, bandwidth=20.0, latency=0.5
    )  # two units of time to put 40 bytes on the wire
    played = play(two(timing, steps=4))
    arrivals = [row.arrived_at for row in sorted(played.rows, key=lambda row: row.step) if row.sender == 0]
    assert arrivals == [3.5, 5.5, 7.5, 9.5]


def test_a_horizon_before_the_first_step_ends_leaves_everybody_at_the_start() -> None:
    played = play(two(VirtualTime(compute=1.0, horizon=0.5), steps=3))
    assert (played.waves, played.rows, played.step_rows) == ([], [], [])
    assert [(s.time, s.final) for s in played.snapshots] == [(0.0, False), (0.5, True)]


def test_a_phase_without_steps_is_one_final_snapshot() -> None:
    for timing in (Lockstep(), VirtualTime()):
        played = play(Setting(two(VirtualTime()).graph, timing, steps=0, started_at=2.0))
        assert [(s.time, s.final, s.steps.tolist()) for s in played.snapshots] == [(2.0, True, [0, 0])]
        assert played.waves == []


def test_waves_are_as_wide_as_the_data_allow() -> None:
    """Nobody hears from anybody within ten steps, so that every client's steps need only its own."""
    graph = nx.cycle_graph(8)
    nx.set_edge_attributes(graph, 1.0, "probability")
    played = play(Setting(graph, VirtualTime("exponential(1)", latency=1e6), steps=8, snapshot_every=1e9))
    assert len(played.waves) == 8
    assert all(len(wave.steps) == 8 for wave in played.waves)


def test_fast_clients_run_no_further_ahead_than_a_window() -> None:
    graph = nx.cycle_graph(4)
    nx.set_edge_attributes(graph, 1.0, "probability")
    timing = VirtualTime("exponential(1)", factors={0: 0.001})
    played = play(Setting(graph, timing, given_weights(graph, 1), steps=400, snapshot_every=1e9))
    started = {(row.client, row.step): row.started_at for row in played.step_rows}
    order = [
        started[client, step]
        for wave in played.waves
        for client, step in zip(wave.absorption.clients.tolist(), wave.steps.tolist(), strict=True)
    ]
    rank = np.argsort(np.argsort(order, kind="stable"), kind="stable")
    assert np.abs(rank - np.arange(len(order))).max() <= 64
