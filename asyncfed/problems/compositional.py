"""Compositional optimization as a bilevel problem: a function of an average of functions (FedNest, Eq. 3).

    r_i(x)    = M_i x + c_i + bend · sin(M_i x)        (sin of every coordinate)
    g_i(y, x) = ½‖y − r_i(x)‖²
    f_i(y)    = ½ (y − t_i)ᵀ W_i (y − t_i)

so that y*(x) is the mean r̄(x) of the r_i, and the objective (1/n) Σ f_i(r̄(x)). The inner Hessian is the
identity, whoever computes it, but each M_i is its client's own. Without bend everything is linear (bars for
means over clients):

    M̄ᵀ W̄ M̄ x* = M̄ᵀ (mean of W_i t_i − W̄ c̄),    y* = M̄ x* + c̄.

A client's data is its own (M, c, W, t), one sample; all three splits are the same. Everything is float64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncfed.checks import NonNegativeFloat, PositiveInt, checked
from asyncfed.data import ClientData, ClientShards
from asyncfed.errors import DataError, ScenarioError
from asyncfed.problems.layout import Params
from asyncfed.problems.problem import Batch, Problem, problem_factory
from asyncfed.problems.quadratic import Curvature, bounds, require_matrices
from asyncfed.rng import Streams


@problem_factory
def compositional(
    clients: PositiveInt = 10,
    dimension: PositiveInt = 5,
    outer_dimension: PositiveInt = 3,
    seed: int = 0,
    heterogeneity: NonNegativeFloat = 1.0,
    curvature: Curvature = (0.5, 2.0),
    bend: NonNegativeFloat = 0.0,
) -> Problem:
    """Random compositions; x and y begin at standard normal values.

    Parameters
    ----------
    dimension, outer_dimension
        Of y and of x; x may not have more, or its minimiser would not be unique.
    heterogeneity
        Standard deviation of the clients' M_i, c_i and t_i about common standard normal ones.
    curvature
        Smallest and largest eigenvalue of the W_i.
    bend
        How far the r_i are from affine.
    """
    low, high = bounds(curvature)
    if outer_dimension > dimension:
        raise DataError(
            f"outer_dimension is {outer_dimension}; it must lie in 1..{dimension}, the dimension of y"
        )
    require_matrices(6 * clients, dimension, dimension)
    generator = Streams(seed).generator("compositional")
    normal = generator.standard_normal

    def about_a_common(*shape: int) -> Tensor:
        return torch.from_numpy(normal(shape) + heterogeneity * normal((clients, *shape)))

    M, c, t = about_a_common(dimension, outer_dimension), about_a_common(dimension), about_a_common(dimension)
    eigenvalues = np.exp(generator.uniform(np.log(low), np.log(high), (clients, dimension)))
    vectors = np.linalg.qr(normal((clients, dimension, dimension)))[0]
    W = torch.from_numpy((vectors * eigenvalues[:, None, :]) @ vectors.transpose(0, 2, 1))
    W = (W + W.mT) / 2
    shards = ClientShards((M, c, W, t), np.ones(clients, dtype=np.int64))

    def inner_sample_loss(y: Tensor, x: Tensor, batch: Batch) -> Tensor:
        M, c, _, _ = batch
        straight = M @ x
        r = straight + c + bend * straight.sin() if bend else straight + c
        return 0.5 * (y - r).square().sum(-1)

    def init(dimensions: int, generator: torch.Generator) -> Params:
        return torch.randn(dimensions, generator=generator, dtype=torch.float64)

    return Problem(
        name="bent compositional" if bend else "compositional",
        data=ClientData(shards, shards, shards),
        inner_loss=lambda y, x, batch: inner_sample_loss(y, x, batch).mean(),
        outer_loss=lambda y, x, batch: outer_sample_loss(y, x, batch).mean(),
        init_inner=lambda generator: init(dimension, generator),
        init_outer=lambda generator: init(outer_dimension, generator),
        metrics={"loss": inner_sample_loss, "outer_loss": outer_sample_loss},
    )


def outer_sample_loss(y: Tensor, x: Tensor, batch: Batch) -> Tensor:
    """½ (y − t)ᵀ W (y − t) for every sample."""
    *_, W, t = batch
    away = y - t
    return 0.5 * torch.einsum("bi,bij,bj->b", away, W, away)


@checked
def compositional_solution(problem: Problem) -> tuple[Tensor, Tensor]:
    """The minimiser x* of a `compositional` without bend, and y*(x*)."""
    if problem.recipe is None or problem.recipe.factory != "compositional":
        raise ScenarioError(f"problem {problem.name!r} is no compositional; only these have this solution")
    if problem.recipe.arguments["bend"]:
        raise ScenarioError("a bent compositional has no closed form; make it with bend=0")
    each = problem.data.train.tensors
    Wt = torch.einsum("nij,nj->i", *each[2:]) / problem.clients
    M, c, W, _ = (tensor.mean(0) for tensor in each)
    x: Tensor = torch.linalg.solve(M.T @ W @ M, M.T @ (Wt - W @ c))
    return x, M @ x + c
