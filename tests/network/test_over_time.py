"""Links over time: schedules, probabilities that change and bursts, exactly or by the laws they have."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import networkx as nx
import numpy as np
import pytest

from asyncfed.errors import ScenarioError, TopologyError
from asyncfed.network import Bursts, LinkTimes, Lockstep, VaryingProbability, VirtualTime
from asyncfed.network.links import Network, compile_network
from asyncfed.registry import from_data, to_data
from asyncfed.rng import Streams
from asyncfed.scenario_data import graph_from_data, graph_to_data
from tests.network.played import Setting, play
from topologies import fully_connected, ring, stochastic_directed, stochastic_undirected, with_links


def graph(**marks: Any) -> nx.DiGraph:
    """Edge 0→1 marked, edge 1→0 always up."""
    made = nx.DiGraph()
    made.add_edge(0, 1, **{"probability": 1.0, **marks})
    made.add_edge(1, 0, probability=1.0)
    return made


def ups(network: Network, times: list[float], edge: int = 0, seed: int = 0) -> list[bool]:
    edges, steps = np.full(len(times), edge), np.arange(len(times))
    up: list[bool] = network.up_of(Streams(seed), edges, steps, np.array(times)).tolist()
    return up


# ---- the times that are given


@pytest.mark.parametrize("timing", [Lockstep(), VirtualTime(compute=0.7, horizon=30.0)])
def test_a_link_with_a_schedule_is_up_exactly_then(timing: Any) -> None:
    """Every potential message of the trace, by the time at which it is sent."""
    schedule = LinkTimes([(0, 2), (5, 6.5)], period=8.0)
    marked = with_links(fully_connected(4), schedule=lambda i, j: schedule if (i, j) == (1, 2) else None)
    played = play(Setting(marked, timing, steps=40))
    seen = {True: 0, False: 0}
    for row in played.rows:
        marked_link = {row.sender, row.receiver} == {1, 2}
        up = not marked_link or row.sent_at % 8 < 2 or 5 <= row.sent_at % 8 < 6.5
        assert (row.status != 2) == up
        seen[up] += marked_link
    assert min(seen.values()) >= 10


def test_in_lockstep_step_t_sends_at_t_plus_1() -> None:
    marked = with_links(ring(3), schedule=[(3, 4)])
    played = play(Setting(marked, Lockstep(), steps=6))
    assert {(row.step, row.sent_at) for row in played.rows if row.status == 0} == {(2, 3.0)}


def test_the_draw_of_a_link_is_the_one_it_would_be_without_a_schedule() -> None:
    base = stochastic_undirected(5, probability=(0.2, 0.9), seed=3)
    plain = compile_network(base)
    scheduled = compile_network(with_links(base, schedule=LinkTimes([(0, 3)], 5.0)))
    for step in range(30):
        expected = plain.up(Streams(1), step, step) & (step % 5 < 3)
        assert scheduled.up(Streams(1), step, step).tolist() == expected.tolist()
        for sender in range(5):
            lo, hi = scheduled.first[sender], scheduled.first[sender + 1]
            edges = np.arange(lo, hi)
            own = scheduled.up_of(
                Streams(1), edges, np.full_like(edges, step), np.full(len(edges), step * 1.0)
            )
            assert own.tolist() == expected[lo:hi].tolist()


def test_a_probability_that_changes_is_that_of_the_time() -> None:
    """4,000 draws at each of some times: within 4 standard errors, 4·√(p(1-p)/4,000) ≤ 0.032."""
    steps = VaryingProbability([(0, 0.2), (2, 0.9)], period=4.0)
    line = VaryingProbability([(0, 0.1), (4, 0.5)], between="linear")
    count = 4_000
    for law, expected in (
        (steps, {0.0: 0.2, 1.9: 0.2, 2.0: 0.9, 3.5: 0.9, 4.0: 0.2, 7.0: 0.9}),
        (line, {0.0: 0.1, 1.0: 0.2, 3.0: 0.4, 4.0: 0.5, 9.0: 0.5}),
    ):
        network = compile_network(graph(probability=law))
        for time, p in expected.items():
            assert law.at(np.array([time]))[0] == pytest.approx(p, abs=1e-12)
            share = np.mean(ups(network, [time] * count))
            assert share == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / count))
    wrapped = VaryingProbability([(0, 0.0), (2, 1.0)], period=4.0, between="linear")
    assert wrapped.at(np.array([1.0, 3.0, 3.5])).tolist() == [0.5, 0.5, 0.25]


# ---- bursts


def lengths(states: np.ndarray[Any, Any], state: bool) -> np.ndarray[Any, Any]:
    """Of the runs of a state that begin and end within each row."""
    found = []
    for row in states:
        changes = np.flatnonzero(np.diff(row)) + 1
        runs = np.split(row, changes)[1:-1]
        found += [len(run) for run in runs if run[0] == state]
    return np.array(found)


def test_in_lockstep_bursts_are_gilberts_markov_chain() -> None:
    """Mean lengths (geometric: variance m(m-1)) and the share of time that is good (of a two-state chain with
    λ = 1 - 1/good - 1/bad the variance of a mean over N is π(1-π)(1+λ)/(1-λ)/N), each within 4 standard
    errors.
    """
    good, bad, steps = 8.0, 3.0, 4_000
    network = Lockstep().network(
        with_links(stochastic_directed(5, probability=1.0), bursts=Bursts(good, bad))
    )
    states = np.array([network.up(Streams(2), step, step + 1.0) for step in range(steps)]).T
    for state, mean in ((True, good), (False, bad)):
        runs = lengths(states, state)
        assert len(runs) > 5_000
        assert runs.mean() == pytest.approx(mean, abs=4 * math.sqrt(mean * (mean - 1) / len(runs)))
    share, slow = good / (good + bad), 1 - 1 / good - 1 / bad
    error = math.sqrt(share * (1 - share) * (1 + slow) / (1 - slow) / states.size)
    assert states.mean() == pytest.approx(share, abs=4 * error)
    assert network.probability.tolist() == [share] * network.edges


def test_in_virtual_time_bursts_are_exponential() -> None:
    """Share of time that is up, and how likely a link that is up is so s later, by the correlation
    exp(-(1/good + 1/bad)·s); of 20 links at 500 instants that are next to independent: 4 standard errors.
    """
    good, bad, s = 2.0, 1.0, 0.4
    marked = with_links(stochastic_directed(5, probability=1.0), bursts=Bursts(good, bad))
    network = VirtualTime().network(marked)
    times = np.arange(500) * 15.0
    edges = np.repeat(np.arange(20), len(times))
    now, later = (
        network.up_of(Streams(5), edges, np.zeros(len(edges), dtype=np.int64), np.tile(times + shift, 20))
        for shift in (0.0, s)
    )
    share = good / (good + bad)
    assert now.mean() == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / len(now)))
    stay = share + (1 - share) * math.exp(-(1 / good + 1 / bad) * s)
    assert later[now].mean() == pytest.approx(stay, abs=4 * math.sqrt(stay * (1 - stay) / now.sum()))


def test_in_a_bad_burst_the_probability_is_the_bursts() -> None:
    """Up with 0.9 while good and 0.3 while bad, on average 0.9·0.8 + 0.3·0.2 = 0.78; 4 standard errors of 20
    chains over 2,000 steps, whose states are correlated over about (good·bad)/(good + bad)·2 = 3.2 steps.
    """
    marked = with_links(stochastic_directed(5, probability=0.9), bursts=Bursts(8, 2, 0.3))
    network = Lockstep().network(marked)
    up = np.array([network.up(Streams(2), step, step + 1.0) for step in range(2_000)])
    assert network.probability == pytest.approx(np.full(20, 0.78))
    assert up.mean() == pytest.approx(0.78, abs=4 * math.sqrt(0.78 * 0.22 * 3.2 / up.size))
    # Bad steps are those in which the link would also be down with probability 0: then only 0.9 counts.
    good = compile_network(with_links(marked, probability=1.0, bursts=Bursts(8, 2)), whole_steps=True)
    states = np.array([good.up(Streams(2), step, step + 1.0) for step in range(2_000)])
    for state, p in ((True, 0.9), (False, 0.3)):
        some = states == state
        assert up[some].mean() == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / some.sum()))


def test_the_two_directions_of_an_undirected_link_share_everything() -> None:
    marked = with_links(
        stochastic_undirected(6, probability=0.7, seed=1),
        schedule=lambda i, j: [(i, i + j + 10.0)],
        bursts=Bursts(3, 2),
    )
    network = Lockstep().network(marked)
    back = network.reverse
    rows = np.array([network.up(Streams(3), step, step + 1.0) for step in range(40)])
    assert (rows == rows[:, back]).all()
    assert 0.1 < rows.mean() < 0.6


# ---- any messages at once


def test_messages_of_all_steps_at_once_have_the_draws_of_single_steps() -> None:
    base = stochastic_undirected(6, probability=(0.3, 0.8), seed=2)
    rng = np.random.default_rng(0)
    for marked in (base, stochastic_directed(6, seed=4), with_links(base, bursts=Bursts(2, 2))):
        network = compile_network(marked, loss=0.3, latency="exponential(0.5)")
        edges = rng.integers(0, network.edges, 500)
        steps = rng.integers(0, 200, 500)
        times = steps * 1.5
        streams = Streams(7)
        up = network.up_of(streams, edges, steps, times)
        lost = network.lost_of(streams, edges, steps)
        late = network.latencies_of(streams, edges, steps)
        fresh = compile_network(marked, loss=0.3, latency="exponential(0.5)")
        for k in range(500):
            step, e = int(steps[k]), int(edges[k])
            assert up[k] == fresh.up(streams, step, float(times[k]))[e]
            assert lost[k] == fresh.lost(streams, step)[e]
            assert late[k] == fresh.latencies_of(streams, np.array([e]), np.array([step]))[0]
        assert network.up_of(streams, edges[:0], steps[:0], times[:0]).tolist() == []


# ---- what the network says of itself


def test_what_kind_of_links_a_network_has() -> None:
    def kind(**marks: Any) -> tuple[bool, bool]:
        network = compile_network(graph(**marks))
        return network.independent, network.stationary

    assert kind(probability=0.5) == (True, True)
    assert kind(bursts=Bursts(3, 2)) == (False, True)
    assert kind(schedule=[(0, 1)]) == (False, False)
    assert kind(probability=VaryingProbability([(0, 0.5)])) == (False, False)


# ---- as data and text


VALUES = [
    LinkTimes([(0, 1), (2, math.inf)]),
    LinkTimes([(0.1, 0.2)], period=0.3),
    Bursts(20, 5, 0.1),
    VaryingProbability([(0, 0.5), (1.5, 1.0)], period=2.5, between="linear"),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_marks_survive_being_written_down_and_read(value: Any) -> None:
    assert from_data(json.loads(json.dumps(to_data(value)))) == value
    mark = {LinkTimes: "schedule", Bursts: "bursts", VaryingProbability: "probability"}[type(value)]
    times = [0.05 + 0.13 * k for k in range(200)]
    as_value, as_text = graph(**{mark: value}), graph(**{mark: str(value)})
    through_json = graph_from_data(json.loads(json.dumps(graph_to_data(as_value))))
    found = [ups(compile_network(one), times) for one in (as_value, as_text, through_json)]
    assert found[0] == found[1] == found[2]
    assert any(found[0])
    assert not all(found[0])


@pytest.mark.parametrize(
    ("marks", "named"),
    [
        ({"schedule": [(2, 1)]}, "schedule of edge 0→1: the interval (2, 1) of a schedule"),
        ({"schedule": 5}, "schedule of edge 0→1 is 5; it must be a list of (from, to), or LinkTimes"),
        ({"schedule": "Bursts(1, 2)"}, "schedule of edge 0→1 is 'Bursts(1, 2)'; it must be a list"),
        ({"schedule": "LinkTime([])"}, "schedule of edge 0→1: unknown a link's mark 'LinkTime'"),
        ({"bursts": 3}, "bursts of edge 0→1 is 3; it must be Bursts(good, bad), with their mean lengths"),
        (
            {"bursts": "Bursts(0, 1)"},
            "bursts of edge 0→1: Bursts: good is 0; it must be a finite number above 0",
        ),
        ({"probability": "Bursts(1, 1)"}, "probability of edge 0→1 is 'Bursts(1, 1)'; it must be a number"),
        ({"probability": "often"}, "probability of edge 0→1 is 'often'; it must lie in (0, 1]"),
    ],
)
def test_a_bad_mark_is_named(marks: dict[str, Any], named: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(named)):
        compile_network(graph(**marks))


def test_bursts_shorter_than_a_step_are_refused_in_lockstep() -> None:
    marked = graph(bursts=Bursts(5, 0.5))
    with pytest.raises(
        TopologyError, match=r"bursts of edge 0→1: Bursts\(5.0, 0.5, 0.0\) has a mean time below 1"
    ):
        Lockstep().network(marked)
    VirtualTime().network(marked)


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: Bursts(1, 2, 1.5), "Bursts: probability is 1.5; it must be a number in [0, 1]"),
        (lambda: Bursts("a", 2), "Bursts: good is 'a'; it must be a finite number above 0"),
        (
            lambda: LinkTimes([(0, 1)], period=-1),
            "LinkTimes: period is -1; it must be a finite number above 0 or None",
        ),
        (lambda: LinkTimes([(0, 3)], period=2), "the interval (0, 3) of a schedule does not lie within"),
        (lambda: VaryingProbability([(1, 0.5)]), "are at [1.0]; they must begin at 0 and rise"),
        (lambda: VaryingProbability([(0, 0.5), (0, 1)]), "they must begin at 0 and rise"),
        (
            lambda: VaryingProbability([(0, 1.5)]),
            "VaryingProbability: points[0][1] is 1.5; it must be a number in [0, 1]",
        ),
        (lambda: VaryingProbability([(0, 0)]), "is 0 at all times; leave out an edge that never exists"),
        (
            lambda: VaryingProbability([(0, 1)], period=0),
            "VaryingProbability: period is 0; it must be a finite number above 0 or None",
        ),
        (lambda: VaryingProbability([(0, 1)], between="cubic"), "it must be 'constant' or 'linear'"),
        (
            lambda: VaryingProbability([3]),
            "VaryingProbability: points[0] is 3; it must be (a finite number, at least 0,",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused(made: Any, named: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(named)):
        made()
