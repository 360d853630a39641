"""Mixtures of normal distributions whose truth is known, for methods that fit a mixture (FedEM).

    p_i(s) = Σ_k π_ik N(s; θ_k, I),   ℓ(θ_k; s) = ½ ‖s − θ_k‖²

All clients share the K means θ_k; the shares π_i are a client's own. The inner variable is the K means, the
outer one λ_i with π_i = softmax(λ_i), and the loss of a sample −log Σ_k π_ik exp(−ℓ(θ_k; s)). The train,
validation and test splits are the same samples. Everything is float64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncfed.checks import PositiveFloat, PositiveInt, checked
from asyncfed.data import ClientData, ClientShards
from asyncfed.errors import ScenarioError
from asyncfed.problems.layout import Params
from asyncfed.problems.personalized import log_mixture
from asyncfed.problems.problem import Batch, Mixture, Problem, problem_factory
from asyncfed.rng import Streams
from asyncfed.room import require_room


@problem_factory
def normal_mixture(
    clients: PositiveInt = 10,
    components: PositiveInt = 2,
    dimension: PositiveInt = 2,
    seed: int = 0,
    apart: PositiveFloat = 3.0,
    concentration: PositiveFloat = 1.0,
    samples: PositiveInt = 100,
) -> Problem:
    """Random mixtures.

    Parameters
    ----------
    components
        K, the number of means.
    apart
        Standard deviation of the means about zero, in each dimension; samples have 1 about their mean.
    concentration
        Of the Dirichlet distribution that the clients' shares are drawn from: small means that most clients
        have samples of one component only.
    samples
        Of each client.
    """
    require_room(
        8.0 * clients * samples * (dimension + components),
        f"a problem of {clients:,} clients with {samples:,} samples each",
        "give fewer `clients` or `samples`",
    )
    means, shares = _truth(clients, components, dimension, seed, apart, concentration)
    generator = Streams(seed).generator("samples of a mixture")
    drawn = (generator.random((clients, samples, 1)) > np.cumsum(shares, axis=1)[:, None, :-1]).sum(-1)
    points = means[drawn] + generator.standard_normal((clients, samples, dimension))
    sizes = np.full(clients, samples, dtype=np.int64)
    shards = ClientShards((torch.from_numpy(points.reshape(-1, dimension)),), sizes)

    def losses(theta: Tensor, batch: Batch) -> Tensor:
        difference = batch[0] - theta.view(components, 1, dimension)
        return 0.5 * difference.square().sum(-1)

    def sample_loss(theta: Tensor, lam: Tensor, batch: Batch) -> Tensor:
        return -log_mixture(-losses(theta, batch), lam)

    def init_inner(generator: torch.Generator) -> Params:
        return torch.randn(components * dimension, generator=generator, dtype=torch.float64)

    return Problem(
        name="normal-mixture",
        data=ClientData(shards, shards, shards),
        inner_loss=lambda theta, lam, batch: sample_loss(theta, lam, batch).mean(),
        init_inner=init_inner,
        init_outer=lambda generator: torch.zeros(components, dtype=torch.float64),
        metrics={"loss": sample_loss},
        mixture=Mixture(components, losses),
    )


@checked
def mixture_truth(problem: Problem) -> tuple[Tensor, Tensor]:
    """What a `normal_mixture` was drawn from: the means (K, d) and every client's shares (clients, K)."""
    if problem.recipe is None or problem.recipe.factory != "normal_mixture":
        raise ScenarioError(
            f"problem {problem.name!r} is no normal_mixture; only of these is the truth known"
        )
    given = {name: value for name, value in problem.recipe.arguments.items() if name != "samples"}
    means, shares = _truth(**given)
    return torch.from_numpy(means), torch.from_numpy(shares)


def _truth(
    clients: int, components: int, dimension: int, seed: int, apart: float, concentration: float
) -> tuple[np.ndarray, np.ndarray]:
    generator = Streams(seed).generator("mixture")
    means = apart * generator.standard_normal((components, dimension))
    return means, generator.dirichlet(np.full(components, concentration), size=clients)
