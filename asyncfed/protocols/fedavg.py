"""FedAvg (McMahan et al. 2017): local steps, and the mean of where they lead.

for every client asked, in parallel:   y_i ← τ_i steps of SGD from y
y ← Σ (n_i / n) y_i, or their plain mean                                   1 round

With momentum the steps are m_i ← β m_i + ∇ℓ_i(y_i; ζ) + w y_i, y_i ← y_i − α m_i, where m_i stays at the
client from round to round: FedProx without its term.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveInt
from asyncfed.network.buffer import AnyServer
from asyncfed.network.server import Server
from asyncfed.protocols.fedprox import proximal_steps
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.rounds import Round, WithServer
from asyncfed.protocols.settings import Momentum
from asyncfed.registry import register
from asyncfed.rng import Streams


@register("method")
@dataclass(frozen=True)
class FedAvg(WithServer):
    """Federated averaging of the inner variable, at a server.

    Parameters
    ----------
    outer_steps
        Rounds.
    local
        Local steps of each client: `LocalSteps(lr=0.1, epochs=1, batch=64)`.
    server
        Whom it asks and how it waits; by default everybody, weighed by their numbers of samples.
    momentum
        β in [0, 1): of the local steps. Clients keep their momenta from round to round.
    weight_decay
        w, at least 0: clients add so much of y_i to their gradients.
    """

    outer_steps: NonNegativeInt
    local: LocalSteps
    server: AnyServer = field(default_factory=lambda: Server(weighted=True))
    max_rounds: PositiveInt | None = None
    momentum: Momentum = field(default=0.0, kw_only=True)
    weight_decay: NonNegativeFloat = field(default=0.0, kw_only=True)
    moves_buffers: ClassVar[tuple[str, ...]] = ("local", "averaged")

    @property
    def needs_outer(self) -> bool:
        return False

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        return (proximal_steps(self.local, iteration, 0.0, self.weight_decay, self.momentum),)
