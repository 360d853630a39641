"""A federated saddle point whose answer is known: FedNest's minimax problem (Section 4.3).

    f_i(x, y) = −[(c_i/2)‖y‖² − b_iᵀy + t_i yᵀx] + (λ/2)‖x‖²,   min over x, max over y of (1/n) Σ f_i

with t_i uniform on (0, 0.1), b_i normal with deviation s, and c_i = 1 in the paper. As a bilevel problem its
inner loss is g_i = −f_i, so that nothing acts on f through y*(x): the indirect part of the hypergradient is 0
there. With bars for means over clients, both gradients vanish where

    c̄ y = b̄ − t̄ x,  λ x = t̄ y    ⇒    y* = λ b̄/(λ c̄ + t̄²),  x* = t̄ b̄/(λ c̄ + t̄²),

and eliminating y leaves, for c̄ = 1, min_x ½‖t̄ x − b̄‖² + (λ/2)‖x‖² (the paper leaves out the last term). The
paper centres the b_i, so that b̄ = 0 and the saddle is the origin; variables therefore begin at standard
normal values.

As long as all c_i are equal, so are the clients' Hessians in y, and those in x: where local steps on y, or on
x, lead the clients in the mean is where they would lead on the mean loss. A method that alternates between
the two, like LFedNest, then ends at the saddle for all its local SGD; a range for the c_i makes it drift.

A client's data is its own (t_i, b_i, c_i), one sample; all three splits are the same. Everything is float64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncfed.checks import NonNegativeFloat, PositiveFloat, PositiveInt, checked
from asyncfed.data import ClientData, ClientShards
from asyncfed.errors import ScenarioError
from asyncfed.problems.layout import Params
from asyncfed.problems.problem import Batch, Problem, problem_factory
from asyncfed.problems.quadratic import Curvature, bounds
from asyncfed.rng import Streams
from asyncfed.room import require_room

_STEEPEST = 0.1  # t_i is below


@problem_factory
def minimax_saddle(
    clients: PositiveInt = 100,
    dimension: PositiveInt = 10,
    spread: NonNegativeFloat = 1.0,
    regularization: PositiveFloat = 10.0,
    seed: int = 0,
    centred: bool = True,
    curvature: Curvature = (1.0, 1.0),
) -> Problem:
    """The problem above; the metric "distance" is that of (x, y) from the saddle.

    Parameters
    ----------
    spread
        s, the deviation of the b_i: how different clients are.
    regularization
        λ, above 0, so that f is strongly convex in x.
    centred
        Subtract the mean from the b_i, as the paper does.
    curvature
        Smallest and largest that a c_i may be (drawn uniformly between); the paper's are all 1.
    """
    low, high = bounds(curvature)
    require_room(
        40.0 * clients * dimension,
        f"a problem of {clients:,} clients in {dimension:,} dimensions",
        "give fewer `clients` or a smaller `dimension`",
    )
    generator = Streams(seed).generator("minimax_saddle")
    t = generator.uniform(0, _STEEPEST, clients)
    b = spread * generator.standard_normal((clients, dimension))
    if centred:
        b = b - b.mean(0)
    c = generator.uniform(low, high, clients)
    shards = ClientShards(tuple(map(torch.from_numpy, (t, b, c))), np.ones(clients, dtype=np.int64))
    saddle = torch.stack(_saddle(shards, regularization))

    def sample_loss(y: Tensor, x: Tensor, batch: Batch) -> Tensor:
        """f of every sample."""
        t, b, c = batch
        bracket = 0.5 * c * y.square().sum() - b @ y + t * (y @ x)
        return 0.5 * regularization * x.square().sum() - bracket

    def distance(y: Tensor, x: Tensor, batch: Batch) -> Tensor:
        away = torch.stack((x, y)) - saddle.to(y.device, y.dtype)
        return away.square().sum().sqrt().expand(len(batch[0]))

    def init(generator: torch.Generator) -> Params:
        return torch.randn(dimension, generator=generator, dtype=torch.float64)

    return Problem(
        name="minimax saddle",
        data=ClientData(shards, shards, shards),
        inner_loss=lambda y, x, batch: -sample_loss(y, x, batch).mean(),
        outer_loss=lambda y, x, batch: sample_loss(y, x, batch).mean(),
        init_inner=init,
        init_outer=init,
        metrics={"distance": distance, "outer_loss": sample_loss},
    )


@checked
def saddle_point(problem: Problem) -> tuple[Tensor, Tensor]:
    """The saddle (x*, y*) of a `minimax_saddle`."""
    if problem.recipe is None or problem.recipe.factory != "minimax_saddle":
        raise ScenarioError(f"problem {problem.name!r} is no minimax_saddle; only these have this saddle")
    return _saddle(problem.data.train, problem.recipe.arguments["regularization"])


def _saddle(shards: ClientShards, regularization: float) -> tuple[Tensor, Tensor]:
    t, b, c = (tensor.mean(0) for tensor in shards.tensors)
    y = regularization * b / (regularization * c + t * t)
    return t * y / regularization, y
