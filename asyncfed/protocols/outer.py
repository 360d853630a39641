"""Steps on the outer variable: everybody on its own (PDBO), or towards a common one (CDBO)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.network.links import Network, require_strongly_connected
from asyncfed.network.timing import Timing
from asyncfed.network.weights import Weights
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.layout import Layout
from asyncfed.protocols.phase import Emission, Estimate, Opening, PhaseDefaults, Site, Steps, Tensors, whole

OuterRate = float | Mapping[str, float]
Start = Literal["fresh", "warm"]


def check_outer(outer_steps: int, outer_lr: OuterRate, start: str) -> None:
    """Refuse settings that no outer loop can have."""
    if not whole(outer_steps) or outer_steps < 0:
        raise ScenarioError(f"outer_steps is {outer_steps!r}; it must be a whole number, at least 0")
    if start not in ("fresh", "warm"):
        raise ScenarioError(
            f"start is {start!r}; it must be 'fresh' (every inner problem from the same initial values) or "
            "'warm' (from where the last one ended)"
        )
    rates = outer_lr if isinstance(outer_lr, Mapping) else {"": outer_lr}
    for part, rate in rates.items():
        if not 0 < rate < float("inf"):
            name = f"outer_lr of {part!r}" if part else "outer_lr"
            raise ScenarioError(f"{name} is {rate}; it must be finite and above 0")


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


@dataclass(frozen=True)
class OuterStep(PhaseDefaults):
    """λ_i ← λ_i − rate · hypergradient (001 Alg. 1, line 7), or one step of Adam; nothing is sent."""

    outer_lr: OuterRate
    optimizer: Literal["adam", "sgd"] = "adam"
    betas: tuple[float, float] = (0.9, 0.999)
    start: Start = "fresh"

    name = "outer"
    kind = "none"
    steps = 0
    batch = 1
    sends = False
    judged = False
    needs_outer = True
    ends_outer_step = True

    def begin(self, site: Site, carried: Tensors) -> Opening:
        lam = carried["outer"]
        memory = {
            "lam": lam,
            "gradient": carried["hypergradient"],
            "rate": rates_by_part(self.outer_lr, site.derivatives.outer, lam).expand_as(lam),
            "inner": site.start if self.start == "fresh" else carried["inner"],
        }
        if self.optimizer == "adam":
            for name in ("adam_mean", "adam_square"):
                memory[name] = carried.get(name, torch.zeros_like(lam))
            memory["adam_steps"] = carried.get("adam_steps", torch.zeros_like(lam[:, :1]))
        return Opening({}, memory)

    def step(
        self,
        derivatives: Derivatives,
        absorbed: Tensors,
        memory: Tensors,
        batch: tuple[Tensor, ...],
        steps: Steps,
        room: Tensors,
    ) -> Emission:
        raise AssertionError("an outer step has no rounds")

    def estimate(self, absorbed: Tensors, memory: Tensors) -> Estimate:
        return Estimate(memory["inner"], memory["lam"])

    def finish(self, absorbed: Tensors, memory: Tensors) -> Tensors:
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
class OuterPush(PhaseDefaults):
    """Rounds of SGP (4b) on λ, of which the first brings in the hypergradient: outer consensus.

    The hypergradient of client i is that of (1/n) Σ F, so it is taken n times: the mean over clients then
    moves by the gradient of (1/n) Σ F in the common λ.
    """

    outer_lr: OuterRate
    steps: int = 1
    start: Start = "fresh"

    name = "outer-push"
    kind = "outer-push"
    batch = 1
    judged = False
    needs_outer = True
    ends_outer_step = True

    def check(self, network: Network, weights: Weights, timing: Timing) -> None:
        require_strongly_connected(network)

    def begin(self, site: Site, carried: Tensors) -> Opening:
        lam = carried["outer"]
        rate = rates_by_part(self.outer_lr, site.derivatives.outer, lam)
        memory = {
            "descent": -rate * site.n * carried["hypergradient"],
            "inner": site.start if self.start == "fresh" else carried["inner"],
        }
        absorbed = {
            "z": carried.get("outer_z", lam).clone(),
            "omega": carried.get("outer_omega", torch.ones_like(lam[:, :1])).clone(),
        }
        return Opening(absorbed, memory)

    def step(
        self,
        derivatives: Derivatives,
        absorbed: Tensors,
        memory: Tensors,
        batch: tuple[Tensor, ...],
        steps: Steps,
        room: Tensors,
    ) -> Emission:
        first = torch.from_numpy(steps == 0).to(memory["descent"])[:, None]
        return Emission(absorbed, residue={"z": memory["descent"] * first})

    def estimate(self, absorbed: Tensors, memory: Tensors) -> Estimate:
        return Estimate(memory["inner"], absorbed["z"] / absorbed["omega"])

    def finish(self, absorbed: Tensors, memory: Tensors) -> Tensors:
        final = self.estimate(absorbed, memory)
        return {
            "outer": final.outer,
            "inner": final.inner,
            "outer_z": absorbed["z"],
            "outer_omega": absorbed["omega"],
        }
