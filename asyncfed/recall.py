"""What an object of ours holds, as data, and back: for those that change while a run goes.

A class whose objects are to be put down and taken up again is marked with `@recalled`. What of its attributes
is `given` (a network, a stream of numbers, a writer: whatever the scenario makes again) is left out; all else
(or what it `holds`, where that is less) must be plain: numbers, text, arrays, lists, tuples, sets,
dictionaries, or objects of marked classes. Anything else is refused when it is put down, so that nothing is
forgotten in silence.

    saved = Saved.of(schedule)         data that JSON can hold, and arrays by number
    saved.into(fresh)                  `fresh`, made from the same scenario, goes on where `schedule` was

Two names for one array or object stay so. Only marked classes are ever made from data, and nothing is called.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class _Mark:
    cls: type
    given: frozenset[str]
    holds: frozenset[str] | None

    def remembers(self, attribute: str) -> bool:
        return attribute not in self.given if self.holds is None else attribute in self.holds


_MARKED: dict[str, _Mark] = {}


def recalled(*, given: Sequence[str] = (), holds: Sequence[str] | None = None) -> Callable[[_Class], _Class]:
    """Marks a class: `given` are the attributes that are made anew, not remembered; or `holds` are those that
    are remembered, and no others.
    """

    def mark(cls: _Class) -> _Class:
        name = _name(cls)
        assert name not in _MARKED, f"two classes are called {name}"
        _MARKED[name] = _Mark(cls, frozenset(given), None if holds is None else frozenset(holds))
        return cls

    return mark


@dataclass(frozen=True, eq=False)
class Saved:
    """An object as data: `plain` is what JSON can hold, and refers to `arrays` by number."""

    plain: Any
    arrays: list[npt.NDArray[Any]]

    @classmethod
    def of(cls, thing: object) -> Saved:
        """Put down an object of a marked class; arrays are copied."""
        down = _Down()
        return cls(down.value(thing, type(thing).__name__), down.arrays)

    def into(self, fresh: object, only: Sequence[str] | None = None) -> None:
        """Make an object, made from the same scenario, what the other was; or only some attributes of it."""
        _Up(self.arrays).update(fresh, self.plain, only)


def _name(cls: type) -> str:
    return f"{cls.__module__.removeprefix('asyncfed.')}.{cls.__qualname__}"


def _attributes(thing: object) -> Mapping[str, Any]:
    if is_dataclass(thing):
        return {field.name: getattr(thing, field.name) for field in fields(thing)}
    return vars(thing)


class _Down:
    """Objects into data."""

    def __init__(self) -> None:
        self.arrays: list[npt.NDArray[Any]] = []
        self._numbers: dict[int, int] = {}  # of arrays and objects that were seen, by identity
        self._seen: list[Any] = []  # kept, so that identities stay theirs

    def value(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, np.generic):
            return self.value(value.item(), where)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, list):
            return [self.value(one, where) for one in value]
        if isinstance(value, np.ndarray):
            return self._array(value)
        for kind, made in (("tuple", tuple), ("set", set)):
            if type(value) is made:
                ordered = sorted(value) if made is set else value
                return {kind: [self.value(one, where) for one in ordered]}
        if isinstance(value, Mapping):
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {kind: [[self.value(key, where), self.value(one, where)] for key, one in value.items()]}
        return self._object(value, where)

    def _array(self, value: npt.NDArray[Any]) -> Any:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.arrays)
            self._seen.append(value)
            self.arrays.append(value.copy())
        return {"array": self._numbers[id(value)]}

    def _object(self, value: Any, where: str) -> Any:
        name = _name(type(value))
        if name not in _MARKED:
            raise TypeError(f"{where} holds a {type(value).__name__}, which is neither plain nor @recalled")
        if id(value) in self._numbers:
            return {"same": self._numbers[id(value)]}
        number = self._numbers[id(value)] = len(self._seen)
        self._seen.append(value)
        mark = _MARKED[name]
        own = {
            key: self.value(one, f"{where}.{key}")
            for key, one in _attributes(value).items()
            if mark.remembers(key)
        }
        return {"object": name, "number": number, "holds": own}


class _Up:
    """Data into objects."""

    def __init__(self, arrays: list[npt.NDArray[Any]]) -> None:
        self._arrays = arrays
        self._made: dict[int, Any] = {}

    def update(self, fresh: Any, data: Any, only: Sequence[str] | None = None) -> None:
        mark = _MARKED[data["object"]]
        if type(fresh) is not mark.cls:
            raise ValueError(f"a {type(fresh).__name__} stands where a {mark.cls.__name__} was")
        self._made[data["number"]] = fresh
        for name, one in data["holds"].items():
            if not mark.remembers(name) or not name.isidentifier() or name.startswith("__"):
                raise ValueError(f"{mark.cls.__name__} does not remember {name!r}")
            if only is None or name in only:
                object.__setattr__(fresh, name, self._value(one, getattr(fresh, name, None)))

    def _value(self, data: Any, fresh: Any = None) -> Any:
        if isinstance(data, list):
            return [self._value(one) for one in data]
        if not isinstance(data, dict):
            return data
        if "object" in data:
            cls = _MARKED[data["object"]].cls
            made = fresh if type(fresh) is cls and not is_dataclass(cls) else object.__new__(cls)
            self.update(made, data)
            return made
        ((kind, content),) = data.items()
        if kind == "same":
            return self._made[content]
        if kind == "array":
            return self._arrays[content]
        if kind == "float":
            return float(content)
        if kind == "tuple":
            return tuple(self._value(one) for one in content)
        if kind == "set":
            return {self._value(one) for one in content}
        pairs = {self._value(key): self._value(one) for key, one in content}
        return Counter(pairs) if kind == "counter" else pairs
