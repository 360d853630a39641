"""What is kept of a run, and how another run is compared with it.

Of the trace: hashes of its tables with rows sorted and times rounded to nine digits, so that neither the
order of rows nor the last bits of a sum matter. Of every final variable: its shape and three projections onto
fixed random directions. Metrics are left out, but for the traffic in their last row.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from asyncfed import Result

Digest = dict[str, Any]

MESSAGES = (
    "step", "sender", "receiver", "status", "sent_at", "arrived_at", "absorbed_step", "weight", "bytes",
    "phase", "kind",
)  # fmt: skip
STEPS = ("client", "step", "started_at", "ended_at", "absorbed", "phase")
"""Columns by name: a table may come to have more."""

_DIRECTIONS = 3
_RTOL, _ATOL = 1e-8, 1e-10


def digest(result: Result) -> Digest:
    """All that is kept of a run, as JSON can hold it."""
    messages, steps = result.trace.to_arrow().to_pydict(), result.trace.steps()
    last = result.metrics.iloc[-1]
    return {
        "messages": table_digest(messages, MESSAGES),
        "steps": table_digest({name: steps[name].tolist() for name in STEPS}, STEPS),
        "status": dict(sorted(Counter(messages["status"]).items())),
        "bytes": sum(messages["bytes"]),
        "last_metrics": {name: int(last[name]) for name in ("messages", "bytes")},
        "final": {name: _projected(name, value) for name, value in sorted(result.final.items())},
    }


def table_digest(table: Mapping[str, Sequence[Any]], columns: Sequence[str]) -> Digest:
    """A hash of the rows, whatever their order; one of each column by itself tells where a difference is."""
    texts = {name: [_text(value) for value in table[name]] for name in columns}
    rows = [",".join(row) for row in zip(*texts.values(), strict=True)]
    return {
        "rows": len(rows),
        "sha256": _hash(rows),
        "columns": {name: _hash(column)[:12] for name, column in texts.items()},
    }


def differences(expected: Digest, found: Digest) -> list[str]:
    """What is not as expected, a line for each; none where all is."""
    lines = [
        line
        for table in ("messages", "steps")
        for line in _table_differences(table, expected[table], found[table])
    ]
    for name in ("status", "bytes", "last_metrics"):
        if expected[name] != found[name]:
            lines.append(f"{name}: expected {expected[name]}, found {found[name]}")
    before, after = expected["final"], found["final"]
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            lines.append(f"final {name!r}: missing")
        elif name not in before:
            lines.append(f"final {name!r}: not expected")
        else:
            lines += _variable_differences(name, before[name], after[name])
    return lines


def _table_differences(table: str, expected: Digest, found: Digest) -> list[str]:
    if expected["sha256"] == found["sha256"]:
        return []
    columns = [name for name, value in expected["columns"].items() if found["columns"].get(name) != value]
    where = f"in {', '.join(columns)}" if columns else "only in which values stand together in a row"
    return [f"{table}: {where}; expected {expected['rows']} rows, found {found['rows']}"]


def _variable_differences(name: str, expected: Digest, found: Digest) -> list[str]:
    if expected["shape"] != found["shape"]:
        return [f"final {name!r}: expected the shape {expected['shape']}, found {found['shape']}"]
    before, after = (np.array(one["projections"]) for one in (expected, found))
    if np.allclose(after, before, rtol=_RTOL, atol=_ATOL):
        return []
    return [
        f"final {name!r}: projections differ by up to {np.abs(after - before).max():.3g}; "
        f"expected {before.tolist()}, found {after.tolist()}"
    ]


def _projected(name: str, value: Tensor) -> Digest:
    """The directions depend on the variable's name and size alone."""
    flat = value.detach().cpu().double().reshape(-1).numpy()
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    directions = np.random.Generator(np.random.Philox(key=key)).random((_DIRECTIONS, flat.size)) - 0.5
    return {"shape": list(value.shape), "projections": [math.fsum(row) for row in directions * flat]}


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value + 0.0:.9g}"  # + 0.0, for −0 is 0
    return str(value)


def _hash(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
