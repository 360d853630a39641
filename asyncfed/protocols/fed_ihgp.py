"""FedIHGP (004 Alg. 3): the product of the inverse of the mean Hessian with the mean gradient, by a Neumann
series whose every factor is an average over clients.

| paper      | here     |                                                             |
|------------|----------|-------------------------------------------------------------|
| p_n        | p        | p_0 = (N/ℓ) mean ∇_y f_i, p_n = mean (I − (1/ℓ) ∇²_y g_i) p_{n−1} |
| N, N'      | terms    | N' is drawn uniformly from {0, …, N−1}                      |
| 1/ℓ_{g,1}  | scale    | λ in 000; at most one over the largest curvature of the g_i |

The mean of p_{N'} over N' is the truncated series (1/ℓ) Σ_{n<N} (I − H/ℓ)ⁿ mean ∇_y f_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from asyncfed.checks import PositiveFloat, PositiveInt
from asyncfed.protocols.at import At, Level
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.part import Inbox, Tensors
from asyncfed.protocols.rounds import Answer, FloatArray, IntArray, Round, draw_whole, taken
from asyncfed.registry import register
from asyncfed.rng import Streams


@register("option")
@dataclass(frozen=True)
class Neumann:
    """How the series is taken.

    Parameters
    ----------
    terms
        N.
    scale
        1/ℓ, the step of the series: at most one over the largest eigenvalue of the inner Hessians.
    products
        "random": N' ∈ {0, …, N−1} drawn for every estimate, as in Alg. 3. "fixed": always N products, the
        variant whose rounds the papers count. "sum": N products as well, and all their terms added up: the
        truncated series itself, with N + 1 terms.
    """

    terms: PositiveInt = 5
    scale: PositiveFloat = 0.01
    products: Literal["random", "fixed", "sum"] = "random"

    @property
    def first(self) -> float:
        """What the gradient is multiplied with at the start."""
        return self.scale * (1 if self.products == "sum" else self.terms)

    def count(self, streams: Streams, iteration: int) -> int:
        """N', the number of products in an iteration."""
        if self.products == "random":
            return draw_whole(streams, "neumann", iteration, self.terms)
        return self.terms


@dataclass(frozen=True)
class StartProduct(Round):
    """p_0 = (N/ℓ) mean ∇_y f_i(x, y; ξ_{i,0})   (Alg. 3, lines 3–6)"""

    first: float
    batch: int | None = None
    cohort: int = 0

    phase = "ihgp"
    kind = "p"
    reads = ("x", "y")
    answers = ("p",)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return taken(self.batch, sizes["outer"])

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        return Cost(gradients=1)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        return Answer({"p": outer_gradients_in_y(at, board["x"], board["y"], self.batch)})

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        p = self.first * mean["p"]
        return {"p": p, "sum": p}


@dataclass(frozen=True)
class Product(Round):
    """p_n = mean (I − (1/ℓ) ∇²_y g_i(x, y; ζ_{i,n})) p_{n−1}   (Alg. 3, lines 12–15)"""

    scale: float
    batch: int | None = None
    cohort: int = 0
    add_up: bool = False  # the last of them leaves the sum of all terms as p

    phase = "ihgp"
    kind = "p"
    reads = ("x", "y", "p")
    answers = ("p",)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return taken(self.batch, sizes["inner"])

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        return Cost(hessian_products=1)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        return Answer({"p": moved(at, board["x"], board["y"], board["p"], self.scale, self.batch)})

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        total = board["sum"] + mean["p"]
        return {"p": total if self.add_up else mean["p"], "sum": total}


def fed_ihgp(
    neumann: Neumann, products: int, batch: int | None, cohorts: tuple[int, ...]
) -> tuple[Round, ...]:
    """Alg. 3 with N' = `products`: N' + 1 rounds, of which number n asks the clients of cohorts[n]."""
    last = products if neumann.products == "sum" else -1
    return (
        StartProduct(neumann.first, batch, cohorts[0]),
        *(Product(neumann.scale, batch, cohorts[n], add_up=n == last) for n in range(1, products + 1)),
    )


def outer_gradients_in_y(at: At, x: Tensor, y: Tensor, batch: int | None) -> Tensor:
    """∇_y f_i(x, y; ξ_i) of every client."""
    f = at.outer_loss(y, x)

    def gradient(places: object, samples: tuple[Tensor, ...]) -> tuple[Tensor]:
        k = len(samples[0])
        return (at.derivatives.outer_gradient(y.expand(k, -1), x.expand(k, -1), samples, "inner")[0],)

    (r,) = f.mean(batch, "r", gradient, (len(y),))
    return r


def moved(at: At, x: Tensor, y: Tensor, p: Tensor, scale: float, batch: int | None) -> Tensor:
    """(I − scale · ∇²_y g_i(x, y; ζ_i)) p of every client."""
    g = at.inner(x)

    def product(places: object, samples: tuple[Tensor, ...]) -> tuple[Tensor]:
        k = len(samples[0])
        hessian = g.derivatives.inner_hessian_vector
        return (hessian(y.expand(k, -1), g.lam.expand(k, -1), samples, p.expand(k, -1), -scale),)

    (change,) = g.mean(batch, "p", product, (len(y),))
    return change + p
