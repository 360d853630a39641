"""Gradient push with epochs between messages: what 001 runs on fixed networks, after Marfoq et al. (2021).

x_i = z_i / ω_i;  θ_i ← epochs of SGD from x_i, on f_i(·, λ_i);  φ_i = [z_i + s_i (θ_i − x_i); ω_i],  ψ_i = 0

| paper     | here            |                                                                       |
|-----------|-----------------|-----------------------------------------------------------------------|
| z_i, ω_i  | z, omega        | as in SGP                                                             |
| s_i       | share           | 1, or n_i where clients count by their samples; ω_i(0) = s_i          |
| m_i       | m               | momentum of the epochs, kept from round to round                      |

On the full graph with weights 1/n this is FedAvg, with n_i / Σ n if `weighted`. With doubly stochastic
weights every ω_i stays 1, and it is decentralized SGD with local epochs, as decentralized FedEM makes it.
With a single step it is SGP (4a). Σ ω_i and Σ z_i move only as SGP's do, so it runs wherever SGP does.

A hypergradient after it is that of SGP (4b) per minibatch, at the last learning rate (001 App. D): of
z_i ← Σ_j p_ji z_j − α s_i ∇f_i(z_i / ω_i).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from asyncfed.checks import PositiveInt
from asyncfed.errors import ScenarioError
from asyncfed.problems.problem import Problem
from asyncfed.protocols.at import At, FloatArray
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.local_steps import LocalSteps, decay
from asyncfed.protocols.part import Inbox, Scene, Start, Step, Steps, Tensors
from asyncfed.protocols.schedules import rate_at
from asyncfed.protocols.settings import Momentum
from asyncfed.protocols.sgp import SGP
from asyncfed.registry import register


@register("method")
@dataclass(frozen=True)
class EpochSGP(SGP):
    """Stochastic gradient push that communicates once per local epoch; see `SGP` for the other arguments.

    Parameters
    ----------
    steps
        Rounds: communications of each client.
    lr
        Learning rate: a number, or a schedule over the rounds.
    batch
        Size of the pieces that an epoch is cut into; None for one step with all of a client's samples.
    epochs
        Between two communications.
    momentum
        In [0, 1): of the epochs' steps. Clients keep their momenta from round to round.
    weighted
        Whether clients count by their numbers of samples.
    """

    order: Literal["4a", "4b"] = "4b"
    epochs: PositiveInt = 1
    momentum: Momentum = 0.0
    weighted: bool = False
    name = "epoch-sgp"
    moves_buffers = ("local",)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.order != "4b":
            raise ScenarioError(
                f"order is {self.order!r}; EpochSGP steps before it communicates, and its hypergradient is "
                "that of '4b': leave order out"
            )

    @property
    def local(self) -> LocalSteps:
        return LocalSteps(self.lr, epochs=self.epochs, batch=self.batch)

    @property
    def backward_lr(self) -> float:
        return rate_at(self.lr, max(0, self.steps - 1))

    def shares(self, at: At, like: Tensor) -> Tensor:
        if not self.weighted:
            return super().shares(at, like)
        return torch.from_numpy(at.train.sizes[at.rows]).to(like)[:, None]

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        sizes = scene.problem.data.train.sizes
        return Cost(gradients=steps * self.local.counts(sizes, np.arange(len(sizes))))

    def samples_per_step(self, problem: Problem) -> FloatArray:
        sizes = problem.data.train.sizes
        return self.local.samples(sizes, np.arange(len(sizes)))

    def start(self, at: At, carried: Tensors) -> Start:
        x = carried["inner"]
        share = self.shares(at, x)
        memory = {"lam": carried["outer"], "share": share}
        if self.momentum:
            memory["m"] = torch.zeros_like(x)
        return Start({"z": share * x, "omega": share}, memory)

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        z, omega = inbox["z"], inbox["omega"]
        x = z / omega.to(z)
        theta, loss, kept = self.epochs_from(x, at, memory)
        phi = {"z": z + memory["share"] * (theta - x), "omega": omega}
        return Step(phi, report={"loss": loss}, memory=kept)

    def epochs_from(self, x: Tensor, at: At, memory: Tensors) -> tuple[Tensor, Tensor, Tensors]:
        """θ, the loss, and what changes of the memory."""
        f = at.inner_by_both(memory["lam"])
        return self.local.remembering(f, x, memory, self.momentum, at.steps, decay(self.weight_decay))
