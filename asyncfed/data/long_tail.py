"""Few of some, many of others: a subset of a dataset whose classes shrink exponentially.

Class c of C keeps largest · ratio^(c/(C−1)) samples, rounded, so that the last class has `ratio` times as
many as the first; or all it has, where that is fewer. FedNest's loss tuning (Section 4.2) takes 6000 and 0.01
of MNIST: 6000, 3597, 2156, 1293, 775, 465, 278, 167, 100 and 60, of which MNIST's own class 0 can only give
5,923.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncfed.checks import PositiveInt, Probability, checked
from asyncfed.data.datasets import Classes, Dataset
from asyncfed.errors import DataError
from asyncfed.rng import Streams


@checked(error=DataError)
def long_tail_sizes(classes: Classes, largest: PositiveInt, ratio: Probability) -> list[int]:
    """How many samples of each class to keep, at most."""
    steps = max(1, classes - 1)
    return [int(largest * ratio ** (c / steps) + 0.5) for c in range(classes)]


@checked(error=DataError)
def long_tail(dataset: Dataset, largest: PositiveInt, ratio: Probability, seed: int = 0) -> Dataset:
    """A random long-tailed subset by `seed`, in the original order."""
    generator = Streams(seed).generator("long tail")
    kept = []
    for label, size in enumerate(long_tail_sizes(dataset.classes, largest, ratio)):
        members = np.flatnonzero(dataset.y.numpy() == label)
        if not min(size, len(members)):
            raise DataError(
                f"class {label} of dataset {dataset.name!r} has {len(members)} samples and would keep "
                f"{size}; use a larger `largest` or `ratio`, or data with samples of every class"
            )
        kept.append(generator.permutation(members)[:size])
    rows = torch.from_numpy(np.sort(np.concatenate(kept)))
    return Dataset(dataset.name, dataset.x[rows], dataset.y[rows], dataset.classes)
