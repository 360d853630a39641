"""FedAvg (McMahan et al. 2017): local steps, and the mean of where they lead.

for every client asked, in parallel:   y_i ← τ_i steps of SGD from y
y ← Σ (n_i / n) y_i, or their plain mean                                   1 round
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from asyncfed.checks import NonNegativeInt, PositiveInt
from asyncfed.network.buffer import AnyServer
from asyncfed.network.server import Server
from asyncfed.protocols.fed_inn import PlainInnerSteps
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.rounds import Round, WithServer
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
    """

    outer_steps: NonNegativeInt
    local: LocalSteps
    server: AnyServer = field(default_factory=lambda: Server(weighted=True))
    max_rounds: PositiveInt | None = None
    moves_buffers: ClassVar[tuple[str, ...]] = ("local", "averaged")

    @property
    def needs_outer(self) -> bool:
        return False

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        return (PlainInnerSteps(self.local, iteration),)
