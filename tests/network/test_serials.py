"""The table over payload serials is a dictionary, only faster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfed.network.serials import SerialTable


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    start=st.sampled_from([0, 1, 1023, 5_000_000]),
    keep=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    late=st.sampled_from([0.0, 0.3, 0.9]),
    batches=st.integers(1, 60),
    seed=st.integers(0, 10_000),
)
def test_it_agrees_with_a_dictionary(start: int, keep: float, late: float, batches: int, seed: int) -> None:
    """Payloads are numbered when their steps begin, and put in when these end: slow ones come late."""
    pick = np.random.default_rng(seed)
    table = SerialTable("pending", "depth")
    oracle: dict[int, dict[str, int]] = {}
    serial, waiting = start, np.zeros(0, dtype=np.int64)
    for _ in range(batches):
        serial += int(pick.integers(0, 400))
        numbered = np.concatenate([waiting, serial + np.arange(int(pick.integers(1, 200)))])
        serial = int(numbered[-1]) + 1
        wait = pick.random(len(numbered)) < late
        new, waiting = pick.permutation(numbered[~wait]), numbered[wait]
        if not len(new):
            continue
        pending = pick.integers(0, 9, len(new))
        table.add(new, pending=pending, depth=7)
        oracle.update((int(s), {"pending": int(p), "depth": 7}) for s, p in zip(new, pending, strict=True))
        some = pick.permutation(np.array(list(oracle)))[: int(pick.integers(0, 50))]
        table.set("depth", some, some * 3)
        for s in some.tolist():
            oracle[s]["depth"] = 3 * s
        gone = np.array([s for s in oracle if pick.random() >= keep], dtype=np.int64)
        table.forget(gone)
        for s in gone.tolist():
            del oracle[s]
        living = pick.permutation(np.array(list(oracle), dtype=np.int64))
        assert table.alive == len(oracle)
        assert table.holds(np.arange(start, serial)).sum() == len(oracle)
        serials, columns = table.entries()
        assert serials.tolist() == sorted(oracle)
        for column in ("pending", "depth"):
            assert table.get(column, living).tolist() == [oracle[s][column] for s in living.tolist()]
            assert columns[column].tolist() == [oracle[s][column] for s in serials.tolist()]


def test_a_payload_may_be_older_than_all_that_are_there() -> None:
    table = SerialTable("depth")
    table.add(np.array([5, 3]), depth=1)
    table.add(np.array([0]), depth=2)
    table.add(np.array([70_000]), depth=3)
    assert table.entries()[0].tolist() == [0, 3, 5, 70_000]
    assert table.get("depth", np.array([0, 70_000, 3])).tolist() == [2, 3, 1]


def test_it_does_not_grow_with_the_number_of_payloads_gone_by() -> None:
    table = SerialTable("depth")
    for first in range(0, 200_000, 100):
        table.add(first + np.arange(100), depth=1)
        if first:
            table.forget(first - 100 + np.arange(100))
    assert table.alive == 100
    assert len(table._alive) <= 32_768


def test_a_table_never_filled_has_nothing_alive() -> None:
    assert SerialTable("depth").alive == 0
    assert SerialTable("depth").get("depth", np.zeros(0, dtype=np.int64)).tolist() == []


def test_an_unknown_column_is_an_error() -> None:
    with pytest.raises(KeyError):
        SerialTable("depth").add(np.array([0]), width=1)
