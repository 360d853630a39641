"""asyncfed: asynchronous, actor-based simulation of federated and decentralized learning.

A scenario is a Python value, `run` returns a result, a result has metrics and a trace; a study is several
scenarios and what to make of their results. Imports are lazy: `import asyncfed` costs nothing until a name is
used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncfed.adaptation import Adapted, adapt
    from asyncfed.callbacks import Callback, EvaluationReport, MessageSummary, PhaseStart, RunStart
    from asyncfed.comparison import Comparison, compare
    from asyncfed.errors import (
        ActorLostError,
        AsyncfedError,
        CallbackError,
        DataError,
        DivergenceError,
        OneByOneWarning,
        QuorumError,
        RecoveredWarning,
        RunError,
        RunExistsError,
        RunStopped,
        ScenarioError,
        SeriesDivergesError,
        StorageError,
        TopologyError,
        TraceError,
        UnknownNameError,
        UnsoundWarning,
    )
    from asyncfed.estimation import HypergradientEstimate, hypergradient
    from asyncfed.exporting import export
    from asyncfed.goals import AtLeast, AtMost
    from asyncfed.network import Lockstep, VirtualTime
    from asyncfed.result import Result, load
    from asyncfed.runner import Progress, resume, run
    from asyncfed.scenario import Scenario
    from asyncfed.study import (
        Study,
        StudyProgress,
        StudyResult,
        Summary,
        SummaryTable,
        load_study,
        run_study,
    )
    from asyncfed.sweeping import sweep
    from asyncfed.trace import Trace

_HOMES = {
    "asyncfed.adaptation": ("Adapted", "adapt"),
    "asyncfed.callbacks": ("Callback", "EvaluationReport", "MessageSummary", "PhaseStart", "RunStart"),
    "asyncfed.comparison": ("Comparison", "compare"),
    "asyncfed.errors": (
        "ActorLostError",
        "AsyncfedError",
        "CallbackError",
        "DataError",
        "DivergenceError",
        "OneByOneWarning",
        "QuorumError",
        "RecoveredWarning",
        "RunError",
        "RunExistsError",
        "RunStopped",
        "ScenarioError",
        "SeriesDivergesError",
        "StorageError",
        "TopologyError",
        "TraceError",
        "UnknownNameError",
        "UnsoundWarning",
    ),
    "asyncfed.estimation": ("HypergradientEstimate", "hypergradient"),
    "asyncfed.exporting": ("export",),
    "asyncfed.goals": ("AtLeast", "AtMost"),
    "asyncfed.network": ("Lockstep", "VirtualTime"),
    "asyncfed.result": ("Result", "load"),
    "asyncfed.runner": ("Progress", "resume", "run"),
    "asyncfed.scenario": ("Scenario",),
    "asyncfed.study": (
        "Study",
        "StudyProgress",
        "StudyResult",
        "Summary",
        "SummaryTable",
        "load_study",
        "run_study",
    ),
    "asyncfed.sweeping": ("sweep",),
    "asyncfed.trace": ("Trace",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "ActorLostError",
    "Adapted",
    "AsyncfedError",
    "AtLeast",
    "AtMost",
    "Callback",
    "CallbackError",
    "Comparison",
    "DataError",
    "DivergenceError",
    "EvaluationReport",
    "HypergradientEstimate",
    "Lockstep",
    "MessageSummary",
    "OneByOneWarning",
    "PhaseStart",
    "Progress",
    "QuorumError",
    "RecoveredWarning",
    "Result",
    "RunError",
    "RunExistsError",
    "RunStart",
    "RunStopped",
    "Scenario",
    "ScenarioError",
    "SeriesDivergesError",
    "StorageError",
    "Study",
    "StudyProgress",
    "StudyResult",
    "Summary",
    "SummaryTable",
    "TopologyError",
    "Trace",
    "TraceError",
    "UnknownNameError",
    "UnsoundWarning",
    "VirtualTime",
    "adapt",
    "compare",
    "export",
    "hypergradient",
    "load",
    "load_study",
    "resume",
    "run",
    "run_study",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'asyncfed' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
