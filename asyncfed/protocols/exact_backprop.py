"""Exact recurrent backpropagation (001 Eq. 11, Alg. 3): HGP's rounds with the weights that were really used.

    v_i ← v_i + Σ_j p_ij(δ_i) ∂_λ φ_i u_j + ∂_λ ψ_i u_i
    u_i ←       Σ_j p_ij(δ_i) ∂_y φ_i u_j + ∂_y ψ_i u_i

over those j to whom i can send. It must hear from exactly these, at that very step: so links must be
undirected, lose nothing, and go in lockstep. HGP needs none of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncfed.errors import ScenarioError
from asyncfed.network.expectations import (
    Expectations,
    TransposedShares,
    require_undirected,
    warn_of_dependence,
)
from asyncfed.network.links import FloatArray
from asyncfed.network.timing import Lockstep
from asyncfed.network.weights import Shares
from asyncfed.protocols.hgp import HGP
from asyncfed.protocols.part import Scene
from asyncfed.registry import register


@register("estimator")
@dataclass(frozen=True)
class ExactBackprop(HGP):
    """Exact recurrent backpropagation on undirected links; the parameters are those of `HGP`, of which
    `expectations` plays no part.
    """

    name = "exact"

    @property
    def estimates(self) -> bool:
        return False

    def check(self, scene: Scene) -> None:
        require_undirected(scene.network, "exact recurrent backpropagation")
        warn_of_dependence(
            scene.network, "exact recurrent backpropagation", always_there=scene.timing.presence is None
        )
        if not isinstance(scene.timing, Lockstep):
            raise ScenarioError(
                "exact recurrent backpropagation weighs a message by what the receiver would send back in "
                "that same step, so it needs timing=Lockstep(); in virtual time use HGP or VRHGP"
            )

    def shares(self, scene: Scene, learned: Expectations | None, pace: FloatArray) -> Shares:
        return TransposedShares(scene.network, scene.weights.prepare(scene.network))
