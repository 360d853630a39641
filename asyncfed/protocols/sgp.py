"""Stochastic gradient push (001 Eq. 2–4, Alg. 2): consensus learning over links that come and go, in one
direction or both.

| paper      | here             |                                                            |
|------------|------------------|------------------------------------------------------------|
| z_i, ω_i   | z, omega         | the biased model and its push-sum weight, ω_i(0) = 1         |
| x_i        | x                | z_i / ω_i, the model                                       |
| y_i        | inbox            | [z_i; ω_i] after everything that arrived is summed         |
| φ_i, ψ_i   | payload, residue | what is shared with weights p_ij, and what stays at home   |
| α_i        | alpha            | learning rate at the client's own step                     |
| ζ_i        | at.batch         | minibatch                                                  |

(4a) steps before it communicates (Assran et al. 2019), (4b) after (Nedić & Olshevsky 2016). In virtual time
the same lines are asynchronous gradient push: a client that received nothing goes on with what it kept, and z
and ω stay in the right proportion however late a message comes. ω is in doubles, whatever z is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, Words
from asyncfed.network.links import require_strongly_connected
from asyncfed.protocols.at import At
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.part import (
    AmongPeers,
    Inbox,
    Judged,
    Part,
    Scene,
    Sizes,
    Start,
    Step,
    Steps,
    Tensors,
)
from asyncfed.protocols.schedules import LearningRate, first_rate, rates
from asyncfed.protocols.settings import Batch
from asyncfed.protocols.soundness import small_weight
from asyncfed.registry import register

Order = Annotated[
    Literal["4a", "4b"], Words("'4a' (gradient before communication) or '4b' (gradient after it)")
]


@register("method")
@dataclass(frozen=True)
class SGP(Part, AmongPeers):
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

    steps: NonNegativeInt
    lr: LearningRate
    order: Order = "4b"
    batch: Batch = 64
    weight_decay: NonNegativeFloat = 0.0

    name = "sgp"
    kind = "push"
    needs_outer = False
    passes_on = ("z", "omega")
    exact = ("omega",)
    conserves = True
    moves_by_weight = True
    moves_buffers = ("local", "averaged")

    def parts(self) -> tuple[Part, ...]:
        return (self,)

    @property
    def backward_lr(self) -> float:
        """The learning rate at which a hypergradient differentiates its steps."""
        return first_rate(self.lr)

    def shares(self, at: At, like: torch.Tensor) -> torch.Tensor:
        """How much each client's loss counts (k, 1): by which its learning rate is multiplied."""
        return torch.ones_like(like[:, :1])

    def check(self, scene: Scene) -> None:
        require_strongly_connected(scene.network)

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        return Cost(gradients=steps)

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {"z": sizes.inner, "omega": 1}

    def start(self, at: At, carried: Tensors) -> Start:
        x = carried["inner"]
        return Start({"z": x.clone(), "omega": torch.ones_like(x[:, :1])}, {"lam": carried["outer"]})

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        z, omega, lam = inbox["z"], inbox["omega"], memory["lam"]
        alpha = rates(self.lr, at.steps, z)
        x = z / omega.to(z)
        descent, loss = at.descent(x, lam, alpha, self.weight_decay, omega, out=at.room.get("z"))  # −α∇f(z/ω)
        report = {"loss": loss}
        if self.order == "4a":
            phi = {"z": descent.add_(z), "omega": omega}  # φ = [z − α∇f; ω], ψ = 0
            return Step(phi, report=report)
        return Step({"z": z, "omega": omega}, {"z": descent}, report)  # φ = [z; ω], ψ = [−α∇f; 0]

    def explain(self, inbox: Inbox, row: int) -> str | None:
        return small_weight(inbox["omega"], row)

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(inbox["z"] / inbox["omega"].to(inbox["z"]), memory["lam"])

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        final = self.judge(at, inbox, memory)
        return {"inner": final.inner, "outer": final.outer, **inbox}
