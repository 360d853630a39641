"""What a benchmark prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    what: str
    value: str
    target: str = ""
    met: bool | None = None
