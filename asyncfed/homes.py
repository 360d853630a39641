"""Where methods, problems and options of one's own are defined, so that a run's scenario can be built again.

A run directory notes the module of each thing of one's own that its scenario names. What is registered is
found by its name, as ever. A module is imported only where whoever reads the run allows it, by name:
`load(run, imports=["my_methods"])`. The files of a run, which anybody may have written, import nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any

from asyncfed.checks import Words, shown
from asyncfed.errors import ScenarioError
from asyncfed.registry import FILE_PREFIX, registered

OURS = ("asyncfed", "topologies", "scenarios")


Imports = Annotated[str | Collection[str], Words("names of modules, such as ['my_methods']")]


def homes_of(data: Any) -> dict[str, str]:
    """The modules of all things of one's own that plain data names."""
    known = registered()
    modules = {name: known[name].__module__ for name in sorted(set(_named(data))) if name in known}
    return {
        name: module.removeprefix(FILE_PREFIX)
        for name, module in modules.items()
        if module.partition(".")[0] not in OURS
    }


def checked_imports(imports: Any) -> tuple[str, ...]:
    """The modules that may be imported; refuses what is no list of names."""
    names = (imports,) if isinstance(imports, str) else imports
    listed = isinstance(names, (list, tuple, set, frozenset))
    if not listed or not all(isinstance(name, str) and name for name in names):
        raise ScenarioError(
            f"imports is {shown(imports)}; it must be names of modules, such as ['my_methods']"
        )
    return tuple(names)


def find(data: Any, homes: Any, imports: Collection[str]) -> None:
    """See to it that all that data names is registered: import where that is allowed, and say where not."""
    there = homes if isinstance(homes, Mapping) else {}
    for name in sorted(set(_named(data)) - set(registered())):
        module = there.get(name)
        if not isinstance(module, str):
            continue  # whoever builds it says that it is unknown
        if not any(module == allowed or module.startswith(f"{allowed}.") for allowed in imports):
            raise ScenarioError(f"{name!r} is not registered; {_how(name, module)}")
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ScenarioError(
                f"{module} cannot be imported ({error}), and it is where {name!r} was defined; put its "
                "folder on sys.path"
            ) from error
        if name not in registered():
            raise ScenarioError(
                f"{module} was imported and does not register {name!r}; mark it with @register (or a problem "
                "with @problem_factory), as it was when the run was made"
            )


def _how(name: str, module: str) -> str:
    if module == "__main__":
        return "it was defined in a script or a notebook: run the cell, or import a file, that defines it"
    return (
        f"it was defined in the module {module!r:.200}: import that first, or allow it to be imported where "
        f"you know what it does, with load(run, imports=[{module!r:.200}])"
    )


def _named(data: Any) -> Iterator[str]:
    """The names of types and factories in data."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key in ("type", "factory") and isinstance(value, str):
                yield value
            else:
                yield from _named(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from _named(value)
