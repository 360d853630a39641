"""Asynchronous gradient push that is stable, and minimises what lockstep minimises.

SGP in virtual time (4a) pushes z_i − α∇f_i(x_i) and ω_i, with x_i = z_i/ω_i. Two things go wrong where paces
differ.

*What is minimised.* Client i adds −α∇f_i to the sum of all z with every step, so λ_i times per unit of time:
at rest Σ λ_i ∇f_i = 0, not Σ ∇f_i = 0.

*How far a model moves.* That is α/ω_i, and ω_i is what stands still at i until it sends. At rest as much of
it comes as goes, so λ_i ω_i = φ_i, the flow through i: a stationary vector of the mean weights, whatever
the paces. Hence ω_i = φ_i τ_i on average, with τ_i = 1/λ_i the time between two steps. A fast client has a
small ω, and one that happens to hear nothing has next to none.

A step that counts the time since the one before (Spiridonoff, Olshevsky & Paschalidis 2020) cures the first,
Σ ∇f_i = 0, and the second on average: α τ_i/ω_i = α/φ_i for fast and slow alike. What is left is chance: an
ω_i that is small just now. So a client pays only what its ω_i bears, and owes the rest:

    owed="gradient"    D ← D + α τ ∇f(x),   pays s D with s = min(1, ω/ω₀),   keeps (1 − s) D
    owed="time"        T ← T + τ,           pays t = min(T, ω/ω₀) as −α t ∇f(x),   keeps T − t

A debt of gradients is always paid in the end: each reaches the mean once, if late, whatever ω₀. A debt of
time is one number, is paid in fresh gradients, and no model ever moves by more than (α/ω₀) ∇f. But it is
paid off only where φ_i > ω₀, with `per` as the unit of time; else client i counts in proportion to φ_i: too
little or too much, if never by its pace.

| symbol   | here    |                                                                             |
|----------|---------|-----------------------------------------------------------------------------|
| z, ω, x  | z, omega, x | as in SGP                                                               |
| τ        | tau     | time since the client began its step before, in units of `per`; 1 at first  |
| α        | alpha   | learning rate, at the client's own time (in units of `per`)                 |
| ω₀       | omega0  | the weight from which on all that is due is paid                            |
| D, T     | owed    | what a client owes                                                          |

In lockstep τ is 1, and where no ω is below ω₀ this is SGP(order="4a") to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveFloat
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
from asyncfed.protocols.schedules import LearningRate, rates
from asyncfed.protocols.settings import Batch
from asyncfed.protocols.soundness import small_weight
from asyncfed.registry import register


@register("method")
@dataclass(frozen=True)
class AsyncSGP(Part, AmongPeers):
    """Stochastic gradient push whose steps count by time, and wait while ω is small.

    Parameters
    ----------
    steps
        Steps of each client, at most: give a `horizon` too, so that all go on until the end.
    lr
        Learning rate of `per` units of time: a number, `StepDecay` or `Diminishing` (over time, too).
    per
        The time that counts as one step: the mean time between steps is a good choice. None makes every step
        count the same, as SGP does; what is minimised then depends on the paces.
    omega0
        ω₀, the weight from which on everything due is paid; None to owe nothing.
    owed
        What a client owes: "gradient" or "time".
    batch
        Minibatch size, drawn with replacement; None for all of a client's training data.
    weight_decay
        Added to the gradient as weight_decay · x.
    """

    steps: NonNegativeInt
    lr: LearningRate
    per: PositiveFloat | None = 1.0
    omega0: PositiveFloat | None = 1.0
    owed: Literal["gradient", "time"] = "gradient"
    batch: Batch = 64
    weight_decay: NonNegativeFloat = 0.0

    name = "async-sgp"
    kind = "push"
    passes_on = ("z", "omega", "owed")
    exact = ("omega",)
    conserves = True
    moves_buffers = ("local",)

    def parts(self) -> tuple[Part, ...]:
        return (self,)

    def check(self, scene: Scene) -> None:
        require_strongly_connected(scene.network)

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        return Cost(gradients=steps)

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {"z": sizes.inner, "omega": 1}

    def start(self, at: At, carried: Tensors) -> Start:
        x, none = carried["inner"], torch.zeros_like(carried["inner"][:, :1])
        owed = torch.zeros_like(x) if self.owed == "gradient" else none.clone()
        memory = {"lam": carried["outer"], "owed": owed, "clock": none}
        return Start({"z": x.clone(), "omega": torch.ones_like(none)}, memory)

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        z, omega, lam = inbox["z"], inbox["omega"], memory["lam"]
        first = at.steps == 0
        elapsed = ~first * 1.0 if self.per is None else at.elapsed / self.per
        clock = memory["clock"] + torch.from_numpy(elapsed).to(z)[:, None]
        tau = torch.from_numpy(np.where(first, 1.0, elapsed)).to(z)[:, None]
        alpha = rates(self.lr, clock[:, 0].double().cpu().numpy(), z)
        bearable = None if self.omega0 is None else omega.to(z) / self.omega0
        x = z / omega.to(z)
        if self.owed == "time":
            due = memory["owed"] + tau
            paid = due if bearable is None else torch.minimum(due, bearable)
            descent, loss = at.descent(x, lam, alpha * paid, self.weight_decay)
            owed = due - paid
        else:
            fresh, loss = at.descent(x, lam, alpha * tau, self.weight_decay)
            all_due = memory["owed"] + fresh  # −D
            descent = all_due if bearable is None else bearable.clamp(max=1.0) * all_due
            owed = all_due - descent
        return Step(
            payload={"z": descent + z, "omega": omega},
            report={"loss": loss},
            memory={"owed": owed, "clock": clock},
        )

    def explain(self, inbox: Inbox, row: int) -> str | None:
        return small_weight(inbox["omega"], row)

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(inbox["z"] / inbox["omega"].to(inbox["z"]), memory["lam"])

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        final = self.judge(at, inbox, memory)
        return {"inner": final.inner, "outer": final.outer, **inbox, "owed": memory["owed"].clone()}
