"""What a run writes down of an evaluation: a row of metrics, and in the end a row for each client."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncfed.runtime.evaluation import Evaluation
from asyncfed.trace import Totals


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
    counts = item.counts
    for name, sums in item.sums.items():
        row[name] = float(sums.sum() / counts.sum())
        if name == "accuracy":
            judged = counts > 0
            row["accuracy_p10"] = float(np.percentile(sums[judged] / counts[judged], 10))
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


def client_rows(item: Evaluation) -> list[dict[str, Any]]:
    with np.errstate(invalid="ignore"):
        means = {name: sums / item.counts for name, sums in item.sums.items()}
    return [
        {"client": int(client), "steps": int(item.steps[place]), "samples": int(item.counts[place])}
        | {name: int(each[place]) for name, each in item.computed.items()}
        | {name: float(values[place]) for name, values in means.items()}
        for place, client in enumerate(item.clients)
    ]
