"""What the README shows must run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parent.parent / "README.md"


def block(words: str) -> str:
    found = [
        text for text in re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.S) if words in text
    ]
    assert len(found) == 1
    return str(found[0])


def test_a_users_own_bilevel_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, but for fewer rounds and outer steps."""
    monkeypatch.setenv("ASYNCFED_RUNS", str(tmp_path))
    text = block("how much should I be listened to")
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
    exec(block("where is the middle"), names)
    assert names["problem"].clients == 10


def test_methods_with_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, but for fewer outer steps."""
    monkeypatch.setenv("ASYNCFED_RUNS", str(tmp_path))
    names: dict[str, Any] = {}
    exec(block("six answers will do").replace("outer_steps=30", "outer_steps=3"), names)
    result = names["result"]
    assert result.metrics["outer_step"].iloc[-1] == 3
    assert result.trace.communication_rounds() == 3 * (2 * 2 + 3)
    assert names["fednest"].needs_outer
