"""A run that is stopped in the middle, and stopped again, comes to the same end: byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncfed import Progress, Result, load, resume, run
from tests.laws.examples import Case
from tests.laws.runs import Runs, every_case


class Killed(BaseException):
    """Nobody catches it."""


class Killer:
    """Ends a run after so many ticks."""

    def __init__(self, ticks: int) -> None:
        self._left = ticks

    def __call__(self, now: Progress) -> None:
        self._left -= 1
        if not self._left:
            raise Killed


def after_kills(case: Case, out: Path, first: int, later: int) -> tuple[Result, int]:
    """A run that is ended after `first` ticks, gone on with, ended again after `later`, and so on."""
    kills = 0
    try:
        return run(case.scenario, out=out, checkpoint_every=1, progress=Killer(first)), kills
    except Killed:
        kills += 1
    while True:
        assert load(out).status == "failed"
        try:
            return resume(out, progress=Killer(later)), kills
        except Killed:
            kills += 1
            later += 1  # for there may be no place to rest within so few


@every_case
def test_a_run_that_was_stopped_twice_and_more_ends_with_the_same_bytes(
    case: Case, told: Runs, tmp_path: Path
) -> None:
    whole = told(case)
    ticks = len(whole.seen)  # about
    first, later = max(1, ticks // 5), max(2, ticks // 4)
    result, kills = after_kills(case, tmp_path / "resumed", first, later)
    assert kills >= 1
    whole.same_as(result, "the same run in pieces")
    assert result.complete
    assert not (result.path / "checkpoints").exists()


def test_a_run_that_is_stopped_before_its_first_checkpoint_begins_anew(told: Runs, tmp_path: Path) -> None:
    from tests.laws.examples import cases

    case = cases()[0]
    with pytest.raises(Killed):
        run(case.scenario, out=tmp_path / "resumed", checkpoint_every=None, progress=Killer(3))
    assert not (tmp_path / "resumed" / "checkpoints").exists()
    told(case).same_as(resume(tmp_path / "resumed"), "the run begun anew")
