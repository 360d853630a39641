"""Large pieces of memory that cost nothing until they are written to.

A piece is mapped, not filled: the system hands out zeroed pages when they are first touched. Where it can, it
hands out large ones, which makes the first touch of a large piece ten times faster. What is mapped is not
promised: who asks for more than is there is not refused, but killed later. So one asks first (`free_bytes`).
"""

from __future__ import annotations

import contextlib
import math
import mmap
from pathlib import Path

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


def free_bytes() -> float:
    """Memory that may still be written to: of the machine, and of the control group that this process is in;
    infinite where the system does not say.
    """
    free = math.inf
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = 1024 * float(line.split()[1])
    for folder, most, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, taken = _lines(f"{folder}/{most}"), _lines(f"{folder}/{used}")
        if limit and taken and limit[0].isdigit():
            idle = [
                line.split()[1]
                for line in _lines(f"{folder}/memory.stat")
                if line.startswith("inactive_file ")
            ]
            free = min(free, float(limit[0]) - float(taken[0]) + sum(map(float, idle)))  # files give way
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # another system, or another version of it
        return []
