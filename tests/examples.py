"""Good arguments for everything that is public: what it takes to make or call it once, and quickly."""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncfed.protocols import HGP, SGP, VRHGP, Diminishing, LocalSteps, StepDecay

FIELDS: dict[str, Any] = {
    **dict.fromkeys(("steps", "outer_steps", "rounds", "mean_rounds", "terms", "samples"), 2),
    **dict.fromkeys(("lr", "inner_lr", "mixing"), Diminishing(0.1, after=3.0)),
    **dict.fromkeys(("inner", "outer", "local"), LocalSteps(StepDecay(0.1, at=(2, 4)), epochs=2, batch=8)),
    **dict.fromkeys(("good", "bad", "mean", "scale", "shape", "median", "sigma", "value", "chance"), 0.5),
    **dict.fromkeys(("bound", "alpha", "beta", "low", "high"), 0.5),
    **dict.fromkeys(("nu", "tau"), 2),
    **dict.fromkeys(("there", "away"), "exponential(0.5)"),
    "at": (1, 2),
    "hypergradient": VRHGP(2, alpha=0.5, sampling="joint"),
    "methods": (HGP(2), VRHGP(3)),
    "matrix": ((0.5, 0.5), (0.25, 0.75)),
    "rows": ((0.5, 0.5), (0.25, 0.75)),
    "points": ((0.0, 0.5), (1.0, 0.25)),
    "path": "a file",
}
"""Of what is registered, the fields that have no default."""

_SGP = SGP(3, 0.1, order="4a")
_OTHERS: dict[str, dict[str, Any]] = {
    "StepDecay": {"lr": 0.5},
    "Diminishing": {"lr": 0.5},
    "PDBO": {"inner": _SGP},
    "CDBO": {"inner": _SGP},
    "CompareHypergradients": {"inner": _SGP},
    "EstimateHypergradient": {"inner": _SGP},
    "LinkTimes": {"intervals": [(0.0, 0.5), (0.75, 1.0)]},
    "GivenPresence": {"intervals": {1: [(0.0, 2.0), (3.0, float("inf"))], "a name": []}},
}


def arguments(thing: type[Any]) -> dict[str, Any]:
    """What a registered class must be given."""
    required = [
        field.name
        for field in dataclasses.fields(thing)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    own = _OTHERS.get(thing.__name__, {})
    return {name: own[name] if name in own else FIELDS[name] for name in required}


def example(thing: type[Any]) -> Any:
    """One of a registered class."""
    return thing(**arguments(thing))
