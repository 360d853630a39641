"""How much memory there is, asked before much of it is taken.

A system hands out more than it has, and kills who uses it. So whoever is about to fill a lot of memory, on
behalf of a number that a person or a file gave, asks first.
"""

from __future__ import annotations

import math
from pathlib import Path

from asyncfed.errors import ScenarioError


def require_room(size: float, what: str, remedy: str) -> None:
    """Refuse what takes `size` bytes where there is not that much memory."""
    if size > _SURELY_THERE and size > (free := free_bytes()):
        raise ScenarioError(
            f"{what} takes about {size / 2**30:.3g} GiB of memory, and there are {free / 2**30:.3g}; {remedy}"
        )


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


_SURELY_THERE = 64 * 2**20  # bytes, about which nobody needs to ask


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # another system, or another version of it
        return []
