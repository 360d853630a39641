"""Packed clients: what goes in per client comes out per client."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncfed.data import (
    IID,
    ClientData,
    ClientShards,
    Dataset,
    DirichletOverClients,
    class_counts,
    client_data_from_lists,
    load_dataset,
    partition_data,
    plot_class_counts,
)
from asyncfed.errors import DataError

SIZES = [3, 1, 5, 2]


@pytest.fixture
def pieces() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 4, generator=generator), torch.arange(size) + 10 * i)
        for i, size in enumerate(SIZES)
    ]


@pytest.fixture
def shards(pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> ClientShards:
    return client_data_from_lists(pieces).train


def test_a_client_finds_its_own_samples(
    shards: ClientShards, pieces: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    assert shards.clients == 4
    assert shards.total == 11
    assert shards.offsets.tolist() == [0, 3, 4, 9]
    for client, (x, y) in enumerate(pieces):
        assert torch.equal(shards.of(client)[0], x)
        assert torch.equal(shards.of(client)[1], y)


def test_select_takes_clients_in_the_order_given(shards: ClientShards) -> None:
    chosen = shards.select([2, 0, 2])
    assert chosen.sizes.tolist() == [5, 3, 5]
    for place, client in enumerate([2, 0, 2]):
        assert all(torch.equal(a, b) for a, b in zip(chosen.of(place), shards.of(client), strict=True))
    assert shards.select(np.array([], dtype=np.int64)).total == 0


def test_gather_picks_samples_within_each_client(shards: ClientShards) -> None:
    clients, index = torch.tensor([3, 0, 1]), torch.tensor([[0, 1, 1], [2, 0, 1], [0, 0, 0]])
    x, y = shards.gather(clients, index)
    assert x.shape == (3, 3, 4)
    assert y.tolist() == [[30, 31, 31], [2, 0, 1], [10, 10, 10]]
    for row, client in enumerate(clients.tolist()):
        assert torch.equal(x[row], shards.of(client)[0][index[row]])


def test_to_converts_floating_tensors_only(shards: ClientShards) -> None:
    double = shards.to(torch.float64)
    assert [t.dtype for t in double.tensors] == [torch.float64, torch.int64]
    assert [t.dtype for t in double.to(torch.float32, "cpu").tensors] == [torch.float32, torch.int64]
    assert torch.equal(double.tensors[0].float(), shards.tensors[0])


def test_splits_left_out_are_empty(pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    data = client_data_from_lists(pieces, test=pieces[::-1])
    assert data.clients == 4
    assert data.validation.sizes.tolist() == [0, 0, 0, 0]
    assert data.validation.of(1)[0].shape == (0, 4)
    assert data.select([1, 2]).test.sizes.tolist() == [5, 1]
    assert data.to(torch.float64).test.tensors[0].dtype == torch.float64


def test_data_that_does_not_fit_together_is_refused(pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with pytest.raises(DataError, match="the splits have different numbers of clients"):
        client_data_from_lists(pieces, test=pieces[:2])
    with pytest.raises(DataError, match="client 1 have shapes"):
        client_data_from_lists([pieces[0], (pieces[1][0], pieces[0][1])])
    with pytest.raises(DataError, match="client 0 has no training samples"):
        client_data_from_lists([(torch.empty(0, 4), torch.empty(0))])
    with pytest.raises(DataError, match="the train split has no clients"):
        client_data_from_lists([])
    with pytest.raises(DataError, match=r"add up to 3 samples, but the packed tensors have \[4\]"):
        ClientShards((torch.zeros(4),), np.array([1, 2]))


def test_a_client_without_training_samples_is_refused_however_it_was_built() -> None:
    """It would find the samples of its neighbour at its own place."""
    tensors = (torch.arange(4.0)[:, None],)
    full, holes = ClientShards(tensors, np.array([1, 1, 2])), ClientShards(tensors, np.array([0, 4, 0]))
    with pytest.raises(DataError, match=r"client 0 has no training samples \(2 such clients in all\)"):
        ClientData(holes, full, full)
    assert ClientData(full, holes, holes).clients == 3
    assert ClientData(full, full, full).select([]).clients == 0  # nobody at all is no client without samples


def numbered(samples: int, classes: int = 3) -> Dataset:
    x = torch.arange(samples, dtype=torch.float32).unsqueeze(1)
    return Dataset("numbered", x, torch.arange(samples) % classes, classes)


def samples_of(data: ClientData, client: int) -> list[list[int]]:
    return [split.of(client)[0][:, 0].int().tolist() for split in (data.train, data.validation, data.test)]


def test_each_client_is_split_by_the_fractions_without_losing_a_sample() -> None:
    dataset = numbered(1000)
    data = partition_data(dataset, IID(), 10, seed=0)
    seen = []
    for client in range(10):
        parts = samples_of(data, client)
        assert [len(part) for part in parts] == [60, 20, 20]
        seen += [sample for part in parts for sample in part]
    assert sorted(seen) == list(range(1000))
    assert torch.equal(data.train.tensors[1], data.train.tensors[0][:, 0].long() % 3)


def test_the_split_follows_from_the_seed() -> None:
    first, again, other = (partition_data(numbered(100), IID(), 4, seed=seed) for seed in (5, 5, 6))
    assert samples_of(first, 2) == samples_of(again, 2)
    assert samples_of(first, 2) != samples_of(other, 2)


@pytest.mark.parametrize(
    ("samples", "fractions", "expected"),
    [
        (3, (0.6, 0.2, 0.2), [1, 1, 1]),
        (4, (0.6, 0.2, 0.2), [2, 1, 1]),
        (1, (1.0, 0.0, 0.0), [1, 0, 0]),
        (2, (0.1, 0.0, 0.9), [1, 0, 1]),
        (10, (0.02, 0.49, 0.49), [1, 5, 4]),
        (600, (0.5, 0.5, 0.0), [300, 300, 0]),
    ],
)
def test_every_part_asked_for_gets_a_sample(
    samples: int, fractions: tuple[float, float, float], expected: list[int]
) -> None:
    data = partition_data(numbered(samples), IID(), 1, seed=0, fractions=fractions)
    assert [len(part) for part in samples_of(data, 0)] == expected


def test_a_client_too_small_to_split_is_named_with_a_remedy() -> None:
    with pytest.raises(DataError, match=r"client 0 has 2 samples.*min_samples=3") as caught:
        partition_data(numbered(6), IID(), 3, seed=0)
    assert "fewer clients" in str(caught.value)


@pytest.mark.parametrize("fractions", [(0.5, 0.5), (0.5, 0.2, 0.2), (-0.1, 0.6, 0.5), (0.0, 0.5, 0.5)])
def test_fractions_that_are_none_are_refused(fractions: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match="fractions"):
        partition_data(numbered(60), IID(), 3, seed=0, fractions=fractions)


def test_a_separate_test_set_is_dealt_out_evenly_and_whole_whatever_the_partition() -> None:
    dataset, test = numbered(400), numbered(130)
    data = partition_data(dataset, DirichletOverClients(0.5), 6, 0, (0.5, 0.5, 0.0), test)
    assert data.test.sizes.tolist() == [22, 22, 22, 22, 21, 21]
    assert sorted(data.test.tensors[0][:, 0].int().tolist()) == list(range(130))
    assert torch.equal(data.test.tensors[1], data.test.tensors[0][:, 0].long() % 3)
    assert samples_of(data, 0)[2] != list(range(22))
    own = [sample for client in range(6) for part in samples_of(data, client)[:2] for sample in part]
    assert sorted(own) == list(range(400))


def test_a_separate_test_set_moves_nothing_else() -> None:
    alone = partition_data(numbered(100), IID(), 4, 5, (0.5, 0.5, 0.0))
    first, again, other = (
        partition_data(numbered(100), IID(), 4, seed, (0.5, 0.5, 0.0), numbered(40)) for seed in (5, 5, 6)
    )
    assert samples_of(first, 2)[:2] == samples_of(alone, 2)[:2]
    assert samples_of(first, 2)[2] == samples_of(again, 2)[2]
    assert samples_of(first, 2)[2] != samples_of(other, 2)[2]


def test_a_separate_test_set_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match=r"a separate test set of 9 samples.*set the third fraction to 0"):
        partition_data(numbered(100), IID(), 4, 0, test=numbered(9))
    with pytest.raises(DataError, match="4 clients need a test sample each, the separate test set has 3"):
        partition_data(numbered(100), IID(), 4, 0, (0.5, 0.5, 0.0), numbered(3))


def test_class_counts_add_up_to_the_dataset() -> None:
    digits = load_dataset("digits")
    data = partition_data(digits, DirichletOverClients(0.4), 12, seed=1)
    table = class_counts(data, 10)
    assert table.shape == (12, 10)
    assert table.index.name == "client"
    assert table.columns.name == "class"
    assert table.sum(axis=0).tolist() == torch.bincount(digits.y).tolist()
    labels = data.train.of(7)[1]
    assert class_counts(data.train, 10).loc[7].tolist() == torch.bincount(labels, minlength=10).tolist()


def test_the_picture_of_class_counts_is_a_png(tmp_path: Path) -> None:
    data = partition_data(numbered(300), DirichletOverClients(0.5), 6, seed=1)
    plot_class_counts(data, 3, tmp_path / "counts.png")
    assert (tmp_path / "counts.png").read_bytes().startswith(b"\x89PNG")
