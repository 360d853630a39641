"""Long tails: how many of each class, which of them, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from asyncfed.data import Dataset, load_dataset, long_tail, long_tail_sizes
from asyncfed.errors import DataError

real = os.environ.get("ASYNCFED_DATA")
needs_mnist = pytest.mark.skipif(
    real is None or not Path(real, "MNIST").is_dir(),
    reason="ASYNCFED_DATA does not point to a directory with MNIST",
)


def test_sizes_are_those_of_the_paper() -> None:
    assert long_tail_sizes(10, 6000, 0.01) == [6000, 3597, 2156, 1293, 775, 465, 278, 167, 100, 60]
    assert long_tail_sizes(3, 100, 0.25) == [100, 50, 25]
    assert long_tail_sizes(4, 7, 1.0) == [7] * 4
    assert long_tail_sizes(1, 5, 0.1) == [5]


def numbered(each: int) -> Dataset:
    return Dataset("numbered", torch.arange(3.0 * each).unsqueeze(1), torch.arange(3 * each) % 3, 3)


def test_a_subset_keeps_order_and_labels_and_follows_from_the_seed() -> None:
    whole = numbered(100)
    first, again, other = (long_tail(whole, 100, 0.25, seed) for seed in (1, 1, 2))
    assert torch.bincount(first.y).tolist() == [100, 50, 25]
    rows = first.x[:, 0].long()
    assert (rows.diff() > 0).all()
    assert torch.equal(first.y, rows % 3)
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)


def test_a_class_with_fewer_gives_all_it_has() -> None:
    assert torch.bincount(long_tail(numbered(60), 100, 0.25).y).tolist() == [60, 50, 25]


@needs_mnist
def test_mnist_has_no_six_thousand_zeros() -> None:
    sizes = torch.bincount(long_tail(load_dataset("mnist"), 6000, 0.01).y).tolist()
    assert sizes == [5923, 3597, 2156, 1293, 775, 465, 278, 167, 100, 60]


def test_tails_that_make_no_sense_are_refused() -> None:
    with pytest.raises(DataError, match="long_tail: largest is 0; it must be a whole number, at least 1"):
        long_tail(numbered(9), 0, 0.5)
    for ratio in (0.0, 1.5, float("nan")):
        with pytest.raises(DataError, match=rf"ratio is {ratio}; .* in \(0, 1\]"):
            long_tail(numbered(9), 9, ratio)
    with pytest.raises(DataError, match="class 2 of dataset 'numbered' has 9 samples and would keep 0"):
        long_tail(numbered(9), 9, 0.01)
