"""Push-DIGing (Nedić, Olshevsky & Shi 2017, "Achieving geometric convergence for distributed optimization
over time-varying graphs", SIAM J. Optim. 27(4)): gradient tracking by push-sum, exact with a constant step.

From u(0) = x(0), v(0) = 1 and y(0) = ∇f(x(0)), with column-stochastic weights C(t) chosen by the senders,

    u(t+1) = C(t) (u(t) − α y(t))
    v(t+1) = C(t) v(t)
    x(t+1) = u(t+1) / v(t+1)
    y(t+1) = C(t) y(t) + ∇f(x(t+1)) − ∇f(x(t))

| paper | here     |                                                              |
|-------|----------|--------------------------------------------------------------|
| u, v  | u, v     | the biased model and its push-sum weight (SGP's z and ω)     |
| x     | x        | u / v, the model                                             |
| y     | y        | the tracker; absorbed as C y, and complete when it is sent   |
| ∇f(x) | gradient | the last one computed, remembered for the difference; or g   |
| α     | alpha    | learning rate at the client's own step                       |

Step t absorbs u(t), v(t) and C y(t−1), computes ∇f(x(t)) and with it y(t), and sends u − αy, v and y. At the
start nothing was absorbed and the remembered gradient is 0: so y(0) is ∇f(x(0)) by the same line, and every
step computes one gradient. With minibatches the difference is of the gradients that were computed, each on
its own minibatch; the error then falls to a level that the noise and α decide.

Σ y = Σ ∇f(x), over all clients and their last gradients, holds at every step. It holds in virtual time too,
with the messages on their way counted: y is a sum that only moves, and a step adds the difference of its own
gradients however many messages came. Where clients rest, y is 0 everywhere and so is Σ ∇f, whatever their
paces: a slow client does not move the point of rest, as it does with SGP. Whether they come to rest is a
question of α/v, the step that x really makes. A client that hears nothing gives away some of its v with every
step, and of y as well; but the difference of its gradients it adds in full. With `omega0` = ω₀ it adds what
its v bears, and the rest later: g(t) is then what y has been told of ∇f, with g(−1) = 0,

    y(t) = C y(t−1) + s (∇f(x(t)) − g(t−1)),   g(t) = g(t−1) + s (∇f(x(t)) − g(t−1)),   s = min(1, v(t)/ω₀)

so Σ y = Σ g always, at rest g = ∇f, and the point of rest is the same. At uneven paces it bears many times
the α (docs/decisions/0013-stable-gradient-push.md); `PushPull` divides by nothing. A client that has
made all of its steps leaves, and what it knew is frozen: a `horizon` keeps everybody until the end.

A message that is lost takes its share of y along. Running sums bring it with the next one; without them the
sum would be wrong for ever, and loss is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveFloat
from asyncfed.errors import TopologyError
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
class PushDIGing(Part, AmongPeers):
    """Gradient tracking by push-sum.

    Parameters
    ----------
    steps
        Steps of each client.
    lr
        Learning rate: a number, `StepDecay` or `Diminishing`.
    batch
        Minibatch size, drawn with replacement; None for all of a client's training data.
    weight_decay
        Added to the gradient as weight_decay · x.
    omega0
        ω₀, the weight v below which a client tells y only v/ω₀ of what is new; None, as in the paper: all of
        it, always.
    """

    steps: NonNegativeInt
    lr: LearningRate
    batch: Batch = 64
    weight_decay: NonNegativeFloat = 0.0
    omega0: PositiveFloat | None = None

    name = "push-diging"
    kind = "push"
    exact = ("v",)
    conserves = True
    tracks = True
    moves_buffers = ("local",)

    @property
    def moves_by_weight(self) -> bool:
        return self.omega0 is None

    def parts(self) -> tuple[Part, ...]:
        return (self,)

    def check(self, scene: Scene) -> None:
        require_strongly_connected(scene.network)
        require_all_arrive(scene, type(self).__name__)

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        return Cost(gradients=steps)

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {"u": sizes.inner, "v": 1, "y": sizes.inner}

    def start(self, at: At, carried: Tensors) -> Start:
        x = carried["inner"]
        absorbed = {"u": x.clone(), "v": torch.ones_like(x[:, :1]), "y": torch.zeros_like(x)}
        return Start(absorbed, {"lam": carried["outer"], "gradient": torch.zeros_like(x)})

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        u, v, lam = inbox["u"], inbox["v"], memory["lam"]
        alpha = rates(self.lr, at.steps, u)
        x = u / v.to(u)
        gradient, loss = at.gradient(x, lam)
        if self.weight_decay:
            gradient += self.weight_decay * x
        if self.omega0 is not None:  # g(t)
            gradient = torch.lerp(memory["gradient"], gradient, (v / self.omega0).clamp(max=1.0).to(u))
        y = inbox["y"].add_(gradient).sub_(memory["gradient"])  # C y(t−1) + ∇f(x(t)) − ∇f(x(t−1))
        phi = {"u": u - alpha * y, "v": v, "y": y}
        return Step(phi, report={"loss": loss}, memory={"gradient": gradient})

    def explain(self, inbox: Inbox, row: int) -> str | None:
        return small_weight(inbox["v"], row)

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(inbox["u"] / inbox["v"].to(inbox["u"]), memory["lam"])

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        final = self.judge(at, inbox, memory)
        return {"inner": final.inner, "outer": final.outer}


def require_all_arrive(scene: Scene, method: str) -> None:
    """A tracker must not lose anything: what is sent has to arrive, or to come later with another."""
    network = scene.network
    if network.lossless or scene.timing.running_sums is not False:
        return
    edge = int(np.flatnonzero(network.loss)[0])
    sender, receiver = (network.names[int(ends[edge])] for ends in (network.senders, network.receivers))
    raise TopologyError(
        f"{method} tracks the sum of all gradients, and a lost message takes its share of it away for ever; "
        f"link {sender}→{receiver} loses a message with probability {network.loss[edge]:g}: leave "
        "running_sums on, or set loss to 0 (a link may be down, by its probability: then the sender keeps "
        "the share)"
    )
