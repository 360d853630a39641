"""What the README and the pages that continue it show must run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def block(page: str, words: str) -> str:
    text = (ROOT / page).read_text("utf-8")
    found = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if words in block]
    assert len(found) == 1
    return str(found[0])


def test_a_users_own_bilevel_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, but for fewer rounds and outer steps."""
    monkeypatch.setenv("ASYNCFED_RUNS", str(tmp_path))
    text = block("docs/hypergradients.md", "how much should I be listened to")
    shorter = text.replace("rounds=300", "rounds=100").replace(
        "rounds=100), outer_steps=20", "rounds=40), outer_steps=3"
    )
    assert shorter.count("rounds=") == 2
    names: dict[str, Any] = {}
    exec(shorter, names)
    assert names["estimate"].relative_error < 0.5
    trust = names["result"].final["outer"].sigmoid().flatten()
    assert trust[:4].min() > 0.5 > trust[4:].max()


def test_a_users_own_problem_of_one_level() -> None:
    names: dict[str, Any] = {}
    exec(block("docs/guide.md", "where is the middle"), names)
    assert names["problem"].clients == 10


def test_methods_with_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, but for fewer outer steps."""
    monkeypatch.setenv("ASYNCFED_RUNS", str(tmp_path))
    names: dict[str, Any] = {}
    exec(block("docs/servers.md", "six answers will do").replace("outer_steps=30", "outer_steps=3"), names)
    result = names["result"]
    assert result.metrics["outer_step"].iloc[-1] == 3
    assert result.trace.communication_rounds() == 3 * (2 * 2 + 3)
    assert names["fednest"].needs_outer


def test_the_first_lines_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, but for fewer steps."""
    monkeypatch.setenv("ASYNCFED_RUNS", str(tmp_path))
    names: dict[str, Any] = {}
    exec(block("README.md", "from topologies import").replace("steps=200", "steps=5"), names)
    assert names["result"].complete


def test_the_readme_is_short_enough_to_be_read() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 250
    assert max(map(len, lines)) <= 120
