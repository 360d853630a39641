"""Clustered federated learning (Sattler et al. 2020): FedAvg that parts clients who pull in different ways.

The server keeps a partition of the clients, at first one cluster, and a model θ_c for each cluster.

for every client asked, in parallel:   Δ_i = θ_i − θ_c(i), after τ_i steps of SGD(m) from θ_c(i)
for every cluster c that there is:
    if ‖mean Δ_i‖₂ < ε₁  and  max ‖Δ_i‖₂ > ε₂  and  |c| > 2,  after the first rounds:
        split c in two, by complete linkage on 1 − cos(Δ_i, Δ_j)
θ_c ← θ_c + mean Δ_i, within each cluster                                  1 round

| paper     | here     |                                                                   |
|-----------|----------|-------------------------------------------------------------------|
| θ_c       | y        | on the board, a row for each cluster; a client is sent its own    |
| C         | cluster  | on the board: the number of each client's cluster                 |
| Δθ_i      | delta    | answers, which the server sees one by one                         |
| ε₁, ε₂    | eps1, eps2 | the cluster is nearly done, while some of its clients are not   |
| –         | m        | momentum, kept at the client from round to round, where wanted    |

Means are weighed as the server weighs answers. Norms are those of whole updates, and clients go by their
numbers in the run (in the code published with FedEM norms are taken number by number, so that clusters hardly
ever part, and places within a cluster are taken for numbers of clients). A cluster is looked at in a round to
which all of its clients answered, for the others could not be placed: so the server must ask everybody, at
least at times. Of the halves, the one without the cluster's first client gets a new number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, Words, shown
from asyncfed.errors import ScenarioError
from asyncfed.network.server import Server
from asyncfed.protocols.at import At
from asyncfed.protocols.local_round import LocalRound
from asyncfed.protocols.local_steps import LocalSteps, decay
from asyncfed.protocols.part import Inbox, Scene, Sizes, Tensors
from asyncfed.protocols.rounds import (
    LEVELS,
    Answer,
    FloatArray,
    IntArray,
    Opening,
    Round,
    WithServer,
)
from asyncfed.protocols.settings import Momentum
from asyncfed.registry import register
from asyncfed.rng import Streams


@dataclass(frozen=True)
class OneCluster(Opening):
    """Everybody together."""

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        cluster = torch.zeros(mean.clients, dtype=torch.int64, device=board["y"].device)
        return {"x": board["x"], "y": board["y"], "cluster": cluster}

    def report(self, board: Tensors) -> dict[str, float]:
        return _counted(board)


Waiting = Annotated[
    Server,
    Words(
        "Server(…): a cluster is looked at when all of its clients have answered to the same model, and with "
        "Buffered(…) some answer twice before others do once"
    ),
]


@register("method")
@dataclass(frozen=True)
class ClusteredFL(WithServer):
    """Federated averaging in clusters that are found on the way, at a server.

    The metrics say how many `clusters` there are and how many `splits` there were; `final["cluster"]` who is
    in which, and `final["inner"]` has a row for each.

    Parameters
    ----------
    outer_steps
        Rounds.
    local
        Local steps of each client: `LocalSteps(lr=0.1, epochs=1, batch=64)`.
    eps1
        ε₁: a cluster is split when the mean of its updates is shorter than this; 0 never splits.
    eps2
        ε₂: and when one of its updates is longer than this.
    min_rounds
        Rounds without splits at the beginning.
    server
        Whom it asks and how it waits; by default everybody, weighed by their numbers of samples.
    momentum
        β in [0, 1): of the local steps. Clients keep their momenta from round to round.
    weight_decay
        At least 0: clients add so much of θ_i to their gradients.
    """

    outer_steps: NonNegativeInt
    local: LocalSteps
    eps1: NonNegativeFloat = 0.4
    eps2: NonNegativeFloat = 1.6
    min_rounds: NonNegativeInt = 20
    server: Waiting = field(default_factory=lambda: Server(weighted=True))
    max_rounds: PositiveInt | None = None
    momentum: Momentum = field(default=0.0, kw_only=True)
    weight_decay: NonNegativeFloat = field(default=0.0, kw_only=True)

    opening: ClassVar[Round] = OneCluster()
    passes_on: ClassVar[tuple[str, ...]] = ()
    moves_buffers: ClassVar[tuple[str, ...]] = ("local",)

    @property
    def needs_outer(self) -> bool:
        return False

    def check(self, scene: Scene) -> None:
        super().check(scene)
        clients = scene.sizes.clients
        if self.eps1 and not self.server.on(scene.network).ever_asks_all(clients):
            raise ScenarioError(
                "ClusteredFL looks at a cluster when all of its clients have answered, and participation "
                f"{shown(self.server.participation)} never asks all {clients} of the first one, so that it "
                "would never be split; ask everybody, at least at times, or give eps1=0, which splits nothing"
            )

    def model_of(self, client: int, final: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Its cluster's."""
        return final["inner"][int(final["cluster"][0, client])], final["outer"][0]

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        splits = iteration >= self.min_rounds
        return (
            ClusterSteps(
                self.local, iteration, splits, self.eps1, self.eps2, self.momentum, self.weight_decay
            ),
        )


@dataclass(frozen=True)
class ClusterSteps(LocalRound):
    """Local steps from one's cluster's model; splits, and means within clusters."""

    steps: LocalSteps
    iteration: int
    splits: bool
    eps1: float
    eps2: float
    momentum: float
    weight_decay: float

    phase = "inner"
    kind = "delta"
    reads = ("x", "y")
    answers = each = ("delta",)
    levels = LEVELS | {"delta": "inner", "m": "inner"}

    @property
    def writes(self) -> tuple[str, ...]:
        return ("y",)

    def remembered(self, sizes: Sizes) -> dict[str, int]:
        return {"m": self.length("m", sizes)} if self.momentum else {}

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        f, theta = at.inner(board["x"]), board["y"]
        own, loss, kept = self.steps.remembering(
            f, theta, memory, self.momentum, self.iteration, decay(self.weight_decay)
        )
        return Answer({"delta": own - theta}, {"loss": loss}, kept)

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        arrived = mean.each("delta")
        senders, delta = arrived.senders, arrived.values
        cluster = board["cluster"].cpu().numpy().copy()
        theta = list(_models(board))
        for c in range(len(theta)) if self.splits else ():
            here = np.flatnonzero(cluster[senders] == c)
            if len(here) == (cluster == c).sum() > 2:
                parting = self._parting(delta[_index(here, delta)], arrived.weights[here])
                if parting is not None:
                    cluster[senders[here[parting]]] = len(theta)
                    theta.append(theta[c])
        for c, before in enumerate(theta):
            here = np.flatnonzero(cluster[senders] == c)
            if len(here):
                theta[c] = before + _mean(delta[_index(here, delta)], arrived.weights[here])
        return {"y": torch.stack(theta), "cluster": _index(cluster, delta)}

    def _parting(self, delta: Tensor, weights: FloatArray) -> IntArray | None:
        """Who is to leave the cluster, if it is to be split: the half without the first."""
        done = float(_mean(delta, weights).norm()) < self.eps1
        if not done or float(delta.norm(dim=1).max()) <= self.eps2:
            return None
        half = bipartition(delta)
        return np.flatnonzero(half != half[0])

    def addressed(self, board: Tensors) -> dict[str, Tensor]:
        return {"y": board["cluster"]} if len(_models(board)) > 1 else {}

    def report(self, board: Tensors) -> dict[str, float]:
        return _counted(board)


def bipartition(delta: Tensor) -> IntArray:
    """Two halves (0 and 1 for each row) by complete linkage on 1 − cos; nothing is like an update of zero."""
    from scipy.cluster.hierarchy import cut_tree, linkage  # here, for all actors load this module
    from scipy.spatial.distance import squareform

    long = delta.double()
    unit = (long / long.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)).cpu().numpy()
    distance = np.clip(1.0 - unit @ unit.T, 0.0, 2.0)
    np.fill_diagonal(distance, 0.0)
    tree = linkage(squareform(distance, checks=False), method="complete")
    return np.asarray(cut_tree(tree, n_clusters=2)[:, 0], dtype=np.int64)


def _models(board: Tensors) -> Tensor:
    theta = board["y"]
    return theta if theta.ndim > 1 else theta[None]


def _mean(delta: Tensor, weights: FloatArray) -> Tensor:
    return torch.from_numpy(weights / weights.sum()).to(delta) @ delta


def _index(places: IntArray, like: Tensor) -> Tensor:
    return torch.from_numpy(places).to(like.device)


def _counted(board: Tensors) -> dict[str, float]:
    clusters = len(_models(board))
    return {"clusters": clusters, "splits": clusters - 1}
