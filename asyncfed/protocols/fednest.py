"""FedNest (004 Alg. 1): T rounds of FedInn on the inner variable, then FedOut on the outer one.

    for k = 0, …, K−1:    y ← FedInn(x, y, β)   T times                     2T rounds
                          p ← FedIHGP(x, y, N)                              N' + 1
                          x ← FedOut(x, y, p, α)                            2

2T + N' + 3 rounds per outer iteration, 2T + N + 3 with all N products. The settings of the paper:

| setting       | inner loss              | what changes                                             |
|---------------|-------------------------|----------------------------------------------------------|
| bilevel       | g_i                     | –                                                        |
| minimax       | −f_i                    | no indirect part, so no FedIHGP                          |
| compositional | ½‖y − r_i(x)‖²          | the Hessian is I: p = mean ∇_y f_i, one round            |
| single        | the problem's only loss | FedInn alone (FedLin)                                    |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from asyncfed.checks import NonNegativeInt, PositiveInt
from asyncfed.network.buffer import AnyServer
from asyncfed.network.server import Server
from asyncfed.protocols.fed_ihgp import Neumann, StartProduct, fed_ihgp
from asyncfed.protocols.fed_inn import PlainInnerSteps, fed_inn
from asyncfed.protocols.fed_out import CorrectedOuterSteps, DirectGradient, Hypergradient
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.rounds import Round, WithServer
from asyncfed.protocols.settings import Batch, StartFrom
from asyncfed.registry import register
from asyncfed.rng import Streams

Setting = Literal["bilevel", "minimax", "compositional", "single"]
Sampling = Literal["products", "parts", "iteration"]


@register("method")
@dataclass(frozen=True)
class FedNest(WithServer):
    """FedNest.

    Parameters
    ----------
    outer_steps
        K.
    inner, outer
        Local steps on the inner variable (β, τ) and on the outer one (α, τ).
    inner_rounds
        T.
    neumann
        N, 1/ℓ, and how the series is taken.
    setting
        "bilevel", "minimax", "compositional" or "single".
    batch
        Minibatch of the gradients and products that are averaged themselves (q, p, h); None for all samples.
    sampling
        How often clients are drawn: "products", for FedInn, for every factor of FedIHGP and for FedOut, as in
        Alg. 1–4; "parts", once for the inner and once for the outer part; "iteration", once.
    start
        Whether an iteration's inner variable begins where the last one ended ("warm"), or where the run did.
    max_rounds
        End before an iteration that would need more communication rounds than that in all.
    """

    outer_steps: NonNegativeInt
    inner: LocalSteps
    outer: LocalSteps = field(default_factory=lambda: LocalSteps(0.01))
    inner_rounds: PositiveInt = 1
    neumann: Neumann = field(default_factory=Neumann)
    setting: Setting = "bilevel"
    batch: Batch = None
    sampling: Sampling = "products"
    start: StartFrom = "warm"
    server: AnyServer = field(default_factory=Server)
    max_rounds: PositiveInt | None = None

    @property
    def needs_outer(self) -> bool:
        return self.setting != "single"

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        inner = self._inner(iteration) * self.inner_rounds
        if self.setting == "single":
            return inner
        outer_cohort = 0 if self.sampling == "iteration" else 1
        steps = CorrectedOuterSteps(self.outer, iteration, outer_cohort)
        if self.setting == "minimax":
            return (*inner, DirectGradient(self.batch, outer_cohort), steps)
        products = 0 if self.setting == "compositional" else self.neumann.count(streams, iteration)
        fresh = range(2, 3 + products)
        cohorts = tuple(fresh) if self.sampling == "products" else (outer_cohort,) * (products + 1)
        if self.setting == "compositional":
            ihgp: tuple[Round, ...] = (StartProduct(1.0, self.batch, cohorts[0]),)
        else:
            ihgp = fed_ihgp(self.neumann, products, self.batch, cohorts)
        return (*inner, *ihgp, Hypergradient(self.batch, outer_cohort), steps)

    def _inner(self, iteration: int) -> tuple[Round, ...]:
        return fed_inn(self.inner, iteration, self.batch)


@register("method")
@dataclass(frozen=True)
class FedNestSGD(FedNest):
    """FedNest with local SGD instead of SVRG as the inner optimizer: T + N' + 3 rounds."""

    def _inner(self, iteration: int) -> tuple[Round, ...]:
        return (PlainInnerSteps(self.inner, iteration),)
