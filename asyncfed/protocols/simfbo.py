"""SimFBO (Yang, Xiao & Ji, NeurIPS 2023): the inner variable, the linear system of the hypergradient and the
outer variable, all three at once, in one loop with one round per iteration.

With v for the solution of mean ∇²_yy g_i v = mean ∇_y f_i, every client makes τ_i steps from the server's
(x, y, v), in which all three start from where the step before left them:

    d_y = ∇_y g_i(x_i, y_i; ζ)                                      y_i ← y_i − η_y d_y
    d_v = ∇²_yy g_i(x_i, y_i; ψ) v_i − ∇_y f_i(x_i, y_i; ψ)         v_i ← v_i − η_v d_v
    d_x = ∇_x f_i(x_i, y_i; ξ) − ∇²_xy g_i(x_i, y_i; ξ) v_i         x_i ← x_i − η_x d_x

and answers with the sums of its directions, divided by τ_i. The server moves by their means:

    y ← y − γ_y mean d_y,   v ← v − γ_v mean d_v,   x ← x − γ_x mean d_x           1 round

| paper         | here                    |                                                         |
|---------------|-------------------------|---------------------------------------------------------|
| η_y, τ_i      | inner                   | rate, number and minibatches of the local steps         |
| η_v, η_x      | v_lr, outer_lr          | local rates of the other two                            |
| γ_y, γ_v, γ_x | server_rates            | of the server; by default the local ones                |
| ζ, ψ, ξ       | "y", "v", "x"           | three independent minibatches, of f_i and g_i each its own |
| division by τ_i | normalise             | ShroFBO; without it SimFBO                              |

With one local step and γ = η this is plain simultaneous descent, whose fixed point is the bilevel solution.
What more local steps do to the fixed point, as the local rates go to 0: nothing with the division; without
it a client counts τ_i times. With local rates that stay, clients drift, by the order of η τ, either way.
The paper's projection of v is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from asyncfed.checks import NonNegativeInt, PositiveFloat, PositiveInt
from asyncfed.network.buffer import AnyServer
from asyncfed.network.server import Server
from asyncfed.protocols.at import At, Level
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.part import Inbox, Tensors
from asyncfed.protocols.rounds import (
    LEVELS,
    Answer,
    FloatArray,
    IntArray,
    Opening,
    Round,
    WithServer,
)
from asyncfed.protocols.schedules import LearningRate, rate_at
from asyncfed.registry import register
from asyncfed.rng import Streams

_LEVELS = LEVELS | {"v": "inner", "dy": "inner", "dv": "inner", "dx": "outer"}


@dataclass(frozen=True)
class ZeroSolution(Opening):
    """v = 0, unless the run was given one."""

    opens: tuple[str, ...] = ("x", "y", "v")

    levels = _LEVELS

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        v = board["v"] if "v" in board else torch.zeros_like(board["y"])
        return {"x": board["x"], "y": board["y"], "v": v}


@register("method")
@dataclass(frozen=True)
class SimFBO(WithServer):
    """SimFBO, and ShroFBO (the default).

    Parameters
    ----------
    outer_steps
        Rounds.
    inner
        The local steps: their number and minibatches, and η_y.
    outer_lr, v_lr
        η_x and η_v: a number, or a schedule over the rounds. Without `v_lr`, η_y.
    server_rates
        γ_y, γ_v and γ_x; None for η_y, η_v and η_x.
    normalise
        Divide a client's sums by its number of local steps.
    server
        Whom it asks and how it waits; by default everybody.
    """

    outer_steps: NonNegativeInt
    inner: LocalSteps
    outer_lr: LearningRate = 0.01
    v_lr: LearningRate | None = None
    server_rates: tuple[PositiveFloat, PositiveFloat, PositiveFloat] | None = None
    normalise: bool = True
    server: AnyServer = field(default_factory=Server)
    max_rounds: PositiveInt | None = None

    opening: ClassVar[Round] = ZeroSolution()
    passes_on: ClassVar[tuple[str, ...]] = ("v",)

    @property
    def local_rates(self) -> tuple[LearningRate, LearningRate, LearningRate]:
        """η_y, η_v and η_x."""
        return self.inner.lr, self.inner.lr if self.v_lr is None else self.v_lr, self.outer_lr

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        return (SimultaneousSteps(self, iteration),)


@dataclass(frozen=True)
class SimultaneousSteps(Round):
    """The local steps on (y, v, x), and the server's."""

    method: SimFBO
    iteration: int

    phase = "simfbo"
    kind = "dy+dv+dx"
    reads = ("x", "y", "v")
    answers = ("dy", "dv", "dx")
    levels = _LEVELS
    normalised = False  # answers are moves: weights that add up to less than 1 make a shorter one

    @property
    def writes(self) -> tuple[str, ...]:
        return self.reads

    def work(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        """A local step is one on each of three variables."""
        return 3 * self.method.inner.counts(sizes["inner"], clients).astype(float)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        """The three directions use g three times and f twice."""
        steps = self.method.inner
        return 3 * steps.samples(sizes["inner"], clients) + 2 * steps.samples(sizes["outer"], clients)

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        """A step takes ∇_y g, ∇_y f and ∇_x f, and two products with v."""
        return Cost(3, 2) * self.method.inner.counts(sizes["inner"], clients)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        steps = self.method.inner
        counts = steps.counts(at.train.sizes[at.rows], at.clients)
        y, v, x = (board[name].expand(len(counts), -1).clone() for name in ("y", "v", "x"))
        totals = [torch.zeros_like(own) for own in (y, v, x)]
        losses = y.new_zeros(len(counts))
        rates = [replace(steps, lr=lr).rates(counts, self.iteration, y) for lr in self.method.local_rates]
        for nu in range(int(counts.max())):
            going = torch.from_numpy(counts > nu).to(y)[:, None]
            *directions, loss = _directions(at, y, v, x, steps.batch, nu)
            for total, own, rate, direction in zip(totals, (y, v, x), rates, directions, strict=True):
                total.addcmul_(going, direction)
                own.addcmul_(rate * going, direction, value=-1.0)
            losses.addcmul_(going[:, 0], loss)
        made = torch.from_numpy(counts).to(losses)
        if self.method.normalise:
            totals = [total / made[:, None] for total in totals]
        return Answer(dict(zip(self.answers, totals, strict=True)), {"loss": losses / made})

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        gammas = self.method.server_rates or [rate_at(lr, self.iteration) for lr in self.method.local_rates]
        return {
            name: board[name] - gamma * mean[f"d{name}"]
            for name, gamma in zip(("y", "v", "x"), gammas, strict=True)
        }


def _directions(
    at: At, y: Tensor, v: Tensor, x: Tensor, batch: int | None, nu: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d_y, d_v and d_x of every client at its own variables, a row each; and the inner losses."""
    derivatives = at.derivatives
    f, g = at.outer_loss(y[0], x[0]), at.inner_by_both(x[0])

    def here(places: IntArray) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.from_numpy(places).to(x.device)
        return y[rows], x[rows], v[rows]

    def g_y(places: IntArray, samples: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        own_y, own_x, _ = here(places)
        return derivatives.inner_gradient(own_y, own_x, samples)

    def g_yy_v(places: IntArray, samples: tuple[Tensor, ...]) -> tuple[Tensor]:
        own_y, own_x, own_v = here(places)
        return (derivatives.inner_hessian_vector(own_y, own_x, samples, own_v),)

    def g_xy_v(places: IntArray, samples: tuple[Tensor, ...]) -> tuple[Tensor]:
        own_y, own_x, own_v = here(places)
        return (derivatives.inner_cross_vector(own_y, own_x, samples, own_v),)

    def f_by(level: Level) -> Callable[[IntArray, tuple[Tensor, ...]], tuple[Tensor]]:
        def gradient(places: IntArray, samples: tuple[Tensor, ...]) -> tuple[Tensor]:
            own_y, own_x, _ = here(places)
            return (derivatives.outer_gradient(own_y, own_x, samples, level)[0],)

        return gradient

    inner, outer = y.shape[1], x.shape[1]
    d_y, loss = g.mean(batch, f"y of g {nu}", g_y, (inner, 1))
    (product,) = g.mean(batch, f"v of g {nu}", g_yy_v, (inner,))
    (towards,) = f.mean(batch, f"v of f {nu}", f_by("inner"), (inner,))
    (direct,) = f.mean(batch, f"x of f {nu}", f_by("outer"), (outer,))
    (indirect,) = g.mean(batch, f"x of g {nu}", g_xy_v, (outer,))
    return d_y, product - towards, direct - indirect, loss[:, 0]
