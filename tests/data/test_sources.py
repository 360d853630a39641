"""Samples from anywhere make the same data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from asyncfed import DataError
from asyncfed.data import ClientData, client_data

SAMPLES, FEATURES = 60, 4
X = np.random.default_rng(0).normal(size=(SAMPLES, FEATURES)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, SAMPLES)
WHOSE = np.array(["north", "south", "east"])[np.random.default_rng(2).integers(0, 3, SAMPLES)]


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> Any:
        return {"image": torch.from_numpy(X[place]), "label": int(Y[place])}


class HuggingFace:
    """What `datasets.Dataset` offers: names of columns, and a column by name."""

    column_names = ("image", "label", "region")

    def __getitem__(self, name: str) -> list[Any]:
        return {"image": X.tolist(), "label": Y.tolist(), "region": WHOSE.tolist()}[name]


def frame() -> pd.DataFrame:
    table = pd.DataFrame(X, columns=[f"f{place}" for place in range(FEATURES)])
    return table.assign(label=Y, region=WHOSE)


SOURCES: dict[str, Any] = {
    "arrays": (X, Y),
    "tensors": (torch.from_numpy(X), torch.from_numpy(Y)),
    "a dict": {"image": X, "label": Y},
    "a list of pairs": [(one.tolist(), int(label)) for one, label in zip(X, Y, strict=True)],
    "a list of dicts": [{"image": one, "label": label} for one, label in zip(X, Y, strict=True)],
    "a TensorDataset": TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
    "a Dataset of dicts": Samples(),
    "a table": frame().drop(columns="region"),
}


def same(one: ClientData, other: ClientData) -> None:
    for split in ("train", "validation", "test"):
        mine, theirs = getattr(one, split), getattr(other, split)
        assert np.array_equal(mine.sizes, theirs.sizes)
        for a, b in zip(mine.tensors, theirs.tensors, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same(source: str) -> None:
    expected = client_data((X, Y), clients=3, partition="dirichlet:1.0", seed=5)
    same(client_data(SOURCES[source], clients=3, partition="dirichlet:1.0", seed=5), expected)
    assert expected.train.tensors[0].dtype == torch.float32
    assert expected.train.tensors[1].dtype == torch.int64


def test_a_column_says_whose_a_sample_is() -> None:
    regions = sorted(set(WHOSE))
    indices = [np.flatnonzero(name == WHOSE) for name in regions]
    expected = client_data((X, Y), indices=indices)
    same(client_data(frame(), column="region"), expected)
    same(client_data(HuggingFace(), column="region", x="image", y="label"), expected)
    same(client_data({"image": X, "label": Y, "region": WHOSE}, column="region"), expected)
    everything = [torch.cat([getattr(expected, s).of(1)[1] for s in ("train", "validation", "test")])]
    assert sorted(everything[0].tolist()) == sorted(Y[regions[1] == WHOSE].tolist())


def test_a_test_set_may_stand_apart_and_transforms_are_applied_once() -> None:
    calls = 0

    def twice(one: Any) -> Any:
        nonlocal calls
        calls += 1
        return 2 * one

    made = client_data(
        (X, Y), clients=4, fractions=(0.8, 0.2, 0.0), test=(X[:8], Y[:8]), transform=twice, seed=1
    )
    assert calls == SAMPLES + 8
    assert made.test.sizes.tolist() == [2, 2, 2, 2]
    plain = client_data((2 * X, Y), clients=4, fractions=(0.8, 0.2, 0.0), test=(2 * X[:8], Y[:8]), seed=1)
    same(made, plain)


def test_samples_need_no_label_and_pictures_are_scaled() -> None:
    made = client_data(X, clients=5)
    assert len(made.train.tensors) == 1
    from PIL import Image

    picture = Image.fromarray(np.full((5, 6, 3), 51, dtype=np.uint8))
    images = client_data([(picture, "cat"), (picture, "ant")] * 5, clients=1)
    assert images.train.tensors[0].shape[1:] == (3, 5, 6)
    assert images.train.tensors[0][0, 0, 0, 0] == pytest.approx(0.2)
    assert set(images.train.tensors[1].tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"source": 5, "clients": 2}, "cannot be read from a int"),
        ({"source": (X, Y)}, "nothing says whose the samples are"),
        ({"source": (X, Y), "clients": 2, "indices": [[0]]}, "indices and clients says whose"),
        (
            {"source": (X, Y), "indices": [[0], [60]]},
            "client 1 is given sample 60; there are samples 0 to 59",
        ),
        ({"source": (X, Y), "indices": [[0.5]]}, "whole number"),
        ({"source": (X, Y), "indices": [[1]], "partition": "iid"}, "both say whose"),
        ({"source": (X, Y[:5]), "clients": 2}, "different numbers of samples: {'0': 60, '1': 5}"),
        ({"source": [([1.0, 2.0], 0), ([1.0], 1)], "clients": 1}, r"sample 1 of column '0' has shape \(1,\)"),
        ({"source": [(1.0, 0), {"a": 1}], "clients": 1}, "sample 1 is a mapping of a"),
        ({"source": {"a": [object()]}, "clients": 1}, "no array of numbers"),
        ({"source": frame(), "column": "town"}, "column names 'town', and there is no such column"),
        ({"source": frame(), "clients": 2, "y": "outcome"}, "y names 'outcome'"),
        ({"source": (X, X[:, 0]), "clients": 2, "partition": "shards:2"}, "the targets are no classes"),
        ({"source": X, "clients": 2, "partition": "shards:2"}, "the samples have none"),
        ({"source": (X, Y), "clients": 2, "test": (X, Y)}, "set the third fraction to 0"),
        ({"source": [], "clients": 2}, "there are no samples"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        client_data(**given)
