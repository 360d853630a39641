"""Hyper-gradient push (001 Eq. 12, Alg. 4): backpropagation over links that go one way and come and go.

    v_i ← v_i + Σ_j (p̄_ij / δ̄_{j→i}) ∂_λ φ_i u_j + ∂_λ ψ_i u_i       v-round
    u_i ←       Σ_j (p̄_ij / δ̄_{j→i}) ∂_y φ_i u_j + ∂_y ψ_i u_i       u-round

from u_i(0) = c^y_i, v_i(0) = c^λ_i; the sums are over those j whose message arrived, i itself included. A
weight is what i would send to j on average, over how often it hears j: both known to i.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from asyncfed.checks import NonNegativeInt, PositiveFloat
from asyncfed.protocols.backward import (
    InnerBatch,
    KnownFrom,
    Linearized,
    Pushed,
    Role,
    Sampling,
)
from asyncfed.protocols.part import Start, Step, Tensors
from asyncfed.registry import register


@register("estimator")
@dataclass(frozen=True)
class HGP(Pushed):
    """Hyper-gradient push.

    Parameters
    ----------
    rounds
        Terms of the series, M.
    sampling
        "alternating" (2M rounds of communication; in lockstep only) or "joint" (M rounds).
    expectations
        p̄ and δ̄ "estimated" by each client from the rounds of SGP before, or "exact".
    batch
        Minibatch size; None for all of a client's training data; "inner" for that of the inner steps.
    lr
        Step size of the linearized step; None for the rate that the inner steps begin with.
    record
        Keep the estimate after every round, as "history" (clients, rounds, d_outer) beside the final one.
    """

    rounds: NonNegativeInt
    sampling: Sampling = "alternating"
    expectations: KnownFrom = "estimated"
    batch: InnerBatch = "inner"
    lr: PositiveFloat | None = None
    record: bool = False

    name = "hgp"
    sent = ("u",)

    def open(self, c: Tensor, c_lam: Tensor) -> Start:
        keeps_u = self.sampling == "alternating"
        return Start({"u": c}, {"v": c_lam, **({"u": c.clone()} if keeps_u else {})})

    def after(self, here: Linearized, role: Role, inbox: Tensors, memory: Tensors, room: Tensors) -> Step:
        v = memory["v"]
        if role is Role.V:
            u = inbox["u"]
            return Step({"u": u}, memory={"v": v + here.by_lambda(u), "u": u})
        if role is Role.U:
            u = inbox["u"].copy_(memory["u"])  # what the v-round brought is not needed: ∂_λ φ = 0
            (residue,) = here.by_y(u, out=(room.get("u"),))
            return Step({"u": u}, residue={"u": residue})
        u = inbox["u"]
        (residue,), (moved,) = here.both(u, out=(room.get("u"),))
        return Step({"u": u}, residue={"u": residue}, memory={"v": v + moved})

    def before(self, here: Linearized, role: Role, inbox: Tensors, memory: Tensors, room: Tensors) -> Step:
        total, v = inbox["u"], memory["v"]  # Σ_j (p̄_ij / δ̄_{j→i}) u_j
        keeps_u = self.sampling == "alternating"
        if role is Role.OPEN:
            return Step({"u": total})
        if role is Role.V:
            moved = here.by_lambda(total)
            return Step({"u": total.copy_(memory["u"])}, memory={"v": v + moved})
        if role is Role.U:
            (product,) = here.by_y(total, out=(room.get("u"),))
            moved_v = {}
        else:
            (product,), (moved,) = here.both(total, out=(room.get("u"),))
            moved_v = {"v": v + moved}
        u = total.add_(product)
        return Step({"u": u}, memory={**moved_v, **({"u": u} if keeps_u else {})})
