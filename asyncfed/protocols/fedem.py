"""FedEM (Marfoq et al. 2021, Alg. 1): every client's data is a mixture of K distributions, which all share.

The server keeps K models, a client the weights π_i of its own mixture, uniform at first.

for every client asked, in parallel:
    q_k(s) ∝ π_ik exp(−ℓ(θ_k; s)),  for each of its samples s                       E step
    π_ik   = mean_s q_k(s)                                                          M step
    θ_ik   ← an epoch of SGD from θ_k on mean_s q_k(s) ℓ(θ_k; s),  for each k       M step
θ_k ← Σ (n_i / n) θ_ik                                                     1 round of K models

| paper     | here    |                                                                             |
|-----------|---------|-----------------------------------------------------------------------------|
| θ_1..θ_M  | y       | on the board: K models side by side, the inner variable                     |
| π_t       | log_pi  | in a client's memory, as logarithms up to a constant: 0 is uniform          |
| q(z_s)    | q       | responsibilities of the models for all samples; made anew in every round    |
| ℓ         | mixture | of the problem: `Mixture.losses`                                            |

Neither π_i nor q ever leaves a client. It predicts Σ_k π_ik softmax(model_k): the problem's outer variable is
judged at log π_i, as `personalized_classification(personalize="mtl")` has it. With K = 1 this is FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveInt
from asyncfed.errors import ScenarioError
from asyncfed.network.buffer import AnyServer
from asyncfed.network.server import Server
from asyncfed.problems.problem import Problem
from asyncfed.problems.whole import samples_at_once
from asyncfed.protocols.at import At, Level
from asyncfed.protocols.local_round import LocalRound
from asyncfed.protocols.local_steps import LocalSteps, decay
from asyncfed.protocols.part import Act, Inbox, Judged, Scene, Sizes, Tensors
from asyncfed.protocols.rounds import (
    LEVELS,
    Answer,
    FloatArray,
    IntArray,
    Round,
    WithServer,
)
from asyncfed.protocols.settings import Momentum
from asyncfed.registry import register
from asyncfed.rng import Streams


@dataclass(frozen=True)
class JudgedByMixture(Act):
    """Everybody is judged by the server's models, mixed in its own way."""

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {}

    def remembered(self, sizes: Sizes) -> dict[str, int]:
        return {"log_pi": sizes.outer}

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(inbox["y"], memory["log_pi"])


@register("method")
@dataclass(frozen=True)
class FedEM(WithServer):
    """Federated expectation-maximization of a mixture of models, at a server.

    `final["clients/log_pi"]` are the logarithms of the clients' weights.

    Parameters
    ----------
    outer_steps
        Rounds.
    local
        Local steps of each client: `LocalSteps(lr=0.05, epochs=1, batch=128)`.
    momentum
        In [0, 1): of the local steps. Clients keep their momenta from round to round.
    weight_decay
        At least 0: clients add so much of their models to their gradients.
    server
        Whom it asks and how it waits; by default everybody, weighed by their numbers of samples.
    """

    outer_steps: NonNegativeInt
    local: LocalSteps
    momentum: Momentum = 0.0
    weight_decay: NonNegativeFloat = 0.0
    server: AnyServer = field(default_factory=lambda: Server(weighted=True))
    max_rounds: PositiveInt | None = None

    judging: ClassVar[Act] = JudgedByMixture()
    passes_on: ClassVar[tuple[str, ...]] = ()

    @property
    def needs_outer(self) -> bool:
        return False

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        return (MixtureSteps(self.local, iteration, self.momentum, self.weight_decay),)

    def check(self, scene: Scene) -> None:
        super().check(scene)
        check_mixture(self, scene.problem, scene.sizes.outer)

    def model_of(self, client: int, final: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The models, mixed in the client's own way."""
        return final["inner"][0], final["clients/log_pi"][client]

    def adaptation(self, problem: Problem, steps: int | None) -> Act:
        """New clients find their weights."""
        return weights_found(self, problem, steps)


@dataclass(frozen=True)
class MixtureSteps(LocalRound):
    """E and M step of every client; θ_k ← mean θ_ik"""

    steps: LocalSteps
    iteration: int
    momentum: float
    weight_decay: float

    phase = "em"
    kind = "y"
    reads = ("y",)
    answers = ("y",)
    levels = LEVELS | {"log_pi": "outer", "m": "inner"}

    def remembered(self, sizes: Sizes) -> dict[str, int]:
        names = ("log_pi", "m") if self.momentum else ("log_pi",)
        return {name: self.length(name, sizes) for name in names}

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        """Those of the E step too."""
        return self.steps.samples(sizes["inner"], clients) + sizes["inner"]

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        q, log_pi = expectation(at, board["y"], memory["log_pi"])
        theta, loss, kept = self.steps.remembering(
            at.mixture(q), board["y"], memory, self.momentum, self.iteration, decay(self.weight_decay)
        )
        return Answer({"y": theta}, {"loss": loss}, {"log_pi": log_pi, **kept})


@dataclass(frozen=True)
class WeightsFound(Act):
    """Everybody is judged by the models as they are, mixed as E and π steps from uniform weights find."""

    steps: int

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {}

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        y = inbox["y"]
        log_pi = torch.zeros_like(inbox["lam"])
        for _ in range(self.steps):
            _, log_pi = expectation(at, y, log_pi)
        return Judged(y, log_pi)


def weights_found(method: object, problem: Problem, steps: int | None) -> Act:
    """How new clients of FedEM adapt: in 10 steps, unless they are given."""
    count = 0 if problem.mixture is None else problem.mixture.count
    check_mixture(method, problem, count)
    return WeightsFound(10 if steps is None else steps)


def check_mixture(method: object, problem: Problem, weights: int) -> None:
    """Refuse a problem that is no mixture of models with a weight for each, and nothing else."""
    name = type(method).__name__
    if problem.mixture is None:
        raise ScenarioError(
            f"{name} fits a mixture of models, and problem {problem.name!r} is none; use "
            "personalized_classification(…, personalize='mtl'), or give your problem a Mixture(…)"
        )
    if problem.draws or problem.buffers is not None:
        raise ScenarioError(
            f"problem {problem.name!r} draws, or has buffers, as it is trained (dropout, BatchNorm), and "
            f"{name} fits plain functions of models and samples; leave such layers out"
        )
    if weights != problem.mixture.count:
        raise ScenarioError(
            f"the mixture of problem {problem.name!r} has {problem.mixture.count} models, and its outer "
            f"variable {weights} numbers; {name} judges clients by one weight for each model"
        )


@torch.no_grad()
def expectation(at: At, theta: Tensor, log_pi: Tensor) -> tuple[Tensor, Tensor]:
    """The E step at θ (one for all, or a row for each client): q of all training samples of the block (zero
    where nobody asks), and the new log π (k, K).
    """
    problem, layout, train = at.derivatives.problem, at.derivatives.inner, at.train
    assert problem.mixture is not None, "checked before the run"
    most = samples_at_once(train)
    q = log_pi.new_zeros(train.total, log_pi.shape[1])
    pi = torch.empty_like(log_pi)
    for place, row in enumerate(at.rows.tolist()):
        models = layout.views_one(theta if theta.ndim == 1 else theta[place])
        first, size = int(train.offsets[row]), int(train.sizes[row])
        for start in range(first, first + size, most):
            stop = min(start + most, first + size)
            losses = problem.mixture.losses(models, tuple(t[start:stop] for t in train.tensors))
            q[start:stop] = torch.softmax(log_pi[place] - losses.mT, -1)  # Bayes' rule
        pi[place] = q[first : first + size].mean(0)
    return q, pi.clamp_min(torch.finfo(pi.dtype).tiny).log()
