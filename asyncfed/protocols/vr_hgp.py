"""Variance-reduced hyper-gradient push (001 §4.2, App. B, Alg. 5): two estimators of a series, averaged.

With S_A[·] and S_B[·] the weighted sums that HGP puts in place of u and v's increments,

    v_i ← α (v_i + S_B[u]) + (1−α) S_B[w]                            v-round
    u_i ← S_A[u],   w_i ← β (S_A[w] + c^y_i) + (1−β) (w_i + u_i)     u-round

from v(0) = 0, u(0) = w(0) = c^y; the answer is v(M) + c^λ. Messages carry (u, w). α = 1, β = 0 is HGP.
(Alg. 5 as printed starts v at c^λ and adds it again at the end, and has u_j where w_j is meant in line 22.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncfed.checks import NonNegativeInt, PositiveFloat, UnitFloat
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
class VRHGP(Pushed):
    """Variance-reduced hyper-gradient push; `alpha` and `beta` in [0, 1], the rest as for `HGP`."""

    rounds: NonNegativeInt
    alpha: UnitFloat = 0.9
    beta: UnitFloat = 0.1
    sampling: Sampling = "alternating"
    expectations: KnownFrom = "estimated"
    batch: InnerBatch = "inner"
    lr: PositiveFloat | None = None
    record: bool = False

    name = "vr-hgp"
    sent = ("u", "w")

    def open(self, c: Tensor, c_lam: Tensor) -> Start:
        # For (4b) the absorbed w is β-weighed against memory's w + u: with w = 0 there it comes out as c.
        memory = {"v": torch.zeros_like(c_lam), "c_lam": c_lam, "c": c, "w": torch.zeros_like(c)}
        if self.sampling == "alternating":
            memory["u"] = c.clone()
        return Start({"u": c.clone(), "w": c.clone()}, memory)

    def after(self, here: Linearized, role: Role, inbox: Tensors, memory: Tensors, room: Tensors) -> Step:
        if role is Role.U:
            u, w = inbox["u"].copy_(memory["u"]), inbox["w"].copy_(memory["w"])
            return Step({"u": u, "w": w}, residue=self._residue(here.by_y(u, w, out=_out(room)), memory))
        u = inbox["u"]
        w = self._averaged(inbox["w"], memory["w"], u)
        sent = {"u": u, "w": w}
        if role is Role.V:
            v = self.alpha * memory["v"] + here.by_lambda(self.alpha * u + (1 - self.alpha) * w)
            return Step(sent, memory={"v": v, "u": u, "w": w})
        by_y, (Bu, Bw) = here.both(u, w, out=_out(room))
        v = self.alpha * (memory["v"] + Bu) + (1 - self.alpha) * Bw
        return Step(sent, residue=self._residue(by_y, memory), memory={"v": v, "w": w})

    def before(self, here: Linearized, role: Role, inbox: Tensors, memory: Tensors, room: Tensors) -> Step:
        total_u, total_w = inbox["u"], inbox["w"]
        if role is Role.OPEN:
            return Step(dict(inbox), memory={"w": total_w})
        if role is Role.V:
            moved = here.by_lambda(self.alpha * total_u + (1 - self.alpha) * total_w)
            sent = {"u": total_u.copy_(memory["u"]), "w": total_w.copy_(memory["w"])}
            return Step(sent, memory={"v": self.alpha * memory["v"] + moved})
        remembered: Tensors = {}
        if role is Role.U:
            by_y = here.by_y(total_u, total_w, out=_out(room))
        else:
            by_y, (Bu, Bw) = here.both(total_u, total_w, out=_out(room))
            remembered["v"] = self.alpha * (memory["v"] + Bu) + (1 - self.alpha) * Bw
        u = total_u.add_(by_y[0])  # S_A[u]
        w = self._averaged(total_w.add_(by_y[1]).add_(memory["c"]), memory["w"], u)
        remembered["w"] = w
        if self.sampling == "alternating":
            remembered["u"] = u
        return Step({"u": u, "w": w}, memory=remembered)

    def result(self, v: Tensor, memory: Tensors) -> Tensor:
        return v + memory["c_lam"]

    def _residue(self, by_y: tuple[Tensor, ...], memory: Tensors) -> Tensors:
        return {"u": by_y[0], "w": by_y[1].add_(memory["c"])}

    def _averaged(self, fresh: Tensor, w: Tensor, u: Tensor) -> Tensor:
        """β (S_A[w] + c) + (1−β) (w + u), where `fresh` is S_A[w] + c."""
        return fresh.mul_(self.beta).add_(w, alpha=1 - self.beta).add_(u, alpha=1 - self.beta)


def _out(room: Tensors) -> tuple[Tensor | None, ...]:
    return room.get("u"), room.get("w")
