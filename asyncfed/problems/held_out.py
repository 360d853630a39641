"""Data for problems whose outer loss is over validation samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncfed.data import ClientData, ClientShards, Dataset, Partition, parse_partition, partition_data
from asyncfed.errors import DataError
from asyncfed.rng import Streams

_OWN_TEST = 0.2  # of a client's samples, where no test set stands apart


def deal(
    samples: Dataset,
    test: Dataset | None,
    partition: Partition | str,
    clients: int,
    seed: int,
    fractions: Sequence[float] | None,
    validation: float,
) -> ClientData:
    """Deal samples to clients as `partition_data` does.

    Where `fractions` are not given, `validation` is the part for validation of what is not for testing: all
    of it with a `test` set that stands apart, else four fifths.
    """
    if fractions is None:
        rest = 1.0 if test is not None else 1.0 - _OWN_TEST
        fractions = (rest * (1 - validation), rest * validation, 1.0 - rest)
    elif len(fractions) == 3 and fractions[1] == 0:
        raise DataError(
            f"fractions are {tuple(fractions)}; the outer loss is over validation samples, "
            "so the second fraction must be positive"
        )
    dealer = parse_partition(partition) if isinstance(partition, str) else partition
    return partition_data(samples, dealer, clients, seed, fractions, test)


def with_own_as_test(data: ClientData, each: int, seed: int) -> ClientData:
    """The same, but that the test samples are `each` of every client's samples for training and validation,
    drawn without replacement: all of them where it has no more.
    """
    streams = Streams(seed)
    chosen: list[tuple[torch.Tensor, ...]] = []
    for client in range(data.clients):
        own = [
            torch.cat(pair) for pair in zip(data.train.of(client), data.validation.of(client), strict=True)
        ]
        order = streams.generator("own as test", client).permutation(len(own[0]))
        rows = torch.from_numpy(np.sort(order[:each]))
        chosen.append(tuple(tensor[rows] for tensor in own))
    sizes = np.array([len(samples[0]) for samples in chosen], dtype=np.int64)
    test = ClientShards(tuple(map(torch.cat, zip(*chosen, strict=True))), sizes)
    return ClientData(data.train, data.validation, test)


def balanced(split: ClientShards, classes: int) -> ClientShards:
    """The split (images, labels) as (images, weights, labels), with the weight of each sample's class such
    that a weighted mean over everybody's samples is a mean over classes of their means.

    That is 1/(C · frequency) for the C classes that occur; it does not depend on who holds what.
    """
    images, labels = split.tensors
    counts = torch.bincount(labels, minlength=classes).to(images.dtype)
    occur = (counts > 0).sum()
    return ClientShards((images, (len(labels) / (occur * counts))[labels], labels), split.sizes)
