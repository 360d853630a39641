"""Bilevel quadratics with an outer variable per client, or one for all, about which everything is known.

    f_i(x, λ_i) = ½ (x − b_i)ᵀ A_i (x − b_i) + xᵀ R_i λ_i   (+ bend(x, λ_i) when curved)
    F_i(x, λ_i) = ½ ‖x − t_i‖² + (ρ/2) ‖λ_i − s_i‖²,        ρ = 0.1

A_i is symmetric positive definite, so every f_i is strongly convex; λ_i tilts it. Curved problems add

    bend(x, λ) = 0.1 Σ_k [ ½ exp(λ_{k mod d_outer}) x_k² + √(1 + x_k²) ]

which is convex in x: the Hessian then depends on x and λ, and so does ∂_λ ∇_x f. A client's data is its own
(A, b, R, t, s): one sample, or several with other A, b and R when `noise` is positive, over which f_i is the
mean. The train, validation and test splits are the same samples. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncfed.checks import NonNegativeFloat, PositiveInt, checked
from asyncfed.data import ClientData, ClientShards
from asyncfed.errors import ScenarioError
from asyncfed.problems.layout import Params
from asyncfed.problems.problem import Batch, Problem, problem_factory
from asyncfed.problems.quadratic import Curvature, bounds, require_matrices
from asyncfed.rng import Streams

_PULL = 0.1  # ρ
_BEND = 0.1


@problem_factory
def bilevel_quadratic(
    clients: PositiveInt = 5,
    dimension: PositiveInt = 3,
    outer_dimension: PositiveInt = 2,
    seed: int = 0,
    curvature: Curvature = (0.5, 2.0),
    noise: NonNegativeFloat = 0.0,
    samples: PositiveInt = 16,
    curved: bool = False,
) -> Problem:
    """Random bilevel quadratics; λ begins at 0.

    Parameters
    ----------
    curvature
        Smallest and largest eigenvalue that an A_i may have before noise (drawn log-uniformly between, with
        random eigenvectors).
    noise
        How much samples differ within a client: a sample has exp(noise · g) A_i with g standard normal, and
        b_i and R_i with noise times standard normal numbers added. With 0 a client has one sample, else
        `samples`.
    curved
        Let second derivatives depend on x and λ.
    """
    low, high = bounds(curvature)
    each = samples if noise else 1
    require_matrices(clients * (4 + 2 * each), dimension, max(dimension, outer_dimension))
    generator = Streams(seed).generator("bilevel_quadratic")
    normal = generator.standard_normal
    eigenvalues = np.exp(generator.uniform(np.log(low), np.log(high), (clients, dimension)))
    vectors = np.linalg.qr(normal((clients, dimension, dimension)))[0]
    A = (vectors * eigenvalues[:, None, :]) @ vectors.transpose(0, 2, 1)
    A = (A + A.transpose(0, 2, 1)) / 2
    b, t = normal((clients, dimension)), normal((clients, dimension))
    R, s = normal((clients, dimension, outer_dimension)), normal((clients, outer_dimension))
    A, b, R, t, s = (np.repeat(array, each, axis=0) for array in (A, b, R, t, s))
    if noise:
        A = np.exp(noise * normal(len(A)))[:, None, None] * A
        b, R = b + noise * normal(b.shape), R + noise * normal(R.shape)
    shards = ClientShards(
        tuple(torch.from_numpy(array) for array in (A, b, R, t, s)), np.full(clients, each, dtype=np.int64)
    )

    def inner_sample_loss(x: Tensor, lam: Tensor, batch: Batch) -> Tensor:
        A, b, R, _, _ = batch
        difference = x - b
        loss = 0.5 * torch.einsum("bi,bij,bj->b", difference, A, difference)
        loss = loss + torch.einsum("i,bij,j->b", x, R, lam)
        return loss + bend(x, lam) if curved else loss

    def init_inner(generator: torch.Generator) -> Params:
        return torch.randn(dimension, generator=generator, dtype=torch.float64)

    def init_outer(generator: torch.Generator) -> Params:
        return torch.zeros(outer_dimension, dtype=torch.float64)

    return Problem(
        name="curved bilevel quadratic" if curved else "bilevel quadratic",
        data=ClientData(shards, shards, shards),
        inner_loss=lambda x, lam, batch: inner_sample_loss(x, lam, batch).mean(),
        outer_loss=lambda x, lam, batch: outer_sample_loss(x, lam, batch).mean(),
        init_inner=init_inner,
        init_outer=init_outer,
        metrics={"loss": inner_sample_loss, "outer_loss": outer_sample_loss},
    )


def bend(x: Tensor, lam: Tensor) -> Tensor:
    """What a curved problem adds to every f_i."""
    rates = lam.repeat(-(-len(x) // len(lam)))[: len(x)].exp()
    return _BEND * (0.5 * rates * x.square() + (1 + x.square()).sqrt()).sum()


def outer_sample_loss(x: Tensor, lam: Tensor, batch: Batch) -> Tensor:
    """½ ‖x − t‖² + (ρ/2) ‖λ − s‖² for every sample of the batch."""
    *_, t, s = batch
    return 0.5 * (x - t).square().sum(-1) + 0.5 * _PULL * (lam - s).square().sum(-1)


@checked
def consensus_limit(problem: Problem, lam: Tensor) -> tuple[Tensor, Tensor]:
    """What SGP on any network tends to as its learning rate goes to 0, at `lam` (n, d_outer): the common x
    (d,) and the hypergradient of (1/n) Σ F_i (n, d_outer). For a `bilevel_quadratic` that is not curved.

        (Σ_i A_i) x = Σ_i (A_i b_i − R_i λ_i)
        d_{λ_i} = (ρ/n) (λ_i − s_i) − R_iᵀ (Σ_k A_k)⁻¹ (1/n) Σ_k (x − t_k)
    """
    n = problem.clients
    A, Ab, R, t, s = _client_means(problem)
    tilt = torch.einsum("nij,nj->ni", R, lam)
    x = torch.linalg.solve(A.sum(0), (Ab - tilt).sum(0))
    q = torch.linalg.solve(A.sum(0), (x - t).mean(0))
    return x, _PULL * (lam - s) / n - torch.einsum("nij,i->nj", R, q)


@checked
def shared_hypergradient(
    problem: Problem, lam: Tensor, weights: Sequence[float] | Tensor | None = None
) -> Tensor:
    """Where all clients share one λ (d_outer,): the gradient in λ of the mean of F_i(x*(λ), λ), for x*(λ) the
    minimiser of the mean of f_i. For a `bilevel_quadratic` that is not curved.

    With bars for means over clients, weighed by `weights` (by default equal; they need not add up to 1):

        Ā x*(λ) = mean of A_i b_i − R̄ λ
        h(λ) = ρ (λ − s̄) − R̄ᵀ Ā⁻¹ (x*(λ) − t̄)
    """
    A, Ab, R, t, s = _weighted_means(problem, weights)
    if lam.shape != s.shape:
        raise ScenarioError(f"lam has the shape {tuple(lam.shape)}; it must be {tuple(s.shape)}")
    x = torch.linalg.solve(A, Ab - R @ lam)
    q: Tensor = torch.linalg.solve(A, x - t)
    return _PULL * (lam - s) - R.T @ q


@checked
def shared_solution(
    problem: Problem, weights: Sequence[float] | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The λ* that all clients share at which `shared_hypergradient` vanishes, and x*(λ*).

    With J = −Ā⁻¹ R̄ and x_0 = x*(0):  (ρ I + JᵀJ) λ* = ρ s̄ + Jᵀ (t̄ − x_0).
    """
    A, Ab, R, t, s = _weighted_means(problem, weights)
    J, x_0 = -torch.linalg.solve(A, R), torch.linalg.solve(A, Ab)
    pull = _PULL * torch.eye(len(s), dtype=s.dtype)
    lam = torch.linalg.solve(pull + J.T @ J, _PULL * s + J.T @ (t - x_0))
    return lam, x_0 + J @ lam


@checked
def local_hypergradient_solution(problem: Problem) -> tuple[Tensor, Tensor]:
    """Where a method ends that takes everybody's own Hessian for the common one: λ and x*(λ) at which

        (1/n) Σ_i [ρ (λ − s_i) − R_iᵀ A_i⁻¹ (x*(λ) − t_i)] = 0.

    With J and x_0 as in `shared_solution` and K_i = R_iᵀ A_i⁻¹:  (ρ I − K̄ J) λ = ρ s̄ + K̄ x_0 − mean K_i t_i.
    LFedNest ends there with small steps, one local step at a time and exact inner solutions. Where that
    matrix has an eigenvalue that is not to the right of 0, such a method diverges.
    """
    A_i, _, R_i, t_i, _ = _client_means(problem)
    A, Ab, R, _, s = _weighted_means(problem, None)
    J, x_0 = -torch.linalg.solve(A, R), torch.linalg.solve(A, Ab)
    K_i = torch.linalg.solve(A_i, R_i).mT
    K, Kt = K_i.mean(0), torch.einsum("nij,nj->ni", K_i, t_i).mean(0)
    matrix = _PULL * torch.eye(len(s), dtype=s.dtype) - K @ J
    slowest = float(torch.linalg.eigvals(matrix).real.min())
    if slowest <= 0:
        raise ScenarioError(
            f"descent along local hypergradients diverges on this problem (a rate of {slowest:.3g}, "
            "which must be positive); use another seed, or clients that differ less"
        )
    lam = torch.linalg.solve(matrix, _PULL * s + K @ x_0 - Kt)
    return lam, x_0 + J @ lam


def _weighted_means(problem: Problem, weights: Sequence[float] | Tensor | None) -> tuple[Tensor, ...]:
    """Means over clients of what `_client_means` gives."""
    each = _client_means(problem)
    given = [1.0] * problem.clients if weights is None else weights
    w = torch.as_tensor(given, dtype=torch.float64)
    if w.shape != (problem.clients,) or not bool((w >= 0).all() & (w.sum() > 0) & w.isfinite().all()):
        raise ScenarioError(
            f"weights are {w.tolist()}; they must be {problem.clients} numbers, one for each client, "
            "none negative and not all 0"
        )
    return tuple(torch.tensordot(w / w.sum(), part, 1) for part in each)


def _client_means(problem: Problem) -> tuple[Tensor, ...]:
    """A_i, A_i b_i, R_i, t_i and s_i as means over each client's samples, with a leading client axis."""
    if problem.recipe is None or problem.recipe.factory != "bilevel_quadratic":
        raise ScenarioError(f"problem {problem.name!r} is no bilevel_quadratic; only these have this limit")
    if problem.recipe.arguments["curved"]:
        raise ScenarioError(
            "a curved bilevel_quadratic has no closed form; make it with curved=False, "
            "or use asyncfed.truth with a small learning rate"
        )
    A, b, R, t, s = problem.data.train.tensors
    return tuple(
        part.view(problem.clients, -1, *part.shape[1:]).mean(1)  # every client has equally many samples
        for part in (A, torch.einsum("bij,bj->bi", A, b), R, t, s)
    )
