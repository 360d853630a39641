"""Stochastic gradient push (001 Eq. 2–4, Alg. 2): consensus learning over links that come and go, in one
direction or both.

| paper      | here             |                                                            |
|------------|------------------|------------------------------------------------------------|
| z_i, ω_i   | z, omega         | the biased model and its push-sum weight, ω_i(0) = 1         |
| x_i        | x                | z_i / ω_i, the model                                       |
| y_i        | absorbed         | [z_i; ω_i] after everything that arrived is summed         |
| φ_i, ψ_i   | payload, residue | what is shared with weights p_ij, and what stays at home   |
| α_i        | alpha            | learning rate at the client's own step                     |
| ζ_i        | batch            | minibatch                                                  |

(4a) steps before it communicates (Assran et al. 2019), (4b) after (Nedić & Olshevsky 2016). In virtual time
the same lines are asynchronous gradient push: a client that received nothing goes on with what it kept, and z
and ω stay in the right proportion however late a message comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from asyncfed.errors import ScenarioError
from asyncfed.network.links import Network, require_strongly_connected
from asyncfed.network.timing import Timing
from asyncfed.network.weights import Weights
from asyncfed.plain import plain_fields
from asyncfed.problems.derivatives import Derivatives
from asyncfed.protocols.phase import Emission, Estimate, Opening, Phase, PhaseDefaults, Site, Tensors, whole
from asyncfed.protocols.schedules import LearningRate, check_rate, rates


@dataclass(frozen=True)
class SGP(PhaseDefaults):
    """Stochastic gradient push.

    Parameters
    ----------
    steps
        Steps of each client.
    lr
        Learning rate: a number, `StepDecay` or `Diminishing`.
    order
        "4b", gradient after communication (the default), or "4a", before.
    batch
        Minibatch size, drawn with replacement; None for all of a client's training data.
    weight_decay
        Added to the gradient as weight_decay · x.
    """

    steps: int
    lr: LearningRate
    order: Literal["4a", "4b"] = "4b"
    batch: int | None = 64
    weight_decay: float = 0.0

    name = "sgp"
    kind = "push"

    def __post_init__(self) -> None:
        plain_fields(self)
        if not whole(self.steps) or self.steps < 0:
            raise ScenarioError(f"steps is {self.steps!r}; it must be a whole number, at least 0")
        if self.order not in ("4a", "4b"):
            raise ScenarioError(
                f"order is {self.order!r}; it must be '4a' (gradient before communication) or '4b' (after)"
            )
        if self.batch is not None and self.batch < 1:
            raise ScenarioError(
                f"batch is {self.batch}; it must be at least 1, or None for all of a client's data"
            )
        if not 0 <= self.weight_decay < float("inf"):
            raise ScenarioError(f"weight_decay is {self.weight_decay}; it must be at least 0")
        check_rate(self.lr)

    def phases(self) -> tuple[Phase, ...]:
        return (self,)

    def check(self, network: Network, weights: Weights, timing: Timing) -> None:
        require_strongly_connected(network)

    def begin(self, site: Site, carried: Tensors) -> Opening:
        x = carried["inner"]
        return Opening({"z": x.clone(), "omega": torch.ones_like(x[:, :1])}, {"lam": carried["outer"]})

    def step(
        self,
        derivatives: Derivatives,
        absorbed: Tensors,
        memory: Tensors,
        batch: tuple[torch.Tensor, ...],
        steps: npt.NDArray[np.int64],
        room: Tensors,
    ) -> Emission:
        z, omega = absorbed["z"], absorbed["omega"]
        alpha = rates(self.lr, steps, z)
        x = z / omega
        lam = memory["lam"]
        descent, loss = derivatives.inner_gradient(
            x, lam, batch, scale=-alpha, out=room.get("z")
        )  # −α∇f(z/ω)
        if self.weight_decay:
            descent -= alpha * self.weight_decay * x
        report = {"loss": loss}
        if self.order == "4a":
            phi = {"z": descent.add_(z), "omega": omega}  # φ = [z − α∇f; ω], ψ = 0
            return Emission(payload=phi, report=report)
        return Emission(payload=absorbed, residue={"z": descent}, report=report)  # φ = [z; ω], ψ = [−α∇f; 0]

    def estimate(self, absorbed: Tensors, memory: Tensors) -> Estimate:
        return Estimate(absorbed["z"] / absorbed["omega"], memory["lam"])

    def finish(self, absorbed: Tensors, memory: Tensors) -> Tensors:
        final = self.estimate(absorbed, memory)
        return {"inner": final.inner, "outer": final.outer, **absorbed}
