"""What comes to a block from others, put with what it has at home: sums, rows and single messages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.network.waves import MatrixSums, Sums
from asyncfed.protocols.part import Messages, Tensors
from asyncfed.runtime.exchange import Away, CommonFrom, Incoming, RowsFrom, SumsFrom
from asyncfed.runtime.pool import Pool

IntArray = npt.NDArray[np.int64]


def with_arrivals(
    name: str,
    total: Tensor | None,
    away: tuple[Away, ...],
    parcels: Sequence[Tensors],
    rows: int,
    device: torch.device,
) -> Tensor | None:
    """`total` (in place), or nothing, and what the parcels add to each of so many rows."""
    for piece in away:
        assert not isinstance(piece, CommonFrom), "what is common is taken as it is"
        if isinstance(piece, SumsFrom):
            total = _with_sums(total, piece.rows, parcels[piece.parcel][name].to(device), rows)
            continue
        values = [value[name] for value in parcels[piece.parcel : piece.parcel + len(piece.first) - 1]]
        if total is None:
            total = values[0].new_zeros(rows, values[0].shape[1], device=device)
        _add_rows(total, piece, values)
    return total


def _with_sums(total: Tensor | None, at: IntArray, sums: Tensor, rows: int) -> Tensor:
    if total is None:
        if len(at) == rows:
            return sums.clone()
        total = sums.new_zeros(rows, sums.shape[1])
    if len(at) == rows:
        return total.add_(sums)
    return total.index_add_(0, torch.from_numpy(at).to(total.device), sums)


def _add_rows(total: Tensor, piece: RowsFrom, values: Sequence[Tensor]) -> None:
    if len(total) == 1:  # for a single node one row after the other, without a matrix around it
        of = np.repeat(np.arange(len(values)), np.diff(piece.first)).tolist()
        for place, column, weight in zip(of, piece.columns.tolist(), piece.weights.tolist(), strict=True):
            total[0].add_(values[place][column].to(total.device), alpha=weight)
        return
    for place, value in enumerate(values):
        part = slice(*piece.first[place : place + 2])
        matrix = np.zeros((len(total), len(value)))
        matrix[piece.rows[part], piece.columns[part]] = piece.weights[part]
        total.addmm_(torch.from_numpy(matrix).to(total), value.to(total.device))


def single_messages(
    name: str, incoming: Incoming, parcels: Sequence[Tensors], pool: Pool, nothing: Tensor
) -> Messages:
    """All messages of a variable, by receiver and sender; `nothing` is what none of them looks like."""
    rows = [np.zeros(0, dtype=np.int64)]
    senders = [np.zeros(0, dtype=np.int64)]
    weights = [np.zeros(0)]
    values = [nothing]
    for channel in incoming.channels:
        if name not in channel.names:
            continue
        home = channel.home
        if isinstance(home, (Sums, MatrixSums)) and len(home.sources):
            rows.append(np.repeat(np.arange(len(home.indptr) - 1), np.diff(home.indptr)))
            senders.append(home.senders)
            weights.append(home.weights)
            values.append(pool.take((name,), home.sources)[name])
        for piece in channel.away:
            assert isinstance(piece, RowsFrom), "single messages come as rows"
            rows.append(piece.rows)
            senders.append(piece.senders)
            weights.append(piece.weights)
            for place, columns in enumerate(np.split(piece.columns, piece.first[1:-1])):
                value = parcels[piece.parcel + place][name]
                values.append(value[torch.from_numpy(columns).to(value.device)].to(nothing.device))
    row, sender = np.concatenate(rows), np.concatenate(senders)
    order = np.lexsort((sender, row))
    ordered = torch.cat(values)[torch.from_numpy(order).to(nothing.device)]
    return Messages(row[order], sender[order], np.concatenate(weights)[order], ordered)


def senders_of(incoming: Incoming) -> IntArray:
    """Who sent what a server absorbs, in order."""
    found = [np.zeros(0, dtype=np.int64), *(piece.senders for piece in _pieces(incoming))]
    return np.sort(np.concatenate(found))


def weight_of(incoming: Incoming) -> float:
    """What the weights of all that a server absorbs add up to, however it came in pieces."""
    return math.fsum(weight for piece in _pieces(incoming) for weight in piece.weights.tolist())


def _pieces(incoming: Incoming) -> Iterator[Sums | MatrixSums | SumsFrom | RowsFrom]:
    for channel in incoming.channels:
        if isinstance(channel.home, (Sums, MatrixSums)):
            yield channel.home
        yield from (piece for piece in channel.away if not isinstance(piece, CommonFrom))
