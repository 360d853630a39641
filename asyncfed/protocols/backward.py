"""What the estimators of a hypergradient have in common: rounds that go backwards through a step of SGP.

At y_i = [z_i; ω_i], where T steps of SGP have led, one more step is y_i ← Σ_j p_ji φ_j(y_j) + ψ_i(y_i). Its
Jacobians, with x = z/ω, H_i = ∇²_x f_i (weight decay included) and C_i = ∂_λ ∇_x f_i, are

    (4a)  ∂_y φ = I − (α/ω) H,  ∂_λ φ = −α C,   ψ = 0
    (4b)  φ = identity,         ∂_y ψ = −(α/ω) H,  ∂_λ ψ = −α C

in the z-part. The ω-part of u is left out: φ and ψ pass ω on as it is, so nothing of it ever reaches u's
z-part, or v. A method is a file that says how u and v move; `Backward` makes a phase of it.

| paper            | here            |                                                                 |
|------------------|-----------------|-----------------------------------------------------------------|
| c^y_i, c^λ_i     | c, c_lam        | ∇_x F_i / (n ω_i), ∇_λ F_i / n: over all of the client's samples  |
| u_i, v_i         | u, v            | what is sent, and the running estimate                          |
| M                | rounds          | terms of the Neumann series                                     |
| α_i              | lr              | of the inner steps                                              |

Two samplings: `alternating` draws links and minibatch anew for the v-round and for the u-round (2M rounds, in
lockstep only); in `joint` one round serves both (M rounds, what the paper's experiments use). Both are
unbiased: ∂_λ of a round only ever multiplies Jacobians of earlier rounds (docs/decisions/0006).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.errors import ScenarioError, SeriesDivergesError
from asyncfed.network.expectations import (
    DebiasedShares,
    Expectations,
    exact_expectations,
    require_links_back,
)
from asyncfed.network.links import Network
from asyncfed.network.timing import Lockstep, Timing
from asyncfed.network.weights import Shares, Weights
from asyncfed.problems.derivatives import Derivatives
from asyncfed.protocols.phase import Emission, Estimate, Opening, PhaseDefaults, Site, Steps, Tensors, whole
from asyncfed.protocols.schedules import first_rate
from asyncfed.protocols.sgp import SGP

Sampling = Literal["alternating", "joint"]

_LAID_OUT = 32  # up to this many inner variables a Hessian is small beside the data
# A Neumann series whose terms have become so many times larger than the first, on the way or in the end, is
# no estimate. On the way there is room for noise: HGP's weights are only right on average.
_GROWTH, _GROWTH_AT_THE_END = 1e3, 10.0


class Role(Enum):
    """What a round is for."""

    OPEN = 0  # (4a) only: u(0) is sent, nothing has come back yet
    V = 1  # the estimate moves
    U = 2  # u moves
    BOTH = 3


class Linearized(Protocol):
    """Products with the Jacobians of one step of SGP, at some clients' variables."""

    def by_y(self, *vectors: Tensor, out: tuple[Tensor | None, ...] | None = None) -> tuple[Tensor, ...]:
        """−(α/ω) H u of each vector u."""

    def by_lambda(self, u: Tensor) -> Tensor:
        """−α C u."""

    def both(
        self, *vectors: Tensor, out: tuple[Tensor | None, ...] | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """−(α/ω) H u and −α C u of each vector u."""


@dataclass(frozen=True, eq=False)
class LinearizedOn:
    """On a minibatch.

    Each costs one Hessian-vector product per client and vector: the Jacobian is applied to a weighted sum of
    messages, never to single ones.
    """

    derivatives: Derivatives
    x: Tensor
    lam: Tensor
    batch: tuple[Tensor, ...]
    omega: Tensor
    lr: float
    weight_decay: float

    def by_y(self, *vectors: Tensor, out: tuple[Tensor | None, ...] | None = None) -> tuple[Tensor, ...]:
        """−(α/ω) H u of each vector u."""
        targets = (None,) * len(vectors) if out is None else out
        scale = self.lr / -self.omega
        found = self.derivatives.inner_hessian_vectors(self.x, self.lam, self.batch, vectors, scale, targets)
        return self._decayed(found, vectors)

    def by_lambda(self, u: Tensor) -> Tensor:
        """−α C u."""
        return self.derivatives.inner_cross_vector(self.x, self.lam, self.batch, u).mul_(-self.lr)

    def both(
        self, *vectors: Tensor, out: tuple[Tensor | None, ...] | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """−(α/ω) H u and −α C u of each vector u, from one gradient."""
        by_y, crossed = self.derivatives.inner_second_vectors(
            self.x, self.lam, self.batch, vectors, self.lr / -self.omega, out
        )
        return self._decayed(by_y, vectors), tuple(value.mul_(-self.lr) for value in crossed)

    def _decayed(self, products: tuple[Tensor, ...], vectors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.weight_decay:
            share = self.lr * self.weight_decay / self.omega
            for product, u in zip(products, vectors, strict=True):
                product.addcmul_(u, share, value=-1)
        return products


@dataclass(frozen=True, eq=False)
class LinearizedOnce:
    """With H and C laid out, where every round uses all of the data and d is small: they never change."""

    hessian: Tensor  # (k, d, d), weight decay included
    cross: Tensor  # (k, d_outer, d)
    omega: Tensor
    lr: float

    def by_y(self, *vectors: Tensor, out: tuple[Tensor | None, ...] | None = None) -> tuple[Tensor, ...]:
        scale = self.lr / -self.omega
        return tuple(torch.bmm(self.hessian, u.unsqueeze(2)).squeeze(2).mul_(scale) for u in vectors)

    def by_lambda(self, u: Tensor) -> Tensor:
        return torch.bmm(self.cross, u.unsqueeze(2)).squeeze(2).mul_(-self.lr)

    def both(
        self, *vectors: Tensor, out: tuple[Tensor | None, ...] | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return self.by_y(*vectors), tuple(self.by_lambda(u) for u in vectors)


class Method(Protocol):
    """How u and v move; `absorbed` and the tensors in `memory` may be overwritten."""

    @property
    def name(self) -> str: ...

    @property
    def rounds(self) -> int: ...

    @property
    def sampling(self) -> Sampling: ...

    @property
    def lr(self) -> float | None: ...

    @property
    def batch(self) -> int | Literal["inner"] | None: ...

    @property
    def record(self) -> bool: ...

    @property
    def estimates(self) -> bool: ...

    def check(self, network: Network, weights: Weights, timing: Timing) -> None: ...

    def shares(
        self, weights: Weights, network: Network, timing: Timing, learned: Expectations | None
    ) -> Shares: ...

    def open(self, c: Tensor, c_lam: Tensor) -> Opening: ...

    def before(
        self, here: Linearized, role: Role, absorbed: Tensors, memory: Tensors, room: Tensors
    ) -> Emission:
        """A round of (4a), gradient before communication: what was absorbed is Σ_j weight · u_j."""

    def after(
        self, here: Linearized, role: Role, absorbed: Tensors, memory: Tensors, room: Tensors
    ) -> Emission:
        """A round of (4b), gradient after communication: what was absorbed is the new u itself."""

    def result(self, v: Tensor, memory: Tensors) -> Tensor:
        """The estimate that a v stands for."""


@dataclass(frozen=True)
class Backward(PhaseDefaults):
    """The rounds of a method, after the steps of `inner`. What it finds is carried on as "hypergradient" (and
    "history", where the method records), with `label` behind it.
    """

    method: Method
    inner: SGP
    label: str = ""

    kind = "hypergradient"
    judged = False
    needs_outer = True

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def steps(self) -> int:
        return self.method.rounds * (1 if self.method.sampling == "joint" else 2)

    @property
    def batch(self) -> int | None:
        return self.inner.batch if self.method.batch == "inner" else self.method.batch

    @property
    def sends(self) -> bool:  # type: ignore[override]
        return self.inner.sends

    @property
    def closing(self) -> bool:  # type: ignore[override]
        """Of (4a) in joint rounds v(M) needs what the last round brings; otherwise it needs no more of it."""
        return self.inner.order == "4a" and self.method.sampling == "joint" and self.method.rounds > 0

    @property
    def estimates(self) -> bool:  # type: ignore[override]
        return self.method.estimates and self.sends

    @property
    def lr(self) -> float:
        return first_rate(self.inner.lr) if self.method.lr is None else self.method.lr

    def check(self, network: Network, weights: Weights, timing: Timing) -> None:
        if self.sends:
            self.method.check(network, weights, timing)

    def shares(
        self, weights: Weights, network: Network, timing: Timing, learned: Expectations | None
    ) -> Shares:
        if not self.sends:
            return weights.prepare(network)
        return self.method.shares(weights, network, timing, learned)

    def begin(self, site: Site, carried: Tensors) -> Opening:
        x, lam = carried["inner"], carried["outer"]
        omega = carried.get("omega", torch.ones_like(x[:, :1]))
        opening = self.method.open(*outer_terms(site, carried))
        memory = {"x": x, "omega": omega, "lam": lam, **opening.memory}
        if self.method.record:
            memory["history"] = lam.new_zeros(len(lam), self.method.rounds, lam.shape[1])
        if self.batch is None and x.shape[1] <= _LAID_OUT:
            hessian, memory["cross"] = site.derivatives.whole_inner_jacobians(x, lam, site.data.train)
            hessian.diagonal(dim1=1, dim2=2).add_(self.inner.weight_decay)
            memory["hessian"] = hessian
        return Opening(opening.absorbed, memory)

    def step(
        self,
        derivatives: Derivatives,
        absorbed: Tensors,
        memory: Tensors,
        batch: tuple[Tensor, ...],
        steps: Steps,
        room: Tensors,
    ) -> Emission:
        roles = self._roles(steps)
        if len(set(roles)) == 1:
            emission = self._round(derivatives, roles[0], absorbed, memory, batch, room)
        else:
            emission = self._some_of_each(derivatives, roles, absorbed, memory, batch)
        if self.method.record and "v" in emission.memory:
            self._write_down(memory["history"], emission.memory["v"], roles, steps)
            emission.memory["history"] = memory["history"]
        return emission

    def _some_of_each(
        self,
        derivatives: Derivatives,
        roles: list[Role],
        absorbed: Tensors,
        memory: Tensors,
        batch: tuple[Tensor, ...],
    ) -> Emission:
        # In virtual time some clients may be in a v-round while others are in a u-round.
        parts: list[tuple[Tensor, Emission]] = []
        for role in Role:
            chosen = np.flatnonzero([own is role for own in roles])
            if not len(chosen):
                continue
            rows = torch.from_numpy(chosen).to(memory["x"].device)
            y = {key: value[rows] for key, value in absorbed.items()}
            remembered = {key: value[rows] for key, value in memory.items()}
            own_batch = tuple(tensor[rows] for tensor in batch)
            parts.append((rows, self._round(derivatives, role, y, remembered, own_batch, {})))
        return _together(parts, absorbed, memory)

    def _round(
        self,
        derivatives: Derivatives,
        role: Role,
        absorbed: Tensors,
        memory: Tensors,
        batch: tuple[Tensor, ...],
        room: Tensors,
    ) -> Emission:
        here: Linearized
        if "hessian" in memory:
            here = LinearizedOnce(memory["hessian"], memory["cross"], memory["omega"], self.lr)
        else:
            x, lam, decay = memory["x"], memory["lam"], self.inner.weight_decay
            here = LinearizedOn(derivatives, x, lam, batch, memory["omega"], self.lr, decay)
        rounds = self.method.before if self.inner.order == "4a" else self.method.after
        emission = rounds(here, role, absorbed, memory, room)
        size = torch.linalg.vector_norm(emission.payload["u"], dim=1)
        return Emission(emission.payload, emission.residue, {"u": size}, emission.memory)

    def _write_down(self, history: Tensor, v: Tensor, roles: list[Role], steps: Steps) -> None:
        moved = np.flatnonzero([role in (Role.V, Role.BOTH) for role in roles])
        turn = steps // 2 if self.method.sampling == "alternating" else steps - (self.inner.order == "4a")
        rows = torch.from_numpy(moved).to(v.device)
        history[rows, torch.from_numpy(turn[moved]).to(v.device)] = v[rows]

    def _roles(self, steps: Steps) -> list[Role]:
        before = self.inner.order == "4a"
        if self.method.sampling == "joint":
            return [Role.OPEN if before and step == 0 else Role.BOTH for step in steps.tolist()]
        even, odd = (Role.U, Role.V) if before else (Role.V, Role.U)
        return [Role.OPEN if before and step == 0 else (odd if step % 2 else even) for step in steps.tolist()]

    def watch(self, reports: list[dict[str, npt.NDArray[np.float64]]], clients: int) -> None:
        sizes = [report["u"] for report in reports if "u" in report]
        if not sizes:
            return
        start, largest = float(sizes[0][:clients].max()), max(float(size.max()) for size in sizes)
        over = sum(map(len, sizes)) >= clients * self.steps
        if over:
            last = float(sizes[-1][-clients:].max())
        if start > 0 and (largest > _GROWTH * start or (over and last > _GROWTH_AT_THE_END * start)):
            raise SeriesDivergesError(self.name, start, largest, self.lr)

    def estimate(self, absorbed: Tensors, memory: Tensors) -> Estimate:
        return Estimate(memory["x"], memory["lam"])

    def finish(self, absorbed: Tensors, memory: Tensors) -> Tensors:
        found = {f"hypergradient{self.label}": self.method.result(memory["v"], memory)}
        if self.method.record:
            constant = {key: value.unsqueeze(1) for key, value in memory.items()}
            found[f"history{self.label}"] = self.method.result(memory["history"], constant)
        return found


def outer_terms(site: Site, carried: Tensors) -> tuple[Tensor, Tensor]:
    """c^y (k, d) and c^λ (k, d_outer)."""
    problem = site.derivatives.problem
    shards = site.data.validation if problem.outer_split == "validation" else site.data.train
    by_x, by_lam, _ = site.derivatives.whole_outer_gradients(carried["inner"], carried["outer"], shards)
    if "omega" in carried:
        by_x.div_(carried["omega"])
    return by_x.div_(site.n), by_lam.div_(site.n)


def debiased_shares(
    weights: Weights,
    network: Network,
    timing: Timing,
    learned: Expectations | None,
    expectations: Literal["estimated", "exact"],
) -> Shares:
    """p̄_ij / δ̄_{j→i} on the link j→i, from the declared network or from what each client has seen."""
    if expectations == "exact":
        learned = exact_expectations(network, weights.prepare(network), timing.pace(network.n))
    if learned is None:
        raise ScenarioError(
            "p̄ and δ̄ are to be estimated from rounds of SGP, but none come before; "
            "give expectations='exact', or run the inner steps first"
        )
    return DebiasedShares(network, learned)


def check_debiased(network: Network, timing: Timing, sampling: Sampling) -> None:
    """Assumption 6, and rounds that go together where they alternate."""
    require_links_back(network)
    if sampling == "alternating" and not isinstance(timing, Lockstep):
        raise ScenarioError(
            "alternating v-rounds and u-rounds need everybody in step: in virtual time what reaches a client "
            "in the wrong kind of round is lost; use sampling='joint', which is unbiased too"
        )


def check_rounds(
    rounds: int,
    sampling: str,
    expectations: str,
    lr: float | None,
    batch: int | str | None,
) -> None:
    """Refuse settings that no method can have."""
    if not whole(rounds) or rounds < 0:
        raise ScenarioError(f"rounds is {rounds!r}; it must be a whole number, at least 0")
    if sampling not in ("alternating", "joint"):
        raise ScenarioError(
            f"sampling is {sampling!r}; it must be 'alternating' (2M rounds) or 'joint' (M rounds)"
        )
    if expectations not in ("estimated", "exact"):
        raise ScenarioError(
            f"expectations is {expectations!r}; it must be 'estimated' (by each client, from its own rounds "
            "of SGP) or 'exact' (from the declared network)"
        )
    if lr is not None and not 0 < lr < float("inf"):
        raise ScenarioError(f"lr is {lr}; it must be above 0, or None for the inner learning rate")
    if isinstance(batch, str):
        if batch != "inner":
            raise ScenarioError(f"batch is {batch!r}; it must be a number, None for all data, or 'inner'")
    elif batch is not None and (not whole(batch) or batch < 1):
        raise ScenarioError(
            f"batch is {batch}; it must be at least 1, None for all of a client's data, or 'inner'"
        )


def _together(parts: list[tuple[Tensor, Emission]], absorbed: Tensors, memory: Tensors) -> Emission:
    """One emission of several, each of some rows."""
    payload = {key: torch.empty_like(value) for key, value in absorbed.items()}
    residue = {key: torch.zeros_like(value) for key, value in absorbed.items()}
    changed = {key for _, emission in parts for key in emission.memory}
    kept = {key: memory[key].clone() for key in changed}
    size = next(iter(absorbed.values())).new_empty(len(next(iter(absorbed.values()))))
    for rows, emission in parts:
        for key, value in emission.payload.items():
            payload[key][rows] = value
        for key, value in emission.residue.items():
            residue[key][rows] = value
        for key, value in emission.memory.items():
            kept[key][rows] = value
        size[rows] = emission.report["u"]
    return Emission(payload, residue, {"u": size}, kept)
