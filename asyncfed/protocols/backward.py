"""What the estimators of a hypergradient have in common: rounds that go backwards through a step of SGP.

At y_i = [z_i; ω_i], where T steps of SGP have led, one more step is y_i ← Σ_j p_ji φ_j(y_j) + ψ_i(y_i). Its
Jacobians, with x = z/ω, H_i = ∇²_x f_i (weight decay included) and C_i = ∂_λ ∇_x f_i, are

    (4a)  ∂_y φ = I − (α/ω) H,  ∂_λ φ = −α C,   ψ = 0
    (4b)  φ = identity,         ∂_y ψ = −(α/ω) H,  ∂_λ ψ = −α C

in the z-part. The ω-part of u is left out: φ and ψ pass ω on as it is, so nothing of it ever reaches u's
z-part, or v. A method is a file that says how u and v move; `Backward` makes a part of it.

| paper            | here            |                                                                 |
|------------------|-----------------|-----------------------------------------------------------------|
| c^y_i, c^λ_i     | c, c_lam        | ∇_x F_i / (n ω_i), ∇_λ F_i / n: over all of the client's samples  |
| u_i, v_i         | u, v            | what is sent, and the running estimate                          |
| M                | rounds          | terms of the Neumann series                                     |
| α_i              | lr              | of the inner steps, times the client's share in `EpochSGP`      |

Two samplings: `alternating` draws links and minibatch anew for the v-round and for the u-round (2M rounds, in
lockstep only); in `joint` one round serves both (M rounds, what the paper's experiments use). Both are
unbiased: ∂_λ of a round only ever multiplies Jacobians of earlier rounds (docs/decisions/0006).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from asyncfed.checks import PositiveInt, Words
from asyncfed.errors import ScenarioError, SeriesDivergesError
from asyncfed.network.expectations import (
    DebiasedShares,
    Expectations,
    exact_expectations,
    require_links_back,
    require_stationary,
    warn_of_dependence,
)
from asyncfed.network.links import FloatArray
from asyncfed.network.timing import Lockstep
from asyncfed.network.weights import Mixing, Shares
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.whole import whole_inner_jacobians, whole_outer_gradients
from asyncfed.protocols.at import At
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.part import (
    Inbox,
    Judged,
    Part,
    Reports,
    Scene,
    Sizes,
    Start,
    Step,
    Steps,
    Tensors,
)
from asyncfed.protocols.sgp import SGP

Sampling = Annotated[
    Literal["alternating", "joint"], Words("'alternating' (2M rounds) or 'joint' (M rounds)")
]
KnownFrom = Annotated[
    Literal["estimated", "exact"],
    Words("'estimated' (by each client, from its own rounds of SGP) or 'exact' (from the declared network)"),
]
InnerBatch = Annotated[
    PositiveInt | Literal["inner"] | None,
    Words("a whole number, at least 1, None for all of a client's data, or 'inner'"),
]

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
    lr: Tensor  # (k, 1)
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
    lr: Tensor  # (k, 1)

    def by_y(self, *vectors: Tensor, out: tuple[Tensor | None, ...] | None = None) -> tuple[Tensor, ...]:
        scale = self.lr / -self.omega
        return tuple(torch.bmm(self.hessian, u.unsqueeze(2)).squeeze(2).mul_(scale) for u in vectors)

    def by_lambda(self, u: Tensor) -> Tensor:
        return torch.bmm(self.cross, u.unsqueeze(2)).squeeze(2).mul_(-self.lr)

    def both(
        self, *vectors: Tensor, out: tuple[Tensor | None, ...] | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return self.by_y(*vectors), tuple(self.by_lambda(u) for u in vectors)


class Pushed:
    """What methods have in common whose messages are weighed by p̄_ij / δ̄_{j→i}: they say how u and v move."""

    rounds: int
    sampling: Sampling
    expectations: Literal["estimated", "exact"]
    batch: int | Literal["inner"] | None
    lr: float | None
    record: bool

    name: ClassVar[str]
    sent: ClassVar[tuple[str, ...]]  # what messages carry

    def with_inner(self, inner: SGP) -> tuple[Part, ...]:
        """The inner steps and then the estimate."""
        return (*inner.parts(), *self.alone(inner))

    def alone(self, inner: SGP) -> tuple[Part, ...]:
        """The estimate at variables that are given, for the steps that `inner` would make."""
        return (Backward(self, inner),)

    @property
    def estimates(self) -> bool:
        return self.expectations == "estimated"

    def check(self, scene: Scene) -> None:
        """Assumption 6, and rounds that go together where they alternate."""
        require_links_back(scene.network)
        if self.expectations == "exact":
            require_stationary(scene.network)
        warn_of_dependence(scene.network, type(self).__name__, always_there=scene.timing.presence is None)
        if self.sampling == "alternating" and not isinstance(scene.timing, Lockstep):
            raise ScenarioError(
                "alternating v-rounds and u-rounds need everybody in step: in virtual time what reaches a "
                "client in the wrong kind of round is lost; use sampling='joint', which is unbiased too"
            )

    def shares(self, scene: Scene, learned: Expectations | None, pace: FloatArray) -> Shares:
        """p̄_ij / δ̄_{j→i} on the link j→i, from the declared network (where clients make so many rounds per
        unit of time) or from what each client has seen.
        """
        network = scene.network
        if self.expectations == "exact":
            learned = exact_expectations(network, scene.weights.prepare(network), pace)
        if learned is None:
            raise ScenarioError(
                "p̄ and δ̄ are to be estimated from rounds of SGP, but none come before; "
                "give expectations='exact', or run the inner steps first"
            )
        return DebiasedShares(network, learned)

    def open(self, c: Tensor, c_lam: Tensor) -> Start:
        raise AssertionError("every method says how it opens")

    def before(self, here: Linearized, role: Role, inbox: Tensors, memory: Tensors, room: Tensors) -> Step:
        """A round of (4a), gradient before communication: what was absorbed is Σ_j weight · u_j."""
        raise AssertionError("every method says how it moves")

    def after(self, here: Linearized, role: Role, inbox: Tensors, memory: Tensors, room: Tensors) -> Step:
        """A round of (4b), gradient after communication: what was absorbed is the new u itself."""
        raise AssertionError("every method says how it moves")

    def result(self, v: Tensor, memory: Tensors) -> Tensor:
        """The estimate that a v stands for."""
        return v


@dataclass(frozen=True)
class Backward(Part):
    """The rounds of a method, after the steps of `inner`. What it finds is carried on as "hypergradient", and
    c^λ, which needs no rounds, as "direct" (and "history", where the method records), with `label` behind it.
    """

    method: Pushed
    inner: SGP
    label: str = ""

    kind = "hypergradient"
    judged = False
    needs_outer = True
    passes_on = ("omega", "hypergradient", "direct", "history")
    exact = ("omega",)

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.method.name

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self.method.rounds * (1 if self.method.sampling == "joint" else 2)

    @property
    def batch(self) -> int | None:  # type: ignore[override]
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
        return self.inner.backward_lr if self.method.lr is None else self.method.lr

    def check(self, scene: Scene) -> None:
        if self.sends:
            self.method.check(scene)

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        """∇F at first; then what each round's products take."""
        vectors = len(self.method.sent)
        takes = {Role.OPEN: 0, Role.V: 1, Role.U: vectors, Role.BOTH: vectors}
        each = [takes[role] for role in self._roles(np.arange(self.steps + self.closing))]
        return Cost(gradients=1, hessian_products=np.cumsum([0, *each])[steps])

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return dict.fromkeys(self.method.sent, sizes.inner)

    def mixing(self, scene: Scene, learned: Expectations | None) -> Mixing:
        if not self.sends:
            return super().mixing(scene, learned)
        n = scene.network.n
        pace = scene.timing.pace(scene.network, n, self.samples_per_step(scene.problem))
        return ((self.method.sent, self.method.shares(scene, learned, pace)),)

    def start(self, at: At, carried: Tensors) -> Start:
        x, lam = carried["inner"], carried["outer"]
        omega = carried.get("omega", torch.ones_like(x[:, :1])).to(x)
        c, c_lam = outer_terms(at, carried)
        opening = self.method.open(c, c_lam)
        lr = self.lr * self.inner.shares(at, x)
        memory = {"x": x, "omega": omega, "lam": lam, "lr": lr, "direct": c_lam.clone(), **opening.memory}
        if self.method.record:
            memory["history"] = lam.new_zeros(len(lam), self.method.rounds, lam.shape[1])
        if self.batch is None and x.shape[1] <= _LAID_OUT:
            hessian, memory["cross"] = whole_inner_jacobians(at.derivatives, x, lam, at.train)
            hessian.diagonal(dim1=1, dim2=2).add_(self.inner.weight_decay)
            memory["hessian"] = hessian
        return Start(opening.absorbed, memory)

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        roles = self._roles(at.steps)
        if len(set(roles)) == 1:
            batch = () if "hessian" in memory else at.batch
            made = self._round(at.derivatives, roles[0], inbox, memory, batch, at.room)
        else:
            made = self._some_of_each(at.derivatives, roles, inbox, memory, at.batch)
        made.report["u_start"] = made.report["u"] * torch.from_numpy(at.steps == 0).to(memory["x"])
        if self.method.record and "v" in made.memory:
            made.memory["history"] = self._written(memory["history"], made.memory["v"], roles, at.steps)
        return made

    def _some_of_each(
        self,
        derivatives: Derivatives,
        roles: list[Role],
        inbox: Inbox,
        memory: Tensors,
        batch: tuple[Tensor, ...],
    ) -> Step:
        # In virtual time some clients may be in a v-round while others are in a u-round.
        parts: list[tuple[Tensor, Step]] = []
        for role in Role:
            chosen = np.flatnonzero([own is role for own in roles])
            if not len(chosen):
                continue
            rows = torch.from_numpy(chosen).to(memory["x"].device)
            y = {key: value[rows] for key, value in inbox.items()}
            remembered = {key: value[rows] for key, value in memory.items()}
            own_batch = tuple(tensor[rows] for tensor in batch)
            parts.append((rows, self._round(derivatives, role, y, remembered, own_batch, {})))
        return _together(parts, inbox, memory)

    def _round(
        self,
        derivatives: Derivatives,
        role: Role,
        inbox: Tensors,
        memory: Tensors,
        batch: tuple[Tensor, ...],
        room: Tensors,
    ) -> Step:
        here: Linearized
        if "hessian" in memory:
            here = LinearizedOnce(memory["hessian"], memory["cross"], memory["omega"], memory["lr"])
        else:
            x, lam, decay = memory["x"], memory["lam"], self.inner.weight_decay
            here = LinearizedOn(derivatives, x, lam, batch, memory["omega"], memory["lr"], decay)
        rounds = self.method.before if self.inner.order == "4a" else self.method.after
        made = rounds(here, role, inbox, memory, room)
        size = torch.linalg.vector_norm(made.payload["u"], dim=1)
        return Step(made.payload, made.residue, {"u": size}, made.memory)

    def _written(self, history: Tensor, v: Tensor, roles: list[Role], steps: Steps) -> Tensor:
        """The history with one more estimate of each whose v has moved."""
        moved = np.flatnonzero([role in (Role.V, Role.BOTH) for role in roles])
        turn = steps // 2 if self.method.sampling == "alternating" else steps - (self.inner.order == "4a")
        rows = torch.from_numpy(moved).to(v.device)
        longer = history.clone()
        longer[rows, torch.from_numpy(turn[moved]).to(v.device)] = v[rows]
        return longer

    def _roles(self, steps: Steps) -> list[Role]:
        before = self.inner.order == "4a"
        if self.method.sampling == "joint":
            return [Role.OPEN if before and step == 0 else Role.BOTH for step in steps.tolist()]
        even, odd = (Role.U, Role.V) if before else (Role.V, Role.U)
        return [Role.OPEN if before and step == 0 else (odd if step % 2 else even) for step in steps.tolist()]

    def watch(self, reports: Reports, clients: int) -> None:
        made = [report for report in reports if report]
        if not made:
            return
        sizes = np.concatenate([report["u"] for report in made])
        start = max(float(report["u_start"].max()) for report in made)
        over = len(sizes) >= clients * self.steps
        last = float(sizes[-clients:].max()) if over else 0.0
        if start > 0 and (sizes.max() > _GROWTH * start or last > _GROWTH_AT_THE_END * start):
            raise SeriesDivergesError(self.name, start, float(sizes.max()), self.lr)

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(memory["x"], memory["lam"])

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        found = {
            f"hypergradient{self.label}": self.method.result(memory["v"], memory),
            f"direct{self.label}": memory["direct"],
        }
        if self.method.record:
            constant = {key: value.unsqueeze(1) for key, value in memory.items()}
            found[f"history{self.label}"] = self.method.result(memory["history"], constant)
        return found


def outer_terms(at: At, carried: Tensors) -> tuple[Tensor, Tensor]:
    """c^y (k, d) and c^λ (k, d_outer)."""
    by_x, by_lam, _ = whole_outer_gradients(at.derivatives, carried["inner"], carried["outer"], at.outer)
    if "omega" in carried:
        by_x.div_(carried["omega"].to(by_x))
    return by_x.div_(at.n), by_lam.div_(at.n)


def _together(parts: list[tuple[Tensor, Step]], absorbed: Tensors, memory: Tensors) -> Step:
    """One step of several, each of some rows."""
    payload = {key: torch.empty_like(value) for key, value in absorbed.items()}
    residue = {key: torch.zeros_like(value) for key, value in absorbed.items()}
    changed = {key for _, made in parts for key in made.memory}
    kept = {key: memory[key].clone() for key in changed}
    size = next(iter(absorbed.values())).new_empty(len(next(iter(absorbed.values()))))
    for rows, made in parts:
        for key, value in made.payload.items():
            payload[key][rows] = value
        for key, value in made.residue.items():
            residue[key][rows] = value
        for key, value in made.memory.items():
            kept[key][rows] = value
        size[rows] = made.report["u"]
    return Step(payload, residue, {"u": size}, kept)
