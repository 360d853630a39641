"""Finds scenarios: files in the `scenarios` package by name, anybody's by path.

A scenario file has a docstring, whose first line `asyncfed list` shows, and a function `scenario` whose
keyword parameters `--set` can change, or a value `SCENARIO`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from asyncfed.errors import AsyncfedError, ScenarioError, UnknownNameError

if TYPE_CHECKING:
    from asyncfed.scenario import Scenario


def known_scenarios() -> dict[str, str]:
    """Name → first line of the docstring; no file is imported for it."""
    return {name: _first_line(path) for name, path in _files().items()}


def load_scenario(name: str, settings: Sequence[str] = (), seed: int | None = None) -> Scenario:
    """The scenario that a name or a path means, with its settings changed as asked."""
    from asyncfed.cli.settings import apply_settings, parse_settings

    changes = parse_settings(settings)
    path = _locate(name)
    module = _module(path)
    parameters = _parameters(module)
    arguments = {key: _checked(key, changes[key], parameters[key]) for key in changes if key in parameters}
    made = _make(module, path, arguments)
    rest = {key: value for key, value in changes.items() if key not in arguments}
    made = apply_settings(made, rest, parameters)
    return made if seed is None else dataclasses.replace(made, seed=seed)


def _files() -> dict[str, Path]:
    package = importlib.util.find_spec("scenarios")
    if package is None or package.submodule_search_locations is None:
        return {}
    folders = map(Path, package.submodule_search_locations)
    found = [path for folder in folders for path in folder.glob("*.py") if not path.name.startswith("_")]
    return {path.stem: path for path in sorted(found)}


def _first_line(path: Path) -> str:
    try:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    except (SyntaxError, UnicodeDecodeError):
        return "(cannot be read)"
    return text.splitlines()[0] if text else ""


def _locate(name: str) -> Path:
    if name.endswith(".py") or os.sep in name:
        path = Path(name)
        if not path.is_file():
            raise ScenarioError(
                f"there is no file {name}; give a name (`asyncfed list`) or the path of a Python file"
            )
        return path
    files = _files()
    if name.replace("-", "_") not in files:
        raise UnknownNameError("scenario", name, files)
    return files[name.replace("-", "_")]


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"asyncfed_scenario_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ScenarioError(f"{path} cannot be loaded as Python; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)  # so that it finds the files beside it, after everything that is installed
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _complaint(error, path) from error
    finally:
        del sys.modules[spec.name]  # so that Ray sends its functions by value: no worker could import it
    return module


def _parameters(module: ModuleType) -> Mapping[str, inspect.Parameter]:
    function = getattr(module, "scenario", None)
    return inspect.signature(function).parameters if callable(function) else {}


def _make(module: ModuleType, path: Path, arguments: dict[str, Any]) -> Scenario:
    from asyncfed.scenario import Scenario

    function: Callable[..., Any] | None = getattr(module, "scenario", None)
    if callable(function):
        try:
            made = function(**arguments)
        except Exception as error:
            raise _complaint(error, path) from error
    else:
        made = getattr(module, "SCENARIO", None)
    if not isinstance(made, Scenario):
        source = "its function scenario() returned" if callable(function) else "its value SCENARIO is"
        raise ScenarioError(
            f"{path} holds no scenario: {source} {made!r}; "
            "write a function scenario() that returns an asyncfed.Scenario, or set SCENARIO to one"
        )
    return made if made.name != "scenario" else dataclasses.replace(made, name=path.stem)


def _checked(key: str, value: Any, parameter: inspect.Parameter) -> Any:
    """The value, where it is of the kind of the parameter's default."""
    kinds: dict[type, tuple[tuple[type, ...], str]] = {
        bool: ((bool,), "True or False"),
        int: ((int,), "a whole number"),
        float: ((int, float), "a number"),
        str: ((str,), "text"),
    }
    if type(parameter.default) in kinds:
        allowed, words = kinds[type(parameter.default)]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ScenarioError(f"{key} is {value!r}; it must be {words}, such as {parameter.default!r}")
    return value


def _complaint(error: Exception, path: Path) -> Exception:
    """What went wrong in a scenario file, with its line; our own words stay as they are."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename) == path:
        return ScenarioError(f"{path}, line {error.lineno}: SyntaxError: {error.msg}")
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path
    ]
    where = f"{path}, line {lines[-1]}" if lines else str(path)
    if isinstance(error, AsyncfedError):
        return error if path in _files().values() else ScenarioError(f"{where}: {error}")
    return ScenarioError(f"{where}: {type(error).__name__}: {error}")
