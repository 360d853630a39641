"""LFedOut (004 Alg. 5): every client follows its own hypergradient, with its own Hessian, and only then is
there an average.

    h_{i,ν} = ∇_x f_i − (N/ℓ) ∇²_xy g_i Π_{n=1}^{N'} (I − (1/ℓ) ∇²_y g_i) ∇_y f_i     at (x_{i,ν}, y)

(Line 6 as printed ends with ∇_x f where ∇_y f is meant.) N' is drawn anew by every client in every step. The
mean of inverses is not the inverse of the mean: with different clients this converges to another point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncfed.protocols.at import At, Level
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.fed_ihgp import Neumann
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.part import Tensors
from asyncfed.protocols.rounds import Answer, FloatArray, IntArray, Round, taken


@dataclass(frozen=True)
class LocalOuterSteps(Round):
    """x_{i,ν+1} = x_{i,ν} − α_i h_{i,ν}; x⁺ = mean x_{i,τ_i}"""

    steps: LocalSteps
    neumann: Neumann | None  # None in a minimax problem: there is no indirect part
    iteration: int
    cohort: int = 0

    phase = "outer"
    kind = "x"
    reads = ("x", "y")
    answers = ("x",)

    def work(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return self.steps.counts(sizes["outer"], clients).astype(float)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return self.work(sizes, clients) * samples_of_a_step(self.steps.batch, self.neumann, sizes)

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost | None:
        step = cost_of_a_step(self.neumann)
        return None if step is None else step * self.steps.counts(sizes["outer"], clients)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        y = board["y"].expand(len(at.rows), -1)
        x = local_outer_steps(at, board["x"], y, self.steps, self.neumann, self.iteration)
        return Answer({"x": x})


def samples_of_a_step(
    batch: int | None, neumann: Neumann | None, sizes: Mapping[Level, IntArray]
) -> FloatArray:
    """Of each client; the terms of a series count together."""
    outer = taken(batch, sizes["outer"])
    return outer if neumann is None else outer + taken(batch, sizes["inner"])


def cost_of_a_step(neumann: Neumann | None) -> Cost | None:
    """Of h_{i,ν}; not known where every client draws its own number of products."""
    if neumann is None:
        return Cost(gradients=1)
    if neumann.products == "random" and neumann.terms > 1:
        return None
    products = 0 if neumann.products == "random" else neumann.terms
    return Cost(gradients=1, hessian_products=products + 1)


def local_outer_steps(
    at: At, x: Tensor, y: Tensor, steps: LocalSteps, neumann: Neumann | None, iteration: int
) -> Tensor:
    """Where the local steps from x (d_outer,) lead every client, at inner variables y (k, d), one each."""
    counts = steps.counts(at.outer.sizes[at.rows], at.clients)
    rate = steps.rates(counts, iteration, x)
    start, x = x, x.expand(len(counts), -1).clone()
    for nu in range(int(counts.max())):
        h = local_hypergradients(at, x, y, neumann, steps.batch, nu, common=None if nu else start)
        going = torch.from_numpy(counts > nu).to(x)[:, None]
        x.addcmul_(rate * going, h, value=-1.0)
    return x


def local_hypergradients(
    at: At,
    x: Tensor,
    y: Tensor,
    neumann: Neumann | None,
    batch: int | None,
    nu: int,
    common: Tensor | None = None,
) -> Tensor:
    """h_{i,ν} of every client at its own x (k, d_outer) and y (k, d).

    Where all are at one x still, it is given as `common`: products over all samples then begin from what a
    first stage of the inner loss makes of these, which is made once.
    """
    derivatives = at.derivatives
    f, g = at.outer_loss(y[0], x[0]), at.inner_by_both(x[0])

    def outer(places: IntArray, samples: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rows = torch.from_numpy(places).to(x.device)
        by_y, by_x, _ = derivatives.outer_gradients(y[rows], x[rows], samples)
        return by_y, by_x

    r, direct = f.mean(batch, f"local outer {nu}", outer, (y.shape[1], x.shape[1]))
    if neumann is None:
        return direct
    series = g if common is None or batch is not None else at.inner(common)

    def hessian(v: Tensor, n: int) -> Tensor:
        def product(places: IntArray, samples: tuple[Tensor, ...]) -> tuple[Tensor]:
            rows = torch.from_numpy(places).to(x.device)
            lam = x[rows] if series is g else series.lam.expand(len(rows), -1)
            return (series.derivatives.inner_hessian_vector(y[rows], lam, samples, v[rows]),)

        (found,) = series.mean(batch, f"local product {nu} {n}", product, (y.shape[1],))
        return found

    def cross(places: IntArray, samples: tuple[Tensor, ...]) -> tuple[Tensor]:
        rows = torch.from_numpy(places).to(x.device)
        return (derivatives.inner_cross_vector(y[rows], x[rows], samples, p[rows]),)

    products = _products(at, neumann, nu)
    p = total = neumann.first * r
    for n in range(1, int(products.max()) + 1):
        going = torch.from_numpy(products >= n).to(x)[:, None]
        p = p - neumann.scale * going * hessian(p, n)
        total = total + p
    p = total if neumann.products == "sum" else p
    (indirect,) = g.mean(batch, f"local cross {nu}", cross, (x.shape[1],))
    return direct - indirect


def _products(at: At, neumann: Neumann, nu: int) -> IntArray:
    if neumann.products != "random":
        return np.full(len(at.rows), neumann.terms, dtype=np.int64)
    return (at.uniforms("local neumann", nu)[:, 0] * neumann.terms).astype(np.int64)
