"""The inner optimizers: FedInn, local SVRG (004 Alg. 4; 000 Alg. 2), and LFedInn, local SGD (004 Alg. 6).

| paper         | here                |                                                   |
|---------------|---------------------|---------------------------------------------------|
| y, y_{i,ν}    | y, rows of an answer | inner variable, and each client's own on the way |
| q_i, q        | q                   | ∇_y g_i(x, y), and its mean                       |
| β_i, τ_i      | steps               | step size and number of local steps               |

FedLin (Mitra et al. 2021) is FedInn on a problem with one level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from asyncfed.protocols.at import At, Level
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.local_round import LocalRound
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.part import Tensors
from asyncfed.protocols.rounds import Answer, FloatArray, IntArray, Round, taken


@dataclass(frozen=True)
class InnerGradient(Round):
    """q_i = ∇_y g_i(x, y; ζ_i); q = mean q_i   (Alg. 4, lines 3–6)"""

    batch: int | None = None
    cohort: int = 0

    phase = "inner"
    kind = "q"
    reads = ("x", "y")
    answers = ("q",)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return taken(self.batch, sizes["inner"])

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        return Cost(gradients=1)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        q, loss = inner_gradients(at, board["x"], board["y"], self.batch)
        return Answer({"q": q}, {"loss": loss})


def inner_gradients(at: At, x: Tensor, y: Tensor, batch: int | None) -> tuple[Tensor, Tensor]:
    """∇_y g_i(x, y; ζ_i) of every client, and the losses."""
    g = at.inner(x)
    q, loss = g.mean(
        batch,
        "q",
        lambda places, samples: g.gradient(y.expand(len(places), -1), samples),
        (len(y), 1),
    )
    return q, loss[:, 0]


@dataclass(frozen=True)
class CorrectedInnerSteps(LocalRound):
    """q_{i,ν} = ∇g_i(y_{i,ν}; ζ) − ∇g_i(y; ζ) + q, y_{i,ν+1} = y_{i,ν} − β_i q_{i,ν}; y⁺ = mean y_{i,τ_i}
    (Alg. 4, lines 7–13)
    """

    steps: LocalSteps
    iteration: int
    cohort: int = 0

    phase = "inner"
    kind = "y"
    reads = ("x", "y", "q")
    answers = ("y",)

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        return self.steps.corrected_cost(sizes["inner"], clients)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        y, loss = self.steps.corrected(at.inner(board["x"]), board["y"], board["q"], self.iteration)
        return Answer({"y": y}, {"loss": loss})


@dataclass(frozen=True)
class PlainInnerSteps(LocalRound):
    """y_{i,ν+1} = y_{i,ν} − β_i ∇_y g_i(x, y_{i,ν}; ζ); y⁺ = mean y_{i,τ_i}   (Alg. 6)"""

    steps: LocalSteps
    iteration: int
    cohort: int = 0

    phase = "inner"
    kind = "y"
    reads = ("x", "y")
    answers = ("y",)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        y, loss = self.steps.plain(at.inner(board["x"]), board["y"], self.iteration)
        return Answer({"y": y}, {"loss": loss})


def fed_inn(
    steps: LocalSteps, iteration: int, batch: int | None = None, cohort: int = 0
) -> tuple[Round, ...]:
    """Alg. 4: two rounds."""
    return InnerGradient(batch, cohort), CorrectedInnerSteps(steps, iteration, cohort)
