"""Small files in the format of MNIST."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def write_idx(path: Path, array: np.ndarray, packed: bool) -> None:
    """The idx format: zero, zero, type 8 (unsigned byte), number of axes, then their sizes, big-endian."""
    content = (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def small_images(root: Path, stem: str, packed: bool) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    images, labels = generator.integers(0, 256, (12, 28, 28)), generator.integers(0, 10, 12)
    write_idx(root / f"{stem}-images-idx3-ubyte", images, packed)
    write_idx(root / f"{stem}-labels-idx1-ubyte", labels, packed)
    return images, labels
