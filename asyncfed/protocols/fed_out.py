"""FedOut (004 Alg. 2; 000 Alg. 4): one aggregation of the hypergradient, then local SVRG steps on the outer
variable that correct its direct part.

| paper      | here  |                                                                     |
|------------|-------|---------------------------------------------------------------------|
| h_i, h     | h     | ∇_x f_i(x, y⁺) − ∇²_xy g_i(x, y⁺) p, and its mean                     |
| α_i, τ_i   | steps | step size and number of local steps                                 |

In a minimax problem g = −f, so that ∇_y f = 0 at y*(x) and the indirect part is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncfed.protocols.at import At, Level
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.part import Tensors
from asyncfed.protocols.rounds import Answer, FloatArray, IntArray, Round, taken


@dataclass(frozen=True)
class Hypergradient(Round):
    """h_i = ∇_x f_i(x, y⁺; ξ_i) − ∇²_xy g_i(x, y⁺; ζ_i) p; h = mean h_i   (lines 4–8)"""

    batch: int | None = None
    cohort: int = 0

    phase = "outer"
    kind = "h"
    reads = ("x", "y", "p")
    answers = ("h",)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return taken(self.batch, sizes["outer"]) + taken(self.batch, sizes["inner"])

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        return Cost(gradients=1, hessian_products=1)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        x, y = board["x"], board["y"]
        direct = direct_gradients(at, x, y, self.batch)
        indirect = cross_products(at, x, y, board["p"], self.batch)
        sizes = direct.norm(dim=1), indirect.norm(dim=1)
        share = sizes[1] / (sizes[0] + sizes[1]).clamp_min(torch.finfo(x.dtype).tiny)
        return Answer({"h": direct - indirect}, {"indirect_share": share})


@dataclass(frozen=True)
class DirectGradient(Round):
    """h_i = ∇_x f_i(x, y⁺; ξ_i); h = mean h_i   (line 6: minimax)"""

    batch: int | None = None
    cohort: int = 0

    phase = "outer"
    kind = "h"
    reads = ("x", "y")
    answers = ("h",)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return taken(self.batch, sizes["outer"])

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        return Cost(gradients=1)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        return Answer({"h": direct_gradients(at, board["x"], board["y"], self.batch)})


@dataclass(frozen=True)
class CorrectedOuterSteps(Round):
    """h_{i,ν} = ∇_x f_i(x_{i,ν}; ξ) − ∇_x f_i(x; ξ) + h, x_{i,ν+1} = x_{i,ν} − α_i h_{i,ν};
    x⁺ = mean x_{i,τ_i}   (lines 9–15)
    """

    steps: LocalSteps
    iteration: int
    cohort: int = 0

    phase = "outer"
    kind = "x"
    reads = ("x", "y", "h")
    answers = ("x",)

    def work(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return self.steps.counts(sizes["outer"], clients).astype(float)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return self.steps.samples(sizes["outer"], clients)

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        return self.steps.corrected_cost(sizes["outer"], clients)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        f = at.outer_loss(board["y"], board["x"])
        x, _ = self.steps.corrected(f, board["x"], board["h"], self.iteration)
        return Answer({"x": x})


def direct_gradients(at: At, x: Tensor, y: Tensor, batch: int | None) -> Tensor:
    """∇_x f_i(x, y; ξ_i) of every client."""
    f = at.outer_loss(y, x)
    h, _ = f.mean(
        batch, "h", lambda places, samples: f.gradient(x.expand(len(places), -1), samples), (len(x), 1)
    )
    return h


def cross_products(at: At, x: Tensor, y: Tensor, p: Tensor, batch: int | None) -> Tensor:
    """∇²_xy g_i(x, y; ζ_i) p of every client."""
    g = at.inner_by_both(x)

    def product(places: object, samples: tuple[Tensor, ...]) -> tuple[Tensor]:
        k = len(samples[0])
        cross = at.derivatives.inner_cross_vector
        return (cross(y.expand(k, -1), x.expand(k, -1), samples, p.expand(k, -1)),)

    (found,) = g.mean(batch, "cross", product, (len(x),))
    return found
