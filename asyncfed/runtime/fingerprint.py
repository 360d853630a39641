"""A hash of what a run computes with, as far as it can be hashed: its problem's functions and data, its
method's code, and ours.

Of a function: its instructions and constants, its defaults, what it closes over, and the functions and plain
values of its own module that it names. Of anything else that is neither plain nor a tensor: its class. So a
change of one's own code is noticed, except where it hides in what is reached otherwise (another module of
one's own, an attribute looked up at run time).
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncfed.problems.problem import Problem
from asyncfed.scenario import Scenario

_LAYERS = ("network", "protocols", "problems", "data", "runtime", "trace")  # of ours, that decide numbers
_FILES = ("models.py", "rng.py", "registry.py", "recall.py", "goals.py", "checks.py")


def fingerprints(scenario: Scenario, of_code: dict[str, str] | None = None) -> dict[str, str]:
    """By what was hashed; `of_code` where it is known."""
    data = {"the problem's data": _Hash().add(_data(scenario.problem)).digest()}
    return data | (code_fingerprints(scenario) if of_code is None else of_code)


def code_fingerprints(scenario: Scenario) -> dict[str, str]:
    """The same without the data, which may be much. Not while the problem's functions are being called: torch
    calls a module with other parameters by putting these into it for a while.
    """
    return {
        "asyncfed's code": _of_package(),
        "the problem's code": _Hash().add(_functions(scenario.problem)).digest(),
        "the method's code": _Hash().add(type(scenario.protocol)).digest(),
    }


@functools.cache
def _of_package() -> str:
    root = Path(__file__).parents[1]
    found = [root / name for name in _FILES]
    found += [path for layer in _LAYERS for path in (root / layer).rglob("*.py")]
    whole = hashlib.blake2b(digest_size=16)
    for path in sorted(found):
        whole.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return whole.hexdigest()


def _data(problem: Problem) -> list[Any]:
    splits = (problem.data.train, problem.data.validation, problem.data.test)
    return [(split.sizes, split.tensors) for split in splits]


def _functions(problem: Problem) -> list[Any]:
    names = [field.name for field in fields(problem) if field.name not in ("name", "data", "recipe")]
    return [(name, getattr(problem, name)) for name in names]


class _Hash:
    """Grows by whatever it is given."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._seen: dict[int, Any] = {}  # by identity, and kept, so that it stays theirs

    def digest(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any) -> _Hash:
        self._hash.update(f"<{type(value).__name__}>".encode())
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            self._hash.update(repr(value).encode())
        elif isinstance(value, torch.Tensor) and value.is_meta:
            self._hash.update(f"{value.dtype}{tuple(value.shape)}".encode())
        elif isinstance(value, torch.Tensor):
            self.add(value.detach().cpu().contiguous().numpy())
        elif isinstance(value, np.ndarray):
            self._hash.update(f"{value.dtype}{value.shape}".encode())
            self._hash.update(np.ascontiguousarray(value).view(np.uint8).data if value.size else b"")
        elif id(value) not in self._seen:
            self._seen[id(value)] = value
            self._add_compound(value)
        return self

    def _add_compound(self, value: Any) -> None:
        if isinstance(value, Mapping):
            self._add_all(part for item in value.items() for part in item)
        elif isinstance(value, Set):
            self._add_all(sorted(value, key=repr))
        elif isinstance(value, (list, tuple)):
            self._add_all(value)
        elif isinstance(value, functools.partial):
            self._add_all((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self._add_all((value.__func__, value.__self__))
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.CodeType):
            self._add_code(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, torch.nn.Module):
            kinds = {type(layer) for layer in value.modules()}
            self._add_all((sorted(kinds, key=repr), repr(value), dict(value.state_dict())))
        elif is_dataclass(value):
            self._add_all((type(value), [getattr(value, field.name) for field in fields(value)]))
        else:
            self.add(type(value))

    def _add_all(self, values: Any) -> None:
        for value in values:
            self.add(value)

    def _add_function(self, function: types.FunctionType) -> None:
        cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
        self._add_all((function.__code__, function.__defaults__, function.__kwdefaults__, cells))
        if _ours(function.__module__):
            return  # its module is hashed as a file
        for name in function.__code__.co_names:
            named = function.__globals__.get(name)
            own = getattr(named, "__module__", None) == function.__module__
            if own or isinstance(named, (bool, int, float, str, tuple, torch.Tensor, np.ndarray)):
                self.add(named)

    def _add_code(self, code: types.CodeType) -> None:
        self._hash.update(code.co_code)
        self._add_all((code.co_names, code.co_varnames, code.co_consts))

    def _add_class(self, cls: type) -> None:
        self._hash.update(f"{cls.__module__}.{cls.__qualname__}".encode())
        if not _ours(cls.__module__) and cls.__module__ not in ("builtins", "__builtin__"):
            for name, member in sorted(vars(cls).items()):
                if isinstance(member, (types.FunctionType, staticmethod, classmethod, property)):
                    self.add(name)
                    parts = (member.fget,) if isinstance(member, property) else (member,)
                    self._add_all(getattr(part, "__func__", part) for part in parts)


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _ours(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "asyncfed"
