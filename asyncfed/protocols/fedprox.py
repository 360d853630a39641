"""FedProx (Li et al. 2020): FedAvg whose clients are held back to where they began.

for every client asked, in parallel:   θ_i ← θ, and τ_i times
    g   = ∇ℓ_i(θ_i; ζ) + w θ_i + μ (θ_i − θ)
    m_i ← β m_i + g                               m_i stays at the client from round to round
    θ_i ← θ_i − α m_i
θ ← Σ (n_i / n) θ_i, or their plain mean                                   1 round

| paper   | here             |                                             |
|---------|------------------|---------------------------------------------|
| w, w_k  | θ, θ_i           | on the board: y                             |
| μ       | mu               | how strongly they are held back             |
| –       | w: weight_decay  | pulls to zero                               |
| –       | β: momentum      | 0: plain steps, m_i = g, nothing remembered |

With μ = 0 and a momentum it is FedAvg with SGDm; without either it is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveInt
from asyncfed.network.buffer import AnyServer
from asyncfed.network.server import Server
from asyncfed.protocols.at import At
from asyncfed.protocols.local_round import LocalRound
from asyncfed.protocols.local_steps import LocalSteps, Rows, Term
from asyncfed.protocols.part import Tensors
from asyncfed.protocols.rounds import (
    LEVELS,
    Answer,
    Round,
    WithServer,
)
from asyncfed.protocols.settings import Momentum
from asyncfed.registry import register
from asyncfed.rng import Streams


@register("method")
@dataclass(frozen=True)
class FedProx(WithServer):
    """Federated averaging with a proximal term, at a server.

    Parameters
    ----------
    outer_steps
        Rounds.
    local
        Local steps of each client: `LocalSteps(lr=0.1, epochs=1, batch=64)`.
    mu
        μ ≥ 0: clients add μ/2 ‖θ_i − θ‖² to their losses.
    momentum
        β in [0, 1): of the local steps. Clients keep their momenta from round to round.
    weight_decay
        At least 0: clients add so much of θ_i to their gradients.
    server
        Whom it asks and how it waits; by default everybody, weighed by their numbers of samples.
    """

    outer_steps: NonNegativeInt
    local: LocalSteps
    mu: NonNegativeFloat = 0.1
    momentum: Momentum = 0.0
    weight_decay: NonNegativeFloat = 0.0
    server: AnyServer = field(default_factory=lambda: Server(weighted=True))
    max_rounds: PositiveInt | None = None
    moves_buffers: ClassVar[tuple[str, ...]] = ("local", "averaged")

    @property
    def needs_outer(self) -> bool:
        return False

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        return (proximal_steps(self.local, iteration, self.mu, self.weight_decay, self.momentum),)


def proximal_steps(
    steps: LocalSteps, iteration: int, mu: float, weight_decay: float, momentum: float
) -> ProximalSteps:
    """The local work of an iteration; without momentum clients remember nothing."""
    if momentum:
        return MomentumSteps(steps, iteration, mu, weight_decay, momentum)
    return ProximalSteps(steps, iteration, mu, weight_decay)


@dataclass(frozen=True)
class ProximalSteps(LocalRound):
    """θ_i ← θ_i − α g; θ ← mean θ_i"""

    steps: LocalSteps
    iteration: int
    mu: float
    weight_decay: float

    phase = "inner"
    kind = "y"
    reads = ("x", "y")
    answers = ("y",)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        theta = board["y"]
        y, loss = self.steps.plain(at.inner(board["x"]), theta, self.iteration, self.term(theta))
        return Answer({"y": y}, {"loss": loss})

    def term(self, theta: Tensor) -> Term | None:
        """w θ_i + μ (θ_i − θ); None where it is zero."""
        mu, decay = self.mu, self.weight_decay

        def pull(own: Tensor, rows: Rows) -> Tensor:
            return decay * own + mu * (own - theta)

        return pull if mu or decay else None


@dataclass(frozen=True)
class MomentumSteps(ProximalSteps):
    """m_i ← β m_i + g, θ_i ← θ_i − α m_i; θ ← mean θ_i"""

    momentum: float

    levels = LEVELS | {"m": "inner"}
    remembers = ("m",)

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        theta = board["y"]
        y, m, loss = self.steps.with_momentum(
            at.inner(board["x"]), theta, memory["m"], self.momentum, self.iteration, self.term(theta)
        )
        return Answer({"y": y}, {"loss": loss}, {"m": m})
