"""Extra test images: nobody's own, in each client's label proportions, and apart from every other draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncfed.data import ClientData, DirichletOverClasses, load_dataset, load_dealt, partition_data
from asyncfed.data.extra_test import extra_test_rows
from asyncfed.data.partition import DirichletOverClients
from asyncfed.errors import DataError
from asyncfed.problems import classification, personalized_classification
from asyncfed.rng import Streams


def numbers(data: ClientData, part: str, client: int) -> list[int]:
    """Which of the digits a client has: no two of them are alike."""
    found: list[int] = []
    for image in getattr(data, part).of(client)[0]:
        found.extend((DIGITS.x == image).all(1).nonzero().flatten().tolist())
    return found


DIGITS = load_dataset("digits")


def test_without_them_a_dataset_is_dealt_as_ever() -> None:
    data, classes = load_dealt("digits", "dirichlet:0.4", 5, seed=3, limit=400)
    expected = partition_data(load_dataset("digits", limit=400, seed=3), DirichletOverClients(0.4), 5, seed=3)
    assert classes == 10
    for part in ("train", "validation", "test"):
        found, wanted = getattr(data, part), getattr(expected, part)
        assert found.sizes.tolist() == wanted.sizes.tolist()
        assert all(map(torch.equal, found.tensors, wanted.tensors))


@pytest.mark.parametrize("limit", [400, None])
def test_they_are_nobodys_and_come_after_a_clients_own_which_stay_as_they_were(limit: int | None) -> None:
    partition = DirichletOverClasses(0.4, samples=60)
    few, _ = load_dealt("digits", partition, 5, seed=3, limit=limit)
    more, _ = load_dealt("digits", partition, 5, seed=3, limit=limit, extra_test=50)
    for part in ("train", "validation"):
        assert all(map(torch.equal, getattr(few, part).tensors, getattr(more, part).tensors))
    held = {
        number
        for client in range(5)
        for part in ("train", "validation", "test")
        for number in numbers(few, part, client)
    }
    assert len(held) == 300
    extra = []
    for client in range(5):
        own, every = numbers(few, "test", client), numbers(more, "test", client)
        assert every[: len(own)] == own
        extra.append(every[len(own) :])
        assert len(set(extra[-1])) == len(extra[-1]) == 50
        assert not held & set(extra[-1])
    assert len({*extra[0], *extra[1], *extra[2], *extra[3], *extra[4]}) < 250  # some are shared


def test_labels_are_as_frequent_as_in_the_clients_share() -> None:
    labels = np.repeat(np.arange(4), 1000)
    shares = [np.array([0, 1, 2, 1000, 1001, 2000]), np.array([3000]), np.array([0, 1000, 2000])]
    rows = extra_test_rows(labels, shares, 100, Streams(0))
    tables = [np.bincount(labels[own], minlength=4).tolist() for own in rows]
    assert tables == [[50, 33, 17, 0], [0, 0, 0, 100], [34, 33, 33, 0]]  # 50, 33⅓, 16⅔; 100; 33⅓ each


def test_what_is_unused_of_a_label_is_all_there_is() -> None:
    labels = np.repeat(np.arange(3), [10, 100, 5])
    shares = [np.arange(6), np.arange(4, 20), np.arange(110, 115)]  # all of labels 0 and 2, and 10 of label 1
    rows = extra_test_rows(labels, shares, 40, Streams(0))
    assert [labels[own].tolist() for own in rows] == [[], [1] * 25, []]  # 10 of 16 samples have label 1
    assert sorted(extra_test_rows(labels, shares, 200, Streams(0))[1]) == list(range(20, 110))  # of 125


def test_they_follow_from_the_seed_and_from_each_client_alone() -> None:
    labels = np.repeat(np.arange(5), 300)
    shares = [np.arange(0, 600, 7), np.arange(3, 1400, 50)]
    first, again, other = (extra_test_rows(labels, shares, 60, Streams(seed)) for seed in (1, 1, 2))
    assert all(map(np.array_equal, first, again))
    assert not np.array_equal(first[0], other[0])
    longer = extra_test_rows(labels, [*shares, np.array([0])], 60, Streams(1))  # sample 0 is client 0's too
    assert all(map(np.array_equal, longer, first))


def test_every_unused_image_of_a_label_is_as_likely() -> None:
    """Of 20 unused images 5 are drawn, 400 times: each is drawn 100 ± 5·8.7 times."""
    labels = np.zeros(21, dtype=np.int64)
    shares = [np.array([20])] * 400
    drawn = np.bincount(np.concatenate(extra_test_rows(labels, shares, 5, Streams(0))), minlength=21)
    assert drawn[20] == 0
    assert drawn.sum() == 2000
    assert (np.abs(drawn[:20] - 100) < 5 * np.sqrt(400 * 0.25 * 0.75)).all()


def test_problems_take_them_and_judge_by_them() -> None:
    arguments = {"clients": 4, "limit": 300, "seed": 1, "extra_test": 30}
    few, more = classification(clients=4, limit=300, seed=1), classification(**arguments)
    assert few.data.test.sizes.tolist() == [size - 30 for size in more.data.test.sizes]
    assert personalized_classification(**arguments).data.test.sizes.tolist() == more.data.test.sizes.tolist()


def test_where_nothing_is_unused_there_is_no_extra_test() -> None:
    with pytest.raises(
        DataError, match=r"extra_test is 9, and the clients hold all of the 1797 samples.*limit="
    ):
        load_dealt("digits", "iid", 3, extra_test=9)
    with pytest.raises(DataError, match="extra_test is -1; it must be a whole number, at least 0"):
        classification(extra_test=-1)


def test_a_client_without_any_test_image_is_refused() -> None:
    whole = load_dataset("digits", limit=1796)
    left = next(y for image, y in zip(DIGITS.x, DIGITS.y, strict=True) if not (whole.x == image).all(1).any())
    with pytest.raises(DataError, match=r"no unused image .* has a label of client \d.*third fraction"):
        load_dealt("digits", "shards:1", 10, fractions=(0.8, 0.2, 0.0), limit=1796, extra_test=5)
    data, _ = load_dealt("digits", "shards:1", 10, limit=1796, extra_test=5)
    with_extra = [client for client in range(10) if data.test.sizes[client] > 36]
    assert with_extra
    assert all(left in data.test.of(client)[1] for client in with_extra)
