"""CIFAR-10 and CIFAR-100, from small files like those their authors give out."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncfed import Scenario, run
from asyncfed.data import (
    CIFAR100_CLASSES,
    CIFAR100_SUPERCLASSES,
    class_counts,
    has_test_part,
    load_dataset,
    load_dealt,
    load_with_test,
)
from asyncfed.data.cifar import CIFARS
from asyncfed.data.torchvision_import import no_downloads
from asyncfed.errors import DataError, UnknownNameError
from asyncfed.problems import hyper_representation
from asyncfed.protocols import AggITD, LocalSteps
from topologies import star

TEN, HUNDRED = CIFARS["cifar10"], CIFARS["cifar100"]
FOLDER, PARTS = TEN.folder, TEN.parts


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
    expected = (third - np.reshape(TEN.mean, (3, 1, 1))) / np.reshape(TEN.std, (3, 1, 1))
    np.testing.assert_allclose(train.x[21].numpy(), expected, rtol=1e-5, atol=1e-6)
    unit = load_dataset("cifar10", tmp_path, pixels="unit")
    np.testing.assert_allclose(unit.x[21].numpy(), third, rtol=1e-6)
    assert train.classes == 10
    assert len(load_dataset("cifar10", tmp_path, limit=7)) == 7
    every = load_dataset("cifar10", tmp_path, part="all")
    assert torch.equal(every.x, torch.cat((train.x, test.x)))
    assert torch.equal(every.y, torch.cat((train.y, test.y)))


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
    (tmp_path / FOLDER / "test_batch").write_bytes(pickle.dumps({"data": np.zeros((8, 3072), np.uint8)}))
    with pytest.raises(DataError, match=r"test_batch cannot be read \(it has no 'labels'"):
        load_dataset("cifar10", tmp_path, part="test")
    for images in (np.zeros((8, 32, 32, 3), np.uint8), np.zeros((8, 3072), np.float32)):
        other = {"data": images, "labels": [0] * 8}
        (tmp_path / FOLDER / "test_batch").write_bytes(pickle.dumps(other))
        with pytest.raises(
            DataError, match=r"images of the form \w+ .*not uint8 \(3072,\), colour by colour"
        ):
            load_dataset("cifar10", tmp_path, part="test")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_batches_that_were_built_again_need_the_images_and_their_labels_alone(
    batches: dict[str, tuple[np.ndarray, list[int]]], tmp_path: Path, protocol: int
) -> None:
    """Without the names of the files that the images once were, labels in whatever holds them."""
    before = load_dataset("cifar10", tmp_path)
    forms = [list, tuple, np.array, lambda labels: [np.int64(label) for label in labels], np.uint8]
    for form, name in zip(forms, PARTS["train"], strict=True):
        images, labels = batches[name]
        batch = {"data": images.reshape(8, 3, 32, 32) if form is list else images, "labels": form(labels)}
        (tmp_path / FOLDER / name).write_bytes(pickle.dumps(batch, protocol=protocol))
    again = load_dataset("cifar10", tmp_path)
    assert torch.equal(before.x, again.x)
    assert torch.equal(before.y, again.y)


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


def hundred(folder: Path, part: str, fine: list[int], coarse: list[int] | None = None) -> np.ndarray:
    """A file of CIFAR-100 with these labels."""
    folder.mkdir(exist_ok=True)
    images = np.random.default_rng(len(fine)).integers(0, 256, (len(fine), 3072)).astype(np.uint8)
    batch = {
        "data": images,
        "fine_labels": fine,
        "coarse_labels": [CIFAR100_SUPERCLASSES[label] for label in fine] if coarse is None else coarse,
        "filenames": ["x.png"] * len(fine),
        "batch_label": part,
    }
    (folder / part).write_bytes(pickle.dumps(batch, protocol=2))
    return images


def test_cifar100_has_fine_labels_and_two_parts(tmp_path: Path) -> None:
    fine = [(7 * number) % 100 for number in range(30)]
    images = hundred(tmp_path / HUNDRED.folder, "train", fine)
    hundred(tmp_path / HUNDRED.folder, "test", [99, 0])
    train, test = load_with_test("cifar100", tmp_path)
    assert test is not None
    assert (train.y.tolist(), test.y.tolist(), train.classes) == (fine, [99, 0], 100)
    image = images[4].reshape(3, 32, 32) / 255.0
    expected = (image - np.reshape(HUNDRED.mean, (3, 1, 1))) / np.reshape(HUNDRED.std, (3, 1, 1))
    np.testing.assert_allclose(train.x[4].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert load_dataset("cifar100", tmp_path, part="all").y.tolist() == [*fine, 99, 0]
    assert has_test_part("cifar100")


def test_the_superclasses_are_those_that_the_files_pair() -> None:
    """The pairs (fine, coarse) of the files that the authors give out."""
    pairs = """ 4  1 14  8  0  6  7  7 18  3    3 14  9 18  7 11  3  9  7 11    6 11  5 10  7  6 13 15  3 15
                0 11  1 10 12 14 16  9 11  5    5 19  8  8 15 13 14 17 18 10   16  4 17  4  2  0 17  4 18 17
               10  3  2 12 12 16 12  1  9 19    2 10  0  1 16 12  9 13 15 13   16 19  2  4  6 19  5  5  8 19
               18  1  2 15  6  0 17  8 14 13"""
    assert list(CIFAR100_SUPERCLASSES) == [int(coarse) for coarse in pairs.split()]
    assert len(set(CIFAR100_CLASSES)) == 100
    assert [CIFAR100_CLASSES[label] for label in (0, 1, 54, 99)] == [
        "apple",
        "aquarium_fish",
        "orchid",
        "worm",
    ]


def test_files_of_cifar100_that_are_missing_or_pair_otherwise_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"'cifar100', part 'test': test not found in .*cifar-100-python; put the files there"
    ):
        load_dataset("cifar100", tmp_path, part="test")
    with no_downloads(), pytest.raises(DataError, match="nothing is downloaded on behalf of a file"):
        load_dataset("cifar100", tmp_path, download=True)
    hundred(tmp_path / HUNDRED.folder, "test", [3, 5], coarse=[8, 2])
    with pytest.raises(
        DataError, match=r"image 1 has the fine label 5 \(bed\) and the coarse label 2.* be 6"
    ):
        load_dataset("cifar100", tmp_path, part="test")
    hundred(tmp_path / HUNDRED.folder, "test", [3, 100], coarse=[8, 2])
    with pytest.raises(DataError, match="2 images, and labels that do not go with them"):
        load_dataset("cifar100", tmp_path, part="test")
    with pytest.raises(UnknownNameError, match="unknown part of dataset 'cifar100' 'fine'"):
        load_dataset("cifar100", tmp_path, part="fine")


def test_pachinko_gives_clients_of_cifar100_few_superclasses(tmp_path: Path) -> None:
    hundred(tmp_path / HUNDRED.folder, "train", list(range(100)) * 12)
    data, classes = load_dealt("cifar100", "pachinko:0.1,10", 5, root=tmp_path)
    assert (data.train.total + data.validation.total + data.test.total, classes) == (1200, 100)
    table = class_counts(data, 100).to_numpy()
    assert table.sum(1).tolist() == [240] * 5
    coarse = np.zeros((5, 20))
    np.add.at(coarse.T, np.array(CIFAR100_SUPERCLASSES), table.T)
    assert coarse.max() == 60  # all there is of one
    assert (coarse == 0).sum() > 20
