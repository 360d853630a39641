"""Links that are offered more than they carry: what is sent waits ever longer, most of it for ever, and the
schedule neither slows down nor keeps what nobody will absorb.
"""

from __future__ import annotations

import networkx as nx
import pytest

from asyncfed.network.timing import VirtualTime
from asyncfed.network.waves import Status, Wave
from tests.network.played import Played, Setting, play, sources_of

STEPS, BYTES = 400, 40
CLIENTS = 5
WAYS = {
    "links": (VirtualTime("exponential(1)", bandwidth=BYTES / 8), {}),
    "until a horizon": (VirtualTime("exponential(1)", bandwidth=BYTES / 8, horizon=300.0), {}),
    "losses made up for": (VirtualTime("exponential(1)", bandwidth=BYTES / 8, loss=0.2), {}),
    "uplinks": (VirtualTime("exponential(1)"), {"uplink": BYTES / 4}),
    "downlinks": (VirtualTime("exponential(1)"), {"downlink": BYTES / 4}),
    "links and downlinks": (VirtualTime(1.0, bandwidth=BYTES / 3), {"downlink": BYTES / 3}),
}


@pytest.fixture(params=WAYS, scope="module")
def played(request: pytest.FixtureRequest) -> Played:
    timing, marks = WAYS[request.param]
    graph = nx.cycle_graph(CLIENTS)
    nx.set_edge_attributes(graph, 1.0, "probability")
    for node in graph:
        graph.nodes[node].update(marks)
    setting = Setting(graph, timing, steps=STEPS, message_bytes=BYTES, snapshot_every=20.0)
    return play(setting, recovers=timing.loss > 0, tallied=False)


def test_every_message_has_one_row_and_is_in_flight_where_it_arrives_after_the_end(played: Played) -> None:
    end = played.snapshots[-1].time
    assert len({(row.sender, row.receiver, row.step) for row in played.rows}) == len(played.rows)
    in_flight = [row for row in played.rows if row.status == Status.IN_FLIGHT]
    come = [row for row in played.rows if row.status in (Status.DELIVERED, Status.CARRIED)]
    assert len(in_flight) > len(come), "the setting saturates nothing"
    assert all(row.arrived_at is not None and row.arrived_at > end for row in in_flight)
    assert all(row.arrived_at is not None and row.arrived_at <= end for row in come)
    here = {(row.receiver, row.sender, row.step) for row in come}
    for item in [*played.waves, played.snapshots[-1]]:
        for client, taken in played.absorbed(item.absorption).items():
            here -= {(client, sender, step) for sender, step, _ in taken}
    assert not here, "what arrived is absorbed"


def test_messages_of_a_link_follow_one_another(played: Played) -> None:
    """In flight or not, each arrives as it would have were everything kept to the end."""
    timing = played.setting.timing
    assert isinstance(timing, VirtualTime)
    gap = 0.0 if timing.loss else BYTES / timing.bandwidth  # what was lost comes with the next
    last: dict[tuple[int, int], float] = {}
    for row in sorted(played.rows, key=lambda row: row.step):
        if row.status in (Status.DELIVERED, Status.IN_FLIGHT):
            assert row.arrived_at is not None
            before = last.get((row.sender, row.receiver), 0.0)
            assert row.arrived_at >= before + gap - 1e-9
            last[row.sender, row.receiver] = row.arrived_at


def test_payloads_are_there_for_whom_they_reach_and_for_nobody_else(played: Played) -> None:
    alive: set[int] = set()
    most = 0
    for item in played.items:
        assert sources_of(item.absorption) <= alive
        if isinstance(item, Wave):
            alive = (alive | set(item.emits.tolist())) - set(item.released.tolist())
            most = max(most, len(alive))
    sent = {(row.sender, row.step) for row in played.rows if row.status != Status.LOST}
    assert most < 0.4 * len(sent)


def test_looks_count_what_was_sent_whether_it_is_recorded_or_not(played: Played) -> None:
    looks = [
        (item, before)
        for item, before in zip(played.items, played.rows_before, strict=True)
        if not isinstance(item, Wave) and not item.final
    ]
    for look, recorded in looks:
        sent = sum(row.sent_at <= look.time for row in played.rows)
        assert recorded + look.unrecorded.arrived + look.unrecorded.on_the_way == sent
        assert look.unrecorded.bytes == BYTES * (sent - recorded)
