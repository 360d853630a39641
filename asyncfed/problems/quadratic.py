"""Quadratics whose answer is known, for tests and for looking at a method with no learning in the way.

    f_i(x) = ½ (x − b_i)ᵀ A_i (x − b_i),   A_i symmetric positive definite

A client's data is its own (A_i, b_i): one sample, or several with perturbed b when `noise` is positive, over
which f_i is the mean. The train, validation and test splits are the same samples. Everything is float64.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from asyncfed.checks import NonNegativeFloat, PositiveFloat, PositiveInt, Words, checked
from asyncfed.data import ClientData, ClientShards
from asyncfed.errors import DataError
from asyncfed.problems.layout import Params
from asyncfed.problems.problem import Batch, Problem, problem_factory
from asyncfed.rng import Streams
from asyncfed.room import require_room

Curvature = Annotated[
    tuple[PositiveFloat, PositiveFloat], Words("two finite numbers above 0, the smaller one first")
]


@problem_factory
def quadratic(
    clients: PositiveInt = 10,
    dimension: PositiveInt = 5,
    seed: int = 0,
    heterogeneity: NonNegativeFloat = 1.0,
    curvature: Curvature = (0.5, 2.0),
    noise: NonNegativeFloat = 0.0,
    samples: PositiveInt = 16,
) -> Problem:
    """Random quadratics.

    Parameters
    ----------
    heterogeneity
        Standard deviation of the clients' minimisers b_i about a common standard normal point; 0 makes them
        equal.
    curvature
        Smallest and largest eigenvalue that an A_i may have (drawn log-uniformly between, with random
        eigenvectors).
    noise
        Standard deviation of b from sample to sample within a client; with 0 a client has one sample, else
        `samples`.
    """
    low, high = bounds(curvature)
    each = samples if noise else 1
    require_matrices(clients * (4 + each), dimension, dimension)
    generator = Streams(seed).generator("quadratic")
    eigenvalues = np.exp(generator.uniform(np.log(low), np.log(high), (clients, dimension)))
    vectors = np.linalg.qr(generator.standard_normal((clients, dimension, dimension)))[0]
    A = (vectors * eigenvalues[:, None, :]) @ vectors.transpose(0, 2, 1)
    A = (A + A.transpose(0, 2, 1)) / 2
    b = generator.standard_normal(dimension) + heterogeneity * generator.standard_normal((clients, dimension))
    A, b = np.repeat(A, each, axis=0), np.repeat(b, each, axis=0)
    b = b + noise * generator.standard_normal(b.shape)
    shards = ClientShards((torch.from_numpy(A), torch.from_numpy(b)), np.full(clients, each, dtype=np.int64))

    def init_inner(generator: torch.Generator) -> Params:
        return torch.randn(dimension, generator=generator, dtype=torch.float64)

    return Problem(
        name="quadratic",
        data=ClientData(shards, shards, shards),
        inner_loss=lambda x, lam, batch: sample_loss(x, lam, batch).mean(),
        init_inner=init_inner,
        metrics={"loss": sample_loss},
    )


def bounds(curvature: Curvature) -> tuple[float, float]:
    """The smallest and the largest, refused where they stand the other way round."""
    low, high = curvature
    if low > high:
        raise DataError(f"curvature is ({low}, {high}); give the smaller one first")
    return low, high


def require_matrices(count: int, rows: int, columns: int) -> None:
    """Refuse so many matrices of clients and their samples where there is no memory for them."""
    require_room(
        8.0 * count * rows * columns,
        f"a problem of clients with matrices {rows:,} × {columns:,}, {count:,} of them on the way,",
        "give fewer `clients` or `samples`, or a smaller `dimension`",
    )


def sample_loss(x: Tensor, lam: Params, batch: Batch) -> Tensor:
    """½ (x − b)ᵀ A (x − b) for every sample (A, b) of the batch."""
    A, b = batch
    difference = x - b
    return 0.5 * torch.einsum("bi,bij,bj->b", difference, A, difference)


@checked
def average_minimiser(problem: Problem) -> Tensor:
    """Where the average over clients of a `quadratic` problem's losses is smallest: (Σ A_i) x = Σ A_i b_i."""
    A, b = (
        problem.data.train.tensors
    )  # every client has equally many samples, so a plain sum weighs clients equally
    minimiser: Tensor = torch.linalg.solve(A.sum(0), torch.einsum("bij,bj->i", A, b))
    return minimiser
