"""Decentralized FedEM (Marfoq et al. 2021, Alg. 4): FedEM among peers, who mix their models.

x_i = z_i / ω_i, K models side by side
    q_k(s) ∝ π_ik exp(−ℓ(x_ik; s)),  π_ik = mean_s q_k(s)                 E and M step, as in FedEM
    θ_ik ← an epoch of SGD from x_ik on mean_s q_k(s) ℓ(θ_k; s)           M step
    φ_i = [z_i + s_i (θ_i − x_i); ω_i],  ψ_i = 0                          as in EpochSGP

| paper      | here     |                                                                         |
|------------|----------|-------------------------------------------------------------------------|
| Θ_i        | x        | the K models of client i, after mixing                                  |
| w_{ij}     | weights  | of the scenario: `FastestMixing()` in the paper, under which ω_i stays 1  |
| π_i        | lam      | as logarithms up to a constant: 0 is uniform; it never leaves the client |

On the full graph with weights 1/n this is FedEM with everybody asked. The paper has fixed undirected links
and doubly stochastic weights; push-sum weights let it run wherever SGP does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncfed.problems.problem import Problem
from asyncfed.protocols.at import At
from asyncfed.protocols.epoch_sgp import EpochSGP
from asyncfed.protocols.fedem import check_mixture, expectation, weights_found
from asyncfed.protocols.local_steps import decay
from asyncfed.protocols.part import Act, Scene, Start, Tensors
from asyncfed.registry import register


@register("method")
@dataclass(frozen=True)
class PeerFedEM(EpochSGP):
    """Expectation-maximization of a mixture of models among peers; see `EpochSGP` for its arguments.

    `final["outer"]` are the logarithms of the clients' weights.
    """

    name = "peer-fedem"
    moves_buffers = ()  # type: ignore[assignment]

    def check(self, scene: Scene) -> None:
        super().check(scene)
        check_mixture(self, scene.problem, scene.sizes.outer)

    def adaptation(self, problem: Problem, steps: int | None) -> Act:
        """New clients find their weights."""
        return weights_found(self, problem, steps)

    def start(self, at: At, carried: Tensors) -> Start:
        begun = super().start(at, carried)
        return Start(begun.absorbed, begun.memory | {"lam": torch.zeros_like(carried["outer"])})

    def epochs_from(self, x: Tensor, at: At, memory: Tensors) -> tuple[Tensor, Tensor, Tensors]:
        q, lam = expectation(at, x, memory["lam"])
        theta, loss, kept = self.local.remembering(
            at.mixture(q), x, memory, self.momentum, at.steps, decay(self.weight_decay)
        )
        return theta, loss, kept | {"lam": lam}
