"""`--set path=value`: a scenario with some of its parts replaced, by name.

Values are Python literals, calls of registered names (`Diminishing(0.2, after=50)`, `Metropolis()`,
`FedAvg(3, LocalSteps(0.1))`, `ring(20)`), or else text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncfed.checks import shown
from asyncfed.errors import AsyncfedError, ScenarioError, UnknownNameError
from asyncfed.problems import problem_from_recipe
from asyncfed.registry import has_call, kind_of, literal, read, to_data
from asyncfed.scenario import Scenario
from topologies import from_recipe

_PLAIN = ("seed", "precision", "evaluate_every", "until", "name")
_KINDS = {
    "protocol": "method",
    "timing": "timing",
    "weights": "weights",
    "problem": "problem",
    "topology": "topology",
}


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """`["clients=50", "protocol.lr=0.1"]` as a mapping; values are read as Python literals, else as text."""
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ScenarioError(
                f"--set {setting!r} must look like path=value, for instance clients=50 or protocol.lr=0.1"
            )
        parsed[key] = literal(text.strip())
    return parsed


def apply_settings(
    scenario: Scenario, changes: Mapping[str, Any], parameters: Iterable[str] = ()
) -> Scenario:
    """`scenario` with each change made; `parameters` are the other names that the user could have meant."""
    for key, value in changes.items():
        known = [*parameters, *_paths(scenario)]
        if key not in known:
            raise _unknown(key, known)
        try:
            scenario = _changed(scenario, key, value)
        except AsyncfedError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ScenarioError(f"{key} cannot be {shown(value)}: {error}") from error
    return scenario


def _unknown(key: str, known: Sequence[str]) -> UnknownNameError:
    """What could have been meant: of `protocol.server.x`, the fields of the protocol's server."""
    within = key.rpartition(".")[0]
    while within and within not in known:
        within = within.rpartition(".")[0]
    near = [name for name in known if name.rpartition(".")[0] == within]
    if not within:
        remedy = "what is inside of these has a dotted path, such as protocol.lr"
        return UnknownNameError("setting", key, near, remedy)
    if near:
        return UnknownNameError("setting", key, near)
    return UnknownNameError(
        "setting", key, [within], f"nothing inside of {within} can be set by itself; set all of it"
    )


def _paths(scenario: Scenario) -> list[str]:
    """Everything that can be set in this scenario."""
    inside = {
        "problem": list(scenario.problem.recipe.arguments) if scenario.problem.recipe else [],
        "topology": list(_topology_recipe(scenario).get("arguments", {})),
        **{name: _fields(getattr(scenario, name)) for name in ("protocol", "timing", "weights")},
    }
    return [*_PLAIN, *inside, *(f"{part}.{name}" for part, names in inside.items() for name in names)]


def _changed(scenario: Scenario, key: str, value: Any) -> Scenario:
    part, _, inner = key.partition(".")
    if not inner:
        return dataclasses.replace(scenario, **{part: _whole_part(part, value)})
    if part == "problem":
        recipe = scenario.problem.recipe
        assert recipe is not None  # or its arguments would not be known
        arguments = recipe.arguments | {inner: to_data(_understood(value, key))}
        return dataclasses.replace(
            scenario, problem=problem_from_recipe({"factory": recipe.factory, "arguments": arguments})
        )
    if part == "topology":
        recipe_data = _topology_recipe(scenario)
        recipe_data["arguments"][inner] = _understood(value, key)
        return dataclasses.replace(scenario, topology=from_recipe(recipe_data))
    return dataclasses.replace(scenario, **{part: _with(getattr(scenario, part), inner, value, key)})


def _with(whole: Any, path: str, value: Any, key: str) -> Any:
    """A value with one of its fields changed, however deep: `inner.lr` of a protocol, say."""
    name, _, rest = path.partition(".")
    current = getattr(whole, name)
    if rest:
        return dataclasses.replace(whole, **{name: _with(current, rest, value, key)})
    return dataclasses.replace(whole, **{name: _field(current, value, key)})


def _field(current: Any, value: Any, key: str) -> Any:
    """What is meant for a field that is `current` now. Whether it fits is for the whole to say."""
    if kind_of(current) in ("method", "estimator", "option"):
        made = read(str(value), what=key)  # so that a name alone will do
        if kind_of(made) is None:
            raise ScenarioError(f"{key} is {shown(value)}; write for instance {type(current).__name__}(…)")
        return made
    value = _understood(value, key)
    return float("inf") if value == "inf" and isinstance(current, (int, float)) else value


def _understood(value: Any, key: str) -> Any:
    """Text with a call in it is read, any other value is itself."""
    return read(value, what=key) if isinstance(value, str) and has_call(value) else value


def _whole_part(part: str, value: Any) -> Any:
    if part == "until" and isinstance(value, str):
        value = _understood(value, part)
    if part in _PLAIN:
        return value
    return read(str(value), _KINDS[part], part)


def _topology_recipe(scenario: Scenario) -> dict[str, Any]:
    recipe: dict[str, Any] = json.loads(scenario.topology.graph.get("recipe", "{}"))
    return recipe


def _fields(value: Any) -> list[str]:
    """The names of a value's fields, and of theirs: lr, inner, inner.lr, …"""
    if not dataclasses.is_dataclass(value):
        return []
    names = [f.name for f in dataclasses.fields(value) if f.init]
    return [*names, *(f"{name}.{deeper}" for name in names for deeper in _fields(getattr(value, name)))]
