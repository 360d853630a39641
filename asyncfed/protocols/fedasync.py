"""FedAsync (Xie et al. 2019): every answer is mixed into the model as it comes.

for the client asked:       θ_i ← τ_i local steps from the θ that it was sent, with the term μ/2 ‖θ_i − θ‖²
when its answer is in:      θ ← (1 − a w(s)) θ + a w(s) θ_i                      1 round

| paper   | here    |                                                                             |
|---------|---------|-----------------------------------------------------------------------------|
| α       | mixing  | a                                                                           |
| s(t−τ)  | server  | `Buffered(1, decay=…)`: w, of the server's moves between request and use    |
| ρ       | mu      |                                                                             |

If the server moves on K answers at a time: θ ← (1 − a W) θ + a Σ w_i θ_i with w_i = w(s_i) / K and W = Σ w_i.

Where nothing is stale this is FedBuff with K = 1 and η_g = a. A stale θ_i was made from an older model θ',
and then the two differ: FedAsync's move is a w (θ_i − θ) = a w Δ_i + a w (θ' − θ), FedBuff's only a w Δ_i.
The rest pulls the model back to where it was when the client was asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability
from asyncfed.network.buffer import AnyServer, Buffered, PolynomialDecay
from asyncfed.protocols.fedprox import ProximalSteps
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.part import Inbox, Tensors
from asyncfed.protocols.rounds import Round, WithServer
from asyncfed.registry import register
from asyncfed.rng import Streams


@register("method")
@dataclass(frozen=True)
class FedAsync(WithServer):
    """Asynchronous federated optimization, at a server that moves on every answer.

    Parameters
    ----------
    outer_steps
        Moves of the server.
    local
        Local steps of each client: `LocalSteps(lr=0.1, epochs=1, batch=64)`.
    mixing
        a in (0, 1]: how much of an answer goes into the model.
    mu
        μ ≥ 0: clients add μ/2 ‖θ_i − θ‖² to their losses.
    server
        How many are at work, whom it asks and what a stale answer counts; by default (1 + s)^−½.
    """

    outer_steps: NonNegativeInt
    local: LocalSteps
    mixing: Probability = 0.6
    mu: NonNegativeFloat = 0.0
    server: AnyServer = field(default_factory=lambda: Buffered(1, decay=PolynomialDecay(0.5)))
    max_rounds: PositiveInt | None = None
    moves_buffers: ClassVar[tuple[str, ...]] = ("local", "averaged")

    @property
    def needs_outer(self) -> bool:
        return False

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        return (MixedIn(self.local, iteration, self.mu, 0.0, self.mixing),)


@dataclass(frozen=True)
class MixedIn(ProximalSteps):
    """θ ← (1 − a W) θ + a Σ w_i θ_i"""

    mixing: float

    normalised = False

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        y, a = board["y"], self.mixing
        return {"y": (1 - a * mean.weight) * y + a * mean["y"]}
