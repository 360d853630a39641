"""What a node's links share, against a loop over single messages."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed.network.sharing import Intake, downlink_arrives, uplink_leaves

law = settings(max_examples=150, deadline=None, derandomize=True)


def one_after_another(
    messages: list[tuple[float, int, int, int]], rate: list[float], busy: dict[int, float]
) -> dict[int, float]:
    """Messages (due, node, other, size) by their place: when each is over."""
    over = {}
    queue = sorted(range(len(messages)), key=lambda place: (messages[place][0], messages[place][2], place))
    for place in queue:
        due, node, _, size = messages[place]
        if math.isinf(rate[node]):
            over[place] = due
            continue
        begins = due if due > busy.get(node, -math.inf) else busy[node]
        over[place] = busy[node] = begins + size / rate[node]
    return over


@law
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(0, 200), st.booleans())
def test_queues_are_those_of_a_loop_to_the_last_bit_over_several_calls(
    seed: int, n: int, m: int, incoming: bool
) -> None:
    rng = np.random.default_rng(seed)
    rate = np.where(rng.random(n) < 0.3, np.inf, rng.uniform(0.5, 20.0, n))
    busy, known, start = np.full(n, -np.inf), dict[int, float](), 0.0
    for _ in range(3):
        due = start + np.round(rng.exponential(3.0, m), int(rng.integers(0, 6)))  # rounded: there are ties
        nodes, others = rng.integers(0, n, m), rng.integers(0, 10**9, m)
        sizes = rng.integers(0, 40, m)
        before = busy.copy()
        if incoming:
            over, later = downlink_arrives(due, others, nodes, sizes, rate, busy)
        else:
            over, later = uplink_leaves(due, nodes, others, sizes, rate, busy)
        assert np.array_equal(busy, before), "what was handed in stays as it is"
        busy = later
        rows = list(zip(due.tolist(), nodes.tolist(), others.tolist(), sizes.tolist(), strict=True))
        expected = one_after_another(rows, rate.tolist(), known)
        assert over.tolist() == [expected[place] for place in range(m)]
        assert busy.tolist() == [known.get(node, -math.inf) for node in range(n)]
        start = float(due.max(initial=start))


def test_a_step_of_one_sender_leaves_in_the_order_of_its_receivers() -> None:
    rate, busy = np.array([10.0, np.inf]), np.array([3.0, -np.inf])
    leaves, busy = uplink_leaves(2.0, np.zeros(3, np.int64), np.array([9, 5, 7]), 20, rate, busy)
    assert leaves.tolist() == [9.0, 5.0, 7.0]
    assert busy.tolist() == [9.0, -np.inf]
    leaves, busy = uplink_leaves(2.0, np.ones(2, np.int64), np.array([0, 3]), 20, rate, busy)
    assert leaves.tolist() == [2.0, 2.0]


def test_an_intake_lets_a_later_message_pass_one_that_has_not_reached_it() -> None:
    intake = Intake(10.0)
    intake.add((4, 0), 100.0, 20)
    assert intake.arrivals({(1, 1): (5.0, 30), (2, 1): (6.0, 30)}) == {
        (1, 1): 8.0,
        (2, 1): 11.0,
        (4, 0): 102.0,
    }
    assert intake.settle(50.0) == {}
    intake.add((3, 2), 99.5, 20)
    assert intake.settle(100.0) == {(3, 2): 101.5, (4, 0): 103.5}
    assert intake.arrivals({(1, 3): (100.5, 10)}) == {(1, 3): 104.5}


@law
@given(st.integers(0, 10**6))
def test_an_intake_asked_in_pieces_is_one_queue(seed: int) -> None:
    rng = np.random.default_rng(seed)
    reaches = np.sort(np.round(rng.exponential(4.0, 20), 1))
    sizes = rng.integers(0, 9, 20).tolist()
    senders = rng.permutation(20).tolist()
    rows = [
        (due, 0, sender, size) for due, sender, size in zip(reaches.tolist(), senders, sizes, strict=True)
    ]
    expected = one_after_another(rows, [2.5], {})
    intake, found = Intake(2.5), dict[tuple[int, int], float]()
    for due, _, sender, size in rows:
        intake.add((sender, 0), due, size)
    for now in (1.0, 2.0, 8.0, math.inf):
        found |= intake.settle(now)
    assert found == {(senders[place], 0): time for place, time in expected.items()}


def test_no_messages_are_no_trouble() -> None:
    nobody = np.zeros(0, dtype=np.int64)
    over, busy = uplink_leaves(0.0, nobody, nobody, 8, np.ones(2), np.array([1.0, 2.0]))
    assert (over.tolist(), busy.tolist()) == ([], [1.0, 2.0])
    assert Intake(1.0).settle(5.0) == {}
    assert Intake(1.0).arrivals({}) == {}
