"""CIFAR-10, from small files like those its authors give out."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncfed import Scenario, run
from asyncfed.data import load_dataset, load_with_test
from asyncfed.data.cifar10 import FOLDER, MEAN, PARTS, STD
from asyncfed.errors import DataError, UnknownNameError
from asyncfed.problems import hyper_representation
from asyncfed.protocols import AggITD, LocalSteps
from topologies import star


@pytest.fixture
def batches(tmp_path: Path) -> dict[str, tuple[np.ndarray, list[int]]]:
    """Eight images in each of the six files, beside the keys that the real ones have."""
    generator = np.random.default_rng(0)
    (tmp_path / FOLDER).mkdir()
    made = {}
    for name in (*PARTS["train"], *PARTS["test"]):
        images = generator.integers(0, 256, (8, 3072)).astype(np.uint8)
        labels = generator.integers(0, 10, 8).tolist()
        batch = {"batch_label": name, "labels": labels, "data": images, "filenames": ["x.png"] * 8}
        (tmp_path / FOLDER / name).write_bytes(pickle.dumps(batch, protocol=2))
        made[name] = images, labels
    return made


def test_parts_are_joined_in_order_and_every_colour_is_normalised(
    batches: dict[str, tuple[np.ndarray, list[int]]], tmp_path: Path
) -> None:
    train, test = load_with_test("cifar10", tmp_path)
    assert test is not None
    assert (train.x.shape, test.x.shape) == ((40, 3, 32, 32), (8, 3, 32, 32))
    assert train.y.tolist() == [label for name in PARTS["train"] for label in batches[name][1]]
    third = batches["data_batch_3"][0][5].reshape(3, 32, 32) / 255.0
    expected = (third - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    np.testing.assert_allclose(train.x[21].numpy(), expected, rtol=1e-5, atol=1e-6)
    unit = load_dataset("cifar10", tmp_path, pixels="unit")
    np.testing.assert_allclose(unit.x[21].numpy(), third, rtol=1e-6)
    assert train.classes == 10
    assert len(load_dataset("cifar10", tmp_path, limit=7)) == 7


@pytest.mark.usefixtures("batches")
def test_missing_and_damaged_files_are_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="part of dataset 'cifar10'"):
        load_dataset("cifar10", tmp_path, part="tests")
    (tmp_path / FOLDER / "data_batch_2").unlink()
    with pytest.raises(DataError, match=r"data_batch_2 not found .* ASYNCFED_DATA .* download=True"):
        load_dataset("cifar10", tmp_path)
    (tmp_path / FOLDER / "test_batch").write_bytes(b"\x80\x02}q\x00(X")
    with pytest.raises(DataError, match="test_batch cannot be read"):
        load_dataset("cifar10", tmp_path, part="test")
    short = {"data": np.zeros((8, 3072), np.uint8), "labels": [1, 2]}
    (tmp_path / FOLDER / "test_batch").write_bytes(pickle.dumps(short))
    with pytest.raises(DataError, match="8 images, and labels that do not go with them"):
        load_dataset("cifar10", tmp_path, part="test")


class _Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("written",)


@pytest.mark.usefixtures("batches")
def test_reading_a_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / FOLDER / "test_batch").write_bytes(pickle.dumps({"data": _Harmful(), "labels": []}))
    with pytest.raises(DataError, match=r"it asks for \w+\.mkdir"):
        load_dataset("cifar10", tmp_path, part="test")
    assert not Path("written").exists()


@pytest.mark.usefixtures("batches")
def test_the_papers_network_is_cut_before_its_last_two_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCFED_DATA", str(tmp_path))
    problem = hyper_representation("cifar10", clients=2, model="lenet", inner_layers=2)
    protocol = AggITD(2, LocalSteps(0.01, epochs=1, batch=5), LocalSteps(0.01))
    result = run(Scenario(problem=problem, topology=star(2), protocol=protocol), out=tmp_path / "run")
    assert result.final["inner"].shape == (1, 120 * 84 + 84 + 84 * 10 + 10)
    assert result.final["outer"].shape == (1, 3 * 6 * 25 + 6 + 6 * 16 * 25 + 16 + 400 * 120 + 120)
    assert torch.isfinite(result.final["outer"]).all()
