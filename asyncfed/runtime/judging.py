"""What clients are worth by the variables they are judged by: sums of metrics, and how far apart they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.data import ClientData, ClientShards
from asyncfed.errors import RunError
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.whole import evaluate, evaluate_common
from asyncfed.protocols.part import Judged

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class Wrong(NamedTuple):
    """A sum that is not finite: of which of a block's clients."""

    place: int
    quantity: str
    value: float


@dataclass(frozen=True, eq=False)
class Measurement:
    """What a block's clients are worth: sums and counts of every metric, and the pieces of their spread."""

    clients: IntArray
    sums: dict[str, FloatArray]
    counts: IntArray
    centre: FloatArray  # mean model of the block; empty where all are judged by one
    spread: float  # Σ ‖x_i − centre‖²
    validation: dict[str, FloatArray]  # sums over validation samples, where asked for
    validation_counts: IntArray
    cause: str = ""  # why the first that is not finite is not, where that is known

    def not_finite(self) -> Wrong | None:
        """The first sum that is not, of a client that has samples."""
        for split, all_sums, counts in (
            ("", self.sums, self.counts),
            ("validation ", self.validation, self.validation_counts),
        ):
            for name, sums in all_sums.items():
                wrong = np.flatnonzero(~np.isfinite(sums) & (counts > 0))
                if len(wrong):
                    return Wrong(int(wrong[0]), split + name, float(sums[wrong[0]]))
        return None


def measured(
    derivatives: Derivatives,
    clients: IntArray,
    data: ClientData,
    rows: IntArray,
    judged: Judged,
    chunk: int,
    validation: bool,
    buffers: Tensor | None = None,
    tuned: Tensor | None = None,
) -> Measurement:
    """Of the block's clients at `rows`, on their test samples (where the block has none, on the next best),
    and on the validation samples too where that is asked for. `buffers` are theirs, where they have some, and
    `tuned` what judging has made of them for the variables it returned first.
    """

    def theirs(split: ClientShards) -> ClientShards:
        return split if len(rows) == split.clients else split.select(rows)

    shards = theirs(next((s for s in (data.test, data.validation) if s.total), data.train))
    held_out = theirs(data.validation)
    problem = derivatives.problem
    beside = problem.beside(judged.inner, buffers if tuned is None else tuned)
    untuned = shards.with_beside(*problem.beside(judged.inner, buffers))
    one_for_all = _common(judged) and len(clients) > 1
    centre, spread = (np.zeros(0), 0.0) if one_for_all else _centre_and_spread(judged.inner, chunk)
    sums = _sums(derivatives, judged, shards.with_beside(*beside))
    for point, other in judged.also.items():
        more = {f"{name}_{point}": found for name, found in _sums(derivatives, other, untuned).items()}
        if taken := more.keys() & sums.keys():
            raise RunError(
                f"clients are also judged by {point!r}, and problem {problem.name!r} has a "
                f"metric called {min(taken)!r} already; give the metric another name"
            )
        sums |= more
    return Measurement(
        clients,
        sums,
        shards.sizes,
        centre,
        spread,
        _sums(derivatives, judged, held_out.with_beside(*beside)) if validation else {},
        held_out.sizes,
    )


def together(pieces: list[Measurement]) -> Measurement:
    """Of some clients after the other: how far they are apart is not asked of what was tuned for each."""
    return Measurement(
        np.concatenate([piece.clients for piece in pieces]),
        {name: np.concatenate([piece.sums[name] for piece in pieces]) for name in pieces[0].sums},
        np.concatenate([piece.counts for piece in pieces]),
        np.zeros(0),
        0.0,
        {name: np.concatenate([piece.validation[name] for piece in pieces]) for name in pieces[0].validation},
        np.concatenate([piece.validation_counts for piece in pieces]),
        next((piece.cause for piece in pieces if piece.cause), ""),
    )


def _common(judged: Judged) -> bool:
    """Whether all are judged by the same variables."""
    return judged.inner.stride(0) == 0 and judged.outer.stride(0) == 0


def _sums(derivatives: Derivatives, judged: Judged, shards: ClientShards) -> dict[str, FloatArray]:
    if _common(judged) and derivatives.problem.local_buffers is None:
        found = evaluate_common(derivatives, judged.inner[0], judged.outer[0], shards)
    else:
        both = evaluate(derivatives, judged.inner, judged.outer, shards)
        found = {name: sums for name, (sums, _) in both.items()}
    return {name: sums.double().cpu().numpy() for name, sums in found.items()}


def _centre_and_spread(x: Tensor, chunk: int) -> tuple[FloatArray, float]:
    """Mean of the rows and the sum of their squared distances from it, in doubles, piece by piece."""
    pieces = torch.split(x, chunk)
    centre = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    for piece in pieces:
        centre += piece.sum(0, dtype=torch.float64)
    centre /= len(x)
    return centre.cpu().numpy(), float(sum((piece - centre).square().sum() for piece in pieces))
