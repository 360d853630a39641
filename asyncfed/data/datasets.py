"""Named datasets as two tensors: everything in memory, scaled once, in a fixed order.

The files stand in torchvision's own layout under a data directory (`ASYNCFED_DATA`, by default
~/.cache/asyncfed). They are read with torchvision's reader, packed (.gz) or not, and torchvision downloads
them where the user asks for it; a directory that already holds the files is never written to. What is drawn
at random (`limit`) depends on `seed` alone.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.checks import PathLike, PositiveInt, Range, checked
from asyncfed.data.cifar import CIFARS
from asyncfed.data.torchvision_import import download_into, import_torchvision
from asyncfed.errors import DataError, UnknownNameError
from asyncfed.rng import Streams

_MEAN, _STD = 0.1307, 0.3081  # of MNIST's training pixels; also what the EMNIST experiments of the papers use

Classes = Annotated[int, Range(1, 10**6)]
Pixels = Literal["normalised", "unit"]


@checked(error=DataError)
@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Samples `x` (N, …) float32 and their labels `y` (N,) int64 in 0..classes-1."""

    name: str
    x: Tensor
    y: Tensor
    classes: Classes

    def __post_init__(self) -> None:
        if self.y.ndim != 1 or not self.x.ndim or len(self.x) != len(self.y):
            raise DataError(
                f"samples have the shape {tuple(self.x.shape)} and labels {tuple(self.y.shape)}; give as "
                "many labels as samples, one number each"
            )

    def __repr__(self) -> str:
        return (
            f"<Dataset {self.name}: {len(self):,} samples {tuple(self.x.shape[1:])}, {self.classes} classes>"
        )

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class _ImageFiles:
    """Where torchvision keeps one of the MNIST-like datasets, and what it calls the files."""

    folder: str
    stems: dict[str, str]  # part -> beginning of the two file names
    default_part: str
    classes: int
    transposed: bool
    options: dict[str, str] = field(default_factory=dict)  # of torchvision's class, named like the folder


_IMAGES = {
    "mnist": _ImageFiles("MNIST", {"train": "train", "test": "t10k"}, "train", 10, transposed=False),
    "emnist": _ImageFiles(
        "EMNIST",
        {"train": "emnist-byclass-train", "test": "emnist-byclass-test"},
        "test",
        62,
        transposed=True,
        options={"split": "byclass"},
    ),
}
DATASETS = ("digits", *_IMAGES, *CIFARS)


@checked(error=DataError)
def data_directory(root: PathLike | None = None) -> Path:
    """`root` where given, else `ASYNCFED_DATA`, else ~/.cache/asyncfed."""
    return Path(root or os.environ.get("ASYNCFED_DATA") or "~/.cache/asyncfed").expanduser()


@checked(error=DataError)
def load_dataset(
    name: str,
    root: PathLike | None = None,
    download: bool = False,
    *,
    part: str | None = None,
    limit: PositiveInt | None = None,
    pixels: Pixels = "normalised",
    seed: int = 0,
) -> Dataset:
    """Load a dataset by name.

    Parameters
    ----------
    name
        "digits": scikit-learn's 1,797 images of 8×8, flat (N, 64), scaled to [0, 1]; always available,
        without parts.
        "mnist": (N, 1, 28, 28), normalised with mean 0.1307 and standard deviation 0.3081.
        "emnist": EMNIST byclass, 62 classes, like mnist; the images are turned upright (the files hold them
        transposed).
        "cifar10", "cifar100": (N, 3, 32, 32), each colour normalised with its own mean and deviation. The
        labels of cifar100 are the 100 fine ones; `CIFAR100_SUPERCLASSES` has the coarse one of each.
    root
        Data directory; see `data_directory`.
    download
        Let torchvision fetch missing files into the data directory.
    part
        "train" or "test". By default the training part of mnist (60,000) and the test part of emnist
        (116,323, which is more than the tenth of EMNIST that the experiments of the papers use; the training
        part has 697,932), and the training part of cifar10 and cifar100 (50,000); of these two "all" is the
        training images followed by the 10,000 for testing, which some experiments deal out together.
    limit
        Keep that many samples, drawn without replacement with `seed`, in their original order.
    pixels
        "normalised" as said above, or "unit": left in [0, 1], where those of digits always are.
    """
    found = read_files(name, data_directory(root), download, part)
    return found.chosen(None if limit is None else limited(name, len(found.y), limit, seed), pixels)


@dataclass(frozen=True, eq=False)
class Files:
    """What the files of a dataset hold, as it stands there: only what is chosen of it becomes float32."""

    name: str
    x: Tensor
    y: Tensor
    classes: int

    def chosen(self, rows: npt.NDArray[np.int64] | None, pixels: Pixels = "normalised") -> Dataset:
        """The samples of those numbers, scaled; without numbers, all."""
        x, y = self.x, self.y
        if rows is not None:
            index = torch.from_numpy(rows)
            x, y = x[index], y[index]
        if self.name in _IMAGES:
            x = x.unsqueeze(1).to(torch.float32).div_(255.0)
            x = x.sub_(_MEAN).div_(_STD) if pixels == "normalised" else x
        elif self.name in CIFARS:
            x = x.to(torch.float32).div_(255.0)
            x = CIFARS[self.name].normalised(x) if pixels == "normalised" else x
        return Dataset(self.name, x, y, self.classes)


def read_files(name: str, root: Path, download: bool, part: str | None) -> Files:
    """One part of a dataset, unscaled; see `load_dataset`."""
    if name == "digits":
        if part is not None:
            raise DataError(f"dataset 'digits' has no parts, {part!r} was asked for; leave out `part`")
        return Files(name, *_digits())
    if name in _IMAGES:
        files = _IMAGES[name]
        part = part or files.default_part
        if part not in files.stems:
            raise UnknownNameError(f"part of dataset {name!r}", part, files.stems)
        return Files(name, *_read_images(name, files, part, root, download), files.classes)
    if name in CIFARS:
        batches, part = CIFARS[name], part or "train"
        if part not in batches.parts:
            raise UnknownNameError(f"part of dataset {name!r}", part, batches.parts)
        return Files(name, *batches.read(part, root, download), batches.classes)
    raise UnknownNameError("dataset", name, DATASETS)


@checked(error=DataError)
def has_test_part(name: str) -> bool:
    """Whether a named dataset comes with test samples that stand apart."""
    if name not in DATASETS:
        raise UnknownNameError("dataset", name, DATASETS)
    return name != "digits"


@checked(error=DataError)
def load_with_test(
    name: str,
    root: PathLike | None = None,
    download: bool = False,
    *,
    separate_test: bool | None = None,
    limit: PositiveInt | None = None,
    seed: int = 0,
) -> tuple[Dataset, Dataset | None]:
    """The training part and, apart from it, the test part; or all there is, and None.

    `separate_test` None means: where the dataset has one. Without it, a dataset that has parts gives its
    default one. `limit` is about the first of the two alone.
    """
    if separate_test is None:
        separate_test = has_test_part(name)
    elif separate_test and not has_test_part(name):
        raise DataError(
            f"dataset {name!r} has no test part; leave out separate_test, and give the third of the fractions"
        )
    if not separate_test:
        return load_dataset(name, root, download, limit=limit, seed=seed), None
    train = load_dataset(name, root, download, part="train", limit=limit, seed=seed)
    return train, load_dataset(name, root, download, part="test")


def _digits() -> tuple[Tensor, Tensor, int]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return torch.as_tensor(bunch.data / 16.0, dtype=torch.float32), torch.as_tensor(bunch.target).long(), 10


def limited(name: str, samples: int, limit: int, seed: int) -> npt.NDArray[np.int64]:
    """The numbers of the `limit` samples to keep, in order."""
    if not 1 <= limit <= samples:
        raise DataError(
            f"limit is {limit}; dataset {name!r} has {samples} samples, so it must lie in 1..{samples}"
        )
    return np.sort(Streams(seed).generator("limit").choice(samples, size=limit, replace=False))


def _read_images(
    name: str, files: _ImageFiles, part: str, root: Path, download: bool
) -> tuple[Tensor, Tensor]:
    raw = root / files.folder / "raw"
    wanted = [raw / f"{files.stems[part]}-{kind}" for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    if download and any(_packed_or_not(path) is None for path in wanted):
        download_into(root, name, files.folder, train=part == "train", **files.options)
    found = [_packed_or_not(path) for path in wanted]
    missing = [f"{path.name}[.gz]" for path, there in zip(wanted, found, strict=True) if there is None]
    images, labels = found
    if images is None or labels is None:
        raise DataError(
            f"dataset {name!r}, part {part!r}: {' and '.join(missing)} not found in {raw}; "
            "put the files there, set ASYNCFED_DATA to the directory that holds them (torchvision's layout), "
            "or load with download=True"
        )
    reader = import_torchvision("torchvision.datasets.mnist")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            x: Tensor = reader.read_image_file(_unpacked(images, Path(scratch)))
            y: Tensor = reader.read_label_file(_unpacked(labels, Path(scratch)))
    except (AssertionError, EOFError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"dataset {name!r}: {images} or {labels.name} cannot be read ({error}); fetch it again"
        ) from error
    if len(x) != len(y):
        raise DataError(
            f"dataset {name!r}: {len(x)} images but {len(y)} labels in {raw}; fetch the files again"
        )
    return (x.transpose(1, 2).contiguous() if files.transposed else x), y


def _packed_or_not(path: Path) -> Path | None:
    packed = path.with_name(path.name + ".gz")
    return path if path.is_file() else packed if packed.is_file() else None


def _unpacked(path: Path, scratch: Path) -> str:
    """A file that torchvision can read; unpacked into `scratch`, as the data may be read-only."""
    if path.suffix != ".gz":
        return str(path)
    target = scratch / path.stem
    with gzip.open(path, "rb") as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    return str(target)
