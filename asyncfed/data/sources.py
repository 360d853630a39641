"""What every client has, from whatever the samples are in.

client_data((x, y), clients=20, partition="dirichlet:0.4")
client_data(frame, column="hospital", y="outcome")
client_data(torch_dataset, indices=[[0, 3, 5], [1, 2, 4]], transform=normalise)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.checks import PositiveInt, checked
from asyncfed.data.columns import Columns, Transform, columns_of, is_table
from asyncfed.data.partition import IID, Partition, parse_partition
from asyncfed.data.shards import ClientData, Samples
from asyncfed.data.split import AnyPartition, Fractions, check_fractions, dealt
from asyncfed.errors import DataError
from asyncfed.rng import Streams

IntArray = npt.NDArray[np.int64]
_TARGETS = ("label", "labels", "target", "y")


@checked(error=DataError)
def client_data(
    source: Any,
    *,
    clients: PositiveInt | None = None,
    partition: AnyPartition | None = None,
    column: str | None = None,
    indices: Sequence[Any] | None = None,
    x: str | Sequence[str] | None = None,
    y: str | None = None,
    fractions: Fractions = (0.6, 0.2, 0.2),
    test: Any = None,
    transform: Transform | None = None,
    seed: int = 0,
) -> ClientData:
    """What every client has, from arrays, lists, datasets or a table.

    Parameters
    ----------
    source
        A tuple of arrays (x, y), a dict of arrays, one array, a list of samples, a map-style Dataset of
        torch, a DataFrame, or a Hugging Face dataset.
    clients, partition
        So many clients, dealt to by a partition of ours ("iid" unless told: "shards:2", "dirichlet:0.4", …),
        which looks at the target.
    column
        Instead: the column that says whose a sample is. Clients are numbered in the order of its values.
    indices
        Instead: the numbers of the samples of each client.
    x, y
        Which columns a sample consists of: x is what a model looks at (one name or several), y the target,
        which comes last. Of a tuple they are "0", "1", …. By default y is the column called label, labels,
        target or y, of a tuple its last; x all others. Several columns of a table make one vector.
    fractions
        Of each client's samples, for training, validation and test.
    test
        A test set that stands apart, in the same form; then the third fraction is 0.
    transform
        A function of what a model looks at (the first column of x), applied once to each sample.
    seed
        Of the partition and the split.
    """
    check_fractions(fractions)
    if test is not None and fractions[2] > 0:
        raise DataError(
            f"fractions are {tuple(fractions)}, but a separate test set is given; set the third fraction to "
            "0, or leave out the test set"
        )
    wanted = None if x is None else [x] if isinstance(x, str) else list(x)
    columns = columns_of(source, transform, wanted[:1] if wanted else None)
    target = _target(source, columns, y, column)
    samples = _samples(source, columns, wanted, target, column)
    streams = Streams(seed)
    labels = None if target is None else columns[target]
    shares = _shares(columns, labels, clients, partition, column, indices, streams)
    apart = None
    if test is not None:
        others = columns_of(test, transform, wanted[:1] if wanted else None)
        missing = [name for name in columns if name not in others and name != column]
        if missing:
            raise DataError(f"the test set has no column {missing[0]!r}; it has {', '.join(others)}")
        apart = _samples(test, others, wanted, target, column)
    return dealt(samples, shares, streams, fractions, apart)


def _target(source: Any, columns: Columns, y: str | None, column: str | None) -> str | None:
    if y is not None:
        _require(columns, y, "y")
        return y
    if isinstance(source, tuple) or all(name.isdecimal() for name in columns):
        return str(len(columns) - 1) if len(columns) > 1 else None
    return next((name for name in _TARGETS if name in columns and name != column), None)


def _samples(
    source: Any, columns: Columns, wanted: list[str] | None, target: str | None, column: str | None
) -> Samples:
    names = [name for name in columns if name not in (target, column)] if wanted is None else wanted
    for name in names:
        _require(columns, name, "x")
    if not names:
        raise DataError(
            f"the samples have nothing for a model to look at: their columns are {', '.join(columns)}; "
            "name some in x=…"
        )
    inputs: list[Tensor] = [columns[name] for name in names]
    if is_table(source):
        inputs = [torch.stack([tensor.to(torch.float32) for tensor in inputs], 1)]
    return tuple(inputs) if target is None else (*inputs, columns[target])


def _require(columns: Columns, name: str, argument: str) -> None:
    if name not in columns:
        raise DataError(
            f"{argument} names {name!r}, and there is no such column; there are {', '.join(columns)}"
        )


def _shares(
    columns: Columns,
    labels: Tensor | None,
    clients: int | None,
    partition: Partition | str | None,
    column: str | None,
    indices: Sequence[Sequence[int]] | None,
    streams: Streams,
) -> list[IntArray]:
    """The numbers of each client's samples."""
    count = len(next(iter(columns.values())))
    ways = {"column": column, "indices": indices, "clients": clients}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        raise DataError(
            f"{' and '.join(given) or 'nothing'} says whose the samples are; give clients=… (and a "
            "partition), or column=…, or indices=…"
        )
    if clients is None and partition is not None:
        raise DataError(f"a partition and {given[0]} are given, and both say whose the samples are; give one")
    if indices is not None:
        return _given(indices, count)
    if column is not None:
        _require(columns, column, "column")
        whose = columns[column]
        if whose.ndim > 1 or whose.is_floating_point():
            raise DataError(
                f"column {column!r} has values such as {whose[0].tolist()}; a client is named by a whole "
                "number or a text"
            )
        return [np.flatnonzero(whose.numpy() == name) for name in np.unique(whose.numpy())]
    assert clients is not None
    deal = parse_partition(partition) if isinstance(partition, str) else partition or IID()
    if labels is None:
        if not isinstance(deal, IID):
            raise DataError(
                f"{deal} deals by labels, and the samples have none; name their column (y=…), or use 'iid'"
            )
        return deal.split(np.zeros(count, dtype=np.int64), clients, streams)
    if not isinstance(deal, IID) and (labels.ndim > 1 or labels.is_floating_point()):
        raise DataError(
            f"{deal} deals by labels, and the targets are no classes ({labels.dtype}, shape "
            f"{tuple(labels.shape[1:])} each); use 'iid', column=… or indices=…"
        )
    return deal.split(labels.numpy(), clients, streams)


def _given(indices: Sequence[Sequence[int]], count: int) -> list[IntArray]:
    shares = []
    for client, own in enumerate(indices):
        share = np.asarray(own)
        if share.ndim != 1 or share.dtype.kind not in "iu" or not len(share):
            raise DataError(
                f"the indices of client {client} are {str(own)[:60]}; give a list of whole numbers"
            )
        if share.min() < 0 or share.max() >= count:
            raise DataError(
                f"client {client} is given sample {int(share[(share < 0) | (share >= count)][0])}; "
                f"there are samples 0 to {count - 1}"
            )
        shares.append(share.astype(np.int64))
    if not shares:
        raise DataError("indices is empty; give a list of sample numbers for each client")
    return shares
