"""In what scenarios differ, from what their run directories say, by the names that `--set` has for it.

Values that have the same type are looked into (`protocol.lr`), others are shown whole (`protocol`). Files may
say anything: whatever has not the shape of ours is compared as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncfed.description import value_text
from asyncfed.reading import parsed
from asyncfed.result import Result
from asyncfed.scenario_data import comparable

MOST_SHOWN = 60  # characters of a value
_MISSING = "–"
_EDGES = "topology.edges"


def identity(result: Result) -> str:
    """Equal for runs that differ by seed and name only."""
    data = comparable(result.scenario_data)
    return json.dumps({key: data[key] for key in data if key not in ("seed", "name")}, sort_keys=True)


def settings(result: Result) -> dict[str, Any]:
    """What was run, in the names of `--set`, and what else may change numbers: versions and the backend."""
    told = result.scenario_data
    data = comparable(told)
    options = result.manifest.get("options")
    found = {key: data[key] for key in data if key not in ("seed", "name")}
    return found | {
        "problem": _problem(data.get("problem")),
        "topology": _topology(data.get("topology")),
        "versions": told.get("versions"),
        "backend": options.get("backend") if isinstance(options, dict) else None,
    }


def differing(of: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Setting → the text of its value in each."""
    found: dict[str, list[str]] = {}
    _look("", list(of), found)
    if any(path.startswith("topology") and path != _EDGES for path in found):
        found.pop(_EDGES, None)  # they follow from the others
    return found


def _look(path: str, values: list[Any], found: dict[str, list[str]]) -> None:
    if all(value == values[0] for value in values):
        return
    if all(isinstance(value, dict) for value in values) and len({_type(value) for value in values}) == 1:
        for key in {key: None for value in values for key in value}:
            _look(f"{path}.{key}".lstrip("."), [value.get(key, _MISSING) for value in values], found)
    else:
        found[path] = [_shown(value) for value in values]


def _type(value: Mapping[str, Any]) -> str:
    return str(value.get("type"))


def _problem(data: Any) -> Any:
    match data:
        case {"factory": str(factory), "arguments": dict(arguments)}:
            return {**arguments, "type": factory}
    return data


def _topology(data: Any) -> Any:
    """How the graph was made, where it says so; and its edges, for whoever changed them afterwards."""
    if not isinstance(data, dict):
        return data
    told_about = data.get("about")
    about: dict[str, Any] = told_about if isinstance(told_about, dict) else {}
    edges = json.dumps([data[key] for key in sorted(data) if key != "about"]).encode()
    count = len(data["from"]) if isinstance(data.get("from"), list) else 0
    told = {"edges": f"{count:,} edges ({hashlib.sha256(edges).hexdigest()[:6]})"}
    try:
        recipe = parsed(str(about.get("recipe", "")).encode("utf-8", "replace"))
    except ValueError:
        recipe = None
    match recipe:
        case {"generator": str(generator), "arguments": dict(arguments)}:
            return {**arguments, "type": generator, **told}
    return {"type": str(about.get("name", "own graph")), **told}


def _shown(value: Any) -> str:
    text = value_text(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}…"
