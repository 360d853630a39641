"""`asyncfed new`: a file to start from. That it runs is shown in test_wheel.py, where it is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_a_starting_file_is_a_scenario_that_says_how_it_is_run(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    done = cli("new", path)
    assert done.exit_code == 0, done.stderr
    assert f"run it with: asyncfed run {path}" in done.stdout
    assert f"asyncfed run {path} --set clients=20" in path.read_text(encoding="utf-8")
    again = cli("new", path)
    assert again.exit_code == 2
    assert "mine.py is there already; give another name" in again.stderr


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mine.txt", "call it mine.py"),
        ("nowhere/mine.py", "No such file or directory; give a place of your own"),
    ],
)
def test_where_no_file_can_be_written_none_is(
    cli: Callable[..., Any], tmp_path: Path, name: str, told: str
) -> None:
    done = cli("new", tmp_path / name)
    assert done.exit_code == 2
    assert told in done.stderr
    assert list(tmp_path.iterdir()) == []
