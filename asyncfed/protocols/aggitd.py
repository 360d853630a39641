"""FBO-AggITD (000 Alg. 1–4): the hypergradient from the iterates of the inner loop, in its own rounds.

| paper      | here    |                                                                       |
|------------|---------|-----------------------------------------------------------------------|
| N, Q       | inner_rounds, q | inner rounds; Q ∈ {0, …, N} is where the series begins            |
| r, z^t     | z       | z^Q = mean ∇_y F_i(x, y^Q); z^t = mean (I − λ ∇²_y G_i(x, y^t)) z^{t−1}  |
| λ          | scale   | step of the series                                                    |
| HessIV, p  | p       | λ (N+1) z^N                                                           |

    Q uniform on {0, …, N}
    for t = 0, …, N:   q ← mean ∇_y G_i(x, y^t) (t < N), with z in the same messages from t = Q on
                       y^{t+1} ← One-Round-Lower(x, y^t, q)  (t < N)          2N + 1 rounds
    h ← mean [∇_x F_i(x, y^N) − ∇_x∇_y G_i(x, y^N) p];  x ← One-Round-Upper   2 rounds

The mean over Q is Eq. 5. (Alg. 1 as printed drops the λ in line 6 and takes z^{N−1} in line 15; the paper's
formula for HessIV has both as at.) With the SGD lower solver q is not needed, and z travels with the local
steps' y, for both are made of x, y^t and z^{t−1}: N + 3 rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from asyncfed.checks import NonNegativeInt, PositiveFloat, PositiveInt
from asyncfed.errors import ScenarioError
from asyncfed.network.buffer import AnyServer
from asyncfed.network.server import Server
from asyncfed.protocols.at import At, Level
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.fed_ihgp import moved, outer_gradients_in_y
from asyncfed.protocols.fed_inn import CorrectedInnerSteps, PlainInnerSteps, inner_gradients
from asyncfed.protocols.fed_out import CorrectedOuterSteps, Hypergradient
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.part import Inbox, Tensors
from asyncfed.protocols.rounds import (
    Answer,
    FloatArray,
    IntArray,
    Round,
    WithServer,
    draw_whole,
    taken,
)
from asyncfed.protocols.settings import Batch, StartFrom
from asyncfed.registry import register
from asyncfed.rng import Streams


@register("method")
@dataclass(frozen=True)
class AggITD(WithServer):
    """FBO-AggITD; one draw of clients per outer iteration.

    Parameters
    ----------
    outer_steps
        K.
    inner, outer
        Local steps of One-Round-Lower (β, τ) and One-Round-Upper (α, τ).
    inner_rounds
        N.
    scale
        λ.
    q
        "random": Q drawn in every iteration; or a number in 0..N.
    solver
        "svrg" or "sgd" for One-Round-Lower.
    batch
        Minibatch of the gradients and products that are averaged themselves; None for all samples.
    start
        Whether an iteration's inner variable begins where the last one ended ("warm"), or where the run did.
    max_rounds
        End before an iteration that would need more communication rounds than that in all.
    """

    outer_steps: NonNegativeInt
    inner: LocalSteps
    outer: LocalSteps = field(default_factory=lambda: LocalSteps(0.01))
    inner_rounds: PositiveInt = 1
    scale: PositiveFloat = 0.01
    q: NonNegativeInt | Literal["random"] = "random"
    solver: Literal["svrg", "sgd"] = "svrg"
    batch: Batch = None
    start: StartFrom = "warm"
    server: AnyServer = field(default_factory=Server)
    max_rounds: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.q != "random" and self.q > self.inner_rounds:
            raise ScenarioError(f"q is {self.q!r}; it must be 'random' or a number in 0..{self.inner_rounds}")

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        N = self.inner_rounds
        Q = draw_whole(streams, "Q", iteration, N + 1) if self.q == "random" else self.q
        rounds: list[Round] = []
        for t in range(N + 1):
            svrg, sgd = (t < N and self.solver == solver for solver in ("svrg", "sgd"))
            rounds += [
                Gather(
                    gradient=svrg,
                    begins=t == Q,
                    moves=t > Q,
                    ends=t == N,
                    scale=self.scale,
                    terms=N + 1,
                    batch=self.batch,
                    steps=PlainInnerSteps(self.inner, iteration) if sgd else None,
                )
            ]
            if svrg:
                rounds += [CorrectedInnerSteps(self.inner, iteration)]
        return (*rounds, Hypergradient(self.batch), CorrectedOuterSteps(self.outer, iteration))


@dataclass(frozen=True)
class Gather(Round):
    """One pass of Alg. 1's loop: q_i (line 4), r_i (line 5) or z_i (line 6), and their means (lines 9–13);
    with SGD the local steps as well, in the same messages.
    """

    gradient: bool
    begins: bool
    moves: bool
    ends: bool
    scale: float
    terms: int
    batch: int | None = None
    steps: PlainInnerSteps | None = None

    phase = "aggitd"

    @property
    def kind(self) -> str:  # type: ignore[override]
        return "+".join(self.answers)

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("x", "y", "z") if self.moves else ("x", "y")

    @property
    def answers(self) -> tuple[str, ...]:  # type: ignore[override]
        steps = () if self.steps is None else self.steps.answers
        return ("q",) * self.gradient + ("z",) * (self.begins or self.moves) + steps

    @property
    def writes(self) -> tuple[str, ...]:
        return (*self.answers, "p") if self.ends else self.answers

    def work(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return super().work(sizes, clients) if self.steps is None else self.steps.work(sizes, clients)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        inner, outer = (taken(self.batch, sizes[level]) for level in ("inner", "outer"))
        averaged = inner * (self.gradient + self.moves) + outer * self.begins
        return averaged if self.steps is None else averaged + self.steps.samples(sizes, clients)

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        averaged = Cost(self.gradient + self.begins, int(self.moves))
        return averaged if self.steps is None else averaged + self.steps.cost(sizes, clients)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        x, y = board["x"], board["y"]
        values, report = {}, {}
        if self.gradient:
            values["q"], report["loss"] = inner_gradients(at, x, y, self.batch)
        if self.begins:
            values["z"] = outer_gradients_in_y(at, x, y, self.batch)
        if self.moves:
            values["z"] = moved(at, x, y, board["z"], self.scale, self.batch)
        if self.steps is not None:
            stepped = self.steps.local(at, board, memory)
            values, report = values | stepped.values, stepped.report
        return Answer(values, report)

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        if self.ends:  # line 15
            return {**mean, "p": self.scale * self.terms * mean["z"]}
        return dict(mean)
