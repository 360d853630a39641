"""asyncfed: asynchronous, actor-based simulation of federated and decentralized learning.

A scenario is a Python value, `run` returns a result, a result has metrics and a trace. Imports are lazy:
`import asyncfed` costs nothing until a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncfed.errors import (
        ActorLostError,
        AsyncfedError,
        DataError,
        DivergenceError,
        RunError,
        RunExistsError,
        ScenarioError,
        TopologyError,
        TraceError,
        UnknownNameError,
    )
    from asyncfed.network import Lockstep, VirtualTime
    from asyncfed.result import Result, load
    from asyncfed.runner import Progress, run
    from asyncfed.scenario import Scenario
    from asyncfed.trace import Trace

_HOMES = {
    "asyncfed.errors": (
        "ActorLostError",
        "AsyncfedError",
        "DataError",
        "DivergenceError",
        "RunError",
        "RunExistsError",
        "ScenarioError",
        "TopologyError",
        "TraceError",
        "UnknownNameError",
    ),
    "asyncfed.network": ("Lockstep", "VirtualTime"),
    "asyncfed.result": ("Result", "load"),
    "asyncfed.runner": ("Progress", "run"),
    "asyncfed.scenario": ("Scenario",),
    "asyncfed.trace": ("Trace",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "ActorLostError",
    "AsyncfedError",
    "DataError",
    "DivergenceError",
    "Lockstep",
    "Progress",
    "Result",
    "RunError",
    "RunExistsError",
    "Scenario",
    "ScenarioError",
    "TopologyError",
    "Trace",
    "TraceError",
    "UnknownNameError",
    "VirtualTime",
    "load",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'asyncfed' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
