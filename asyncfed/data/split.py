"""From a dataset to what every client holds: deal the samples out, then split each client's share at random.

Both draws follow from one seed through streams of their own ("partition", "split"). Every part that was asked
for (fraction > 0) gets at least one sample of every client, because a client without test samples would
silently vanish from the averages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncfed.data.datasets import Dataset
from asyncfed.data.partition import IntArray, Partition
from asyncfed.data.shards import ClientData, ClientShards
from asyncfed.errors import DataError
from asyncfed.rng import Streams


def partition_data(
    dataset: Dataset,
    partition: Partition,
    clients: int,
    seed: int,
    fractions: Sequence[float] = (0.6, 0.2, 0.2),
) -> ClientData:
    """Deal `dataset` to `clients`; split each one's samples by `fractions` (train, validation, test)."""
    check_fractions(fractions)
    streams = Streams(seed)
    shares = partition.split(dataset.y.numpy(), clients, streams)
    generator = streams.generator("split")
    parts: tuple[list[IntArray], ...] = ([], [], [])
    for client, share in enumerate(shares):
        train, validation, _ = _sizes(client, len(share), fractions)
        pieces = np.split(generator.permutation(share), [train, train + validation])
        for part, piece in zip(parts, pieces, strict=True):
            part.append(np.sort(piece))
    return ClientData(*(_packed(dataset, part) for part in parts))


def _packed(dataset: Dataset, part: list[IntArray]) -> ClientShards:
    rows = torch.from_numpy(np.concatenate(part))
    return ClientShards(
        (dataset.x[rows], dataset.y[rows]), np.array([len(piece) for piece in part], dtype=np.int64)
    )


def check_fractions(fractions: Sequence[float]) -> None:
    """Refuse what are not three parts of a whole."""
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-9 or fractions[0] == 0:
        raise DataError(
            f"fractions are {tuple(fractions)}; they must be three non-negative numbers "
            "(train, validation, test) that add up to 1, the first of them positive"
        )


def _sizes(client: int, samples: int, fractions: Sequence[float]) -> tuple[int, int, int]:
    validation, test = (
        max(1, int(fraction * samples + 0.5)) if fraction else 0 for fraction in fractions[1:]
    )
    if samples - validation - test < 1:  # rounding up took it all: give one back to train
        validation, test = (validation - 1, test) if validation > test else (validation, test - 1)
    train = samples - validation - test
    needed = sum(fraction > 0 for fraction in fractions)
    if train < 1 or (fractions[1] > 0 and validation < 1) or (fractions[2] > 0 and test < 1):
        raise DataError(
            f"client {client} has {samples} samples, which cannot be split into {tuple(fractions)} "
            f"with at least one sample in each part; give every client at least {needed} "
            f"(min_samples={needed} where the partition has it, a larger alpha, fewer clients) "
            "or set a fraction to 0"
        )
    return train, validation, test
