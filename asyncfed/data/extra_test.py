"""A named dataset dealt to clients, and tested on more images than the clients hold.

A client of a small federation keeps a fifth of few samples to be tested on, and its accuracy is then mostly
noise. Where `limit`, or the partition, leaves images unused, each client can be tested on some of these too,
in the proportions of its own labels: what it would meet, had it more of the same. Nobody trains on them or
chooses anything by them, so two clients may be tested on the same image; no client meets one twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncfed.checks import NonNegativeInt, PathLike, PositiveInt, checked
from asyncfed.data.datasets import Pixels, data_directory, limited, read_files
from asyncfed.data.partition import IntArray, parse_partition
from asyncfed.data.shards import ClientData
from asyncfed.data.split import AnyPartition, Fractions, check_fractions, dealt
from asyncfed.errors import DataError
from asyncfed.rng import Streams


@checked(error=DataError)
def load_dealt(
    name: str,
    partition: AnyPartition,
    clients: PositiveInt,
    seed: int = 0,
    fractions: Fractions = (0.6, 0.2, 0.2),
    *,
    part: str | None = None,
    limit: PositiveInt | None = None,
    extra_test: NonNegativeInt = 0,
    root: PathLike | None = None,
    download: bool = False,
    pixels: Pixels = "normalised",
) -> tuple[ClientData, int]:
    """What every client has of a named dataset, and the number of classes.

    Parameters
    ----------
    name, part, limit, root, download, pixels
        See `load_dataset`.
    partition, clients, seed, fractions
        See `parse_partition` and `partition_data`.
    extra_test
        That many more test images for each client, out of those of the same part that no client holds,
        without replacement, as many of each label as the client's own share has in proportion. Where too few
        of a label are unused it gets what there is. Two clients may share such an image: they are only
        tested on it.
    """
    check_fractions(fractions)
    files = read_files(name, data_directory(root), download, part)
    labels = files.y.numpy()
    kept = np.arange(len(labels)) if limit is None else limited(name, len(labels), limit, seed)
    dealer = parse_partition(partition) if isinstance(partition, str) else partition
    streams = Streams(seed)
    shares = dealer.split(labels[kept], clients, streams)
    if not extra_test:
        samples = files.chosen(None if limit is None else kept, pixels)
        return dealt((samples.x, samples.y), shares, streams, fractions), files.classes
    extra = extra_test_rows(labels, [kept[share] for share in shares], extra_test, streams)
    alone = [client for client, rows in enumerate(extra) if not len(rows)]
    if alone and fractions[2] == 0:
        raise DataError(
            f"no unused image of dataset {name!r} has a label of client {alone[0]}, and the third of the "
            f"fractions {tuple(fractions)} is 0, so there is nothing to test it on; keep fewer samples "
            "(limit=…), or give the third fraction"
        )
    chosen = np.unique(np.concatenate([kept, *extra]))
    samples = files.chosen(chosen, pixels)
    places = [np.searchsorted(chosen, kept[share]) for share in shares]
    more = [np.searchsorted(chosen, rows) for rows in extra]
    return dealt((samples.x, samples.y), places, streams, fractions, extra_test=more), files.classes


def extra_test_rows(
    labels: npt.NDArray[Any], shares: Sequence[IntArray], each: int, streams: Streams
) -> list[IntArray]:
    """The numbers of the unused samples that each client is tested on besides: about `each` of them."""
    used = np.zeros(len(labels), dtype=bool)
    used[np.concatenate(shares)] = True
    if used.all():
        raise DataError(
            f"extra_test is {each}, and the clients hold all of the {len(labels)} samples; keep some unused "
            "(a smaller limit=…, or a partition with fewer samples for each), or leave out extra_test"
        )
    classes = int(labels.max()) + 1
    unused = np.flatnonzero(~used)
    by_label = np.split(
        unused[np.argsort(labels[unused], kind="stable")],
        np.cumsum(np.bincount(labels[unused], minlength=classes))[:-1],
    )
    rows = []
    for client, share in enumerate(shares):
        generator = streams.generator("extra test", row=client)
        counts = _apportioned(np.bincount(labels[share], minlength=classes), each)
        wanted = np.minimum(counts, [len(members) for members in by_label])
        picked = [
            generator.choice(by_label[label], size=wanted[label], replace=False)
            for label in np.flatnonzero(wanted)
        ]
        rows.append(np.sort(np.concatenate([np.empty(0, dtype=np.int64), *picked])))
    return rows


def _apportioned(weights: npt.NDArray[np.int64], seats: int) -> npt.NDArray[np.int64]:
    """Whole numbers in proportion to the weights that add up to `seats`: what is left over after rounding
    down goes to the largest remainders (of equal ones, to the first).
    """
    exact = weights * seats
    whole, remainder = np.divmod(exact, weights.sum())
    first = np.argsort(-remainder, kind="stable")[: seats - int(whole.sum())]
    whole[first] += 1
    return whole
