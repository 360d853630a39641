"""What a run writes down of an evaluation: a row of metrics, and in the end a row for each client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncfed.runtime.evaluation import Evaluation
from asyncfed.trace import Totals

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def metrics_row(item: Evaluation, totals: Totals) -> dict[str, Any]:
    steps = float(item.steps.mean()) if np.ptp(item.steps) else int(item.steps[0])
    row: dict[str, Any] = {
        "phase": item.phase,
        "step": steps if item.rounds is None else item.rounds,
        "virtual_time": item.time,
        "train_loss": None,
    }
    for name, values in item.reports.items():
        known = values[~np.isnan(values)]
        if len(known):
            column = "train_loss" if name == "loss" else name
            row[column if column not in item.sums else f"reported_{column}"] = float(known.mean())
    row |= means(item.sums, item.counts)
    if item.outer_step is not None:
        row["outer_step"] = item.outer_step
        for name, sums in item.validation.items():
            if item.validation_counts.sum():
                row[f"validation_{name}"] = float(sums.sum() / item.validation_counts.sum())
    if item.consensus is not None:
        row["consensus"] = item.consensus
    unrecorded = item.unrecorded
    return row | {
        "messages": totals.sent + unrecorded.arrived + unrecorded.on_the_way,
        "delivered": totals.delivered + unrecorded.arrived - unrecorded.early,
        "lost": totals.lost,
        "bytes": totals.bytes + unrecorded.bytes,
        **{name: int(each.sum()) for name, each in item.computed.items()},
    }


def means(sums: Mapping[str, FloatArray], counts: IntArray) -> dict[str, float]:
    """Metrics over all samples, from their sums over those of each client."""
    row: dict[str, float] = {}
    for name, own in sums.items():
        row[name] = float(own.sum() / counts.sum())
        if name == "accuracy":
            judged = counts > 0
            row["accuracy_p10"] = float(np.percentile(own[judged] / counts[judged], 10))
    return row


def client_rows(item: Evaluation) -> list[dict[str, Any]]:
    with np.errstate(invalid="ignore"):
        means = {name: sums / item.counts for name, sums in item.sums.items()}
    return [
        {"client": int(client), "steps": int(item.steps[place]), "samples": int(item.counts[place])}
        | {name: int(each[place]) for name, each in item.computed.items()}
        | {name: float(values[place]) for name, values in means.items()}
        for place, client in enumerate(item.clients)
    ]
