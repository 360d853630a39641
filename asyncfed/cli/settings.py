"""`--set path=value`: a scenario with some of its parts replaced.

Values are Python literals, calls of asyncfed's own types (`Diminishing(0.2, after=50)`, `Metropolis()`,
`ring(20)`), or else text.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from asyncfed.errors import AsyncfedError, ScenarioError, UnknownNameError
from asyncfed.scenario import Scenario

_PLAIN: dict[str, tuple[tuple[type, ...], str]] = {
    "seed": ((int,), "a whole number"),
    "precision": ((str,), "float32 or float64"),
    "evaluate_every": ((int, float, type(None)), "a number or None"),
    "until": ((dict, type(None)), "a mapping such as {'accuracy': AtLeast(0.9)}, or None"),
    "name": ((str,), "text"),
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
        parsed[key] = _literal(text.strip())
    return parsed


def apply_settings(
    scenario: Scenario, changes: Mapping[str, Any], parameters: Iterable[str] = ()
) -> Scenario:
    """`scenario` with each change made; `parameters` are the other names that the user could have meant."""
    for key, value in changes.items():
        known = [*parameters, *_paths(scenario)]
        if key not in known:
            raise UnknownNameError("setting", key, known)
        try:
            scenario = _changed(scenario, key, value)
        except AsyncfedError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ScenarioError(f"{key} cannot be {value!r}: {error}") from error
    return scenario


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
        from asyncfed.problems import problem_from_recipe

        recipe = scenario.problem.recipe
        assert recipe is not None  # or its arguments would not be known
        arguments = recipe.arguments | {inner: value}
        return dataclasses.replace(
            scenario, problem=problem_from_recipe({"factory": recipe.factory, "arguments": arguments})
        )
    if part == "topology":
        from topologies import from_recipe

        recipe_data = _topology_recipe(scenario)
        recipe_data["arguments"][inner] = value
        return dataclasses.replace(scenario, topology=from_recipe(recipe_data))
    return dataclasses.replace(scenario, **{part: _with(getattr(scenario, part), inner, value, key)})


def _with(whole: Any, path: str, value: Any, key: str) -> Any:
    """A value with one of its fields changed, however deep: `inner.lr` of a protocol, say."""
    name, _, rest = path.partition(".")
    current = getattr(whole, name)
    if rest:
        return dataclasses.replace(whole, **{name: _with(current, rest, value, key)})
    if name == "lr" and isinstance(value, str):
        value = _called(value, _makers()["lr"], "learning rate")
    elif name in ("inner", "hypergradient", "outer", "local", "server", "neumann"):
        value = _called(str(value), _makers()[name], name)
    elif isinstance(current, (int, float)) and isinstance(value, str) and name != "bandwidth":
        raise ScenarioError(f"{key} is {value!r}; it must be a number, such as {current!r}")
    return dataclasses.replace(whole, **{name: value})


def _whole_part(part: str, value: Any) -> Any:
    if part == "until" and isinstance(value, str):
        value = _goals(value)
    if part in _PLAIN:
        allowed, words = _PLAIN[part]
        if not isinstance(value, allowed) or isinstance(value, bool):
            raise ScenarioError(f"{part} is {value!r}; it must be {words}")
        return value
    return _called(str(value), _makers()[part], part)


def _goals(text: str) -> Any:
    """`{'accuracy': AtLeast(0.9)}`; what is no mapping stays text."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.Dict):
            return text
        names = [ast.literal_eval(key) for key in tree.keys if key is not None]
    except (SyntaxError, ValueError):
        return text
    goals = [_called(ast.unparse(value), _makers()["until"], "goal") for value in tree.values]
    return dict(zip(names, goals, strict=True))


def _called(text: str, makers: Mapping[str, Callable[..., Any]], what: str) -> Any:
    """`Name(literals)` or just `Name`, for the names given; nothing else is evaluated."""
    try:
        tree = ast.parse(text, mode="eval").body
        function = tree.func if isinstance(tree, ast.Call) else tree
        if not isinstance(function, ast.Name):
            raise ValueError
        positional = [ast.literal_eval(item) for item in tree.args] if isinstance(tree, ast.Call) else []
        named = (
            {str(item.arg): ast.literal_eval(item.value) for item in tree.keywords}
            if isinstance(tree, ast.Call)
            else {}
        )
    except (SyntaxError, ValueError):
        example = f"{next(iter(makers))}(…)"
        raise ScenarioError(
            f"cannot read {text!r} as a {what}; write for instance {example} with plain values"
        ) from None
    by_name = {name.lower(): maker for name, maker in makers.items()}
    if function.id.lower() not in by_name:
        raise UnknownNameError(what, function.id, makers)
    return by_name[function.id.lower()](*positional, **named)


def _makers() -> dict[str, dict[str, Callable[..., Any]]]:
    import topologies
    from asyncfed import goals, network, problems, protocols

    generators = [
        name for name in topologies.__all__ if name not in ("from_recipe", "load", "save", "with_links")
    ]
    kinds: dict[str, list[Callable[..., Any]]] = {
        "protocol": [protocols.SGP, protocols.DSGD, protocols.PeerFedAvg, protocols.Local],
        "inner": [
            protocols.SGP,
            protocols.DSGD,
            protocols.PeerFedAvg,
            protocols.Local,
            protocols.LocalSteps,
        ],
        "outer": [protocols.LocalSteps],
        "local": [protocols.LocalSteps],
        "server": [protocols.Server],
        "neumann": [protocols.Neumann],
        "hypergradient": [
            protocols.HGP,
            protocols.VRHGP,
            protocols.ExactBackprop,
            protocols.ITDForward,
            protocols.ITDBackward,
        ],
        "timing": [network.Lockstep, network.VirtualTime],
        "weights": [network.Uniform, network.Metropolis, network.FastestMixing],
        "until": [goals.AtLeast, goals.AtMost],
        "lr": [protocols.Diminishing, protocols.StepDecay],
        "problem": [
            problems.classification,
            problems.quadratic,
            problems.personalized_classification,
            problems.personalized_characters,
            problems.bilevel_quadratic,
            problems.logistic_pair,
        ],
        "topology": [getattr(topologies, name) for name in generators],
    }
    return {part: {maker.__name__: maker for maker in makers} for part, makers in kinds.items()}


def _topology_recipe(scenario: Scenario) -> dict[str, Any]:
    recipe: dict[str, Any] = json.loads(scenario.topology.graph.get("recipe", "{}"))
    return recipe


def _fields(value: Any) -> list[str]:
    """The names of a value's fields, and of theirs: lr, inner, inner.lr, …"""
    if not dataclasses.is_dataclass(value):
        return []
    names = [f.name for f in dataclasses.fields(value) if f.init]
    return [*names, *(f"{name}.{deeper}" for name in names for deeper in _fields(getattr(value, name)))]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
