"""Laws of both timing models, over random strongly connected networks and random everything else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncfed.network.links import Network
from asyncfed.network.timing import Lockstep, VirtualTime
from asyncfed.network.waves import MatrixSums, Snapshot, Status, Sums, Unrecorded, Wave
from asyncfed.network.weights import Given, PullShares
from asyncfed.rng import Streams
from tests.network.played import (
    Played,
    Row,
    Setting,
    StepRow,
    entries,
    given_weights,
    graphs,
    play,
    settings_of,
    sources_of,
)

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
        assert sources_of(item.absorption) <= alive
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
def test_values_are_there_when_they_are_wanted_and_are_those_the_trace_tells_of(setting: Setting) -> None:
    """Waves and looks are executed with histories for values. From the trace alone: after k steps that have
    ended a client stands where it was when step k began, or where that would begin from now.
    """
    played = play(setting)
    absorbed: dict[tuple[int, int], list[Row]] = {}
    for row in played.rows:
        if row.absorbed_step is not None:
            absorbed.setdefault((row.receiver, row.absorbed_step), []).append(row)

    def sources(client: int, step: int, by: float) -> list[int]:
        """What a client has taken in at a time after so many steps, itself included."""
        rows = [row for row in absorbed.get((client, step), []) if (row.arrived_at or 0.0) <= by]
        own = [(client, step - 1)] if step > setting.first_step else []
        return sorted(history(*key) for key in [*((row.sender, row.step) for row in rows), *own])

    @cache
    def history(client: int, step: int) -> int:
        return hash((client, step, *sources(client, step, np.inf)))

    alive: dict[int, int] = {}
    for item in played.items:
        nodes = item.absorption.nodes.tolist()
        found = {
            client: sorted(alive[serial] for serial, _ in pairs) for client, pairs in entries(item.absorption)
        }
        if isinstance(item, Wave):
            for client, step, serial in zip(nodes, item.steps.tolist(), item.emits.tolist(), strict=True):
                alive[serial] = hash((client, step, *found[client]))
                assert alive[serial] == history(client, step)
            for serial in item.released.tolist():
                del alive[serial]
            continue
        for client, steps in zip(nodes, item.steps.tolist(), strict=True):
            ended = [row for row in played.step_rows if row.client == client and row.ended_at <= item.time]
            assert steps == setting.first_step + len(ended)
            assert found[client] == sources(client, steps, item.time)


@law
@given(settings_of())
def test_payloads_are_kept_no_longer_than_somebody_may_still_want_them(setting: Setting) -> None:
    played = play(setting)
    last_use: dict[int, int] = {}
    released_at: dict[int, int] = {}
    for at, wave in enumerate(played.waves):
        last_use.update(dict.fromkeys(sources_of(wave.absorption), at))
        released_at.update(dict.fromkeys(wave.released.tolist(), at))
    wanted = sources_of(played.snapshots[-1].absorption)
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
def test_a_wave_says_how_long_ago_everybody_began_its_step_before(setting: Setting) -> None:
    played = play(setting)
    started = {key: row.started_at for key, row in steps_of(played).items()}
    for wave in played.waves:
        assert wave.elapsed is not None
        keys = zip(wave.absorption.nodes.tolist(), wave.steps.tolist(), strict=True)
        since = [started[i, t] - started[i, t - 1] if t > setting.first_step else 0.0 for i, t in keys]
        assert wave.elapsed.tolist() == pytest.approx(since, rel=1e-9, abs=1e-9)


@law
@given(settings_of())
def test_every_client_makes_its_steps_one_by_one_and_absorbs_its_own_last_payload(setting: Setting) -> None:
    played = play(setting)
    done = [setting.first_step] * played.network.n
    for item in played.items:
        if isinstance(item, Snapshot):
            assert item.steps.tolist() == done
        else:
            clients = item.absorption.nodes.tolist()
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
        begun = dict(zip(item.absorption.nodes.tolist(), item.steps.tolist(), strict=True))
        sums = {client: total(client, begun[client], absorbed[client]) for client in absorbed}
        if isinstance(item, Wave):
            omega.update({(client, begun[client]): sums[client] for client in sums})
            continue
        on_the_way = waiting = lost = 0.0
        for row in played.rows:
            if row.sent_at <= item.time and row.weight is not None:
                mass = row.weight * omega[row.sender, row.step]
                if row.status == Status.LOST:
                    lost += mass
                elif row.arrived_at is not None and row.arrived_at > item.time:
                    on_the_way += mass
                elif row.absorbed_step is not None and row.absorbed_step > begun[row.receiver]:
                    waiting += mass  # it has come while its receiver is at work
        assert sum(sums.values()) + on_the_way + waiting + lost == pytest.approx(played.network.n, abs=1e-9)
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
        up, lost = network.up(streams, row.step, row.step)[e], network.lost(streams, row.step)[e]
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
        begun = dict(zip(item.absorption.nodes.tolist(), item.steps.tolist(), strict=True))
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
        unrecorded = item.unrecorded
        assert recorded + unrecorded.arrived + unrecorded.on_the_way == len(sent)
        assert unrecorded.bytes == setting.message_bytes * (unrecorded.arrived + unrecorded.on_the_way)
        if isinstance(setting.timing, Lockstep) or item.final:
            assert (unrecorded.arrived, unrecorded.on_the_way) == (0, 0)
            continue
        assert unrecorded.on_the_way == sum(
            row.arrived_at is not None and row.arrived_at > item.time for row in sent
        )
        waiting = 0
        for row in sent:
            if row.status == Status.DELIVERED and row.arrived_at is not None and row.arrived_at <= item.time:
                assert row.absorbed_step is not None
                absorber = steps.get((row.receiver, row.absorbed_step))
                waiting += absorber is None or absorber.started_at >= item.time
        assert unrecorded.arrived == waiting


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
def test_the_same_setting_gives_the_same_schedule_twice(setting: Setting) -> None:
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
    for marks in setting.graph.nodes.values():
        marks.clear()  # what a node's links share makes delays
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
def test_a_horizon_cuts_the_schedule_and_changes_nothing_before(setting: Setting, horizon: float) -> None:
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
    """Recomputed edge by edge from the rows alone, for constant and for random latency, and behind those
    before it unless the link is said to let messages overtake.
    """
    assume(len(graph) > 1)
    for latency in ("constant(0.7)", "uniform(0.2, 1.9)"):
        timing = VirtualTime(
            "exponential(1)", latency=latency, bandwidth=bandwidth, loss=loss, ordered=seed % 2 == 0
        )
        played = play(Setting(graph, timing, seed=seed, steps=6))
        network, streams = played.network, Streams(seed)
        on_the_wire = played.setting.message_bytes / bandwidth
        for e, (i, j) in enumerate(zip(network.senders.tolist(), network.receivers.tolist(), strict=True)):
            rows = sorted(
                (row for row in played.rows if (row.sender, row.receiver) == (i, j) and row.status in UP),
                key=lambda row: row.step,
            )
            free_at = newest = -np.inf
            keeps_order = network.ordered[e]
            assert keeps_order == graph.edges[i, j].get("ordered", seed % 2 == 0)
            for row in rows:
                put_on = max(row.sent_at, free_at)  # the one before it has left
                free_at = put_on + on_the_wire
                if row.arrived_at is None:
                    continue
                u = streams.uniforms("latency", row.step, e, e + 1)[0]
                takes = 0.7 if latency.startswith("constant") else 0.2 + 1.7 * u
                arrives = max(free_at + takes, newest) if keeps_order else free_at + takes
                assert row.arrived_at == pytest.approx(arrives, rel=1e-12)
                newest = row.arrived_at
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


def test_a_look_knows_nothing_of_a_step_that_has_not_ended() -> None:
    """The same two. Looks come every 1.5; a message is 0.25 on the way."""
    timing = VirtualTime(compute=1.0, factors={1: 3.0}, latency=0.25)
    played = play(two(timing, steps=4, snapshot_every=1.5))
    looks = {look.time: look for look in played.snapshots}
    half = 0.5
    # Client 0 is at its step 1, which began from its own; client 1 at its first. Message 0 waits for it.
    assert looks[1.5].steps.tolist() == [1, 0]
    assert played.absorbed(looks[1.5].absorption) == {0: [(0, 0, half)], 1: []}
    assert looks[1.5].unrecorded == Unrecorded(arrived=1, on_the_way=0, bytes=40)
    # Both have just ended a step, and would begin the next from what is here. Two messages left just now.
    assert looks[3.0].steps.tolist() == [3, 1]
    assert played.absorbed(looks[3.0].absorption) == {
        0: [(0, 2, half)],
        1: [(0, 0, half), (0, 1, half), (1, 0, half)],
    }
    assert looks[3.0].unrecorded == Unrecorded(arrived=2, on_the_way=2, bytes=160)
    # Client 0 has left, and would go on from what has come since; client 1 is at the step it began at 3.
    assert looks[4.5].steps.tolist() == [4, 1]
    assert played.absorbed(looks[4.5].absorption) == {
        0: [(0, 3, half), (1, 0, half)],
        1: [(0, 0, half), (0, 1, half), (1, 0, half)],
    }
    assert looks[4.5].unrecorded == Unrecorded(arrived=3, on_the_way=0, bytes=120)


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
        for client, step in zip(wave.absorption.nodes.tolist(), wave.steps.tolist(), strict=True)
    ]
    rank = np.argsort(np.argsort(order, kind="stable"), kind="stable")
    assert np.abs(rank - np.arange(len(order))).max() <= 64


# --- several variables, weighed differently ---


@law
@given(settings_of())
def test_senders_weights_add_up_at_the_sender_and_receivers_at_the_receiver(setting: Setting) -> None:
    """Whatever is down or lost, in both timings; and both are weights of the same messages."""
    played = play(setting, pulled=True)
    kept: dict[tuple[int, int], float] = {}
    for item in [*played.waves, played.snapshots[-1]]:
        pushed, pulled = (played.absorbed(item.absorption, name) for name in ("z", "y"))
        for client, sources in pushed.items():
            kept.update({(sender, step): weight for sender, step, weight in sources if sender == client})
            assert [source[:2] for source in pulled[client]] == [source[:2] for source in sources]
            if sources:  # beside what it began with, where it has made no step yet
                share = 1 / (1 + sum(sender != client for sender, *_ in sources))
                assert [weight for *_, weight in pulled[client]] == pytest.approx([share] * len(sources))
    given_away: Counter[tuple[int, int]] = Counter()
    for row in played.rows:
        given_away[row.sender, row.step] += row.weight or 0.0
    assert len(kept) == len(played.step_rows)
    for key, share in kept.items():
        assert share + given_away[key] == pytest.approx(1.0, abs=1e-12)


class Pulled:
    """A rule whose weights are the receiver's, to be named where one of the sender's is."""

    def prepare(self, network: Network) -> PullShares:
        return PullShares(network)


@law
@given(settings_of())
def test_the_trace_has_the_weights_of_a_receiver_too(setting: Setting) -> None:
    played = play(setting, weights=Pulled())
    absorbed = {
        (client, sender, step): weight
        for item in [*played.waves, played.snapshots[-1]]
        for client, sources in played.absorbed(item.absorption).items()
        for sender, step, weight in sources
    }
    for row in played.rows:
        if row.status == Status.DELIVERED:
            assert row.weight == absorbed[row.receiver, row.sender, row.step]
        elif row.status == Status.LOST:
            assert row.weight == 0.0
        else:
            assert row.weight is None


@pytest.mark.parametrize(("graph", "form"), [(nx.complete_graph(5), MatrixSums), (nx.cycle_graph(12), Sums)])
def test_dense_and_sparse_networks_have_channels_of_their_own_form(graph: nx.Graph, form: type) -> None:
    nx.set_edge_attributes(graph, 0.7, "probability")
    played = play(Setting(graph, Lockstep(loss=0.2), steps=6, pulled=True))
    for wave in played.waves[1:]:
        assert [type(channel) for channel in wave.absorption.channels] == [form, form]
        assert [channel.names for channel in wave.absorption.channels] == [("z",), ("y",)]
    # Virtual time spells out its sums client by client.
    virtual = play(played.setting, timing=VirtualTime(loss=0.2))
    for name in ("z", "y"):
        ours, theirs = (
            [one.absorbed(wave.absorption, name) for wave in one.waves[1:]] for one in (played, virtual)
        )
        assert ours == theirs


@pytest.mark.parametrize("n", [5, 12])
def test_a_message_of_no_weight_is_a_message_on_dense_and_sparse_networks(n: int) -> None:
    graph = nx.cycle_graph(n)  # 5: dense, 12: sparse
    nx.set_edge_attributes(graph, 1.0, "probability")
    played = play(Setting(graph, Lockstep(), steps=3), weights=Given(np.eye(n).tolist()))
    absorbed = [(row.receiver, row.sender) for row in played.rows if row.step == 0]
    for wave in played.waves[1:2]:
        (channel,) = wave.absorption.channels
        assert isinstance(channel, (Sums, MatrixSums))
        receivers = np.repeat(np.arange(n), np.diff(channel.indptr))
        found = set(zip(receivers.tolist(), channel.senders.tolist(), strict=True))
        assert found == {*absorbed, *((c, c) for c in range(n))}


@law
@given(settings_of())
def test_senders_are_those_who_emitted_the_sources(setting: Setting) -> None:
    played = play(setting, pulled=True)
    emitted = played.emitted
    for item in played.items:
        for channel in item.absorption.channels:
            assert isinstance(channel, (Sums, MatrixSums))
            assert channel.senders.tolist() == [emitted[source][0] for source in channel.sources.tolist()]


@law
@given(st.integers(1, 6), st.integers(0, 10_000))
def test_a_matrix_says_the_same_as_the_sums_spelt_out(n: int, seed: int) -> None:
    pick = np.random.default_rng(seed)
    arrived = pick.random((n, n)) < 0.5
    matrix = np.where(arrived & (pick.random((n, n)) < 0.8), pick.random((n, n)), 0.0)
    rows = [[c for c in range(n) if arrived[r, c] or c == r] for r in range(n)]
    cells = np.flatnonzero(~np.eye(n, dtype=np.bool_))
    channel = MatrixSums(("z",), matrix, 7 * n, cells, arrived.flatten()[cells])
    assert channel.indptr.tolist() == [sum(map(len, rows[:r])) for r in range(n + 1)]
    assert channel.senders.tolist() == [c for row in rows for c in row]
    assert channel.sources.tolist() == [7 * n + c for row in rows for c in row]
    assert channel.weights.tolist() == [matrix[r, c] for r, row in enumerate(rows) for c in row]
