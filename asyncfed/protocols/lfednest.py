"""Light FedNest (004 App. A): hypergradients from local Hessians, so that the outer part takes one round.

| method          | inner                  | outer                 | rounds per outer iteration |
|-----------------|------------------------|-----------------------|----------------------------|
| LFedNest        | Alg. 6 (SGD)           | Alg. 5                | T + 1                      |
| LFedNestSVRG    | Alg. 4 (SVRG)          | Alg. 5                | 2T + 1                     |
| LFedNestNonAlt  | local y, then local x at that y, one average of both | | 1                          |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from asyncfed.checks import NonNegativeInt, PositiveInt
from asyncfed.errors import ScenarioError
from asyncfed.network.buffer import AnyServer
from asyncfed.network.server import Server
from asyncfed.protocols.at import At, Level
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.fed_ihgp import Neumann
from asyncfed.protocols.fed_inn import PlainInnerSteps, fed_inn
from asyncfed.protocols.lfed_out import LocalOuterSteps, cost_of_a_step, local_outer_steps, samples_of_a_step
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.part import Tensors
from asyncfed.protocols.rounds import (
    Answer,
    FloatArray,
    IntArray,
    Round,
    WithServer,
)
from asyncfed.protocols.settings import Batch, StartFrom
from asyncfed.registry import register
from asyncfed.rng import Streams


@register("method")
@dataclass(frozen=True)
class LFedNest(WithServer):
    """Light FedNest; see `FedNest` for the parameters. Minibatches are those of `inner` and `outer`."""

    outer_steps: NonNegativeInt
    inner: LocalSteps
    outer: LocalSteps = field(default_factory=lambda: LocalSteps(0.01))
    inner_rounds: PositiveInt = 1
    neumann: Neumann = field(default_factory=Neumann)
    setting: Literal["bilevel", "minimax", "compositional"] = "bilevel"
    sampling: Literal["parts", "iteration"] = "parts"
    start: StartFrom = "warm"
    server: AnyServer = field(default_factory=Server)
    max_rounds: PositiveInt | None = None

    @property
    def _series(self) -> Neumann | None:
        if self.setting == "compositional":
            return Neumann(terms=1, scale=1.0)  # its first term alone, ∇_y f_i: the Hessian is I
        return None if self.setting == "minimax" else self.neumann

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        cohort = 0 if self.sampling == "iteration" else 1
        outer = LocalOuterSteps(self.outer, self._series, iteration, cohort=cohort)
        return (*self._inner(iteration) * self.inner_rounds, outer)

    def _inner(self, iteration: int) -> tuple[Round, ...]:
        return (PlainInnerSteps(self.inner, iteration),)


@register("method")
@dataclass(frozen=True)
class LFedNestSVRG(LFedNest):
    """Light FedNest with FedInn: 2T + 1 rounds. `batch` is that of q."""

    batch: Batch = None

    def _inner(self, iteration: int) -> tuple[Round, ...]:
        return fed_inn(self.inner, iteration, self.batch)


@register("method")
@dataclass(frozen=True)
class LFedNestNonAlt(LFedNest):
    """Both variables locally, one average (004 App. H.1): 1 round. T is 1."""

    def __post_init__(self) -> None:
        if self.inner_rounds != 1:
            raise ScenarioError(
                f"inner_rounds is {self.inner_rounds}; LFedNest-NonAlt has no inner rounds of its own, make "
                "more local steps instead"
            )

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        return (BothLocally(self.inner, self.outer, self._series, iteration),)


@dataclass(frozen=True)
class BothLocally(Round):
    """y_i: τ local steps; then x_i: τ local steps at that y_i; x⁺ = mean x_i, y⁺ = mean y_i"""

    inner: LocalSteps
    outer: LocalSteps
    neumann: Neumann | None
    iteration: int

    phase = "both"
    kind = "xy"
    reads = ("x", "y")
    answers = ("x", "y")

    def work(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        inner, outer = self.inner.counts(sizes["inner"], clients), self.outer.counts(sizes["outer"], clients)
        return (inner + outer).astype(float)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        outer = self.outer.counts(sizes["outer"], clients) * samples_of_a_step(
            self.outer.batch, self.neumann, sizes
        )
        return self.inner.samples(sizes["inner"], clients) + outer

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost | None:
        step = cost_of_a_step(self.neumann)
        if step is None:
            return None
        inner = self.inner.cost(sizes["inner"], clients)
        return inner + step * self.outer.counts(sizes["outer"], clients)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        y, loss = self.inner.plain(at.inner(board["x"]), board["y"], self.iteration)
        x = local_outer_steps(at, board["x"], y, self.outer, self.neumann, self.iteration)
        return Answer({"x": x, "y": y}, {"loss": loss})
