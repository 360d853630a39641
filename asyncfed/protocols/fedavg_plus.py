"""FedAvg+ (the baseline of Marfoq et al. 2021 and of 001): FedAvg, and everybody tunes the model for itself.

for every client asked, in parallel:   y_i ← τ_i steps of SGD from y
y ← Σ (n_i / n) y_i                                                        1 round
judged, whenever somebody looks:       y_i ← an epoch of SGD from y, on one's own samples; nothing is sent

The epoch has a momentum of its own, zero at first; what a client keeps for its training is not touched.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from asyncfed.errors import ScenarioError
from asyncfed.problems.problem import Problem
from asyncfed.protocols.adapting import require_no_steps
from asyncfed.protocols.at import At
from asyncfed.protocols.fedavg import FedAvg
from asyncfed.protocols.fedprox import proximal_steps
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.part import Act, Inbox, Judged, Scene, Sizes, Tensors
from asyncfed.registry import register


@register("method")
@dataclass(frozen=True)
class FedAvgPlus(FedAvg):
    """Federated averaging whose clients are judged after tuning; see `FedAvg` for the other arguments.

    The metrics are those after tuning; loss_tuned_0 (accuracy_tuned_0, …) those before it, FedAvg's own.

    Parameters
    ----------
    tuning
        The steps of tuning, `LocalSteps(…)`; by default one epoch at the learning rate and batch of `local`.
    """

    tuning: LocalSteps | None = field(default=None, kw_only=True)

    def check(self, scene: Scene) -> None:
        super().check(scene)
        self._check_tuning(scene.sizes.clients)

    def adaptation(self, problem: Problem, steps: int | None) -> Act:
        """New clients tune."""
        require_no_steps(self, steps, "make those of `tuning`")
        self._check_tuning(problem.clients)
        return self.judging

    def _check_tuning(self, clients: int) -> None:
        if self.tuning is not None:
            self.tuning.fits(clients)
        elif not isinstance(self.local.lr, (int, float)):
            raise ScenarioError(
                f"the learning rate of the local steps is {self.local.lr}, which changes with the rounds; "
                "say how clients tune, as in tuning=LocalSteps(0.01, epochs=1, batch=64)"
            )

    @property
    def judging(self) -> Act:  # type: ignore[override]
        steps = self.tuning or LocalSteps(self.local.lr, epochs=1, batch=self.local.batch)
        return Tuned(steps, self.weight_decay, self.momentum)


@dataclass(frozen=True)
class Tuned(Act):
    """Everybody is judged after steps of its own from the server's variables."""

    steps: LocalSteps
    weight_decay: float
    momentum: float

    tunes = True

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {}

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        x, y = inbox["x"], inbox["y"]
        tuning = proximal_steps(self.steps, 0, 0.0, self.weight_decay, self.momentum)
        tuned = tuning.local(at, {"x": x[0], "y": y[0]}, {"m": torch.zeros_like(y)})
        return Judged(tuned.values["y"], x, {"tuned_0": Judged(y, x)})
