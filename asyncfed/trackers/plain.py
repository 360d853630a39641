"""What all trackers log: numbers by name, and a scenario as flat parameters."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from asyncfed.callbacks import EvaluationReport
from asyncfed.errors import ScenarioError

_MOST_TEXT = 250  # characters of a parameter


def library(module: str, extra: str) -> Any:
    """A tracker's library, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ScenarioError(
            f"{module} cannot be imported ({error}); install it: pip install 'asyncfed[{extra}]'"
        ) from error


def numbers(report: EvaluationReport, per_client: bool) -> dict[str, float]:
    """All metrics that are numbers, by name; where it is wanted those of each client, as client/ann/loss."""
    found = dict(_numbers(report.metrics))
    for row in report.clients if per_client else ():
        found |= {
            f"client/{row['client']}/{name}": value for name, value in _numbers(row) if name != "client"
        }
    return found


def step_of(report: EvaluationReport) -> int:
    """The step, for trackers that want a whole number: of all clients the mean."""
    return round(float(report.metrics["step"]))


def parameters(data: Mapping[str, Any]) -> dict[str, str]:
    """A scenario as names and short texts, such as protocol.lr; of its network, what people call it."""
    topology = data.get("topology", {})
    named = {key: value for key, value in data.items() if key != "topology"}
    named["topology"] = topology.get("about", {}).get("name", "own graph")
    return {name: str(value)[:_MOST_TEXT] for name, value in _flat("", named)}


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}".lstrip("."), item)
    elif value is not None:
        yield prefix, value
