"""Names and things: all that can be named in a file, in a recipe or on the command line.

A method, an option, a problem is registered where it is defined, with one line above it::

    @register("method")
    @dataclass(frozen=True)
    class SGP: …

From then on its name stands for it, and what it is made of is checked against its annotations (`checks`).
`to_data` and `from_data` write a value as plain data (what JSON can
hold) and build it again; `read` builds it from text, such as `PDBO(SGP(3, 0.1), HGP(2), outer_steps=1)`. Only
what is registered is ever built. Nothing is evaluated or unpickled.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from asyncfed.checks import checked, shown
from asyncfed.errors import DataError, ScenarioError, TopologyError, UnknownNameError

T = TypeVar("T", bound=Callable[..., Any])

KINDS = (
    "method",  # a scenario's protocol
    "estimator",  # of a hypergradient, within a method
    "option",  # any other part of a method
    "rate",  # a learning rate that changes
    "timing",
    "presence",  # when clients are there
    "link",  # how a link changes over time
    "weights",
    "duration",  # written as its text, exponential(0.2)
    "times",  # durations as given, in a table
    "problem",
    "partition",
    "topology",
    "goal",
)
_FUNCTIONS = ("problem", "topology")  # kinds whose things are functions, which write down their own recipes
_ERRORS: Mapping[str, type[ScenarioError]] = {
    "problem": DataError, "partition": DataError, "topology": TopologyError,
}  # fmt: skip

_MOST_LEVELS = 64  # of text that is read

_THINGS: dict[str, dict[str, Callable[..., Any]]] = {kind: {} for kind in KINDS}
_NAMES: dict[type[Any], tuple[str, str]] = {}  # class → (kind, name)
FILE_PREFIX = "asyncfed_scenario_"  # of the modules that the command line makes of files
ONE_OF_YOUR_OWN = "one of your own must be registered first: import the file that defines it"


class NotPlainError(ScenarioError):
    """A value that cannot be written down as plain data."""


def register(kind: str, name: str | None = None) -> Callable[[T], T]:
    """Let a name (by default its own) stand for a frozen dataclass, or for a function that makes something.

    A name is given once. What is defined again, by the same file under the same name (a notebook's cell,
    say), takes the place of what it was.
    """
    if not isinstance(kind, str):
        raise ScenarioError(
            f"@register stands bare above {kind!r}; say what it is, as in @register('method')"
        )
    if kind not in KINDS:
        raise UnknownNameError("kind of thing", kind, KINDS)

    def mark(thing: T) -> T:
        chosen = thing.__name__ if name is None else name
        _check(kind, chosen, thing)
        thing = checked(error=_ERRORS.get(kind, ScenarioError))(thing)
        _THINGS[kind][chosen] = thing
        if isinstance(thing, type):
            _NAMES[thing] = (kind, chosen)
        return thing

    return mark


def registered(kind: str | None = None) -> Mapping[str, Any]:
    """Name → thing, in order of registration; of one kind (what is registered later appears in it), or all
    of them, kind by kind.
    """
    if kind is None:
        return {name: thing for things in _THINGS.values() for name, thing in things.items()}
    if kind not in KINDS:
        raise UnknownNameError("kind of thing", kind, KINDS)
    return MappingProxyType(_THINGS[kind])


def kind_of(value: object) -> str | None:
    """The kind of a registered thing's instance; None for any other value."""
    return _NAMES[type(value)][0] if type(value) in _NAMES else None


def _check(kind: str, name: str, thing: Callable[..., Any]) -> None:
    if kind in _FUNCTIONS:
        if not inspect.isfunction(thing):
            raise ScenarioError(f"a {kind} is registered as the function that makes it; {name} is {thing!r}")
    elif "__dataclass_params__" not in vars(thing) or not vars(thing)["__dataclass_params__"].frozen:
        raise ScenarioError(
            f"{name} is not a frozen dataclass; write @dataclass(frozen=True) between "
            f"@register({kind!r}) and the class"
        )
    for other_kind, things in _THINGS.items():
        for other_name, other in things.items():
            # `uniform` is a duration and `Uniform` are weights, but within a kind case makes no difference.
            same = other_name == name or (other_kind == kind and other_name.lower() == name.lower())
            if same and (other_kind, _home(other)) != (kind, _home(thing)):
                raise ScenarioError(
                    f"the name {name!r} of a {kind} is taken: it stands for the {other_kind} "
                    f"{'.'.join(_home(other))}; choose another name"
                )


def _home(thing: Callable[..., Any]) -> tuple[str, str]:
    return thing.__module__, thing.__qualname__


def to_data(value: Any, *, strict: bool = False) -> Any:
    """Plain data that says what a value is.

    What cannot be built again, a user's own object that is not registered, is written as {"own": its repr};
    with `strict` it raises `NotPlainError`, and so does a mapping whose keys are not text.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)  # JSON has no infinity
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_data(item, strict=strict) for item in value]
    if isinstance(value, Mapping) and _writable(value, strict):
        return {str(key): to_data(item, strict=strict) for key, item in value.items()}
    if type(value) in _NAMES:
        kind, name = _NAMES[type(value)]
        if kind == "duration":
            return str(value)
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {"type": name} | {field: to_data(getattr(value, field), strict=strict) for field in fields}
    if strict:
        raise NotPlainError(
            f"{value!r} cannot be written down; use plain values, or mark its class with @register"
        )
    return {"own": repr(value)}


def _writable(mapping: Mapping[Any, Any], strict: bool) -> bool:
    """Whether a mapping could not be taken for a written type, and (where that counts) keeps its keys."""
    return not {"type", "own"} & set(mapping) and (not strict or all(isinstance(key, str) for key in mapping))


def from_data(data: Any, within: str = "data") -> Any:
    """The value that `to_data` wrote. Lists come back as tuples, durations as their text.

    `within` says where the data is from, for messages: "a scenario", "a recipe".
    """
    if isinstance(data, str) and data in ("inf", "-inf"):
        return float(data)
    if isinstance(data, (list, tuple)):
        return tuple(from_data(item, within) for item in data)
    if not isinstance(data, Mapping):
        return data
    if "own" in data:
        raise ScenarioError(
            f"{data['own']} is of a type that is not registered, so only its text was stored; build the "
            "scenario from the Python file that defines it. To have it stored next time, mark its class "
            "(a frozen dataclass) with @register from asyncfed.registry"
        )
    if "type" not in data:
        return {key: from_data(item, within) for key, item in data.items()}
    name = data["type"]
    types = {known: thing for known, thing in registered().items() if isinstance(thing, type)}
    if name not in types:
        raise UnknownNameError(f"type in {within}", str(name), types, ONE_OF_YOUR_OWN)
    fields = {key: from_data(item, within) for key, item in data.items() if key != "type"}
    return _made(name, types[name], (), fields, "field")


def read(text: str, kind: str | None = None, what: str | None = None) -> Any:
    """What a text such as `FedAvg(3, LocalSteps(0.1))` means.

    Its names are registered ones, in capitals or not; their arguments are plain values, or again such
    expressions; a name alone is a call without arguments. With a `kind` it must be a thing of that kind, else
    it can be any value. `what` says what is read, for messages.
    """
    what = what or kind or "value"
    tree = _parsed(text)
    if kind is None and tree is not None:
        return _value(tree, what)
    things = registered(kind)
    if tree is None or not isinstance(tree.func if isinstance(tree, ast.Call) else tree, ast.Name):
        example = f"{next(iter(things), 'Name')}(…)"
        raise ScenarioError(f"cannot read {text!r} as {what}; write for instance {example} with plain values")
    return _called(tree, things, what)


def has_call(text: str) -> bool:
    """Whether a text is an expression with a call in it, as those that `read` is for."""
    tree = _parsed(text)
    return tree is not None and any(isinstance(node, ast.Call) for node in ast.walk(tree))


def literal(text: str) -> Any:
    """The plain value that a text is in Python; the text itself where it is none."""
    tree = _parsed(text)
    try:
        return text if tree is None else ast.literal_eval(tree)
    except (ValueError, TypeError):  # names, calls; a list as a key
        return text


def _parsed(text: str) -> ast.expr | None:
    """The expression that a text is, or None; whoever walks through it can go down to the last level."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        level: list[ast.AST] = [tree]
        for _ in range(_MOST_LEVELS):
            level = [child for node in level for child in ast.iter_child_nodes(node)]
            if not level:
                return tree
    except (SyntaxError, ValueError):
        return None
    except (RecursionError, MemoryError):  # of Python's parser, which has levels of its own
        pass
    raise ScenarioError(f"{shown(text, 60)} is nested too deeply; it may have {_MOST_LEVELS} levels")


def _value(node: ast.expr, what: str) -> Any:
    match node:
        case ast.Name(id="inf"):
            return float("inf")
        case ast.Call() | ast.Name():
            return _called(node, registered(), what)
        case ast.Tuple(elts=items):
            return tuple(_value(item, what) for item in items)
        case ast.List(elts=items):
            return [_value(item, what) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = [(_literal(key, what), value) for key, value in zip(keys, values, strict=True)]
            return {key: _value(value, what) for key, value in pairs}
        case _:
            return _literal(node, what)


def _literal(node: ast.expr | None, what: str) -> Any:
    try:
        if node is not None:  # None stands for the ** of a dict
            value = ast.literal_eval(node)
            hash(value)  # a key of a mapping must have one, and a set could not be written down
            return value
    except (ValueError, TypeError):
        pass
    raise ScenarioError(
        f"cannot read {'**' if node is None else ast.unparse(node)!r} in {what}; "
        "write numbers, 'text' in quotes, None, True, False, lists of these, or names such as SGP(…)"
    )


def _called(node: ast.expr, things: Mapping[str, Callable[..., Any]], what: str) -> Any:
    """`Name(values)`, or just `Name`."""
    function = node.func if isinstance(node, ast.Call) else node
    if not isinstance(function, ast.Name):
        raise ScenarioError(f"cannot read {ast.unparse(node)!r} in {what}; write a name such as SGP(…)")
    name = function.id
    if name not in things:
        same = [known for known in things if known.lower() == name.lower()]
        if len(same) != 1:
            raise UnknownNameError(what, name, things)
        name = same[0]
    arguments = node.args if isinstance(node, ast.Call) else []
    keywords = node.keywords if isinstance(node, ast.Call) else []
    if any(keyword.arg is None for keyword in keywords):
        raise ScenarioError(f"cannot read {ast.unparse(node)!r} in {what}; write its arguments without **")
    positional = [_value(argument, what) for argument in arguments]
    named = {str(keyword.arg): _value(keyword.value, what) for keyword in keywords}
    return _made(name, things[name], positional, named, "argument")


def _made(
    name: str, thing: Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any], word: str
) -> Any:
    signature = inspect.signature(thing)
    for key in named:
        if key not in signature.parameters:
            raise UnknownNameError(f"{word} of {name}", key, signature.parameters)
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise ScenarioError(f"{name}(…): {error}; its {word}s are: {known}") from None
    return thing(*positional, **named)
