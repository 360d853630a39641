"""CIFAR-10 and CIFAR-100 as their authors give them out and torchvision keeps them: pickled batches.

A batch is a dictionary of texts and numpy arrays, of which the images ("data") and their labels are read;
what else it holds (the names of the original files, …) may be missing. What else a file might want to build
is refused, so that reading one never runs code.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.data.superclasses import CIFAR100_CLASSES, CIFAR100_SUPERCLASSES
from asyncfed.data.torchvision_import import download_into
from asyncfed.errors import DataError

Colours = tuple[float, float, float]


@dataclass(frozen=True)
class Batches:
    """Where one of the two datasets stands, what its labels are called, and what its pixels are like."""

    name: str
    kind: str  # torchvision's class
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: str
    classes: int
    mean: Colours  # of the training pixels, by colour
    std: Colours
    superclasses: tuple[int, ...] | None = None

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        return {"train": self.train, "test": self.test, "all": self.train + self.test}

    def read(self, part: str, root: Path, download: bool) -> tuple[Tensor, Tensor]:
        """Images (N, 3, 32, 32) of bytes, and labels."""
        folder = root / self.folder
        wanted = [folder / name for name in self.parts[part]]
        if download and not all(path.is_file() for path in wanted):
            download_into(root, self.name, self.kind, train=part != "test")
        missing = [path.name for path in wanted if not path.is_file()]
        if missing:
            raise DataError(
                f"dataset {self.name!r}, part {part!r}: {', '.join(missing)} not found in {folder}; put the "
                "files there, set ASYNCFED_DATA to the directory that holds them (torchvision's layout), or "
                "load with download=True"
            )
        batches = [self._batch(path) for path in wanted]
        return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])

    def normalised(self, x: Tensor) -> Tensor:
        """Numbers in [0, 1], in place, each colour with its own mean and deviation."""
        mean, std = (torch.tensor(of).view(3, 1, 1) for of in (self.mean, self.std))
        return x.sub_(mean).div_(std)

    def _batch(self, path: Path) -> tuple[Tensor, Tensor]:
        try:
            with path.open("rb") as file:
                batch = _Arrays(file, encoding="latin1").load()
            x = _images(batch["data"])
            y = _labels(batch[self.labels], len(x), self.classes)
            if self.superclasses is not None and "coarse_labels" in batch:
                coarse = _labels(batch["coarse_labels"], len(x), max(self.superclasses) + 1)
                _compare(y, coarse, self.superclasses)
        except Exception as error:  # a damaged pickle can raise nearly anything
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise DataError(
                f"dataset {self.name!r}: {path} cannot be read ({reason}); fetch it again"
            ) from error
        return torch.from_numpy(x), torch.from_numpy(y)


CIFARS = {
    "cifar10": Batches(
        name="cifar10",
        kind="CIFAR10",
        folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test=("test_batch",),
        labels="labels",
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Batches(
        name="cifar100",
        kind="CIFAR100",
        folder="cifar-100-python",
        train=("train",),
        test=("test",),
        labels="fine_labels",
        classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        superclasses=CIFAR100_SUPERCLASSES,
    ),
}

# What an array, or a number of numpy's, is built of; which of the names depends on the versions of numpy and
# of the pickle.
_HARMLESS = {
    *(
        (f"numpy.{core}.{module}", name)
        for core in ("core", "_core")
        for module, name in (
            ("multiarray", "_reconstruct"),
            ("multiarray", "scalar"),
            ("numeric", "_frombuffer"),
        )
    ),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no such file has")
        return super().find_class(module, name)


def _images(data: Any) -> npt.NDArray[np.uint8]:
    x = np.asarray(data)
    if x.dtype != np.uint8 or x.shape[1:] not in ((3072,), (3, 32, 32)):
        raise ValueError(f"images of the form {x.dtype} {x.shape[1:]}, not uint8 (3072,), colour by colour")
    return x.reshape(-1, 3, 32, 32).copy()


def _labels(labels: Any, images: int, classes: int) -> npt.NDArray[np.int64]:
    y = np.asarray(labels, dtype=np.int64)
    if y.shape != (images,) or ((y < 0) | (y >= classes)).any():
        raise ValueError(f"{images} images, and labels that do not go with them")
    return y


def _compare(
    fine: npt.NDArray[np.int64], coarse: npt.NDArray[np.int64], superclasses: tuple[int, ...]
) -> None:
    other = np.flatnonzero(np.array(superclasses)[fine] != coarse)
    if len(other):
        image = int(other[0])
        name = CIFAR100_CLASSES[fine[image]]
        raise ValueError(
            f"image {image} has the fine label {fine[image]} ({name}) and the coarse label {coarse[image]}, "
            f"which would be {superclasses[fine[image]]}"
        )
