"""Steps on the outer variable: everybody on its own (PDBO), or towards a common one (CDBO)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncfed.checks import PositiveFloat
from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.network.links import require_strongly_connected
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.layout import Layout
from asyncfed.protocols.at import At
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.part import Inbox, Judged, Part, Scene, Sizes, Start, Step, Steps, Tensors
from asyncfed.protocols.settings import StartFrom
from asyncfed.protocols.soundness import small_weight

OuterRate = PositiveFloat | Mapping[str, PositiveFloat]


def rates_by_part(outer_lr: OuterRate, layout: Layout, like: Tensor) -> Tensor:
    """The learning rate of every entry of the outer variable (d_outer,)."""
    if not isinstance(outer_lr, Mapping):
        return like.new_full((layout.d,), float(outer_lr))
    if layout.names is None:
        raise ScenarioError(
            f"outer_lr names {', '.join(outer_lr)}, but the outer variable is a single tensor without named "
            "parts; give one number"
        )
    parts = layout.names
    for name in outer_lr:
        if name not in parts:
            raise UnknownNameError("part of the outer variable in outer_lr", name, parts)
    missing = [name for name in parts if name not in outer_lr]
    if missing:
        raise ScenarioError(f"outer_lr says nothing of {', '.join(missing)}; give every part a rate")
    return torch.cat(
        [
            like.new_full((size,), float(outer_lr[name]))
            for name, size in zip(parts, layout.sizes, strict=True)
        ]
    )


def check_parts_of_rate(outer_lr: OuterRate, scene: Scene) -> None:
    """Refuse rates for parts that λ does not have."""
    rates_by_part(outer_lr, Derivatives.of(scene.problem).outer, torch.empty(0, dtype=torch.float64))


@dataclass(frozen=True)
class OuterStep(Part):
    """λ_i ← λ_i − rate · hypergradient (001 Alg. 1, line 7), or one step of Adam; nothing is sent."""

    outer_lr: OuterRate
    optimizer: Literal["adam", "sgd"] = "adam"
    betas: tuple[float, float] = (0.9, 0.999)
    begins: StartFrom = "fresh"

    name = "outer"
    kind = "none"
    steps = 0
    batch = 1
    sends = False
    judged = False
    needs_outer = True
    ends_outer_step = True
    passes_on = ("hypergradient", "adam_mean", "adam_square", "adam_steps")

    def check(self, scene: Scene) -> None:
        check_parts_of_rate(self.outer_lr, scene)

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        return Cost()

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {}

    def start(self, at: At, carried: Tensors) -> Start:
        lam = carried["outer"]
        memory = {
            "lam": lam,
            "gradient": carried["hypergradient"],
            "rate": rates_by_part(self.outer_lr, at.derivatives.outer, lam).expand_as(lam),
            "inner": at.starting_inner if self.begins == "fresh" else carried["inner"],
        }
        if self.optimizer == "adam":
            for name in ("adam_mean", "adam_square"):
                memory[name] = carried.get(name, torch.zeros_like(lam))
            memory["adam_steps"] = carried.get("adam_steps", torch.zeros_like(lam[:, :1]))
        return Start({}, memory)

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(memory["inner"], memory["lam"])

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        lam, gradient, rate = memory["lam"], memory["gradient"], memory["rate"]
        if self.optimizer == "sgd":
            return {"outer": lam - rate * gradient, "inner": memory["inner"]}
        first, second = self.betas
        count = memory["adam_steps"] + 1
        mean = first * memory["adam_mean"] + (1 - first) * gradient
        square = second * memory["adam_square"] + (1 - second) * gradient.square()
        step = (mean / (1 - first**count)) / ((square / (1 - second**count)).sqrt() + 1e-8)
        return {
            "outer": lam - rate * step,
            "inner": memory["inner"],
            "adam_mean": mean,
            "adam_square": square,
            "adam_steps": count,
        }


@dataclass(frozen=True)
class OuterPush(Part):
    """Rounds of SGP (4b) on λ, of which the first brings in the hypergradient: outer consensus.

    The hypergradient of client i is that of (1/n) Σ F, so it is taken n times: the mean over clients then
    moves by the gradient of (1/n) Σ F in the common λ.
    """

    outer_lr: OuterRate
    steps: int = 1
    begins: StartFrom = "fresh"

    name = "outer-push"
    kind = "outer-push"
    batch = 1
    judged = False
    needs_outer = True
    ends_outer_step = True
    passes_on = ("hypergradient", "outer_z", "outer_omega")
    exact = ("omega", "outer_omega")
    conserves = True

    def check(self, scene: Scene) -> None:
        require_strongly_connected(scene.network)
        check_parts_of_rate(self.outer_lr, scene)

    def cost(self, scene: Scene, steps: Steps) -> Cost:
        return Cost()

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {"z": sizes.outer, "omega": 1}

    def start(self, at: At, carried: Tensors) -> Start:
        lam = carried["outer"]
        rate = rates_by_part(self.outer_lr, at.derivatives.outer, lam)
        memory = {
            "descent": -rate * at.n * carried["hypergradient"],
            "inner": at.starting_inner if self.begins == "fresh" else carried["inner"],
        }
        absorbed = {
            "z": carried.get("outer_z", lam).clone(),
            "omega": carried.get("outer_omega", torch.ones_like(lam[:, :1])).clone(),
        }
        return Start(absorbed, memory)

    def step(self, at: At, inbox: Inbox, memory: Tensors) -> Step:
        first = torch.from_numpy(at.steps == 0).to(memory["descent"])[:, None]
        return Step(dict(inbox), residue={"z": memory["descent"] * first})

    def explain(self, inbox: Inbox, row: int) -> str | None:
        return small_weight(inbox["omega"], row)

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        return Judged(memory["inner"], inbox["z"] / inbox["omega"].to(inbox["z"]))

    def finish(self, at: At, inbox: Inbox, memory: Tensors) -> Tensors:
        final = self.judge(at, inbox, memory)
        return {
            "outer": final.outer,
            "inner": final.inner,
            "outer_z": inbox["z"],
            "outer_omega": inbox["omega"],
        }
