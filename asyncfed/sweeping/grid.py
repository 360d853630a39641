"""All combinations of settings, and what the directory of each is called."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from asyncfed.checks import shown
from asyncfed.errors import ScenarioError
from asyncfed.registry import literal

MOST_RUNS = 10_000
_LONGEST_NAME = 100
_FOREIGN = re.compile(r"[^\w.+=%@-]+")


def checked_settings(settings: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Setting → its values; refuses none, too many, and what is no list of values."""
    found: dict[str, list[Any]] = {}
    count = 1
    for path, values in settings.items():
        if isinstance(values, str) or not isinstance(values, (Collection, range)) or not len(values):
            raise ScenarioError(f"{path} is {shown(values)}; give its values in a list, at least one")
        count *= len(values)
        if count > MOST_RUNS:
            raise ScenarioError(f"these are more than {MOST_RUNS:,} runs; sweep over fewer values")
        found[path] = [value.item() if hasattr(value, "item") else value for value in values]
    if not found:
        raise ScenarioError("nothing to sweep over; give settings, such as {'protocol.lr': [0.1, 0.3]}")
    return found


def combinations(settings: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Name → settings of a run, in the order given, the last setting fastest.

    A name has the last word of each setting where that is enough: `lr=0.1,seed=0`.
    """
    words = {path: path.rpartition(".")[2] for path in settings}
    short = {path: word if list(words.values()).count(word) == 1 else path for path, word in words.items()}
    named: dict[str, dict[str, Any]] = {}
    taken: set[str] = set()
    for values in itertools.product(*settings.values()):
        chosen = dict(zip(settings, values, strict=True))
        text = ",".join(f"{short[path]}={_FOREIGN.sub('-', str(value))}" for path, value in chosen.items())
        base = name = text[:_LONGEST_NAME].rstrip(".,-")
        number = 2
        while name.lower() in taken:  # some file systems know no capitals
            name, number = f"{base}+{number}", number + 1
        taken.add(name.lower())
        named[name] = chosen
    return named


def parse_sweeps(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`["protocol.lr=0.1,0.3"]` as a mapping; values are read as those of `--set`."""
    parsed: dict[str, list[Any]] = {}
    for text in texts:
        path, equals, values = text.partition("=")
        if not equals or not path.strip() or not values.strip():
            raise ScenarioError(
                f"--sweep {text!r} must look like path=value,value, as in protocol.lr=0.1,0.3"
            )
        if path.strip() in parsed:
            raise ScenarioError(f"--sweep {path.strip()} is given twice; give all of its values at once")
        parsed[path.strip()] = [literal(value.strip()) for value in _split(values)]
    return parsed


def _split(text: str) -> list[str]:
    """At the commas that stand in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += (character in "([{") - (character in ")]}") if not quote else 0
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts
