"""What a value must be is said once, in the annotation of the field or argument that takes it.

    @checked
    def deal(clients: PositiveInt, alpha: PositiveFloat, how: Literal["even", "uneven"] = "even"): …

From then on `deal("3", 0.1)` says "deal: clients is '3'; it must be a whole number, at least 1", and
`deal(np.int64(3), np.float32(0.1))` works: NumPy's numbers come out as Python's own, lists as tuples. It is
the same for a dataclass. Whatever is registered (see `registry`) is checked, a user's own methods too.

Annotations are read as the type checker reads them. Ranges, and better words, stand in `Annotated`:
`Annotated[float, Range(0, 1)]`, `Annotated[int | None, Words("a whole number, or None for all")]`. What
depends on several values at once is for the function or the class itself to refuse.
"""

from __future__ import annotations

import builtins
import collections.abc
import difflib
import functools
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, overload

import numpy as np

from asyncfed.errors import ScenarioError

T = TypeVar("T", bound=Callable[..., Any])

MOST = 2**31 - 1  # of anything that is counted: what a trace has room for
_LARGEST = 2**128  # of numbers that are not counts: seeds
_LONGEST_TEXT = 4096
_HALVES = re.compile("[\ud800-\udfff]")
_NOBODYS = ("builtins", "numpy", "torch", "pandas")  # what is from there is no thing of ours, whatever it can
_LONGEST = 200  # characters of a value in a message
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Range:
    """Of numbers: from `low` to `high`, either of them left out where `above` or `below` says so. Infinity is
    out of range, unless it is allowed. A bound that nobody comes near is mentioned when it is passed.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    infinite: bool = False

    def holds(self, value: float) -> bool:
        if math.isinf(value) and not self.infinite:
            return False
        over = value > self.low if self.above else value >= self.low
        return over and (value < self.high if self.below else value <= self.high)

    def words(self, whole: bool) -> str:
        bounded = math.isfinite(self.high) and self.high < MOST
        if math.isfinite(self.low) and bounded:
            left, right = "(" if self.above else "[", ")" if self.below else "]"
            low, high = (f"{bound:{',.0f' if whole else 'g'}}" for bound in (self.low, self.high))
            return f"{'a whole number' if whole else 'a number'} in {left}{low}, {high}{right}"
        number = "a whole number" if whole else "a number" if self.infinite else "a finite number"
        if math.isfinite(self.low):
            return f"{number} above {self.low:g}" if self.above else f"{number}, at least {self.low:g}"
        if bounded:
            return f"{number} below {self.high:g}" if self.below else f"{number}, at most {self.high:g}"
        return number


@dataclass(frozen=True)
class Words:
    """What is allowed, said better than from the annotation."""

    text: str


@dataclass(frozen=True)
class _OnDisk:
    """Of paths: without what no file system takes."""


NonNegativeInt = Annotated[int, Range(0, MOST)]
PositiveInt = Annotated[int, Range(1, MOST)]
FiniteFloat = Annotated[float, Range()]
PositiveFloat = Annotated[float, Range(0, above=True)]
NonNegativeFloat = Annotated[float, Range(0)]
Probability = Annotated[float, Range(0, 1, above=True)]
LossProbability = Annotated[float, Range(0, 1, below=True)]
UnitFloat = Annotated[float, Range(0, 1)]
Capacity = Annotated[float, Range(0, above=True, infinite=True)]
PathLike = Annotated[str | os.PathLike[str], _OnDisk(), Words("a path")]


@overload
def checked(thing: T) -> T: ...
@overload
def checked(*, error: type[ScenarioError]) -> Callable[[T], T]: ...
def checked(thing: Any = None, *, error: type[ScenarioError] = ScenarioError) -> Any:
    """A function, or a class, whose arguments are looked at before anything is done with them."""
    if thing is None:
        return functools.partial(checked, error=error)
    if not isinstance(thing, type):
        return _looking(thing, thing.__name__, error, (thing,))
    if not hasattr(vars(thing).get("__init__"), "__wrapped__"):
        init: Any = thing.__init__  # type: ignore[misc]
        homes = tuple(reversed(thing.__mro__)) if is_dataclass(thing) else (init,)
        thing.__init__ = _looking(init, thing.__name__, error, homes)  # type: ignore[misc]
    return thing


def fitting(value: Any, hint: Any, what: str, error: type[ScenarioError] = ScenarioError) -> Any:
    """The value as its annotation has it, or an error that says what it must be."""
    rule = _rule(hint)
    try:
        return rule.take(value)
    except _MisfitError as misfit:
        place, wrong, words = (
            misfit.place,
            misfit.value if misfit.place else value,
            misfit.words or rule.words,
        )
        reason = misfit.reason or f"it must be {words}"
        raise error(f"{what}{place} is {shown(wrong)}; {reason}") from None


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says."""
    try:
        _rule(hint).take(value)
    except _MisfitError:
        return False
    return True


def described(hint: Any) -> str:
    """An annotation in words: "a whole number, at least 1, or None"."""
    return _rule(hint).words


def shown(value: object, longest: int = _LONGEST) -> str:
    """A value as it is written in Python, but for what would fill pages, or cannot be written."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and len(shape):
        kind = type(value).__name__
        return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind} of shape {tuple(shape)}"
    if isinstance(value, Integral) and abs(int(value)) > _LARGEST:
        return f"a number of {len(bin(int(value))) - 2} bits"
    value = value.item() if hasattr(value, "dtype") and hasattr(value, "item") else value
    try:
        text = repr(value[: longest + 1] if isinstance(value, (str, bytes)) else value)
    except Exception:  # of any kind: it is the user's own, or nested too deeply
        text = f"a {type(value).__name__} that cannot be written down"
    text = " ".join(line.strip() for line in text.splitlines())
    return text if len(text) <= longest else f"{text[:longest]}…"


# --- functions and classes ---------------------------------------------------------------------------------


def _looking(
    function: Callable[..., Any], name: str, error: type[ScenarioError], homes: Sequence[Any]
) -> Any:
    """A function that looks at its arguments first. Their annotations stand in its `homes`: the function
    itself, or classes, of which the later say more. They are read when it is first called, for they may name
    what is defined below.
    """
    signature = inspect.signature(function)
    hints: dict[str, Any] = {}

    @functools.wraps(function)
    def looked_at(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if not hints:
            hints.update(_hints(signature, homes))
        for key, value in bound.arguments.items():
            if hints.get(key, Any) is not Any:
                bound.arguments[key] = fitting(value, hints[key], f"{name}: {key}", error)
        return function(*bound.args, **bound.kwargs)

    return looked_at


def _hints(signature: inspect.Signature, homes: Sequence[Any]) -> dict[str, Any]:
    """The annotation of every argument; Any where a name in it is not known when the program runs."""
    hints: dict[str, Any] = dict.fromkeys(signature.parameters, Any)
    for home in homes:
        made: Any = inspect.unwrap(
            vars(home).get("__init__", object.__init__) if isinstance(home, type) else home
        )
        names = getattr(made, "__globals__", {})
        for key, hint in inspect.get_annotations(home).items():
            if key in hints and signature.parameters[key].kind not in _SEVERAL:
                hints[key] = _evaluated(hint, names)
    return hints


def _evaluated(hint: Any, names: Mapping[str, Any]) -> Any:
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, {}, _Names(vars(builtins), **names))  # of source that was imported anyway
    except Exception:  # it is for the type checker alone
        return Any


class _OfUnknown(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, inside: Any) -> type:
        return cls


class _Unknown(metaclass=_OfUnknown):
    """Stands for a name that only the type checker imports, and for what is in it: anything will do."""


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return _Unknown


# --- annotations -------------------------------------------------------------------------------------------


class _MisfitError(Exception):
    """A value that does not fit, and why, where the words of its rule do not say it. Of an entry of a list
    or a mapping: at which `place`, and what an entry must be.
    """

    def __init__(
        self, reason: str = "", places: tuple[str, ...] = (), value: Any = None, words: str = ""
    ) -> None:
        self.reason, self.places, self.value, self.words = reason, places, value, words

    @property
    def place(self) -> str:
        return "".join(self.places)


class _Rule(NamedTuple):
    take: Callable[[Any], Any]
    words: str


def _rule(hint: Any) -> _Rule:
    try:
        return _cached_rule(hint)
    except TypeError:  # not hashable: words or ranges of somebody's own
        return _made_rule(hint)


@functools.lru_cache(maxsize=1024)
def _cached_rule(hint: Any) -> _Rule:
    return _made_rule(hint)


def _made_rule(hint: Any) -> _Rule:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        limits = [mark for mark in hint.__metadata__ if isinstance(mark, Range)]
        told = [mark.text for mark in hint.__metadata__ if isinstance(mark, Words)]
        rule = _number(inside[0], limits[0]) if limits else _rule(inside[0])
        if any(isinstance(mark, _OnDisk) for mark in hint.__metadata__):
            rule = _path(rule)
        return rule._replace(words=told[0]) if told else rule
    if hint in (int, float):
        return _number(hint, Range(infinite=True))
    if hint is bool:
        return _Rule(_flag, "True or False")
    if hint is None or hint is type(None):
        return _Rule(lambda value: _same(value, (None,)), "None")
    if origin is Literal:
        return _literal(inside)
    if origin in (typing.Union, types.UnionType):
        return _union([_rule(choice) for choice in inside])
    if origin in (tuple, list, collections.abc.Sequence):
        return _sequence(inside, fixed=origin is tuple and inside[-1:] != (...,))
    if origin in (dict, collections.abc.Mapping):
        return _mapping(inside)
    if origin is collections.abc.Callable:
        return _Rule(_function, "a function")
    kind = origin or hint
    if kind is str:
        return _Rule(_text, "text")
    if not isinstance(kind, type) or hint in (Any, object, _Unknown):
        return _Rule(lambda value: value, "anything")
    return _instance(kind)


def _number(kind: Any, limits: Range) -> _Rule:
    """Of an int or a float; where it may be something else too, of the numbers among that."""
    if kind not in (int, float):
        choices = [(choice, choice in (int, float)) for choice in typing.get_args(kind)]
        return _union([_number(choice, limits) if number else _rule(choice) for choice, number in choices])

    most = limits.high

    def take(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
            raise _MisfitError
        if isinstance(value, Integral) and abs(int(value)) > _LARGEST:
            raise _MisfitError(f"that is too large: it must be at most {min(most, _LARGEST):,}")
        plain = kind(value)
        if most >= MOST and most < plain < math.inf:
            raise _MisfitError(f"that is too large: it must be at most {most:{',d' if kind is int else 'g'}}")
        if math.isnan(plain) or not limits.holds(plain):
            raise _MisfitError
        return plain

    return _Rule(take, limits.words(kind is int))


def _union(rules: Sequence[_Rule]) -> _Rule:
    return _Rule(lambda value: _first(value, rules), _either([rule.words for rule in rules]))


def _flag(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise _MisfitError


def _text(value: Any) -> str:
    """Text that a file can hold, and a person may want to read."""
    if not isinstance(value, str):
        raise _MisfitError
    if len(value) > _LONGEST_TEXT:
        raise _MisfitError(f"that is too long: it must be text of at most {_LONGEST_TEXT:,} characters")
    if not value.isascii() and _HALVES.search(value):
        raise _MisfitError("it must be text without halves of characters, which no file can hold")
    return value


def _same(value: Any, choices: Sequence[Any]) -> Any:
    """One of some values, and of its type: 1 is not True."""
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    raise _MisfitError


def _path(rule: _Rule) -> _Rule:
    def take(value: Any) -> Any:
        path = rule.take(value)
        if "\0" in os.fspath(path):
            raise _MisfitError("a path has no NUL in it")
        return path

    return rule._replace(take=take)


def _literal(choices: tuple[Any, ...]) -> _Rule:
    words = _either([repr(choice) for choice in choices])
    names = [choice for choice in choices if isinstance(choice, str)]

    def take(value: Any) -> Any:
        try:
            return _same(value, choices)
        except _MisfitError:
            near = difflib.get_close_matches(value, names, 1) if isinstance(value, str) else []
            raise _MisfitError(f"did you mean {near[0]!r}? It must be {words}" if near else "") from None

    return _Rule(take, words)


def _first(value: Any, rules: Sequence[_Rule]) -> Any:
    """As the first rule has it that it fits. Of those that it does not, the one that it nearly does says why:
    the one that got furthest into it, if that is one alone.
    """
    misfits = []
    for rule in rules:
        try:
            return rule.take(value)
        except _MisfitError as misfit:
            misfits.append(misfit.with_traceback(None))  # it would hold all that is running, in a circle
    deepest = max(len(misfit.places) for misfit in misfits)
    nearest = [misfit for misfit in misfits if len(misfit.places) == deepest and (deepest or misfit.reason)]
    found = nearest[0] if len(nearest) == 1 else _MisfitError()
    raise _MisfitError(found.reason, found.places, found.value, found.words)  # a new one: likewise


def _entry(rule: _Rule, place: object, value: Any) -> Any:
    """An entry of a list or a mapping, as its rule has it."""
    try:
        return rule.take(value)
    except _MisfitError as misfit:
        inside = (misfit.value, misfit.words) if misfit.places else (value, rule.words)
        places = (f"[{shown(place, 40)}]", *misfit.places)
        raise _MisfitError(misfit.reason, places, *inside) from None


def _sequence(inside: tuple[Any, ...], fixed: bool) -> _Rule:
    if fixed:
        rules = [_rule(hint) for hint in inside]
        alike = len({rule.words for rule in rules}) == 1
        words = (
            f"{len(rules)} values, each {rules[0].words}"
            if alike
            else f"({', '.join(r.words for r in rules)})"
        )
    else:
        each = _rule(inside[0] if inside else Any)
        words = "a list" if each.words == "anything" else f"a list, each entry {each.words}"

    numbers = any(map(_of_numbers, inside))

    def take(value: Any) -> tuple[Any, ...]:
        entries = _entries(value, numbers)
        if fixed and len(entries) != len(rules):
            raise _MisfitError
        return tuple(
            _entry(rules[place] if fixed else each, place, entry) for place, entry in enumerate(entries)
        )

    return _Rule(take, words)


def _of_numbers(hint: Any) -> bool:
    """Whether an annotation is that of numbers, or of lists of them."""
    return hint in (int, float) or any(map(_of_numbers, typing.get_args(hint)))


def _entries(value: Any, numbers: bool) -> Sequence[Any]:
    """Of a list; where they may be numbers, of an array or a tensor too."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview)):
        return value
    if numbers and getattr(value, "ndim", 0) >= 1 and hasattr(value, "tolist"):
        entries: list[Any] = value.tolist()
        return entries
    raise _MisfitError


def _mapping(inside: tuple[Any, ...]) -> _Rule:
    key, item = (_rule(hint) for hint in (inside or (Any, Any)))
    keys = "" if key.words == "anything" else f" from {key.words.removeprefix('a ')}"
    words = f"a mapping{keys}" + ("" if item.words == "anything" else f" to {item.words.removeprefix('a ')}")

    def take(value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise _MisfitError
        return {key.take(name): _entry(item, name, entry) for name, entry in value.items()}

    return _Rule(take, words)


def _function(value: Any) -> Any:
    if callable(value) and not isinstance(value, type):
        return value
    raise _MisfitError


_NAMES = {
    "PathLike": "a path", "Path": "a path", "Tensor": "a tensor", "ndarray": "an array",
    "Graph": "a networkx graph", "Module": "a torch module", "DataFrame": "a pandas DataFrame",
}  # fmt: skip


def _instance(kind: type) -> _Rule:
    protocol = getattr(kind, "_is_protocol", False)

    def take(value: Any) -> Any:
        if isinstance(value, type) and kind is not type:
            raise _MisfitError
        if protocol and type(value).__module__.partition(".")[0] in _NOBODYS:
            raise _MisfitError
        try:
            if isinstance(value, kind):
                return value
        except TypeError:  # a protocol that cannot be looked for
            return value
        raise _MisfitError

    article = "an" if kind.__name__[:1] in "AEIOU" else "a"
    made = f"{kind.__name__}(…)" if hasattr(kind, "__dataclass_fields__") else f"{article} {kind.__name__}"
    return _Rule(take, _NAMES.get(kind.__name__, made))


def _either(choices: Sequence[str]) -> str:
    """A list in words. What is longer than a word, and has commas in it, is set apart by one."""
    some = list(dict.fromkeys(choices))
    if len(some) == 1:
        return some[0]
    comma = "," if "," in some[-2] else ""
    return f"{', '.join(some[:-1])}{comma} or {some[-1]}"
