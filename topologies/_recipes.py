"""How a graph was made, as data: a generator's name and its arguments, enough to make the graph again."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

import networkx as nx

from asyncfed.checks import shown
from asyncfed.errors import TopologyError, UnknownNameError
from asyncfed.registry import register, registered

P = ParamSpec("P")

GENERATORS: Mapping[str, Callable[..., nx.Graph]] = registered("topology")
_NOT_PLAIN = object()


def generator(function: Callable[P, nx.Graph]) -> Callable[P, nx.Graph]:
    """Register a generator, and let it note in the graph how it was called where its arguments are plain."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def noting(*args: P.args, **kwargs: P.kwargs) -> nx.Graph:
        graph = function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        note_recipe(graph, function.__name__, bound.arguments)
        return graph

    return register("topology")(noting)


def note_recipe(graph: nx.Graph, name: str, given: Mapping[str, Any]) -> None:
    """Let a graph say how it was made, where the arguments are plain."""
    arguments = {key: _as_json(value) for key, value in given.items()}
    graph.graph.pop("recipe", None)
    if _NOT_PLAIN not in arguments.values():
        graph.graph["recipe"] = json.dumps({"generator": name, "arguments": arguments})


def from_recipe(recipe: str | Mapping[str, Any]) -> nx.Graph:
    """Make a graph again from what `graph.graph["recipe"]` says about it.

    Parameters
    ----------
    recipe : str or mapping
        ``{"generator": name, "arguments": {...}}``, or that as JSON. Arguments left out take their defaults.

    Raises
    ------
    UnknownNameError
        For a generator or an argument that does not exist.
    TopologyError
        For anything else that is not a recipe.
    """
    if isinstance(recipe, str):
        try:
            recipe = json.loads(recipe)
        except (ValueError, RecursionError) as error:
            raise TopologyError(f"the recipe {shown(recipe)} is not JSON: {error}") from error
    match recipe:
        case {"generator": str(name), "arguments": {**arguments}}:
            pass
        case _:
            raise TopologyError(
                f"the recipe is {shown(recipe)}; "
                'it must look like {"generator": "ring", "arguments": {"n": 8}}'
            )
    if name not in GENERATORS:
        raise UnknownNameError("topology generator", name, GENERATORS)
    parameters = inspect.signature(GENERATORS[name]).parameters
    for argument in arguments:
        if argument not in parameters:
            raise UnknownNameError(f"argument of {name}", str(argument), parameters)
    for parameter in parameters.values():
        if parameter.default is parameter.empty and parameter.name not in arguments:
            raise TopologyError(
                f"the recipe for {name} lacks the argument {parameter.name!r}; add it to the arguments"
            )
    # JSON has no tuples: a list in a recipe was one.
    values = {str(key): tuple(v) if isinstance(v, list) else v for key, v in arguments.items()}
    return GENERATORS[name](**values)


def _as_json(value: object) -> object:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        entries = [_as_json(entry) for entry in value]
        return _NOT_PLAIN if _NOT_PLAIN in entries else entries
    return _NOT_PLAIN
