"""Generalized meta FL (002 Alg. 1–4), and Per-FedAvg (Fallah et al. 2020), which is the case ν = 1.

Sought is a model from which ν steps on one's own data lead far: F_i(w) = f_i(w_ν).

for every client asked, in parallel:   w_i ← w, and τ times
    w_l = w_{l−1} − α ∇f_i(w_{l−1}; D_{l−1}),  l = 1..ν                             Alg. 2, lines 2–5
    d   = ∇f_i(w_ν; D_ν)                                                            line 6
    for l = ν−1 … 0:
        exact  d ← d − α ∇²f_i(w_l; D'_l) d                                         lines 7–10
        FO     d ← d                                                                Alg. 3
        HF     d ← d − (α/2δ) [∇f_i(w_l + δd; D'_l) − ∇f_i(w_l − δd; D'_l)]         Alg. 4, lines 8–10
    w_i ← w_i − β d                                                                 line 11
w ← mean w_i                                                               1 round

| paper        | here           |                                                                    |
|--------------|----------------|--------------------------------------------------------------------|
| w, w^i_{k,t} | y, w           | on the board, and each client's own on the way                      |
| ν, τ         | nu, tau        | steps of fine-tuning, local updates                                |
| α, β         | alpha, beta    | step sizes of these                                                |
| D_l, D'_l    | `Minibatches`  | all of them independent of each other                              |
| r            | server         | `Server(participation=r)`                                          |

The leftmost factor of ∇F_i = Π_l (I − α∇²f_i(w_l)) ∇f_i(w_ν) is that of w_0, so the product is applied from
ν−1 down to 0. D_ν of local update t is the minibatch that step t of `LocalSteps(…, independent=True)` uses:
with ν = 0 this is FedAvg, sample by sample.

| per local update | gradients | Hessian products | independent minibatches |
|------------------|-----------|------------------|-------------------------|
| exact            | ν + 1     | ν                | 2ν + 1                  |
| FO               | ν + 1     | 0                | ν + 1                   |
| HF               | 3ν + 1    | 0                | 2ν + 1                  |

Everybody is judged after steps of fine-tuning on its own training samples, of which nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncfed.checks import NonNegativeInt, PositiveFloat, PositiveInt
from asyncfed.errors import ScenarioError
from asyncfed.network.buffer import AnyServer
from asyncfed.network.server import Server
from asyncfed.problems.layout import aligned_rows
from asyncfed.problems.problem import Problem
from asyncfed.protocols.at import At, Level, Samples
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.local_steps import update
from asyncfed.protocols.part import Act, Inbox, Judged, Sizes, Tensors
from asyncfed.protocols.rounds import (
    Answer,
    FloatArray,
    IntArray,
    Round,
    WithServer,
)
from asyncfed.protocols.schedules import LearningRate, rate_at
from asyncfed.protocols.settings import Batch
from asyncfed.registry import register
from asyncfed.rng import Streams

Variant = Literal["exact", "fo", "hf"]


@register("method")
@dataclass(frozen=True)
class MetaFL(WithServer):
    """A model to fine-tune from, at a server.

    The metrics are those after `tuning` steps; loss_tuned_0 and loss_tuned_1 (accuracy_tuned_0, …) those
    after none and after one.

    Parameters
    ----------
    outer_steps
        Rounds.
    nu
        ν: steps of fine-tuning that the model is trained for; 0 is FedAvg.
    tau
        τ: local updates of each client in a round.
    alpha
        α: step size of fine-tuning.
    beta
        β: step size of the local updates: a number, or a schedule over the rounds.
    batch
        Size of each minibatch, drawn with replacement; None for all of a client's samples every time.
    variant
        "exact"; "fo", first-order: Hessians are left out; or "hf", Hessian-free: differences of gradients.
    delta
        δ > 0 of "hf": how far apart, in units of d, the gradients are whose difference is taken.
    tuning
        Steps of fine-tuning after which clients are judged; by default ν.
    server
        Whom it asks and how it waits; by default everybody. All answers count the same.
    """

    outer_steps: NonNegativeInt
    nu: NonNegativeInt
    tau: PositiveInt
    alpha: PositiveFloat
    beta: LearningRate
    batch: Batch = 40
    variant: Variant = "exact"
    delta: PositiveFloat | None = None
    tuning: NonNegativeInt | None = None
    server: AnyServer = field(default_factory=Server)
    max_rounds: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.variant != "hf" and self.delta is not None:
            raise ScenarioError(
                f"delta is {self.delta}, and variant {self.variant!r} takes no differences of gradients; "
                "leave delta out, or use variant='hf'"
            )
        if self.variant == "hf" and self.delta is None:
            raise ScenarioError(
                "delta is None; variant 'hf' needs a number above 0: small, and not so small that the "
                "difference of two gradients is rounding (0.001 in single precision)"
            )

    @property
    def needs_outer(self) -> bool:
        return False

    def rounds(self, iteration: int, streams: Streams) -> tuple[Round, ...]:
        beta = rate_at(self.beta, iteration)
        meta = MetaUpdates(self.nu, self.tau, self.alpha, beta, self.batch, self.variant, self.delta or 0.0)
        return (meta,)

    @property
    def judging(self) -> Act:  # type: ignore[override]
        return FineTuned(self.nu if self.tuning is None else self.tuning, self.alpha, self.batch)

    def adaptation(self, problem: Problem, steps: int | None) -> Act:
        """New clients fine-tune."""
        return self.judging if steps is None else FineTuned(steps, self.alpha, self.batch)


@register("method")
@dataclass(frozen=True)
class PerFedAvg(MetaFL):
    """Personalized FedAvg (Fallah et al. 2020): `MetaFL` with one step of fine-tuning."""

    nu: int = field(default=1, init=False, repr=False)


@dataclass(frozen=True)
class MetaUpdates(Round):
    """w_i ← w_i − β d, τ times; w ← mean w_i"""

    nu: int
    tau: int
    alpha: float
    beta: float
    size: int | None
    variant: Variant
    delta: float

    phase = "meta"
    kind = "y"
    reads = ("x", "y")
    answers = ("y",)

    def work(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        """A Hessian product counts as a step, as a gradient does."""
        each = self.cost(sizes, clients).of(len(clients))
        return (each["gradients"] + each["hessian_products"]).astype(float)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        batches = self.tau * ((1 if self.variant == "fo" else 2) * self.nu + 1)
        return np.full(len(clients), float(batches)) * (self.size or sizes["inner"])

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        update = Cost(
            gradients=(3 if self.variant == "hf" else 1) * self.nu + 1,
            hessian_products=self.nu if self.variant == "exact" else 0,
        )
        return update * self.tau

    def local(self, at: At, board: Tensors, memory: Tensors) -> Answer:
        f = at.inner(board["x"])
        data = Minibatches(f, self.size)
        w = aligned_rows(f.k, board["y"]).copy_(board["y"])
        room = Room.like(w, self.nu, self.variant)
        losses = w.new_zeros(f.k)
        for t in range(self.tau):
            losses += self.update(data, w, t, room)
        return Answer({"y": w}, {"loss": losses / self.tau})

    def update(self, data: Minibatches, w: Tensor, t: int, room: Room) -> Tensor:
        """Local update t, in place; returns the loss after ν steps."""
        path = [w]
        for l in range(self.nu):  # noqa: E741, the paper's
            path.append(data.stepped(path[l], f"{update(t)}, D {l}", self.alpha, room.path[l]))
        if room.d is None:  # d would be a gradient and no more: w moves by it as it is made
            return data.descend(path[self.nu], update(t), self.beta, w)
        d, loss = data.gradient(path[self.nu], update(t), room.d)
        for l in reversed(range(self.nu)):  # noqa: E741
            primed = f"{update(t)}, D' {l}"
            if self.variant == "exact":
                data.less_hessian(path[l], d, primed, self.alpha)
            elif self.variant == "hf":
                above, below = (
                    data.gradient(torch.add(path[l], d, alpha=shift, out=there), primed, there)[0]
                    for shift, there in zip((self.delta, -self.delta), room.shifted, strict=True)
                )
                d.sub_(above.sub_(below), alpha=self.alpha / (2 * self.delta))
        w.sub_(d, alpha=self.beta)
        return loss


class Room(NamedTuple):
    """Where the vectors of a local update are written, the same for all: to find memory anew takes long."""

    path: tuple[Tensor, ...]
    d: Tensor | None = None
    shifted: tuple[Tensor, ...] = ()

    @classmethod
    def like(cls, w: Tensor, nu: int, variant: Variant) -> Room:
        """First-order, nobody looks back at the path: one place will do for all."""
        if variant == "fo" or not nu:
            return cls((aligned_rows(len(w), w),) * nu)
        path = tuple(aligned_rows(len(w), w) for _ in range(nu))
        shifted = tuple(aligned_rows(len(w), w) for _ in range(2 if variant == "hf" else 0))
        return cls(path, aligned_rows(len(w), w), shifted)


@dataclass(frozen=True)
class FineTuned(Act):
    """Everybody is judged after some steps from the server's variables, on its own training samples."""

    steps: int
    alpha: float
    size: int | None

    tunes = True

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {}

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        x, w = inbox["x"], inbox["y"]
        data = Minibatches(at.inner(x[0]), self.size)
        path = [w]
        for number in range(max(self.steps, 1)):
            path.append(data.stepped(path[-1], f"tuning {number}", self.alpha, aligned_rows(len(w), w)))
        also = {f"tuned_{number}": Judged(path[number], x) for number in (0, 1)}
        return Judged(path[self.steps], x, also)


@dataclass(frozen=True, eq=False)
class Minibatches:
    """Derivatives of the clients' losses over independent minibatches, or over all samples."""

    f: Samples
    batch: int | None

    def stepped(self, w: Tensor, purpose: str, rate: float, into: Tensor) -> Tensor:
        """w − rate · ∇f(w), in `into`, which may be w."""
        moved = into if into is w else into.copy_(w)
        self.descend(moved, purpose, rate, moved)
        return moved

    def descend(self, w: Tensor, purpose: str, rate: float, into: Tensor) -> Tensor:
        """Move `into`, which may be w, by −rate · ∇f(w); returns the losses."""
        if self.batch is not None:
            return self.f.descend(w, self.f.drawn(self.batch, purpose), rate, into)
        found, loss = self.gradient(w, purpose)
        into.sub_(found, alpha=rate)
        return loss

    def gradient(self, w: Tensor, purpose: str, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """∇f(w), in `out` where given, which may be w; and the losses."""
        if self.batch is not None:
            return self.f.gradient(w, self.f.drawn(self.batch, purpose), out)

        def piece(places: IntArray, samples: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return self.f.gradient(w[torch.from_numpy(places).to(w.device)], samples)

        found, loss = self.f.mean(None, purpose, piece, (w.shape[1], 1))
        return found if out is None else out.copy_(found), loss.view(-1)

    def less_hessian(self, w: Tensor, d: Tensor, purpose: str, alpha: float) -> None:
        """d ← d − α ∇²f(w) d"""
        product = self.f.derivatives.inner_hessian_vector
        if self.batch is not None:
            batch = self.f.drawn(self.batch, purpose)
            product(w, self.f.lam.expand(len(w), -1), batch, d, -alpha, d, add=True)
            return

        def piece(places: IntArray, samples: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            at = torch.from_numpy(places).to(w.device)
            return (product(w[at], self.f.lam.expand(len(at), -1), samples, d[at]),)

        (found,) = self.f.mean(None, purpose, piece, (w.shape[1],))
        d.sub_(found, alpha=alpha)
