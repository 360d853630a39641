"""SCAFFOLD (Karimireddy et al. 2020, Alg. 1): local steps corrected by control variates.

for every client asked, in parallel:   y_i ← x, and K_i times
    y_i ← y_i − η_l (∇f_i(y_i; ζ) − c_i + c)                        lines 9–11
    c_i⁺ = ∇f_i(x), over all of its samples                         line 12, option I
         = c_i − c + (x − y_i) / (K_i η_l)                          line 12, option II
    answer (Δy_i, Δc_i) = (y_i − x, c_i⁺ − c_i);  c_i ← c_i⁺        lines 13–14
x ← x + η_g mean Δy_i,   c ← c + (|S| / N) mean Δc_i                lines 16–17; 1 round of twice the numbers

| paper    | here      |                                                                          |
|----------|-----------|--------------------------------------------------------------------------|
| x        | y         | on the board, the inner variable                                         |
| c, c_i   | c, c_i    | on the board, and in the memory of client i; zero at first               |
| Δy, Δc   | dy, dc    | answers                                                                  |
| S, N     | senders, clients | whose answers arrived, and how many clients there are             |
| η_l, K   | local     | step size and number of local steps, which need not be the same for all  |
| η_g      | server_lr |                                                                          |

In the paper everybody in S answers, and c is the mean of the c_i. An answer that gets lost, or is not used,
takes its Δc_i along: the client has its new c_i, and c never hears of it. With `Buffered(…)` as its server
this is FedBuff with control variates: c + (|S| / N) mean Δc_i = c + (1/N) Σ Δc_i whoever answers, so c stays
the mean of the c_i that have come, as long as nothing counts less for being stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveInt
from asyncfed.errors import ScenarioError
from asyncfed.network.buffer import AnyServer, Buffered, NoDecay
from asyncfed.network.server import Server
from asyncfed.protocols.at import At, Level
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.fed_inn import inner_gradients
from asyncfed.protocols.local_steps import LocalSteps, Rows
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
from asyncfed.registry import register
from asyncfed.rng import Streams

_LEVELS = LEVELS | {"c": "inner", "c_i": "inner", "dy": "inner", "dc": "inner"}


@dataclass(frozen=True)
class ZeroVariate(Opening):
    """c = 0, as the c_i."""

    opens: tuple[str, ...] = ("x", "y", "c")

    levels = _LEVELS

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        return {"x": board["x"], "y": board["y"], "c": torch.zeros_like(board["y"])}


@register("method")
@dataclass(frozen=True)
class Scaffold(WithServer):
    """Federated averaging without client drift, at a server.

    Parameters
    ----------
    outer_steps
        Rounds.
    local
        Local steps of each client: `LocalSteps(lr=0.1, epochs=1, batch=64)`.
    server_lr
        η_g: how far the server goes along the mean of the clients' steps.
    option
        How a client renews its control variate: "II" from its own steps, "I" by a gradient over all its
        samples.
    server
        Whom it asks and how it waits; by default everybody. All answers count the same.
    """

    outer_steps: NonNegativeInt
    local: LocalSteps
    server_lr: NonNegativeFloat = 1.0
    option: Literal["I", "II"] = "II"
    server: AnyServer = field(default_factory=Server)
    max_rounds: PositiveInt | None = None

    opening: ClassVar[Round] = ZeroVariate()
    passes_on: ClassVar[tuple[str, ...]] = ()
    moves_buffers: ClassVar[tuple[str, ...]] = ("local",)

    def __post_init__(self) -> None:
        if self.server.weighted:
            raise ScenarioError(
                f"Scaffold has {type(self.server).__name__}(weighted=True), but its control variates are "
                "means in which all clients count the same; use weighted=False"
            )
        if isinstance(self.server, Buffered) and not isinstance(self.server.decay, NoDecay):
            raise ScenarioError(
                f"Scaffold has Buffered(decay={self.server.decay}), but c is the mean of the clients' "
                "control variates only if all their changes count in full; use decay=NoDecay()"
            )

    @property
    def needs_outer(self) -> bool:
        return False

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        return (ControlledSteps(self.local, iteration, self.server_lr, self.option),)


@dataclass(frozen=True)
class ControlledSteps(Round):
    """Lines 5–17."""

    steps: LocalSteps
    iteration: int
    server_lr: float
    option: Literal["I", "II"]

    phase = "inner"
    kind = "dy, dc"
    reads = ("x", "y", "c")
    answers = ("dy", "dc")
    levels = _LEVELS
    remembers = ("c_i",)
    normalised = False

    @property
    def writes(self) -> tuple[str, ...]:
        return ("y", "c")

    def work(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        """A gradient over all samples counts as a step, as it does everywhere."""
        return self.steps.counts(sizes["inner"], clients).astype(float) + (self.option == "I")

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return self.steps.samples(sizes["inner"], clients) + (self.option == "I") * sizes["inner"]

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        return self.steps.cost(sizes["inner"], clients) + Cost(int(self.option == "I"))

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        y, c, c_i = board["y"], board["c"], memory["c_i"]
        correction = c - c_i

        def corrected(v: Tensor, rows: Rows) -> Tensor:
            return correction[rows]

        samples = at.inner(board["x"])
        y_i, loss = self.steps.plain(samples, y, self.iteration, corrected)
        if self.option == "I":
            renewed, _ = inner_gradients(at, board["x"], y, None)
        else:
            counts = self.steps.counts(samples.sizes, at.clients)
            length = self.steps.rates(counts, self.iteration, y) * torch.from_numpy(counts).to(y)[:, None]
            renewed = (y - y_i) / length - correction
        return Answer({"dy": y_i - y, "dc": renewed - c_i}, {"loss": loss}, {"c_i": renewed})

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        share = len(mean.senders) / mean.clients
        return {"y": board["y"] + self.server_lr * mean["dy"], "c": board["c"] + share * mean["dc"]}
