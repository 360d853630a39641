"""pFedMe (T. Dinh et al. 2020, Alg. 1): a model of one's own near the mean; and its form in FedEM.

The original: everybody minimises its Moreau envelope, min_θ ℓ_i(θ) + λ/2 ‖θ − w‖², in w.

for every client asked, in parallel:   w_i ← w, θ_i ← w, and R times, with one minibatch ζ each
    K times:  θ_i ← θ_i − η_p (∇ℓ_i(θ_i; ζ) + λ (θ_i − w_i))                      the proximal point, nearly
    w_i ← w_i − η λ (w_i − θ_i)
w ← (1 − β) w + β Σ (n_i / n) w_i                                          1 round

The form in the code published with FedEM (Marfoq et al. 2021), with μ for λ: θ_i stays from round to round.

for every client asked, in parallel:   τ_i times
    θ_i ← θ_i − α (∇ℓ_i(θ_i; ζ) + wd θ_i + μ (θ_i − w))                           with momentum, where wanted
w ← Σ (n_i / n) θ_i                                                        1 round

| paper     | here       |                                                                          |
|-----------|------------|--------------------------------------------------------------------------|
| w, w_i    | y          | on the board, and answers                                                |
| θ_i       | theta      | in a client's memory; it is judged by it                                 |
| η, R      | local      | step size and number of local steps (α and τ_i in FedEM's form)          |
| η_p, K    | prox_lr, prox_steps |                                                                 |
| λ (μ), β  | lam, beta  |                                                                          |

A client that was never asked has no θ_i yet, and is judged by w.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from asyncfed.errors import ScenarioError
from asyncfed.network.buffer import AnyServer
from asyncfed.network.server import Server
from asyncfed.problems.problem import Problem
from asyncfed.protocols.adapting import require_no_steps
from asyncfed.protocols.at import At, Level
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.local_round import LocalRound
from asyncfed.protocols.local_steps import LocalSteps, Rows
from asyncfed.protocols.part import Act, Inbox, Judged, Sizes, Tensors
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

_LEVELS = LEVELS | {"theta": "inner", "m": "inner", "begun": 1}


@dataclass(frozen=True)
class JudgedByOwn(Act):
    """Everybody is judged by its own model, and by the server's too."""

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {}

    def remembered(self, sizes: Sizes) -> dict[str, int]:
        return {"theta": sizes.inner, "begun": 1}

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        x, y = inbox["x"], inbox["y"]
        return Judged(_own(memory, y), x, {"global": Judged(y, x)})


@register("method")
@dataclass(frozen=True)
class PFedMe(WithServer):
    """Personalized federated learning with Moreau envelopes, at a server.

    The metrics are those of the clients' own models θ_i; loss_global (accuracy_global, …) those of w.

    Parameters
    ----------
    outer_steps
        Rounds.
    local
        Local steps of each client, as LocalSteps(0.005, steps=20, batch=20); in FedEM's form
        LocalSteps(0.01, epochs=1, batch=128).
    form
        "original" or "fedem".
    lam
        λ, how near to w clients stay; by default 15, and 1 in FedEM's form.
    prox_lr, prox_steps, beta
        Of the original: η_p (0.09) and number K (5) of steps towards the proximal point; β (1), how far the
        server moves.
    momentum, weight_decay
        Of FedEM's form.
    server
        Whom it asks and how it waits; by default everybody, weighed by their numbers of samples.
    """

    outer_steps: NonNegativeInt
    local: LocalSteps
    form: Literal["original", "fedem"] = "original"
    lam: NonNegativeFloat | None = None
    prox_lr: PositiveFloat | None = None
    prox_steps: PositiveInt | None = None
    beta: NonNegativeFloat | None = None
    momentum: Momentum = 0.0
    weight_decay: NonNegativeFloat = 0.0
    server: AnyServer = field(default_factory=lambda: Server(weighted=True))
    max_rounds: PositiveInt | None = None

    judging: ClassVar[Act] = JudgedByOwn()
    passes_on: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        others: dict[str, float | None] = {"momentum": 0.0, "weight_decay": 0.0}
        if self.form == "fedem":
            others = {"prox_lr": None, "prox_steps": None, "beta": None}
        for name, left_out in others.items():
            value = getattr(self, name)
            if value != left_out:
                raise ScenarioError(f"{name} is {value}, and the form {self.form!r} has none; leave it out")

    @property
    def needs_outer(self) -> bool:
        return False

    @property
    def moves_buffers(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("local",) if self.form == "fedem" else ()

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        def given(value: float | None, otherwise: float) -> float:
            return otherwise if value is None else value

        if self.form == "fedem":
            mu = given(self.lam, 1.0)
            return (PulledSteps(self.local, iteration, mu, self.momentum, self.weight_decay),)
        return (
            EnvelopeSteps(
                self.local,
                iteration,
                given(self.lam, 15.0),
                given(self.prox_lr, 0.09),
                self.prox_steps or 5,
                given(self.beta, 1.0),
            ),
        )

    def model_of(self, client: int, final: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        kept = {name: final[f"clients/{name}"][client] for name in ("theta", "begun")}
        return _own(kept, final["inner"][0]), final["outer"][0]

    def adaptation(self, problem: Problem, steps: int | None) -> Act:
        """New clients do the local work of one more round, at the rate of the last."""
        require_no_steps(self, steps, "make those of `local`")
        self.local.fits(problem.clients)
        (work,) = self.rounds(max(0, self.outer_steps - 1), Streams(0))
        return AfterOneRound(work)


@dataclass(frozen=True)
class AfterOneRound(Act):
    """Everybody is judged by the model of its own that one round from w makes."""

    work: Round

    tunes = True

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {}

    def remembered(self, sizes: Sizes) -> dict[str, int]:
        return self.work.remembered(sizes)

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        x, y = inbox["x"], inbox["y"]
        answer = self.work.local(at, {"x": x[0], "y": y[0]}, memory)
        return Judged(answer.memory["theta"], x, {"global": Judged(y, x)})


@dataclass(frozen=True)
class EnvelopeSteps(Round):
    """The original."""

    steps: LocalSteps
    iteration: int
    lam: float
    prox_lr: float
    prox_steps: int
    beta: float

    phase = "inner"
    kind = "y"
    reads = ("x", "y")
    answers = ("y",)
    levels = _LEVELS
    remembers = ("theta", "begun")

    def work(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return self.prox_steps * self.steps.counts(sizes["inner"], clients).astype(float)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return self.prox_steps * self.steps.samples(sizes["inner"], clients)

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        return self.steps.cost(sizes["inner"], clients) * self.prox_steps

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        f, w = at.inner(board["x"]), board["y"]
        own, theta = w.repeat(f.k, 1), w.repeat(f.k, 1)
        counts = self.steps.counts(f.sizes, at.clients)
        eta = self.steps.rates(counts, self.iteration, w)
        losses = w.new_zeros(f.k)
        for places, batches, length in self.steps.stretches(f, w):
            rows = torch.from_numpy(places).to(w.device)
            w_i, theta_i = own[rows], theta[rows]
            for j in range(length):
                batch = tuple(tensor[j] for tensor in batches)
                for _ in range(self.prox_steps):
                    pull = self.prox_lr * self.lam * (theta_i - w_i)
                    loss = f.descend(theta_i, batch, self.prox_lr)
                    theta_i.sub_(pull)
                w_i = w_i - self.lam * eta[rows] * (w_i - theta_i)
                losses.index_add_(0, rows, loss)
            own[rows], theta[rows] = w_i, theta_i
        loss = losses / torch.from_numpy(counts).to(losses)
        return Answer({"y": own}, {"loss": loss}, {"theta": theta, "begun": torch.ones_like(memory["begun"])})

    def fold(self, board: Tensors, mean: Inbox) -> Tensors:
        return {"y": (1 - self.beta) * board["y"] + self.beta * mean["y"]}


@dataclass(frozen=True)
class PulledSteps(LocalRound):
    """The form in FedEM's code."""

    steps: LocalSteps
    iteration: int
    mu: float
    momentum: float
    weight_decay: float

    phase = "inner"
    kind = "y"
    reads = ("x", "y")
    answers = ("y",)
    levels = _LEVELS

    def remembered(self, sizes: Sizes) -> dict[str, int]:
        names = ("theta", "begun", "m") if self.momentum else ("theta", "begun")
        return {name: self.length(name, sizes) for name in names}

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        f, w = at.inner(board["x"]), board["y"]

        def pull(own: Tensor, rows: Rows) -> Tensor:
            return self.weight_decay * own + self.mu * (own - w)

        theta, loss, kept = self.steps.remembering(
            f, _own(memory, w.expand(f.k, -1)), memory, self.momentum, self.iteration, pull
        )
        begun = torch.ones_like(memory["begun"])
        return Answer({"y": theta}, {"loss": loss}, {"theta": theta, "begun": begun, **kept})


def _own(memory: Tensors, w: Tensor) -> Tensor:
    """θ_i of those who have one, w of the others."""
    return torch.where(memory["begun"] > 0, memory["theta"], w)
