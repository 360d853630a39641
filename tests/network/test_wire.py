"""One physics of a link, whoever sends: it carries one message at a time, and keeps their order or not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed.errors import TopologyError
from asyncfed.network import Lockstep, VirtualTime
from asyncfed.network.links import Network
from asyncfed.network.waves import Status
from asyncfed.network.wire import Wire
from asyncfed.rng import Streams
from tests.network.played import Played, Recording, Setting, graphs, play

law = settings(max_examples=60, deadline=None, derandomize=True)


def wire(network: Network, seed: int = 0) -> Wire:
    return Wire(network, Streams(seed), Recording(), instant=False)


@law
@given(graphs(), st.integers(0, 10_000), st.sampled_from(["exponential(1)", 0.5]), st.booleans())
def test_a_link_does_the_same_for_a_peer_and_for_a_server(
    graph: nx.Graph, seed: int, latency: Any, ordered: bool
) -> None:
    """A peer hands a message to all of its links, a server to some edges: what becomes of it is the same."""
    timing = VirtualTime(latency=latency, bandwidth=30.0, loss=0.2, ordered=ordered)
    for node in list(graph)[::2]:
        graph.nodes[node]["uplink"] = 25.0
    network = timing.network(graph)
    of_peer, of_server = wire(network, seed), wire(network, seed)
    at = np.cumsum(np.random.default_rng(seed).exponential(0.5, (12, network.n)), axis=0)
    for step, times in enumerate(at):
        for sender, now in enumerate(times.tolist()):
            edges = np.arange(network.first[sender], network.first[sender + 1])
            steps, times_sent = np.full(len(edges), step), np.full(len(edges), now)
            up = of_peer.up_of(edges, steps, times_sent)
            one = of_peer.send_many(edges, steps, up, times_sent, 20, np.zeros_like(edges))
            other = of_server.send(edges, step, times_sent, 20)
            assert one.up.tolist() == other.up.tolist()
            assert one.goes.tolist() == other.goes.tolist()
            assert np.array_equal(one.status, other.status)  # one number where all are delivered
            assert one.arrives[one.goes].tolist() == other.arrives[other.goes].tolist()


def test_what_was_planned_can_be_taken_back() -> None:
    graph = nx.path_graph(2, create_using=nx.DiGraph)
    nx.set_edge_attributes(graph, 1.0, "probability")
    edges = np.array([0])
    # Held back by the order, by the message before on the link, or by that at the sender's uplink.
    ways: list[tuple[Any, float, float]] = [
        ("exponential(9)", 10.0, np.inf),
        (0.5, 10.0, np.inf),
        (0.5, np.inf, 10.0),
    ]
    for latency, bandwidth, uplink in ways:
        graph.nodes[0]["uplink"] = uplink
        link = wire(VirtualTime(latency=latency, bandwidth=bandwidth).network(graph))
        for step in range(20):
            before = link.state(edges)
            planned = link.send(edges, step, np.array([float(step)]), 20).arrives
            link.send(edges, step + 20, np.array([float(step)]), 20)  # would hold up what comes after it
            link.restore(edges, before)
            assert link.send(edges, step, np.array([float(step)]), 20).arrives.tolist() == planned.tolist()


def test_by_hand_what_a_peer_sends_leaves_its_uplink_one_by_one() -> None:
    """8 bytes at 16 per unit to each of three, at the end of a step of 1; the link then takes 0.25."""
    graph = nx.complete_graph(4)
    nx.set_edge_attributes(graph, 1.0, "probability")
    graph.nodes[1]["uplink"] = 16.0
    played = play(Setting(graph, VirtualTime(compute=1.0, latency=0.25), steps=3, message_bytes=8))
    rows = [row for row in played.rows if row.step < 2]
    arrived = {(row.step, row.receiver): row.arrived_at for row in rows if row.sender == 1}
    assert arrived == {
        (0, 0): 1.75, (0, 2): 2.25, (0, 3): 2.75,
        (1, 0): 3.25, (1, 2): 3.75, (1, 3): 4.25,
    }  # fmt: skip
    assert {row.arrived_at for row in rows if row.sender == 0} == {1.25, 2.25}


# --- order, among peers (with a server: test_server.py) ---


def pair(**marks: Any) -> nx.DiGraph:
    """0 sends to 1 over a link with these marks, and 1 to 0 over one that says nothing."""
    graph = nx.DiGraph()
    graph.add_edge(0, 1, probability=1.0, **marks)
    graph.add_edge(1, 0, probability=1.0)
    return graph


def overtaken(played: Played, sender: int) -> int:
    """Messages of a sender that arrive before the one it sent before them."""
    rows = sorted((row for row in played.rows if row.sender == sender), key=lambda row: row.step)
    arrivals = [row.arrived_at for row in rows if row.arrived_at is not None]
    return sum(later < earlier for earlier, later in pairwise(arrivals))


@pytest.mark.parametrize(
    ("option", "mark", "forth", "back"),
    [
        (None, None, False, False),
        (True, None, False, False),
        (False, None, True, True),
        (True, False, True, False),
        (False, True, False, True),
        (None, np.False_, True, False),
    ],
)
def test_messages_overtake_where_the_link_or_else_the_timing_lets_them(
    option: bool | None, mark: Any, forth: bool, back: bool
) -> None:
    options = {} if option is None else {"ordered": option}
    timing = VirtualTime(compute=1.0, latency="exponential(4)", **options)  # type: ignore[arg-type]
    played = play(Setting(pair(**({} if mark is None else {"ordered": mark})), timing, steps=40))
    assert (overtaken(played, 0) > 5, overtaken(played, 1) > 5) == (forth, back)
    assert (overtaken(played, 0) > 0, overtaken(played, 1) > 0) == (forth, back)


def test_a_message_behind_a_slow_one_arrives_with_it() -> None:
    """Latencies of 0 to 8: in order, one arrives when its own way and all ways before are over."""
    kept, free = (
        play(Setting(pair(), VirtualTime(compute=1.0, latency="uniform(0, 8)", ordered=ordered), steps=30))
        for ordered in (True, False)
    )
    times = [
        {row.step: row.arrived_at for row in played.rows if row.sender == 0 and row.arrived_at is not None}
        for played in (kept, free)
    ]
    latest = [max(times[1][k] for k in range(step + 1)) for step in range(30)]
    assert [times[0][step] for step in range(30)] == latest


def test_a_lost_message_holds_nobody_up() -> None:
    network = VirtualTime(latency="uniform(0, 100)", loss=0.5).network(pair())
    link = wire(network, seed=3)
    newest = -np.inf
    for step in range(60):
        fate = link.send(np.array([0]), step, np.array([float(step)]), 8)
        own = step + network.latencies_of(Streams(3), np.array([0]), np.array([step]))[0]
        if fate.goes[0]:
            newest = max(newest, own)
            assert fate.arrives[0] == newest
        else:
            assert fate.status[0] == Status.LOST


@pytest.mark.parametrize("ordered", [True, False])
def test_lockstep_knows_no_order_to_keep(ordered: bool) -> None:
    marks = {"latency": "exponential(9)", "bandwidth": 1.0}
    plain, marked = (
        play(Setting(graph, Lockstep(loss=0.2), steps=20))
        for graph in (pair(), pair(ordered=ordered, **marks))
    )
    assert plain.rows == marked.rows
    assert all(row.arrived_at in (None, row.sent_at) for row in marked.rows)


@pytest.mark.parametrize("value", ["yes", 1, None, 0.0])
def test_an_order_that_is_no_truth_value_is_refused_by_its_edge(value: Any) -> None:
    with pytest.raises(TopologyError, match=rf"ordered of edge 0→1 is {value!r}; it must be True"):
        VirtualTime().network(pair(ordered=value))
