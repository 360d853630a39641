"""Large pieces of memory that cost nothing until they are written to.

A piece is mapped, not filled: the system hands out zeroed pages when they are first touched. Where it can, it
hands out large ones, which makes the first touch of a large piece ten times faster. What is mapped is not
promised: who asks for more than is there is not refused, but killed later. So one asks first
(`asyncfed.room`).
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch
from torch import Tensor

_LARGE = 4 * 2**20  # bytes, below which it is not worth the while
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


def lazy_zeros(rows: int, length: int, dtype: torch.dtype) -> Tensor:
    """Zeros (rows, length) in this process's memory."""
    kind = np.float32 if dtype == torch.float32 else np.float64
    size = rows * length * np.dtype(kind).itemsize
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.from_numpy(np.zeros((rows, length), dtype=kind))
    pages = mmap.mmap(-1, size, flags=_PRIVATE)
    with contextlib.suppress(OSError):  # a system without them has small ones
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(pages, dtype=kind).reshape(rows, length))
