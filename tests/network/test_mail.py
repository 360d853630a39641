"""A mailbox is a list of letters, only faster: what is far away costs nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed.network.schedules.mail import Letters, Mailbox


def _letters(serials: list[int], arrives: list[float]) -> Letters:
    numbers, flags = np.array(serials, dtype=np.int64), np.zeros(len(serials), dtype=np.bool_)
    times = np.array(arrives)
    weights = np.zeros((len(serials), 1))
    return Letters(numbers, numbers, numbers, numbers, numbers, times, times, flags, weights, numbers)


def _plain(letters: Letters) -> list[tuple[int, float]]:
    return list(zip(letters.serial.tolist(), letters.arrives.tolist(), strict=True))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), late=st.sampled_from([0.5, 3.0, 40.0]))
def test_it_agrees_with_a_list(seed: int, late: float) -> None:
    """`late`: messages take so many windows; most are far away where that is long."""
    pick = np.random.default_rng(seed)
    box, oracle, shelf, put = Mailbox(1), list[tuple[int, float]](), list[tuple[int, float]](), 0
    for now in range(1, 40):
        count = int(pick.integers(0, 600))
        arrives = (now - 1 + np.round(late * pick.exponential(size=count), 1)).tolist()
        letters = list(zip(range(put, put + count), arrives, strict=True))
        put += count
        box.put(_letters([serial for serial, _ in letters], arrives), now)
        oracle += letters
        here = box.look(now)
        arrived = [letter for letter in oracle if letter[1] < now]
        assert [letter for letter in _plain(here) if letter[1] < now] == arrived
        takes = (here.arrives < now) & (pick.random(len(here)) < 0.8)
        taken = _plain(box.take(takes))
        shelves = pick.random(len(box.here)) < 0.05
        shelved = _plain(box.here.at(shelves))
        box.shelve(shelves)
        oracle = sorted(set(oracle) - set(taken) - set(shelved))
        shelf += shelved
        assert len(box) == len(oracle) + len(shelf)
        assert _plain(box.by(now)) == sorted(one for one in [*oracle, *shelf] if one[1] <= now)
        assert _plain(box.all()) == sorted([*oracle, *shelf])


def test_what_is_far_away_is_not_looked_at() -> None:
    """A hundred messages in every window that take ever longer."""
    box, looked_at = Mailbox(1), 0
    for now in range(2000):
        box.put(_letters(list(range(100)), [now * 3.0 + 1] * 100), now + 1)
        here = box.look(now + 1)
        looked_at += len(here)
        box.take(here.arrives < now + 1)
    assert len(box) > 120_000
    assert looked_at < 2000 * 3000
