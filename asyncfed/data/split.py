"""From a dataset to what every client holds: deal the samples out, then split each client's share at random.

All draws follow from one seed through streams of their own ("partition", "split", and "test part" for a test
set that stands apart). Every part that was asked for (fraction > 0) gets at least one sample of every client,
because a client without test samples would silently vanish from the averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch

from asyncfed.checks import PositiveInt, UnitFloat, Words, checked, described
from asyncfed.data.datasets import Dataset
from asyncfed.data.partition import IntArray, Partition
from asyncfed.data.shards import ClientData, ClientShards, Samples
from asyncfed.errors import DataError
from asyncfed.rng import Streams

Fractions = Annotated[
    Sequence[UnitFloat],
    Words("three numbers in [0, 1] (train, validation, test) that add up to 1, the first of them positive"),
]
AnyPartition = Annotated[
    Partition | str,
    Words("a partition, such as IID() or DirichletOverClients(0.4), or its text, such as 'dirichlet:0.4'"),
]


@checked(error=DataError)
def partition_data(
    dataset: Dataset,
    partition: Annotated[Partition, Words("a partition, such as IID() or DirichletOverClients(0.4)")],
    clients: PositiveInt,
    seed: int,
    fractions: Fractions = (0.6, 0.2, 0.2),
    test: Dataset | None = None,
) -> ClientData:
    """Deal `dataset` to `clients`; split each one's samples by `fractions` (train, validation, test).

    A `test` set that stands apart is dealt out evenly at random, whatever the partition: a mean over clients
    is then one over the whole of it. `fractions` describe the clients' own samples, and the third must be 0.
    """
    check_fractions(fractions)
    if test is not None and fractions[2] > 0:
        raise DataError(
            f"fractions are {tuple(fractions)}, but a separate test set of {len(test)} samples is given; "
            "set the third fraction to 0, or leave out the test set"
        )
    streams = Streams(seed)
    shares = partition.split(dataset.y.numpy(), clients, streams)
    apart = None if test is None else (test.x, test.y)
    return dealt((dataset.x, dataset.y), shares, streams, fractions, apart)


def dealt(
    samples: Samples,
    shares: Sequence[IntArray],
    streams: Streams,
    fractions: Sequence[float],
    test: Samples | None = None,
    extra_test: Sequence[IntArray] | None = None,
) -> ClientData:
    """Each client's share of the samples, split; and a test set that stands apart, dealt out evenly.

    `extra_test` are more samples for each client, all of them to be tested on, after those of its share.
    """
    generator = streams.generator("split")
    parts: tuple[list[IntArray], ...] = ([], [], [])
    for client, share in enumerate(shares):
        train, validation, _ = _sizes(client, len(share), fractions)
        pieces = np.split(generator.permutation(share), [train, train + validation])
        for part, piece in zip(parts, pieces, strict=True):
            part.append(np.sort(piece))
    if extra_test is not None:
        parts[2][:] = [np.concatenate(both) for both in zip(parts[2], extra_test, strict=True)]
    packed = [_packed(samples, part) for part in parts]
    if test is not None:
        packed[2] = _packed(test, _even_shares(len(test[0]), len(shares), streams))
    return ClientData(*packed)


def _even_shares(samples: int, clients: int, streams: Streams) -> list[IntArray]:
    if samples < clients:
        raise DataError(
            f"{clients} clients need a test sample each, the separate test set has {samples}; "
            "use fewer clients, or leave it out and set the third fraction"
        )
    order = streams.generator("test part").permutation(samples)
    return [np.sort(share) for share in np.array_split(order, clients)]


def _packed(samples: Samples, part: list[IntArray]) -> ClientShards:
    rows = torch.from_numpy(np.concatenate(part))
    return ClientShards(
        tuple(tensor[rows] for tensor in samples), np.array([len(piece) for piece in part], dtype=np.int64)
    )


def check_fractions(fractions: Sequence[float]) -> None:
    """Refuse what are not three parts of a whole."""
    if len(fractions) != 3 or abs(sum(fractions) - 1) > 1e-9 or fractions[0] == 0:
        raise DataError(f"fractions are {tuple(fractions)}; they must be {described(Fractions)}")


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
