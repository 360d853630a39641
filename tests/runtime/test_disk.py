"""Disks that are full, read-only or gone: told in a paragraph, and what was recorded can be gone on with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncfed import Progress, RunError, StorageError, load, resume, run
from tests.helpers import files_of
from tests.runtime.test_resume import LONGER, ROOT, scenario


def mounted(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")


def unmounted(place: Path) -> None:
    subprocess.run(["umount", "--lazy", str(place)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted("-t", "tmpfs", "-o", "size=1m", "asyncfed-test", str(place))
    try:
        yield place
    finally:
        unmounted(place)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "run"
    return files_of(run(scenario(), out=out, save_final=True).path)


class Then:
    """Does something after so many ticks, and lets the clock go on so that the run writes."""

    def __init__(self, what: Callable[[], object], ticks: int = 50) -> None:
        self._what, self._left = what, ticks

    def __call__(self, now: Progress) -> None:
        self._left -= 1
        if not self._left:
            self._what()


def filled(disk: Path) -> Path:
    """Take all the room there is."""
    file = disk / "filler"
    with file.open("wb", buffering=0) as handle:
        for size in (4096, 512, 1):
            try:
                while handle.write(b"x" * size):
                    pass
            except OSError:
                continue
    return file


@pytest.mark.parametrize("every", [5, None])
def test_a_full_disk_ends_a_run_that_can_be_gone_on_with(
    every: int | None, disk: Path, whole: dict[str, bytes]
) -> None:
    out = disk / "run"
    full = Then(lambda: filled(disk))
    with pytest.raises(StorageError, match=r"cannot write to .*[Nn]o space left.*stays readable\. Make room"):
        run(scenario(), out=out, save_final=True, checkpoint_every=every, progress=full)
    assert issubclass(StorageError, RunError)
    assert not list(out.rglob("*.part"))
    partial = load(out)
    assert partial.status != "complete"
    assert len(partial.metrics) >= (0 if every is None else 1)
    assert partial.trace.to_arrow().num_rows == len(partial.trace)
    (disk / "filler").unlink()
    assert files_of(resume(out).path) == whole


@pytest.mark.parametrize("name", ["checkpoints", "final"])
def test_a_disk_too_small_for_variables_says_so(name: str, disk: Path, tmp_path: Path) -> None:
    """The library that writes them has errors of its own."""
    from asyncfed import Scenario
    from asyncfed.problems import quadratic
    from asyncfed.protocols import SGP
    from topologies import ring

    large = Scenario(quadratic(clients=3, dimension=300, seed=1), ring(3), SGP(6, 0.01))

    def nearly_full() -> None:
        with (filled(disk)).open("rb+") as file:
            file.truncate(file.seek(0, os.SEEK_END) - (8 << 10))

    every = 3 if name == "checkpoints" else None
    with pytest.raises(StorageError, match=r"cannot write to .*[Nn]o space left"):
        run(large, out=disk / "run", save_final=True, checkpoint_every=every, progress=Then(nearly_full, 1))
    (disk / "filler").unlink()
    undisturbed = run(large, out=tmp_path / "whole", save_final=True)
    assert files_of(resume(disk / "run").path) == files_of(undisturbed.path)


def test_a_full_disk_ends_the_command_with_3_and_one_paragraph(disk: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "scenario.py", disk / "run"
    file.write_text(LONGER)
    command = [sys.executable, "-m", "asyncfed", "run", str(file), "--out", str(out)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while not (out / "metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.01)
        filled(disk)
        said = process.communicate()[1]
    assert process.returncode == 3, said
    assert said.count("error: cannot write to") == 1
    assert "Traceback" not in said
    assert f"go on with: asyncfed resume {out}" in said
    assert load(out).status == "running"


def test_a_directory_that_becomes_read_only(disk: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    out, protected = disk / "run", tmp_path / "protected"
    protected.mkdir()
    with ExitStack() as afterwards:

        def protect() -> None:
            for place, how in ((protected, ["--bind", str(out)]), (out, ["--bind", str(protected)])):
                subprocess.run(["mount", *how, str(place)], check=True)
                afterwards.callback(unmounted, place)
                if place is protected:  # first aside, so that nobody writes there
                    subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)

        with pytest.raises(StorageError, match=r"cannot write to .*Read-only file system.*writable again"):
            run(scenario(), out=out, save_final=True, checkpoint_every=5, progress=Then(protect))
        assert len(load(out).metrics) >= 1
        with pytest.raises(StorageError, match="Read-only file system"):
            resume(out)
    assert files_of(resume(out).path) == whole


def test_a_directory_that_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(StorageError, match=r"cannot write to .*No such file"):
        run(scenario(), out=out, checkpoint_every=5, progress=Then(lambda: _remove(out)))
    assert not out.exists(), "and is not made again"


def _remove(out: Path) -> None:
    """At once, for the run goes on writing: under another name first."""
    shutil.rmtree(out.rename(out.with_name("removed")))
