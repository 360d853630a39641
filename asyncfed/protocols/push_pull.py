"""Push-Pull (Pu, Shi, Xu & Nedić 2021, "Push-pull gradient methods for distributed optimization in networks",
IEEE Trans. Autom. Control 66(1)), also known as AB (Xin & Khan 2018): gradient tracking with weights of two
kinds, exact with a constant step.

From any x(0) and y(0) = ∇f(x(0)), with row-stochastic A(t) and column-stochastic B(t),

    x(t+1) = A(t) (x(t) − α y(t))
    y(t+1) = B(t) y(t) + ∇f(x(t+1)) − ∇f(x(t))

| paper  | here     |                                                                          |
|--------|----------|--------------------------------------------------------------------------|
| x      | x        | the model, pulled: a mean of what arrived and the client's own           |
| y      | y        | the tracker, pushed; absorbed as B y, and complete when it is sent       |
| R or A | A        | 1 / (messages that arrived + 1), chosen by the receiver (`PullShares`)   |
| C or B | B        | the scenario's weights, chosen by the sender; these stand in the trace   |
| ∇f(x)  | gradient | the last one computed, remembered for the difference                     |
| α      | alpha    | learning rate at the client's own step                                   |

This is the order of Pu et al., in which x − αy is sent; AB as first printed takes −αy after the sum. Weights
of the receiver need no push-sum weight: x is a mean already and nothing is divided. Both kinds go over the
same links as they come and go, as in the time-varying AB of Saadatniaki, Xin & Khan (2020); so the papers' "a
common root of both graphs" is strong connectivity here.

Step t absorbs x(t) and B y(t−1), computes ∇f(x(t)) and with it y(t), and sends x − αy and y. At the start the
remembered gradient is 0, so y(0) is ∇f(x(0)) by the same line. With minibatches the difference is of the
gradients that were computed.

Σ y = Σ ∇f(x) holds at every step, and in virtual time with the messages on their way counted: a step takes
the mean of all models that have come and the sum of all trackers, which is asynchronous push-pull (APPG,
Zhang & You 2019). As for Push-DIGing, paces do not move the point of rest, a `horizon` keeps fast clients
from leaving early. Loss needs running sums: A would not mind, for it knows what arrived, but B loses its
share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncfed.checks import NonNegativeFloat, NonNegativeInt
from asyncfed.network.expectations import Expectations
from asyncfed.network.links import require_strongly_connected
from asyncfed.network.weights import Mixing, PullShares
from asyncfed.protocols.at import At
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.part import AmongPeers, Inbox, Judged, Part, Scene, Sizes, Start, Step, Steps, Tensors
from asyncfed.protocols.push_diging import require_all_arrive
from asyncfed.protocols.schedules import LearningRate, rates
from asyncfed.protocols.settings import Batch
from asyncfed.registry import register


@register("method")
@dataclass(frozen=True)
class PushPull(Part, AmongPeers):
    """Gradient tracking where models are pulled and trackers pushed.

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
    """

    steps: NonNegativeInt
    lr: LearningRate
    batch: Batch = 64
    weight_decay: NonNegativeFloat = 0.0

    name = "push-pull"
    kind = "push-pull"
    conserves = True
    tracks = True
    moves_buffers = ("local",)

    def parts(self) -> tuple[Part, ...]:
        return (self,)

    def check(self, scene: Scene) -> None:
        require_strongly_connected(scene.network)
        require_all_arrive(scene, type(self).__name__)

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        return Cost(gradients=steps)

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {"y": sizes.inner, "x": sizes.inner}

    def mixing(self, scene: Scene, learned: Expectations | None) -> Mixing:
        """The scenario's weights first, for these are the ones to see in the trace."""
        return (("y",), scene.weights.prepare(scene.network)), (("x",), PullShares(scene.network))

    def start(self, at: At, carried: Tensors) -> Start:
        x = carried["inner"]
        memory = {"lam": carried["outer"], "gradient": torch.zeros_like(x)}
        return Start({"y": torch.zeros_like(x), "x": x.clone()}, memory)

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        x, lam = inbox["x"], memory["lam"]
        alpha = rates(self.lr, at.steps, x)
        gradient, loss = at.gradient(x, lam)
        if self.weight_decay:
            gradient += self.weight_decay * x
        y = inbox["y"].add_(gradient).sub_(memory["gradient"])  # B y(t−1) + ∇f(x(t)) − ∇f(x(t−1))
        phi = {"y": y, "x": x - alpha * y}
        return Step(phi, report={"loss": loss}, memory={"gradient": gradient})

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(inbox["x"], memory["lam"])

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        return {"inner": inbox["x"], "outer": memory["lam"]}
