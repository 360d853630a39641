"""Datasets: real ones where they are at hand, small files in torchvision's format otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncfed.data import DATASETS, data_directory, has_test_part, load_dataset, load_with_test
from asyncfed.data.torchvision_import import import_torchvision
from asyncfed.errors import DataError, UnknownNameError
from tests.data.idx import small_images, write_idx

real = os.environ.get("ASYNCFED_DATA")
needs_mnist = pytest.mark.skipif(
    real is None or not Path(real, "MNIST").is_dir(),
    reason="ASYNCFED_DATA does not point to a directory with MNIST",
)
needs_emnist = pytest.mark.skipif(
    real is None or not Path(real, "EMNIST").is_dir(),
    reason="ASYNCFED_DATA does not point to a directory with EMNIST",
)


def test_digits_are_flat_and_scaled_to_the_unit_interval() -> None:
    digits = load_dataset("digits")
    assert digits.x.shape == (1797, 64)
    assert digits.x.dtype == torch.float32
    assert digits.y.dtype == torch.int64
    assert (digits.x.min().item(), digits.x.max().item()) == (0.0, 1.0)
    assert digits.classes == 10 == len(digits.y.unique())
    assert len(digits) == 1797


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("part", "stem"), [("train", "train"), ("test", "t10k")])
def test_mnist_is_normalised_whether_packed_or_not(
    tmp_path: Path, packed: bool, part: str, stem: str
) -> None:
    images, labels = small_images(tmp_path / "MNIST" / "raw", stem, packed)
    mnist = load_dataset("mnist", tmp_path, part=part)
    expected = ((images / 255.0 - 0.1307) / 0.3081).astype(np.float32)
    np.testing.assert_allclose(mnist.x[:, 0].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert mnist.x.shape == (12, 1, 28, 28)
    assert mnist.y.tolist() == labels.tolist()


def test_emnist_letters_are_turned_upright(tmp_path: Path) -> None:
    images, _ = small_images(tmp_path / "EMNIST" / "raw", "emnist-byclass-test", packed=True)
    emnist = load_dataset("emnist", tmp_path)
    expected = ((images.transpose(0, 2, 1) / 255.0 - 0.1307) / 0.3081).astype(np.float32)
    np.testing.assert_allclose(emnist.x[:, 0].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert emnist.classes == 62


def test_pixels_may_stay_in_the_unit_interval(tmp_path: Path) -> None:
    images, _ = small_images(tmp_path / "MNIST" / "raw", "train", packed=False)
    plain = load_dataset("mnist", tmp_path, pixels="unit")
    np.testing.assert_allclose(plain.x[:, 0].numpy(), images / 255.0, rtol=1e-6)
    assert torch.equal(load_dataset("digits", pixels="unit").x, load_dataset("digits").x)
    with pytest.raises(DataError, match="pixels is 'raw'; it must be 'normalised' or 'unit'"):
        load_dataset("mnist", tmp_path, pixels="raw")  # type: ignore[arg-type]


def test_loading_writes_nothing_beside_the_files(tmp_path: Path) -> None:
    small_images(tmp_path / "MNIST" / "raw", "train", packed=True)
    before = sorted(tmp_path.rglob("*"))
    load_dataset("mnist", tmp_path, download=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_environment_names_the_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_images(tmp_path / "MNIST" / "raw", "train", packed=True)
    monkeypatch.setenv("ASYNCFED_DATA", str(tmp_path))
    assert len(load_dataset("mnist")) == 12
    monkeypatch.delenv("ASYNCFED_DATA")
    assert data_directory() == Path.home() / ".cache" / "asyncfed"
    assert data_directory("elsewhere") == Path("elsewhere")


def test_a_limit_draws_by_seed_and_keeps_the_order() -> None:
    whole = load_dataset("digits")
    first, again, other = (load_dataset("digits", limit=300, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.y, other.y)
    rows = [next(i for i in range(1797) if torch.equal(whole.x[i], x)) for x in first.x[:20]]
    assert rows == sorted(set(rows))
    assert [whole.y[i].item() for i in rows] == first.y[:20].tolist()


@pytest.mark.parametrize(
    ("limit", "told"), [(0, "it must be a whole number"), (1798, "dataset 'digits' has 1797 samples")]
)
def test_a_limit_out_of_range_is_refused(limit: int, told: str) -> None:
    with pytest.raises(DataError, match=f"limit is {limit}; {told}"):
        load_dataset("digits", limit=limit)


def test_missing_files_are_named_with_a_remedy(tmp_path: Path) -> None:
    small_images(tmp_path / "MNIST" / "raw", "train", packed=True)
    (tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError) as caught:
        load_dataset("mnist", tmp_path)
    message = str(caught.value)
    assert "train-labels-idx1-ubyte" in message
    assert "train-images" not in message
    for word in (str(tmp_path / "MNIST" / "raw"), "ASYNCFED_DATA", "download=True"):
        assert word in message


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    small_images(tmp_path / "MNIST" / "raw", "train", packed=False)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03\x00")
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.* cannot be read"):
        load_dataset("mnist", tmp_path)


def test_images_without_their_labels_are_refused(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    small_images(raw, "train", packed=False)
    write_idx(raw / "train-labels-idx1-ubyte", np.zeros(3), packed=False)
    with pytest.raises(DataError, match="12 images but 3 labels"):
        load_dataset("mnist", tmp_path)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown dataset 'mnits'; did you mean 'mnist'"):
        load_dataset("mnits")
    with pytest.raises(
        UnknownNameError, match="unknown part of dataset 'mnist' 'tests'; did you mean 'test'"
    ):
        load_dataset("mnist", part="tests")
    with pytest.raises(DataError, match="'digits' has no parts"):
        load_dataset("digits", part="train")
    assert set(DATASETS) == {"digits", "mnist", "emnist", "cifar10", "cifar100"}


def test_the_test_part_stands_apart_where_there_is_one(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    images, labels = small_images(raw, "train", packed=False)
    write_idx(raw / "t10k-images-idx3-ubyte", images[:5], packed=False)
    write_idx(raw / "t10k-labels-idx1-ubyte", labels[:5], packed=False)
    train, test = load_with_test("mnist", tmp_path, limit=7)
    assert test is not None
    assert (len(train), len(test)) == (7, 5)
    assert test.y.tolist() == labels[:5].tolist()
    assert load_with_test("mnist", tmp_path, separate_test=False)[1] is None
    assert has_test_part("mnist")
    whole, nothing = load_with_test("digits")
    assert (len(whole), nothing) == (1797, None)
    with pytest.raises(DataError, match="dataset 'digits' has no test part; leave out separate_test"):
        load_with_test("digits", separate_test=True)
    with pytest.raises(UnknownNameError, match="unknown dataset 'mnits'"):
        load_with_test("mnits")


def test_importing_torchvision_leaves_torch_as_it_was() -> None:
    before = torch.library.register_fake
    assert hasattr(import_torchvision("torchvision.datasets"), "MNIST")
    assert torch.library.register_fake is before


@needs_mnist
@pytest.mark.parametrize(("part", "size"), [("train", 60_000), ("test", 10_000)])
def test_the_real_mnist(part: str, size: int) -> None:
    mnist = load_dataset("mnist", part=part)
    assert mnist.x.shape == (size, 1, 28, 28)
    assert torch.bincount(mnist.y, minlength=10).min() > size * 0.085
    if part == "train":
        assert mnist.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
        assert abs(mnist.x.mean().item()) < 1e-3
        assert abs(mnist.x.std().item() - 1) < 1e-3


@needs_emnist
def test_the_real_emnist_stands_upright() -> None:
    emnist = load_dataset("emnist", limit=20_000, seed=0)
    assert emnist.x.shape == (20_000, 1, 28, 28)
    assert len(emnist.y.unique()) == 62
    # The mean "T" (class 29) has its bar at the top, and the mean "L" (class 21) its foot at the bottom.
    ink = {label: emnist.x[emnist.y == label, 0].mean(0) for label in (29, 21)}
    wide = {label: mean[:, [6, 7, 20, 21]].mean(1) for label, mean in ink.items()}
    assert wide[29][:14].max() > wide[29][14:].max() + 0.2
    assert ink[21][18:24, 18:22].mean() > ink[21][4:10, 18:22].mean() + 0.2
