"""Methods that are stochastic gradient push on a particular network (001 §2).

Each refuses a network on which it would be something else.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncfed.errors import TopologyError
from asyncfed.network.links import require_strongly_connected
from asyncfed.protocols.epoch_sgp import EpochSGP
from asyncfed.protocols.part import Scene
from asyncfed.protocols.sgp import SGP, Order
from asyncfed.registry import register


@register("method")
@dataclass(frozen=True)
class DSGD(SGP):
    """Decentralized SGD: SGP with doubly stochastic weights, under which every ω_i stays 1."""

    name = "dsgd"

    def check(self, scene: Scene) -> None:
        require_strongly_connected(scene.network)
        if not scene.weights.prepare(scene.network).doubly_stochastic:
            raise TopologyError(
                "DSGD needs doubly stochastic weights, and these are not on this topology; "
                "use weights=Metropolis() or FastestMixing() on undirected links, or the protocol SGP"
            )


@register("method")
@dataclass(frozen=True)
class PeerFedAvg(SGP):
    """FedAvg with one local step per round and no server: SGP (4a) on the full graph with p = 1/n."""

    order: Order = "4a"
    name = "peer-fedavg"

    def check(self, scene: Scene) -> None:
        network, n = scene.network, scene.network.n
        always = bool((network.probability == 1).all()) and network.lossless
        if network.edges != n * (n - 1) or not always or not scene.weights.prepare(network).doubly_stochastic:
            raise TopologyError(
                f"PeerFedAvg averages over all {n} clients in every step, "
                f"so it needs every link, always up and without loss, and weights 1/{n}; "
                f"use topologies.fully_connected({n}), the protocol SGP, or FedAvg with a server"
            )


@register("method")
@dataclass(frozen=True)
class Local(SGP):
    """Everybody alone: SGP with self-links only. Nothing is sent, whatever the topology."""

    name = "local"
    kind = "none"
    sends = False

    def check(self, scene: Scene) -> None:
        return None


@register("method")
@dataclass(frozen=True)
class LocalEpochs(EpochSGP):
    """Everybody alone, epoch by epoch: `EpochSGP` with self-links only. Nothing is sent."""

    name = "local-epochs"
    kind = "none"
    sends = False

    def check(self, scene: Scene) -> None:
        return None
