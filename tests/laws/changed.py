"""Scenarios with something changed in them, whatever the method: a field anywhere within it, or the data of
one client.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from asyncfed import Scenario
from asyncfed.data import ClientData, client_data_from_lists

Samples = tuple[Tensor, ...]


def with_fields(thing: Any, change: Callable[[str, Any], Any]) -> Any:
    """A method with `change` made to all its fields, and to those of the options and methods within it."""
    if isinstance(thing, tuple):
        return tuple(with_fields(item, change) for item in thing)
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        return thing
    changed = {
        field.name: change(field.name, with_fields(getattr(thing, field.name), change))
        for field in dataclasses.fields(thing)
        if field.init
    }
    return dataclasses.replace(thing, **changed)


def with_method(scenario: Scenario, change: Callable[[str, Any], Any]) -> Scenario:
    """A scenario whose method has changed fields."""
    return dataclasses.replace(scenario, protocol=with_fields(scenario.protocol, change))


def with_samples(scenario: Scenario, client: int, change: Callable[[Samples], Samples]) -> Scenario:
    """A scenario in which one client has other samples, in every split."""
    data = scenario.problem.data
    splits = []
    for split in (data.train, data.validation, data.test):
        each = [split.of(number) for number in range(split.clients)]
        if split.sizes[client]:
            each[client] = change(tuple(tensor.clone() for tensor in each[client]))
        splits.append(each)
    changed: ClientData = client_data_from_lists(*splits)
    assert np.array_equal(changed.train.sizes > 0, data.train.sizes > 0)
    problem = dataclasses.replace(scenario.problem, data=changed, recipe=None)
    return dataclasses.replace(scenario, problem=problem)
