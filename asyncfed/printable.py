"""What may go to a terminal.

Names, notes and errors come from files, and a terminal obeys some characters: they move the cursor, set its
title, or turn the order of letters around. All that is printed passes through here, and shows them instead.
"""

from __future__ import annotations

import re
import unicodedata

_UNSEEN = (
    "Cc",
    "Cf",
    "Cs",
    "Zl",
    "Zp",
)  # controls, formats, halves, ends of lines
_SUSPECT = re.compile(r"[^\x20-\x7e\n\t]")


def printable(text: str) -> str:
    """The text, with every character that a terminal would obey as its escape, such as \\x1b."""
    return _SUSPECT.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    character = match[0]
    if unicodedata.category(character) not in _UNSEEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


def duration(seconds: float) -> str:
    """Short, for people."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
