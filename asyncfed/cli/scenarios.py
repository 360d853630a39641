"""Finds scenarios and studies: files in the `scenarios` package by name, anybody's by path.

A scenario file has a docstring, whose first line `asyncfed list` shows, and a function `scenario` whose
keyword parameters `--set` can change, or a value `SCENARIO`. The file of a study has a function `study`
instead (and what else it needs, so a function `scenario` beside it is the study's own business).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
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
    from asyncfed.study import Study


def known_scenarios() -> dict[str, str]:
    """Name → first line of the docstring, of scenarios; no file is imported for it."""
    return {name: line for name, (line, is_study) in _known().items() if not is_study}


def known_studies() -> dict[str, str]:
    """Name → first line of the docstring, of studies."""
    return {name: line for name, (line, is_study) in _known().items() if is_study}


def load_work(name: str, settings: Sequence[str] = (), seed: int | None = None) -> Scenario | Study:
    """What a name or a path means, a scenario or a study, with its settings changed as asked."""
    from asyncfed.settings import parse_settings

    changes = parse_settings(settings)
    path = _locate(name)
    module = _module(path)
    if callable(getattr(module, "study", None)):
        return _study(module, path, changes, seed)
    return _scenario(module, path, changes, seed)


def load_scenario(name: str, settings: Sequence[str] = (), seed: int | None = None) -> Scenario:
    """The scenario that a name or a path means."""
    from asyncfed.scenario import Scenario

    work = load_work(name, settings, seed)
    if not isinstance(work, Scenario):
        raise ScenarioError(f"{name} is a study of several runs; a single scenario is needed here")
    return work


def load_maker(
    name: str, settings: Sequence[str] = (), seed: int | None = None
) -> Callable[[Mapping[str, Any]], Scenario]:
    """Makes the scenario that a name or a path means, with further settings each time: for sweeps."""
    from asyncfed.settings import parse_settings

    changes = parse_settings(settings)
    path = _locate(name)
    module = _module(path)
    if callable(getattr(module, "study", None)):
        raise ScenarioError(f"{name} is a study of several runs; a sweep is over settings of one scenario")

    def made(chosen: Mapping[str, Any]) -> Scenario:
        own = {**changes, **chosen}
        return _scenario(module, path, {key: own[key] for key in own if key != "seed"}, own.get("seed", seed))

    return made


def _study(module: ModuleType, path: Path, changes: Mapping[str, Any], seed: int | None) -> Study:
    from asyncfed.study import Study

    parameters = _parameters(module, "study")
    listing = ", ".join(parameters) or "(none)"
    for key in changes:
        if "." in key:
            raise ScenarioError(
                f"--set {key} is a part of one scenario, and {path.stem} is a study of several; "
                f"set a parameter of its function study(): {listing}"
            )
        if key not in parameters:
            raise UnknownNameError("parameter of study():", key, parameters)
    if seed is not None and "seed" not in parameters:
        raise ScenarioError(
            f"--seed {seed}: the function study() of {path.stem} has no parameter 'seed'; it has {listing}"
        )
    arguments = {key: _checked(key, value, parameters[key]) for key, value in changes.items()}
    if seed is not None:
        arguments["seed"] = seed
    telling = _telling(path)
    made = telling(module.study)(**arguments)
    if not isinstance(made, Study):
        raise ScenarioError(
            f"{path} holds no study: its function study() returned {made!r}; it must return an asyncfed.Study"
        )
    parts = {part: telling(build) if callable(build) else build for part, build in made.parts.items()}
    return dataclasses.replace(made, parts=parts, summarise=telling(made.summarise))


def _telling(path: Path) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function of the file say where in the file it failed."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                raise _complaint(error, path) from error

        return wrapped

    return wrap


def _scenario(module: ModuleType, path: Path, changes: Mapping[str, Any], seed: int | None) -> Scenario:
    from asyncfed.settings import apply_settings

    parameters = _parameters(module, "scenario")
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


def _known() -> dict[str, tuple[str, bool]]:
    return {name: _glance(path) for name, path in _files().items()}


def _glance(path: Path) -> tuple[str, bool]:
    """The first line of a file's docstring, and whether it defines a study."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return "(cannot be read)", False
    text = ast.get_docstring(tree)
    is_study = any(isinstance(node, ast.FunctionDef) and node.name == "study" for node in tree.body)
    return text.splitlines()[0] if text else "", is_study


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
    from asyncfed.registry import FILE_PREFIX

    spec = importlib.util.spec_from_file_location(f"{FILE_PREFIX}{path.stem}", path)
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


def _parameters(module: ModuleType, name: str) -> Mapping[str, inspect.Parameter]:
    function = getattr(module, name, None)
    return inspect.signature(function).parameters if callable(function) else {}


def _make(module: ModuleType, path: Path, arguments: dict[str, Any]) -> Scenario:
    from asyncfed.scenario import Scenario

    function: Callable[..., Any] | None = getattr(module, "scenario", None)
    made = _telling(path)(function)(**arguments) if callable(function) else getattr(module, "SCENARIO", None)
    if not isinstance(made, Scenario):
        source = "its function scenario() returned" if callable(function) else "its value SCENARIO is"
        raise ScenarioError(
            f"{path} holds no scenario: {source} {made!r}; "
            "write a function scenario() that returns an asyncfed.Scenario, or set SCENARIO to one "
            "(or a function study() that returns an asyncfed.Study)"
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
