"""The true hypergradient of small problems, by dense linear algebra: what estimators are held against.

In expectation over links and minibatches, SGP (001 Eq. 4) moves as

    (4b)  z_i ← Σ_j p̄_ji z_j − α g_i          (4a)  z_i ← Σ_j p̄_ji (z_j − α g_j)
    with g_i = ∇_x f_i(x_i, λ_i) + weight_decay · x_i,  x_i = z_i/ω_i,  and ω_i ← Σ_j p̄_ji ω_j

f_i being over all of client i's training samples. Where it comes to rest, z is a function of all clients' λ,
and so is F̄ = (1/n) Σ_i F_i(x_i, λ_i), F_i over all of the client's samples in the problem's `outer_split`.
Implicit differentiation (001 App. A.2) gives its derivative. Jacobians stand as in the paper: rows belong to
what is differentiated by, columns to what is differentiated; H_i = ∂_x ∇_x f_i, C_i = ∂_λ ∇_x f_i.

| paper      | here         |                                                                            |
| ---------- | ------------ | -------------------------------------------------------------------------- |
| p̄_ij      | p_bar[i, j]  | expected weight with which i sends to j; rows sum to one                   |
| Ā          | A            | blocks p̄_ij A^φ_i + 1_ij A^ψ_i:                                           |
|            |              | (4b) A^φ = I, A^ψ = −(α/ω)(H + weight_decay I); (4a) A^φ = I + that, A^ψ = 0 |
| B̄          | B            | blocks p̄_ij B^φ_i + 1_ij B^ψ_i: −αC_i is B^ψ in (4b) and B^φ in (4a)      |
| c^y, c^λ   | c_y, c_lam   | ∇_x F_i/(nω_i) and ∇_λ F_i/n                                               |
| d_λ F̄     |              | B (I − A)⁻¹ c_y + c_lam                                                    |

Only the z-part of y = [z; ω] is here. The ω-part of u never reaches its z-part, and so never λ; besides, with
it I − Ā would be singular, for ω moves by p̄ alone, which has the eigenvalue 1.

Derivatives are taken here anew, client by client, from the problem's plain functions and not through
`Derivatives`, which is among the things that the truth is to test. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import grad, jacrev

from asyncfed.data import ClientShards
from asyncfed.errors import DataError, RunError, ScenarioError, TopologyError
from asyncfed.network.links import Network
from asyncfed.problems.layout import Layout
from asyncfed.problems.problem import Batch, Loss, Problem

FloatArray = npt.NDArray[np.float64]

LIMIT = 4000
"""Rows that a dense matrix may have: at 4000 one takes 128 MB, and a solve a few seconds."""

_NEWTON_STEPS = 50
_HALVINGS = 8
_DAMPED_STEPS = 100
_SMALL = 1e-6  # a Newton step this small (relative to x) that brings nothing is rounding


@dataclass(frozen=True)
class InnerMap:
    """What one step of SGP does: constant learning rate, order of (4), weight decay."""

    lr: float
    order: Literal["4a", "4b"] = "4b"
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ScenarioError(f"lr is {self.lr}; it must be a positive number")
        if self.order not in ("4a", "4b"):
            raise ScenarioError(
                f"order is {self.order!r}; it must be '4a' (gradient before communication) or '4b' (after)"
            )
        if not 0 <= self.weight_decay < float("inf"):
            raise ScenarioError(f"weight_decay is {self.weight_decay}; it must be at least 0")


@dataclass(frozen=True, eq=False)
class Point:
    """Where derivatives are taken: models x (n, d), push-sum weights omega (n, 1), lam (n, d_outer)."""

    x: Tensor
    omega: Tensor
    lam: Tensor


@dataclass(frozen=True, eq=False)
class ExpectedJacobians:
    """A (nd, nd), B (n·d_outer, nd), c_y (nd,) and c_lam (n·d_outer,), clients one after another."""

    A: Tensor
    B: Tensor
    c_y: Tensor
    c_lam: Tensor


def affordable(problem: Problem, limit: int = LIMIT) -> bool:
    """Whether the dense matrices of `stationary_point` and `dense_hypergradient` stay within `limit` rows."""
    losses = _WholeLosses(problem)
    return losses.numbers <= limit and losses.largest_blocks <= limit**2


def expected_matrix(network: Network, sent: FloatArray, kept: FloatArray) -> Tensor:
    """p̄ (n, n) from the expected weight of each edge (as in network.senders) and what each client keeps."""
    if sent.shape != (network.edges,) or kept.shape != (network.n,):
        raise ScenarioError(
            f"sent has shape {sent.shape} and kept {kept.shape}; a network of {network.n} clients and "
            f"{network.edges} edges needs ({network.edges},) and ({network.n},)"
        )
    p_bar = np.zeros((network.n, network.n))
    p_bar[network.senders, network.receivers] = sent
    p_bar[np.arange(network.n), np.arange(network.n)] = kept
    return torch.from_numpy(p_bar)


def stationary_omega(p_bar: Tensor) -> Tensor:
    """The push-sum weights (n, 1) at rest: ω = p̄ᵀ ω, with sum n."""
    from scipy.sparse.csgraph import connected_components

    p_bar = _checked(p_bar, len(p_bar))
    n = len(p_bar)
    parts, of = connected_components(p_bar.numpy() > 0, directed=True, connection="strong")
    if parts > 1:
        other = int(np.flatnonzero(of != of[0])[0])
        raise TopologyError(
            f"the expected weights are not strongly connected: clients 0 and {other} do not reach each other "
            f"both ways ({parts} separate parts in all), so the push-sum weights have no single place of "
            "rest; add links"
        )
    system = torch.eye(n, dtype=torch.float64) - p_bar.T
    system[-1] = 1.0  # the rows are dependent: any one of them gives way to the sum
    total = torch.zeros(n, 1, dtype=torch.float64)
    total[-1] = n
    omega: Tensor = torch.linalg.solve(system, total)
    return omega


def stationary_point(
    problem: Problem,
    p_bar: Tensor,
    inner: InnerMap,
    lam: Tensor | None = None,
    start: Tensor | None = None,
    tolerance: float = 1e-12,
    limit: int = LIMIT,
) -> Point:
    """Where expected SGP comes to rest.

    If every f_i is strongly convex there is only one such place: in (4b) whatever the learning rate, for
    (I − p̄ᵀ) diag(ω) has no negative symmetric part, and in (4a) while it is below ω_i over f_i's curvature.

    Newton's method on the whole fixed-point equation, with the step halved while it does not lessen the
    residual; where no step does, damped steps of the iteration itself and then Newton again.

    Parameters
    ----------
    lam
        Outer variables (n, d_outer); by default everybody has the problem's initial ones.
    start
        Models x (n, d) to begin from; by default everybody has the problem's initial one.
    tolerance
        Newton's last change of x, relative to 1 + |x|. Where rounding does not allow it, as near as it does.
    """
    losses = _WholeLosses(problem)
    losses.require_affordable(limit)
    p_bar = _checked(p_bar, losses.n)
    omega = stationary_omega(p_bar)
    lam = losses.lam(lam)
    z = omega * losses.x(start)

    def residual(z: Tensor) -> Tensor:
        return _expected_step(losses, p_bar, inner, z, omega, lam) - z

    left = residual(z)
    for _ in range(_NEWTON_STEPS):
        change = _newton_change(losses, p_bar, inner, Point(z / omega, omega, lam), left)
        size = float("inf") if change is None else _size(change / omega) / (1.0 + _size(z / omega))
        if change is not None and size <= tolerance:
            return Point((z + change) / omega, omega, lam)
        better = None if change is None else _improved(residual, z, change, left)
        if better is not None:
            z, left = better
        elif size <= _SMALL:
            return Point(z / omega, omega, lam)
        else:
            for _ in range(_DAMPED_STEPS):
                z = z + 0.5 * left
                left = residual(z)
        if not torch.isfinite(left).all():
            break
    raise RunError(
        f"no stationary point was found: SGP's expected step still changes z by {_size(left):.3g}; "
        f"lower the learning rate ({inner.lr}), start elsewhere, or see whether the inner losses are "
        "strongly convex (weight_decay makes them more so)"
    )


def expected_jacobians(
    problem: Problem, p_bar: Tensor, inner: InnerMap, point: Point, limit: int = LIMIT
) -> ExpectedJacobians:
    """Ā, B̄, c^y and c^λ at any point, dense."""
    losses = _WholeLosses(problem)
    losses.require_affordable(limit)
    if losses.n * losses.outer.d > limit:
        raise ScenarioError(
            f"B has {losses.n * losses.outer.d} rows (clients × outer variables); at most {limit} are built: "
            "use dense_hypergradient, which does not need it, or pass a larger limit"
        )
    p_bar = _checked(p_bar, losses.n)
    blocks = _blocks(losses, inner, losses.point(point))
    A = _dense(p_bar, blocks.A_phi, blocks.A_psi)
    B = _dense(p_bar, blocks.B_phi, blocks.B_psi)
    return ExpectedJacobians(A, B, blocks.c_y.reshape(-1), blocks.c_lam.reshape(-1))


def dense_hypergradient(
    problem: Problem, p_bar: Tensor, inner: InnerMap, point: Point, limit: int = LIMIT
) -> Tensor:
    """B̄ (I − Ā)⁻¹ c^y + c^λ (n, d_outer), at any point: at a stationary one the truth."""
    losses = _WholeLosses(problem)
    losses.require_affordable(limit)
    p_bar = _checked(p_bar, losses.n)
    blocks = _blocks(losses, inner, losses.point(point))
    A = _dense(p_bar, blocks.A_phi, blocks.A_psi)
    u = _solved(torch.eye(len(A), dtype=A.dtype) - A, blocks.c_y.reshape(-1))
    if u is None:
        raise RunError(
            "I − A is singular, so there is no hypergradient: the sum of the inner losses is flat in some "
            "direction; give it weight_decay or more data"
        )
    return blocks.c_lam + _times(p_bar, blocks.B_phi, blocks.B_psi, u.view(losses.n, -1))


def neumann_hypergradient(
    problem: Problem, p_bar: Tensor, inner: InnerMap, point: Point, rounds: int, limit: int = LIMIT
) -> Tensor:
    """B̄ Σ_{m < rounds} Ā^m c^y + c^λ (n, d_outer): what HGP gives in the mean.

    No matrix here is larger than a client's own Hessian, so it reaches further than `dense_hypergradient`. It
    converges where SGP does: where the spectral radius of Ā is below one.
    """
    if rounds < 0:
        raise ScenarioError(f"rounds is {rounds}; it must be at least 0")
    losses = _WholeLosses(problem)
    losses.require_blocks(limit)
    p_bar = _checked(p_bar, losses.n)
    blocks = _blocks(losses, inner, losses.point(point))
    u, v = blocks.c_y, blocks.c_lam
    for _ in range(rounds):
        v = v + _times(p_bar, blocks.B_phi, blocks.B_psi, u)
        u = _times(p_bar, blocks.A_phi, blocks.A_psi, u)
    return v


def finite_difference_hypergradient(
    problem: Problem,
    p_bar: Tensor,
    inner: InnerMap,
    lam: Tensor,
    epsilon: float = 1e-5,
    limit: int = LIMIT,
) -> Tensor:
    """Central differences of F̄ (n, d_outer), with the inner problem solved anew for every number in `lam`.

    Knows nothing of implicit differentiation, and costs 2·n·d_outer solves.
    """
    losses = _WholeLosses(problem)
    lam = losses.lam(lam)
    start = stationary_point(problem, p_bar, inner, lam, limit=limit).x

    def objective(lam: Tensor) -> Tensor:
        return losses.objective(stationary_point(problem, p_bar, inner, lam, start, limit=limit))

    result = torch.empty_like(lam)
    for place in np.ndindex(*lam.shape):
        nudge = torch.zeros_like(lam)
        nudge[place] = epsilon
        result[place] = (objective(lam + nudge) - objective(lam - nudge)) / (2 * epsilon)
    return result


class _WholeLosses:
    """Every client's f_i and F_i over all its samples, as functions of flat rows, in float64."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        generator = torch.Generator().manual_seed(0)
        self._x = problem.init_inner(generator)
        self._lam = problem.init_outer(generator)
        self.inner, self.outer = Layout.of(self._x), Layout.of(self._lam)
        self.n = problem.clients
        self.numbers = self.n * self.inner.d
        self.largest_blocks = self.numbers * max(self.inner.d, self.outer.d)
        # Jacobians go through vmap, except for functions that it cannot do: these take one row at a time.
        self._at_once = None if problem.vectorize else 1

    def require_affordable(self, limit: int) -> None:
        if self.numbers > limit:
            raise ScenarioError(
                f"{self.n} clients with {self.inner.d} numbers each make dense matrices of {self.numbers} "
                f"rows; at most {limit} are solved: make the problem smaller, pass a larger limit, or use "
                "neumann_hypergradient"
            )
        self.require_blocks(limit)

    def require_blocks(self, limit: int) -> None:
        if self.largest_blocks > limit**2:
            raise ScenarioError(
                f"the second derivatives of {self.n} clients with {self.inner.d} inner and {self.outer.d} "
                f"outer numbers are {self.largest_blocks} numbers; at most {limit}² are kept: make the "
                "problem smaller or pass a larger limit"
            )

    def x(self, given: Tensor | None) -> Tensor:
        """Inner variables (n, d), everybody's initial ones unless given."""
        return self._rows("x", self.inner.flatten(self._x), given)

    def lam(self, given: Tensor | None) -> Tensor:
        """Outer variables (n, d_outer), everybody's initial ones unless given."""
        return self._rows("lam", self.outer.flatten(self._lam), given)

    def point(self, given: Point) -> Point:
        """The point in float64, of the right shapes."""
        return Point(self.x(given.x), self._rows("omega", given.omega[0], given.omega), self.lam(given.lam))

    def gradient(self, x: Tensor, lam: Tensor) -> Tensor:
        """∇_x f (n, d)."""
        return torch.stack([grad(self._f(i))(x[i], lam[i]) for i in range(self.n)])

    def second(self, x: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        """H (n, d, d) and C (n, d_outer, d): rows for what ∇_x f is differentiated by."""
        hessians, crosses = [], []
        for i in range(self.n):
            wanted = (0, 1) if self.outer.d else (0,)
            found = jacrev(grad(self._f(i)), argnums=wanted, chunk_size=self._at_once)(x[i], lam[i])
            hessians.append(found[0].T)
            crosses.append(found[1].T if self.outer.d else x.new_empty(0, self.inner.d))
        return torch.stack(hessians), torch.stack(crosses)

    def outer_gradients(self, x: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        """∇_x F (n, d) and ∇_λ F (n, d_outer)."""
        found = [grad(self._F(i), argnums=(0, 1))(x[i], lam[i]) for i in range(self.n)]
        return torch.stack([by_x for by_x, _ in found]), torch.stack([by_lam for _, by_lam in found])

    def objective(self, point: Point) -> Tensor:
        """F̄."""
        return torch.stack([self._F(i)(point.x[i], point.lam[i]) for i in range(self.n)]).mean()

    def _f(self, i: int) -> Callable[[Tensor, Tensor], Tensor]:
        return self._flat(self.problem.inner_loss, self._train.of(i))

    def _F(self, i: int) -> Callable[[Tensor, Tensor], Tensor]:  # noqa: N802, the paper's letter
        return self._flat(self.problem.outer_loss, self._outer_split.of(i))

    def _flat(self, loss: Loss, batch: Batch) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, lam: loss(self.inner.views_one(x), self.outer.views_one(lam), batch)

    @cached_property
    def _train(self) -> ClientShards:
        return self._shards("train")

    @cached_property
    def _outer_split(self) -> ClientShards:
        return self._shards(self.problem.outer_split)

    def _shards(self, split: str) -> ClientShards:
        shards: ClientShards = getattr(self.problem.data, split)
        if not shards.sizes.all():
            without = int(np.flatnonzero(shards.sizes == 0)[0])
            raise DataError(
                f"client {without} has no {split} samples, and so no loss over them; give it some"
            )
        like = torch.zeros(shards.clients, dtype=torch.float64)
        return shards.to(torch.float64).with_beside(*self.problem.beside(like))

    def _rows(self, name: str, initial: Tensor, given: Tensor | None) -> Tensor:
        if given is None:
            return initial.double().repeat(self.n, 1)
        if given.shape != (self.n, len(initial)):
            raise ScenarioError(
                f"{name} has shape {tuple(given.shape)}; this problem needs ({self.n}, {len(initial)})"
            )
        return given.detach().double()


@dataclass(frozen=True, eq=False)
class _Blocks:
    """What stands in the blocks of A and B, per client, and the two c."""

    A_phi: Tensor
    A_psi: Tensor
    B_phi: Tensor
    B_psi: Tensor
    c_y: Tensor
    c_lam: Tensor


def _blocks(losses: _WholeLosses, inner: InnerMap, point: Point) -> _Blocks:
    by_x, by_lam = losses.outer_gradients(point.x, point.lam)
    A_phi, A_psi, C = _inner_blocks(losses, inner, point)
    by_outer, nothing = -inner.lr * C, torch.zeros_like(C)
    B_phi, B_psi = (by_outer, nothing) if inner.order == "4a" else (nothing, by_outer)
    return _Blocks(A_phi, A_psi, B_phi, B_psi, by_x / (losses.n * point.omega), by_lam / losses.n)


def _inner_blocks(losses: _WholeLosses, inner: InnerMap, point: Point) -> tuple[Tensor, Tensor, Tensor]:
    """A^φ, A^ψ and C."""
    H, C = losses.second(point.x, point.lam)
    identity = torch.eye(losses.inner.d, dtype=H.dtype).expand_as(H)
    descent = -(inner.lr / point.omega.unsqueeze(2)) * (H + inner.weight_decay * identity)
    if inner.order == "4a":
        return identity + descent, torch.zeros_like(H), C
    return identity, descent, C


def _times(p_bar: Tensor, phi: Tensor, psi: Tensor, u: Tensor) -> Tensor:
    """A or B times u (n, d), from its blocks."""
    return torch.einsum("iab,ib->ia", phi, p_bar @ u) + torch.einsum("iab,ib->ia", psi, u)


def _dense(p_bar: Tensor, phi: Tensor, psi: Tensor) -> Tensor:
    """A or B as one matrix, from its blocks."""
    n, rows, columns = phi.shape
    matrix = torch.einsum("ij,iab->iajb", p_bar, phi)
    for i in range(n):
        matrix[i, :, i] += psi[i]
    return matrix.reshape(n * rows, n * columns)


def _expected_step(
    losses: _WholeLosses, p_bar: Tensor, inner: InnerMap, z: Tensor, omega: Tensor, lam: Tensor
) -> Tensor:
    x = z / omega
    descent = -inner.lr * (losses.gradient(x, lam) + inner.weight_decay * x)
    return p_bar.T @ (z + descent) if inner.order == "4a" else p_bar.T @ z + descent


def _newton_change(
    losses: _WholeLosses, p_bar: Tensor, inner: InnerMap, point: Point, left: Tensor
) -> Tensor | None:
    """The change of z that would make the residual `left` vanish were the step linear; None if there is none.

    z's Jacobian is Aᵀ, because rows of A are for what is differentiated by.
    """
    A_phi, A_psi, _ = _inner_blocks(losses, inner, point)
    A = _dense(p_bar, A_phi, A_psi)
    change = _solved((torch.eye(len(A), dtype=A.dtype) - A).T, left.reshape(-1))
    return None if change is None else change.view_as(left)


def _solved(system: Tensor, right: Tensor) -> Tensor | None:
    """The solution of a linear system; None where it is singular."""
    solution, failed = torch.linalg.solve_ex(system, right)
    return solution if not failed and bool(torch.isfinite(solution).all()) else None


def _improved(
    residual: Callable[[Tensor], Tensor], z: Tensor, change: Tensor, left: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The first of change, change/2, change/4, … that lessens the residual: the new z and residual."""
    for halvings in range(_HALVINGS):
        candidate = z + change * 0.5**halvings
        then = residual(candidate)
        if then.norm() < left.norm():
            return candidate, then
    return None


def _checked(p_bar: Tensor, n: int) -> Tensor:
    if p_bar.shape != (n, n):
        raise ScenarioError(f"p_bar has shape {tuple(p_bar.shape)}; {n} clients need ({n}, {n})")
    p_bar = p_bar.detach().double()
    sums = p_bar.sum(1)
    if not (p_bar >= 0).all() or not ((sums - 1).abs() < 1e-6).all():
        raise ScenarioError(
            f"the rows of p_bar sum to between {sums.min():.9g} and {sums.max():.9g}, its smallest weight is "
            f"{p_bar.min():.3g}; what a client keeps and sends must be at least 0 and sum to 1"
        )
    return p_bar


def _size(rows: Tensor) -> float:
    return float(rows.abs().max())
