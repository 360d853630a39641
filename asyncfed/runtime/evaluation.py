"""A snapshot, measured: what the blocks found, put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncfed.errors import DivergenceError
from asyncfed.network.waves import Unrecorded
from asyncfed.runtime.judging import Measurement

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A snapshot, measured."""

    phase: str
    time: float
    steps: IntArray  # of each client
    reports: dict[str, FloatArray]
    clients: IntArray
    sums: dict[str, FloatArray]
    counts: IntArray
    validation: dict[str, FloatArray]  # sums over validation samples, where the protocol selects by them
    validation_counts: IntArray
    consensus: float | None  # None where there is one model only
    final: bool
    outer_step: int | None  # how often the outer variable was stepped, where the protocol does that
    unrecorded: Unrecorded
    rounds: int | None = None  # of the server, where there is one
    computed: dict[str, IntArray] = field(default_factory=dict)  # by each client so far, where it is known


def gathered(parts: list[Measurement]) -> dict[str, Any]:
    """Put together in the order of the clients."""
    order = np.argsort(np.concatenate([part.clients for part in parts]))

    def of(pieces: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.concatenate(pieces)[order]

    return {
        "clients": of([part.clients for part in parts]),
        "sums": {name: of([part.sums[name] for part in parts]) for name in parts[0].sums},
        "counts": of([part.counts for part in parts]),
        "validation": {name: of([part.validation[name] for part in parts]) for name in parts[0].validation},
        "validation_counts": of([part.validation_counts for part in parts]),
    }


def require_finite(parts: list[Measurement], steps: IntArray) -> None:
    """That what was measured is finite: the data are, so a model of which it is not has diverged, be its own
    numbers finite or not.
    """
    for part in parts:
        if (wrong := part.not_finite()) is not None:
            client = int(part.clients[wrong.place])
            quantity = f"{wrong.quantity}, as judged,"
            raise DivergenceError(client, int(steps[client]), quantity, wrong.value, cause=part.cause)


def consensus(parts: list[Measurement]) -> float:
    """Root mean square distance of the clients' models from their mean, put together from the blocks."""
    sizes = np.array([len(part.clients) for part in parts], dtype=np.float64)
    centre = sum(
        (size * part.centre for size, part in zip(sizes, parts, strict=True)), np.zeros_like(parts[0].centre)
    )
    centre = centre / sizes.sum()
    spread = sum(
        part.spread + size * float(np.square(part.centre - centre).sum())
        for size, part in zip(sizes, parts, strict=True)
    )
    return float(np.sqrt(spread / sizes.sum()))
