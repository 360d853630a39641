"""Killed at random instants, a run is resumed to the same bytes; the long version is `python -m benchmarks
kills`.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kills import KINDS, Undisturbed, killed_driver

FEW = ("SGP in virtual time", "PDBO", "FedAvg with a quorum", "FedBuff")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """In memory where that can be had: a disk takes longer to sync than the runs take."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Undisturbed:
    return Undisturbed(folder)


@pytest.mark.parametrize("name", FEW)
def test_a_run_whose_process_is_killed_thrice_ends_with_the_same_bytes(
    name: str, whole: Undisturbed, folder: Path
) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    chance, kills = random.Random(name), 0
    for _ in range(20):
        story = killed_driver(kind, whole, folder, chance)
        assert not story.wrong, f"{story.kind}, killed {story.kills} times: {story.wrong}"
        kills += story.kills
        if kills >= 3:
            return
    raise AssertionError(f"{name} was killed {kills} times only")
