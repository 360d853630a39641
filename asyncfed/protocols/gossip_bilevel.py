"""Bilevel optimization by gossip with full Hessians, for small problems (Yang, Zhang & Wang, NeurIPS 2022,
arXiv 2206.10870): what AggITD is compared with in Fig. 7 of 000.

All want one x and one y: min_x (1/n) Σ_k f_k(x, y*(x)) where y*(x) = argmin_y (1/n) Σ_k g_k(x, y). In every
round agent k averages all that it holds with its neighbours, and adds what it sees at its own (x_k, y_k):

    x_k  ← Σ_j w_kj x_j − α (s_k − u_k q_k h_k)
    y_k  ← Σ_j w_kj y_j − γ ∇_y g_k
    s_k  ← (1 − β) Σ_j w_kj s_j + β ∇_x f_k
    h_k  ← (1 − β) Σ_j w_kj h_j + β ∇_y f_k
    u_k  ← (1 − β) Σ_j w_kj u_j + β ∇²_xy g_k
    v_ki ← (1 − β) Σ_j w_kj v_ji + β ∇²_yy g_k(ξ_ki),   i = 1 … b
    q_k  = Q_b / L,   Q_0 = I,   Q_i = I + (I − v_ki / L) Q_{i−1}

| paper   | here                 |                                                                      |
|---------|----------------------|----------------------------------------------------------------------|
| x, f_k  | x, outer             | the outer variable and loss of a `Problem`                           |
| y, g_k  | y, inner             | the inner variable and loss                                          |
| s, h    | s, h                 | running estimates of the mean ∇_x f and ∇_y f                        |
| u, v_i  | u, v                 | of the mean ∇²_xy g (d_x, d_y), and b of the mean ∇²_yy g (d_y, d_y) |
| q       | _q_h makes q h       | about the inverse of the mean ∇²_yy g; only q h is ever needed       |
| α, γ, β | lr, inner_lr, mixing | rates of x, of y, and of the estimates                               |
| b, L    | terms, bound         | of the Neumann series; L bounds the eigenvalues of every ∇²_yy g_k   |
| w_kj    | weights              | doubly stochastic                                                    |

A message has 2 d_x + 2 d_y + d_x d_y + b d_y² numbers. FedNest and AggITD send vectors; this is what full
matrices cost.

How far this is the paper's: its text was not at hand, and 000 found no code of it. 001 (App. E) says that it
computes and sends full Jacobians and Hessians, over static undirected links with doubly stochastic weights.
The lines above follow a description of its algorithm from memory and were not compared with the print. Chosen
here, whatever the paper does:

- s, h and u begin at 0 and every v_i at L·I, with which the series converges from the first round on.
- ∇f_k is over all of the outer split, as in the other methods here. Minibatches are for g_k: one for ∇_y g_k
  and ∇²_xy g_k, and one for each of the b Hessians. Without minibatches these are equal, and are all sent.
- Links may come and go, as long as the weights stay doubly stochastic at every step.

With constant rates the agents come to rest apart from each other, by the order of α, γ and β, unless they are
all alike; and with b Hessians of smallest eigenvalue μ, q is off by a factor of up to 1 − (1 − μ/L)^(b+1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from asyncfed.checks import NonNegativeInt, PositiveInt, Range, Words
from asyncfed.errors import DivergenceError, RunError, ScenarioError, TopologyError
from asyncfed.network.links import require_strongly_connected
from asyncfed.network.timing import Lockstep
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.whole import whole_outer_gradients
from asyncfed.protocols.at import At
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.part import (
    AmongPeers,
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
from asyncfed.protocols.schedules import LearningRate, first_rate, rates
from asyncfed.protocols.settings import Batch
from asyncfed.registry import register

_MOST = 4_000_000  # numbers in the matrices of one message
_GROWTH = 10.0  # of Π (I − v_i / L) h over h: there is no series any more, only room for noise


Bound = Annotated[
    float,
    Range(0, above=True),
    Words("finite, above 0, and at least the largest eigenvalue of any client's inner Hessian"),
]


@register("method")
@dataclass(frozen=True)
class GossipBilevel(AmongPeers):
    """Gossip on variables, gradients and full second derivatives.

    Parameters
    ----------
    steps
        Rounds.
    lr, inner_lr
        α of the outer and γ of the inner variable: a number, `StepDecay` or `Diminishing`.
    mixing
        β, the weight of what is new in the estimates, at most 1: a number or a schedule.
    terms
        b, the Hessians that each agent keeps and sends; the Neumann series has b + 1 terms.
    bound
        L, at least the largest eigenvalue of any ∇²_yy g_k.
    batch
        Minibatch size of each of the b + 1 draws of g_k; None for all of a client's training data.
    """

    steps: NonNegativeInt
    lr: LearningRate
    inner_lr: LearningRate
    mixing: LearningRate
    terms: PositiveInt
    bound: Bound
    batch: Batch = None

    def __post_init__(self) -> None:
        if first_rate(self.mixing) > 1:
            raise ScenarioError(
                f"mixing begins with {first_rate(self.mixing)}; it must be at most 1, which keeps nothing old"
            )

    def parts(self) -> tuple[Part, ...]:
        return (GossipRounds(self),)


@dataclass(frozen=True)
class GossipRounds(Part):
    """The rounds of `method`. Matrices travel as flat rows; s, h, u and v are scaled by 1 − β before they are
    sent, and everything that is new stays at home as the residue.
    """

    method: GossipBilevel

    name = "gossip-bilevel"
    kind = "gossip"
    needs_outer = True

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self.method.steps

    @property
    def batch(self) -> int | None:  # type: ignore[override]
        """Samples of a round: those of b + 1 independent minibatches."""
        return None if self.method.batch is None else self.method.batch * (1 + self.method.terms)

    def check(self, scene: Scene) -> None:
        require_strongly_connected(scene.network)
        check_size(scene.sizes.outer, scene.sizes.inner, self.method.terms)
        if not isinstance(scene.timing, Lockstep):
            raise ScenarioError(
                "GossipBilevel needs everybody in step: its weights sum to one at every receiver in every "
                "round, which nothing ensures where clients absorb at their own times; use "
                "timing=Lockstep(), or in virtual time CDBO with HGP"
            )
        if not scene.weights.prepare(scene.network).doubly_stochastic:
            raise TopologyError(
                "GossipBilevel needs doubly stochastic weights, and these are not on this topology; "
                "use weights=Metropolis() or FastestMixing() on undirected links without loss, or CDBO"
            )

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        """Every second derivative is laid out column by column."""
        hessians = 1 if self.method.batch is None else 1 + self.method.terms
        return Cost(2, hessians * scene.sizes.inner) * steps

    def carries(self, sizes: Sizes) -> dict[str, int]:
        x, y = sizes.outer, sizes.inner
        return {"x": x, "y": y, "s": x, "h": y, "u": x * y, "v": self.method.terms * y * y}

    def start(self, at: At, carried: Tensors) -> Start:
        x, y, b = carried["outer"], carried["inner"], self.method.terms
        scaled = self.method.bound * torch.eye(y.shape[1], dtype=y.dtype, device=y.device)
        absorbed = {
            "x": x.clone(),
            "y": y.clone(),
            "s": torch.zeros_like(x),
            "h": torch.zeros_like(y),
            "u": x.new_zeros(len(x), x.shape[1] * y.shape[1]),
            "v": scaled.flatten().repeat(len(y), b),
        }
        return Start(absorbed)

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        x, y, s, h, u, v = (inbox[key] for key in ("x", "y", "s", "h", "u", "v"))
        alpha, gamma = rates(self.method.lr, at.steps, x), rates(self.method.inner_lr, at.steps, x)
        beta = rates(self.method.mixing, at.steps, x)
        first, *others = self._minibatches(at.batch)

        u_q_h = torch.bmm(u.view(len(x), x.shape[1], -1), self._q_h(v, h)).squeeze(2)
        derivatives = at.derivatives
        descent, loss = derivatives.inner_gradient(
            y, x, first, scale=-gamma, out=at.room.get("y")
        )  # −γ ∇_y g
        f_y, f_x, _ = whole_outer_gradients(derivatives, y, x, at.outer.select(at.rows))
        g_yy, g_xy = _second_derivatives(derivatives, y, x, first)
        if others:
            hessians = [_second_derivatives(derivatives, y, x, other)[0] for other in others]
        else:
            hessians = [g_yy] * self.method.terms
        residue = {
            "x": alpha * (u_q_h - s),
            "y": descent,
            "s": beta * f_x,
            "h": beta * f_y,
            "u": beta * g_xy.flatten(1),
            "v": beta * torch.stack(hessians, dim=1).flatten(1),
        }
        sent = {key: inbox[key].mul_(1 - beta) for key in ("s", "h", "u", "v")}
        return Step({"x": x, "y": y, **sent}, residue, {"loss": loss})

    def _minibatches(self, batch: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """b + 1 of them; or the one that is all of the data."""
        size = self.method.batch
        if size is None:
            return [batch]
        return list(zip(*(torch.split(tensor, size, dim=1) for tensor in batch), strict=True))

    def _q_h(self, v: Tensor, h: Tensor) -> Tensor:
        """q h (k, d_y, 1), by Q_i h = h + (I − v_i / L) Q_{i−1} h; beside it goes Π_i (I − v_i / L) h, which
        says whether the series converges.
        """
        h = h.unsqueeze(2)
        both = torch.cat([h, h], dim=2)
        for v_i in v.view(len(h), self.method.terms, h.shape[1], -1).unbind(1):
            both = torch.baddbmm(both, v_i, both, alpha=-1 / self.method.bound)
            both[:, :, :1] += h
        last, start = torch.linalg.vector_norm(both[:, :, 1:], dim=1), torch.linalg.vector_norm(h, dim=1)
        if bool((last > _GROWTH * start).any()):
            raise NeumannDivergesError(float((last / start).nan_to_num().max()), self.method.bound)
        return both[:, :, :1] / self.method.bound

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(inner=inbox["y"], outer=inbox["x"])

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        return {"inner": inbox["y"], "outer": inbox["x"]}


class NeumannDivergesError(DivergenceError):
    """The terms of the series that stands for the inverse Hessian grow instead of shrinking."""

    def __init__(self, growth: float, bound: float) -> None:
        RunError.__init__(
            self,
            f"gossip-bilevel: the last term of a client's Neumann series is {growth:.3g} times its first, so "
            f"the series is no inverse; raise bound (it is {bound:g}) above the largest eigenvalue of the "
            "inner Hessians, and see that the inner loss is convex",
        )
        self.growth, self.bound = growth, bound

    def __reduce__(self) -> tuple[type[NeumannDivergesError], tuple[float, float]]:
        return type(self), (self.growth, self.bound)


def check_size(d_x: int, d_y: int, terms: int) -> None:
    """Refuse variables whose second derivatives nobody would send."""
    if d_x * d_y + terms * d_y * d_y > _MOST:
        raise ScenarioError(
            f"GossipBilevel would send {d_x} × {d_y} mixed derivatives and {terms} Hessians of {d_y} × {d_y} "
            f"numbers in every message, and takes at most {_MOST:,}; it is for small problems: use FedNest "
            "or AggITD, which send vectors"
        )


def _second_derivatives(
    derivatives: Derivatives, y: Tensor, x: Tensor, batch: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """∇²_yy g (k, d_y, d_y) and ∇²_xy g (k, d_x, d_y), column by column."""
    units = torch.eye(y.shape[1], dtype=y.dtype, device=y.device)
    directions = tuple(unit.expand_as(y) for unit in units)
    by_y, by_x = derivatives.inner_second_vectors(y, x, batch, directions)
    return torch.stack(by_y, dim=2), torch.stack(by_x, dim=2)
