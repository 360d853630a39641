"""FedBuff (Nguyen et al. 2022): the server moves when K answers are in, along how far the clients went.

for every client asked, in parallel:   θ_i ← τ_i local steps from θ;  Δ_i = θ_i − θ, of the θ that it was sent
when K answers are in:                 θ ← θ + η_g (1/K) Σ w(s_i) Δ_i            1 round

| paper     | here        |                                                                     |
|-----------|-------------|---------------------------------------------------------------------|
| K, w, s_i | server      | `Buffered(size, decay)`; s_i: moves between request and use         |
| η_g       | server_lr   |                                                                     |
| Δ_i       | dy          | answers; θ is y on the board                                        |

With `server=Buffered(weighted=True)` 1/K becomes n_i / Σ n_i. The local work is that of FedAvg, and with μ or
a momentum that of FedProx. With that of SCAFFOLD it is `Scaffold(…, server=Buffered(…))`, whose answers are
moves as well. With a `Server(…)` that waits it is FedAvg with a step size at the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveInt
from asyncfed.network.buffer import AnyServer, Buffered
from asyncfed.protocols.at import At, Level
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.fedprox import ProximalSteps, proximal_steps
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.part import Inbox, Sizes, Tensors
from asyncfed.protocols.rounds import (
    LEVELS,
    Answer,
    FloatArray,
    IntArray,
    Round,
    WithServer,
)
from asyncfed.protocols.settings import Momentum
from asyncfed.registry import register
from asyncfed.rng import Streams


@register("method")
@dataclass(frozen=True)
class FedBuff(WithServer):
    """Federated learning with a buffer, at a server that does not wait.

    Parameters
    ----------
    outer_steps
        Moves of the server.
    local
        Local steps of each client: `LocalSteps(lr=0.1, epochs=1, batch=64)`.
    server_lr
        η_g: how far the server goes along the mean of the clients' moves.
    mu, momentum, weight_decay
        Of the local steps, as in FedProx; by default none.
    server
        When it moves, how many are at work, whom it asks and what a stale answer counts.
    """

    outer_steps: NonNegativeInt
    local: LocalSteps
    server_lr: NonNegativeFloat = 1.0
    mu: NonNegativeFloat = 0.0
    momentum: Momentum = 0.0
    weight_decay: NonNegativeFloat = 0.0
    server: AnyServer = field(default_factory=Buffered)
    max_rounds: PositiveInt | None = None
    moves_buffers: ClassVar[tuple[str, ...]] = ("local",)

    @property
    def needs_outer(self) -> bool:
        return False

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        work = proximal_steps(self.local, iteration, self.mu, self.weight_decay, self.momentum)
        return (Moves(work, self.server_lr),)


@dataclass(frozen=True)
class Moves(Round):
    """Δ_i = θ_i − θ of some local work; θ ← θ + η_g Σ weight_i Δ_i"""

    work_on: ProximalSteps
    server_lr: float

    phase = "inner"
    kind = "dy"
    reads = ("x", "y")
    answers = ("dy",)
    levels = LEVELS | {"dy": "inner"}
    normalised = False

    @property
    def writes(self) -> tuple[str, ...]:
        return ("y",)

    def remembered(self, sizes: Sizes) -> dict[str, int]:
        return self.work_on.remembered(sizes)

    def work(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return self.work_on.work(sizes, clients)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return self.work_on.samples(sizes, clients)

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        return self.work_on.cost(sizes, clients)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        made = self.work_on.local(at, board, memory)
        return Answer({"dy": made.values["y"].sub_(board["y"])}, made.report, made.memory)

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        return {"y": board["y"] + self.server_lr * mean["dy"]}
