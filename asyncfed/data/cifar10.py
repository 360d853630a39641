"""CIFAR-10 as its authors give it out and torchvision keeps it: six pickled batches of 10,000 images.

A batch is a dictionary of bytes and numpy arrays; what else a file might want to build is refused, so that
reading one never runs code.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncfed.data.torchvision_import import download_into
from asyncfed.errors import DataError

FOLDER = "cifar-10-batches-py"
PARTS = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
CLASSES = 10
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training pixels, by colour

_HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no such file has")
        return super().find_class(module, name)


def read_cifar10(part: str, root: Path, download: bool) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) of bytes, and labels."""
    folder = root / FOLDER
    wanted = [folder / name for name in PARTS[part]]
    if download and not all(path.is_file() for path in wanted):
        download_into(root, "cifar10", "CIFAR10", train=part == "train")
    missing = [path.name for path in wanted if not path.is_file()]
    if missing:
        raise DataError(
            f"dataset 'cifar10', part {part!r}: {', '.join(missing)} not found in {folder}; put the files "
            "there, set ASYNCFED_DATA to the directory that holds them (torchvision's layout), or load with "
            "download=True"
        )
    batches = [_read(path) for path in wanted]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def _read(path: Path) -> tuple[Tensor, Tensor]:
    try:
        with path.open("rb") as file:
            batch = _Arrays(file, encoding="latin1").load()
        x = np.asarray(batch["data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
        y = np.asarray(batch["labels"], dtype=np.int64)
        if y.shape != (len(x),) or ((y < 0) | (y >= CLASSES)).any():
            raise ValueError(f"{len(x)} images, and labels that do not go with them")
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(f"dataset 'cifar10': {path} cannot be read ({error}); fetch it again") from error
    return torch.from_numpy(x.copy()), torch.from_numpy(y)
