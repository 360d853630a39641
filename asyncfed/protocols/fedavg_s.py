"""FedAvg-S (Hou et al. 2021, as 004 §4.3 compares with it): both variables of a minimax problem at once.

τ times:   x_i ← x_i − α ∇_x f_i(x_i, y_i),   y_i ← y_i − β ∇_y g_i(x_i, y_i)      (g = −f: ascent)
x⁺ = mean x_i,   y⁺ = mean y_i                                                      1 round
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncfed.checks import NonNegativeInt, PositiveInt
from asyncfed.errors import ScenarioError
from asyncfed.network.buffer import AnyServer
from asyncfed.network.server import Server
from asyncfed.protocols.at import At, Level
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.part import Tensors
from asyncfed.protocols.rounds import (
    Answer,
    FloatArray,
    IntArray,
    Round,
    WithServer,
    taken,
)
from asyncfed.registry import register
from asyncfed.rng import Streams


@register("method")
@dataclass(frozen=True)
class FedAvgS(WithServer):
    """Simultaneous descent-ascent with local steps: as many on the inner as on the outer variable."""

    outer_steps: NonNegativeInt
    inner: LocalSteps
    outer: LocalSteps
    server: AnyServer = field(default_factory=Server)
    max_rounds: PositiveInt | None = None

    def __post_init__(self) -> None:
        if (self.inner.steps, self.inner.epochs) != (self.outer.steps, self.outer.epochs):
            raise ScenarioError(
                "FedAvg-S steps on both variables at once; give inner and outer the same steps or epochs, "
                f"not {self.inner.steps or self.inner.epochs} and {self.outer.steps or self.outer.epochs}"
            )
        if self.inner.epochs is not None and self.inner.batch != self.outer.batch:
            raise ScenarioError(
                "FedAvg-S steps on both variables at once, and epochs of batches of "
                f"{self.inner.batch} and {self.outer.batch} samples are not equally many steps; give inner "
                "and outer the same batch, or steps"
            )

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        return (Simultaneous(self.inner, self.outer, iteration),)


@dataclass(frozen=True)
class Simultaneous(Round):
    """The local steps on (x, y), and both means."""

    inner: LocalSteps
    outer: LocalSteps
    iteration: int

    phase = "both"
    kind = "xy"
    reads = ("x", "y")
    answers = ("x", "y")

    def work(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return self.inner.counts(sizes["inner"], clients).astype(float)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        each = taken(self.inner.batch, sizes["inner"]) + taken(self.outer.batch, sizes["outer"])
        return self.work(sizes, clients) * each

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        return Cost(2 * self.inner.counts(sizes["inner"], clients))

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        k = len(at.rows)
        counts = self.inner.counts(at.train.sizes[at.rows], at.clients)
        x, y = (board[name].expand(k, -1).clone() for name in ("x", "y"))
        f, g = at.outer_loss(board["y"], board["x"]), at.inner_by_both(board["x"])

        def by_x(places: IntArray, samples: tuple[Tensor, ...]) -> tuple[Tensor]:
            rows = torch.from_numpy(places).to(x.device)
            return (at.derivatives.outer_gradient(y[rows], x[rows], samples, "outer")[0],)

        def by_y(places: IntArray, samples: tuple[Tensor, ...]) -> tuple[Tensor]:
            rows = torch.from_numpy(places).to(x.device)
            return (at.derivatives.inner_gradient(y[rows], x[rows], samples)[0],)

        alpha, beta = (steps.rates(counts, self.iteration, x) for steps in (self.outer, self.inner))
        for nu in range(int(counts.max())):
            going = torch.from_numpy(counts > nu).to(x)[:, None]
            (d_x,) = f.mean(self.outer.batch, f"by x {nu}", by_x, (x.shape[1],))
            (d_y,) = g.mean(self.inner.batch, f"by y {nu}", by_y, (y.shape[1],))
            x.addcmul_(alpha * going, d_x, value=-1.0)
            y.addcmul_(beta * going, d_y, value=-1.0)
        return Answer({"x": x, "y": y})
