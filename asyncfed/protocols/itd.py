"""Iterative differentiation (001 App. H, Eq. 41–44): the derivative of the T steps of SGP as they were made.

HGP asks how the place where SGP comes to rest moves with λ. Here the way there is differentiated, wherever it
has led: with Â(t), B̂(t) the Jacobians of step t, which takes y(t) to y(t+1), the answer is

    Σ_{t<T} B̂(t) Â(t+1) … Â(T−1) c^y + c^λ                                                     (41)

with the links, weights and minibatches of that very run. Both ways to sum it are for small problems:
`ITDForward` from the left, along with the steps, in messages as large as all clients' λ times a model;
`ITDBackward` from the right, afterwards, over links that must still be those of step t.

| paper          | here       |                                                                           |
|----------------|------------|---------------------------------------------------------------------------|
| x_i(t), ω_i(t) | trajectory | what client i went through, step after step (backward)                    |
| H_i, C_i       |            | ∇²_x f_i (+ weight decay), ∂_λ ∇_x f_i, at x_i(t) with the minibatch of t |
| U_ki, all k    | U          | d z_i / d λ_k: n·d_λ rows of d numbers, one after another (forward)       |
| c^y_i, c^λ_i   | c, c_lam   | ∇_x F_i / (n ω_i), ∇_λ F_i / n: over all of the client's samples          |
| u_i, v_i       | u, v       | what is sent, and the running estimate (backward)                         |

Only z-parts are here: links and weights do not depend on λ, so d ω / d λ = 0; and ω moves by the weights
alone, so what u has for ω reaches neither its z-part nor v.

Printed indices differ: the recursion of ITD-backward has Â(t+1), B̂(t+1) where t is meant, by (41).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncfed.checks import PositiveInt
from asyncfed.errors import ScenarioError, TopologyError
from asyncfed.network.expectations import Expectations, TransposedShares, require_undirected
from asyncfed.network.timing import Lockstep
from asyncfed.network.weights import Mixing
from asyncfed.problems.derivatives import Derivatives
from asyncfed.protocols.at import At
from asyncfed.protocols.backward import outer_terms
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.part import (
    Inbox,
    Judged,
    Part,
    Scene,
    Sizes,
    Start,
    Step,
    Steps,
    Tensors,
)
from asyncfed.protocols.schedules import rates
from asyncfed.protocols.sgp import SGP
from asyncfed.protocols.soundness import small_weight
from asyncfed.registry import register


@register("estimator")
@dataclass(frozen=True)
class ITDForward:
    """Forward mode: every client carries the derivative of its z in everybody's λ.

    Works wherever SGP does, on directed links that come and go and in virtual time. A message has
    n·d_λ·d + d + 1 numbers.

    Parameters
    ----------
    gather
        Rounds of the sum over all clients at the end (Eq. 44), by push-sum: the "several communication
        rounds" of the paper. On a fully connected network with weights 1/n one round is exact; elsewhere the
        error shrinks geometrically with the rounds. (Where messages are lost, so are parts of the sum.)
    """

    gather: PositiveInt = 1

    name = "itd-forward"

    def with_inner(self, inner: SGP) -> tuple[Part, ...]:
        """The inner steps with U, and the sum."""
        return _Forward(inner), _Gather(inner, self.gather)


@register("estimator")
@dataclass(frozen=True)
class ITDBackward:
    """Backward mode: the steps are recorded, and gone back over.

    A client keeps T·(d + 1) numbers. Links must be undirected and always up, in lockstep: going back needs
    the links of step t again. HGP needs none of that.
    """

    name = "itd-backward"

    def with_inner(self, inner: SGP) -> tuple[Part, ...]:
        """The inner steps, recorded, and the way back."""
        return _Recorded(inner), _Back(inner)


@dataclass(frozen=True)
class _Along(Part):
    """The steps of `inner`, with something beside them."""

    inner: SGP

    needs_outer = True
    passes_on = ("z", "omega", "U", "trajectory")
    exact = ("omega",)
    conserves = True
    moves_by_weight = True

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self.inner.steps

    @property
    def batch(self) -> int | None:  # type: ignore[override]
        return self.inner.batch

    @property
    def sends(self) -> bool:  # type: ignore[override]
        return self.inner.sends

    def check(self, scene: Scene) -> None:
        self.inner.check(scene)

    def explain(self, inbox: Inbox, row: int) -> str | None:
        return self.inner.explain(inbox, row)

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return self.inner.judge(at, inbox, memory)


@dataclass(frozen=True)
class _Forward(_Along):
    """Eq. 43, as weighted sums like those of z: everybody's terms −α C_i begin at home, in block k = i.

    (4a)  U_i ← Σ_j p_ji (U_j − (α/ω_j) U_j H_j − α e_j C_j)
    (4b)  U_i ← Σ_j p_ji U_j − (α/ω_i) U_i H_i − α e_i C_i
    """

    name = "itd-forward"
    kind = "itd-forward"

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        """Beside a gradient, products with all rows of U, and the rows of C."""
        sizes = scene.sizes
        return Cost(1, (sizes.clients + 1) * sizes.outer) * steps

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {**self.inner.carries(sizes), "U": sizes.clients * sizes.outer * sizes.inner}

    def start(self, at: At, carried: Tensors) -> Start:
        opening, lam = self.inner.start(at, carried), carried["outer"]
        z = opening.absorbed["z"]
        U = z.new_zeros(len(z), at.n * lam.shape[1] * z.shape[1])
        return Start({**opening.absorbed, "U": U}, {**opening.memory, "e": _own_number(at, z)})

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        z, U, lam = inbox["z"], inbox["U"], memory["lam"]
        omega = inbox["omega"].to(z)
        x, alpha = z / omega, rates(self.inner.lr, at.steps, z)
        own = self.inner.step(at, inbox, memory)
        k, d = x.shape
        moved = at.room["U"] if "U" in at.room else torch.empty_like(U)
        rows, targets = (table.view(k, -1, d).unbind(1) for table in (U, moved))
        at.derivatives.inner_hessian_vectors(x, lam, at.batch, rows, alpha / -omega, targets)  # −(α/ω) U H
        if self.inner.weight_decay:
            moved -= (alpha / omega) * self.inner.weight_decay * U
        C = _cross(at.derivatives, x, lam, at.batch)
        moved -= torch.einsum("kn,kad->knad", alpha * memory["e"], C).reshape_as(U)  # −α e_i C_i
        if self.inner.order == "4a":
            return Step({**own.payload, "U": moved.add_(U)}, report=own.report)
        return Step({**own.payload, "U": U}, {**own.residue, "U": moved}, own.report)

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        return self.inner.finish(at, inbox, memory)  # U among what it absorbed


@dataclass(frozen=True)
class _Gather(Part):
    """Eq. 44: client i wants Σ_j U_ij c_j, of which j has the term for every i. A table of these (n·d_λ) is
    averaged by push-sum, and i takes n times its own row of it.
    """

    inner: SGP
    steps: int

    name = "itd-gather"
    kind = "itd-gather"
    batch = 1
    judged = False
    needs_outer = True
    passes_on = ("hypergradient",)
    exact = ("omega",)
    conserves = True

    @property
    def sends(self) -> bool:  # type: ignore[override]
        return self.inner.sends

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        return Cost(gradients=1)

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {"z": sizes.clients * sizes.outer, "omega": 1}

    def start(self, at: At, carried: Tensors) -> Start:
        x = carried["inner"]
        c, c_lam = outer_terms(at, carried)
        table = torch.einsum("kad,kd->ka", carried["U"].view(len(x), -1, x.shape[1]), c)
        memory = {"x": x, "lam": carried["outer"], "c_lam": c_lam, "e": _own_number(at, x)}
        return Start({"z": table, "omega": torch.ones_like(x[:, :1])}, memory)

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        return Step(dict(inbox))

    def explain(self, inbox: Inbox, row: int) -> str | None:
        return small_weight(inbox["omega"], row)

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(memory["x"], memory["lam"])

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        e, mean = memory["e"], inbox["z"] / inbox["omega"].to(inbox["z"])
        own = torch.einsum("kn,kna->ka", e, mean.view(*e.shape, -1))
        # Where nobody sends, a client's z depends on no λ but its own, and its own term is the sum.
        total = own * e.shape[1] if self.sends else own
        return {"hypergradient": memory["c_lam"] + total, "U": mean.new_empty(len(mean), 0)}  # served


@dataclass(frozen=True)
class _Recorded(_Along):
    """The steps of `inner`, each of which writes down where it was taken: x(t), ω(t)."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.inner.kind

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        return Cost(gradients=steps)

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return self.inner.carries(sizes)

    def start(self, at: At, carried: Tensors) -> Start:
        opening = self.inner.start(at, carried)
        z = opening.absorbed["z"]
        trajectory = z.new_zeros(len(z), self.steps * (z.shape[1] + 1))
        return Start(opening.absorbed, {**opening.memory, "trajectory": trajectory})

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        z, trajectory = inbox["z"], memory["trajectory"].clone()
        omega = inbox["omega"].to(z)
        t = int(at.steps[0])  # in lockstep everybody is at the same step
        trajectory.view(len(z), self.steps, -1)[:, t] = torch.cat([z / omega, omega], dim=1)
        own = self.inner.step(at, inbox, memory)
        return Step(own.payload, own.residue, own.report, {"trajectory": trajectory})

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        return {**self.inner.finish(at, inbox, memory), "trajectory": memory["trajectory"]}


@dataclass(frozen=True)
class _Back(Part):
    """From u(T) = c^y, v(T) = c^λ back to v(0), for t = T−1, …, 0 with the Jacobians of step t:

    (4a)  s = Σ_j p_ij u_j,   v ← v − α C s,     u ← s − (α/ω) H s
    (4b)                      v ← v − α C u_i,   u ← Σ_j p_ij u_j − (α/ω) H u_i

    The runtime sums what a round sends at the beginning of the next. So (4b) takes step T−1 at once, while
    (4a) first sends u(T), comes to step t one round later, and to t = 0 in the closing step.
    """

    inner: SGP

    name = "itd-backward"
    kind = "itd-backward"
    judged = False
    needs_outer = True
    passes_on = ("hypergradient",)

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self.inner.steps

    @property
    def batch(self) -> int | None:  # type: ignore[override]
        return self.inner.batch

    @property
    def sends(self) -> bool:  # type: ignore[override]
        return self.inner.sends

    @property
    def closing(self) -> bool:  # type: ignore[override]
        return self.inner.order == "4a" and self.steps > 0

    def check(self, scene: Scene) -> None:
        network = scene.network
        require_undirected(network, "ITD-backward")
        if not (network.probability == 1).all():
            edge = int((network.probability != 1).argmax())
            chance = network.probability[edge]
            often = "at some times only" if np.isnan(chance) else f"with probability {chance:.3g}"
            a, b = (network.names[ends[edge]] for ends in (network.senders, network.receivers))
            raise TopologyError(
                "ITD-backward goes back over the links that every inner step had, but links that come and go "
                f"do not repeat them (edge {a}→{b} is up {often}): "
                "make every probability 1, or use HGP, which needs no old links"
            )
        if not isinstance(scene.timing, Lockstep):
            raise ScenarioError(
                "ITD-backward takes the inner steps back one by one, all clients together, so it needs "
                "timing=Lockstep(); in virtual time use HGP"
            )

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        open_rounds = int(self.inner.order == "4a")
        return Cost(gradients=1, hessian_products=np.maximum(steps - open_rounds, 0))

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {"u": sizes.inner}

    def mixing(self, scene: Scene, learned: Expectations | None) -> Mixing:
        return ((("u",), TransposedShares(scene.network, scene.weights.prepare(scene.network))),)

    def samples_of(self, steps: Steps) -> Steps:
        """The minibatch of the inner step that is gone back over; −1 is the last of the part before."""
        return self._inner_steps(steps) - self.steps

    def _inner_steps(self, steps: Steps) -> Steps:
        """t of each round; T, which there is not, for the first of (4a)."""
        return self.steps - steps - (self.inner.order == "4b")

    def start(self, at: At, carried: Tensors) -> Start:
        c, c_lam = outer_terms(at, carried)
        memory = {key: carried[key] for key in ("inner", "outer", "trajectory")}
        return Start({"u": c}, {**memory, "v": c_lam})

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        u, lam = inbox["u"], memory["outer"]  # of (4a) the sum s
        inner_steps = self._inner_steps(at.steps)
        t = int(inner_steps[0])
        if t == self.steps:
            return Step({"u": u})
        k, d = u.shape
        here = memory["trajectory"].view(k, self.steps, d + 1)[:, t]
        x, omega = here[:, :d], here[:, d:]
        alpha = rates(self.inner.lr, inner_steps, u)
        (moved,), (crossed,) = at.derivatives.inner_second_vectors(
            x, lam, at.batch, (u,), alpha / -omega, (at.room.get("u"),)
        )  # −(α/ω) H u, C u
        if self.inner.weight_decay:
            moved -= (alpha / omega) * self.inner.weight_decay * u
        v = {"v": memory["v"] - alpha * crossed}
        if self.inner.order == "4a":
            return Step({"u": moved.add_(u)}, memory=v)
        return Step({"u": u}, {"u": moved}, memory=v)

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(memory["inner"], memory["outer"])

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        v = memory["v"]
        return {"hypergradient": v, "trajectory": v.new_empty(len(v), 0)}  # served


def _own_number(at: At, like: Tensor) -> Tensor:
    """e_i (k, n): one at the client's own number, else zero."""
    return torch.eye(at.n, dtype=like.dtype, device=like.device)[torch.from_numpy(at.clients)]


def _cross(derivatives: Derivatives, x: Tensor, lam: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    """C (k, d_λ, d), row by row: ∂_x of every ∂f/∂λ_a."""
    units = torch.eye(lam.shape[1], dtype=lam.dtype, device=lam.device)
    rows = [derivatives.inner_cross_transposed(x, lam, batch, unit.expand_as(lam)) for unit in units]
    return torch.stack(rows, dim=1)
