"""Two digits told apart by one number: small enough that a hypergradient can be had exactly.

The problem of PDBO's Figure 2 (Appendix C.6): a sample's only feature a is the mean pixel of its image, its
label y says which of two digits it shows, and the model is a weight and a bias, x = (w, c):

    f_i = mean over train of 2·softmax(λ_i)_y · BCE(w·a + c, y) + (l2/2)‖x‖²
    F_i = mean over validation of BCE(w·a + c, y)

so f_i is strongly convex, and λ_i (label weights, as in PDBO-DA) acts on F_i through x alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from asyncfed.checks import PositiveFloat, PositiveInt, Words
from asyncfed.data import client_data_from_lists, load_dataset
from asyncfed.errors import DataError
from asyncfed.problems.personalized import personalized
from asyncfed.problems.problem import Problem, problem_factory
from asyncfed.rng import Streams

_PERSONAL = {"labels": "da", "none": "none"}


@problem_factory
def logistic_pair(
    clients: PositiveInt = 3,
    samples: PositiveInt = 100,
    digits: Annotated[
        Sequence[int] | None, Words("two different labels, or None for two that are drawn")
    ] = None,
    seed: int = 0,
    personal: Literal["labels", "none"] = "labels",
    dataset: str = "mnist",
    standardize: bool = True,
    l2: PositiveFloat = 0.01,
    part: str | None = None,
    download: bool = False,
) -> Problem:
    """Deal `samples` images of two digits to every client for training and as many for validation.

    Parameters
    ----------
    digits
        Labels of the two, which become 0 and 1; by default drawn with `seed`.
    personal
        "labels" for label weights as the outer variable, "none" for no outer variable.
    dataset
        "mnist", or "digits", which is always at hand but only has about 360 images of two digits.
    standardize
        Shift and scale the feature to mean 0 and variance 1 over everybody's training samples. That makes
        the inner problem well conditioned: its curvatures start at 0.26, and 500 steps at rate 1 end within
        1e-12 of the minimiser. Without, the feature is the mean of the pixels as `load_dataset` scales them,
        which varies so little that one curvature is 0.014, mostly l2, and the same steps end at 1e-3.
    """
    images = load_dataset(dataset, part=part, download=download)
    generator = Streams(seed).generator("logistic pair")
    drawn = generator.choice(images.classes, size=2, replace=False)
    pair = [int(digit) for digit in (drawn if digits is None else digits)]
    if len(set(pair)) != 2 or len(pair) != 2 or not all(0 <= digit < images.classes for digit in pair):
        raise DataError(f"digits are {pair}; they must be two different labels in 0..{images.classes - 1}")
    rows = torch.from_numpy(generator.permutation(torch.isin(images.y, torch.tensor(pair)).nonzero()[:, 0]))
    if len(rows) < 2 * clients * samples:
        raise DataError(
            f"{clients} clients with {samples} + {samples} samples need {2 * clients * samples}, "
            f"but {dataset!r} has {len(rows)} images of {pair[0]} and {pair[1]}; "
            f"use at most {len(rows) // (2 * clients)} samples, or fewer clients"
        )
    rows = rows[: 2 * clients * samples]
    feature = images.x[rows].flatten(1).double().mean(1).view(2, clients, samples, 1)
    if standardize:
        deviation, mean = torch.std_mean(feature[0], correction=0)
        feature = (feature - mean) / deviation
    labels = (images.y[rows] == pair[1]).long().view(2, clients, samples)
    train, validation = (list(zip(*split, strict=True)) for split in zip(feature, labels, strict=True))
    return personalized(
        f"{dataset}-{pair[0]}-or-{pair[1]}",
        client_data_from_lists(train, validation),
        BinaryLogistic(),
        classes=2,
        personalize=_PERSONAL[personal],
        l2=l2,
        outer_split="validation",
    )


class BinaryLogistic(nn.Module):
    """Logits (0, w·a + c) for features a (B, 1), begun at w = c = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, features: Tensor) -> Tensor:
        score = features * self.weight + self.bias
        return torch.cat((torch.zeros_like(score), score), -1)
