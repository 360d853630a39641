"""Personalized decentralized bilevel optimization (001 Alg. 1), and its relatives with a common λ (App. E).

    for s in outer steps:   y_i ← T steps of SGP at λ_i(s)
                            h_i ← hypergradient at y_i, by HGP, VR-HGP, …
                            λ_i ← one step of Adam (or SGD) along h_i

and at the end T steps of SGP once more, at the λ that was found. Every solved inner problem is judged on test
and validation samples; what is reported is the test accuracy at the outer step of the best validation
accuracy (`Result.best`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal, Protocol, runtime_checkable

from asyncfed.checks import PositiveInt, Range, Words
from asyncfed.errors import ScenarioError
from asyncfed.problems.problem import Problem
from asyncfed.protocols.at import At
from asyncfed.protocols.backward import Backward, outer_terms
from asyncfed.protocols.epoch_sgp import EpochSGP
from asyncfed.protocols.hgp import HGP
from asyncfed.protocols.itd import ITDBackward, ITDForward
from asyncfed.protocols.outer import OuterPush, OuterRate, OuterStep
from asyncfed.protocols.part import Act, AmongPeers, Inbox, Judged, Part, Sizes, Tensors, drawing_from
from asyncfed.protocols.peer_fedem import PeerFedEM
from asyncfed.protocols.settings import OuterSteps, StartFrom
from asyncfed.protocols.sgp import SGP
from asyncfed.protocols.vr_hgp import VRHGP
from asyncfed.registry import register


@runtime_checkable
class Estimator(Protocol):
    """A way to a hypergradient."""

    def with_inner(self, inner: SGP) -> tuple[Part, ...]:
        """The inner steps and the estimate, which is carried on as "hypergradient"."""


Inner = Annotated[SGP, Words("SGP(…), DSGD(…), EpochSGP(…), PeerFedAvg(…) or Local(…)")]
Hypergradient = Annotated[
    Estimator, Words("HGP(…), VRHGP(…), ExactBackprop(…), ITDForward(…) or ITDBackward()")
]
Beta = Annotated[float, Range(0, 1, below=True)]


@register("method")
@dataclass(frozen=True)
class PDBO(AmongPeers):
    """Everybody its own λ.

    Parameters
    ----------
    inner
        `SGP(…)` or one of its special cases, with the number of inner steps; `EpochSGP(…)` for one
        communication per local epoch, as in the paper on fixed networks.
    hypergradient
        `VRHGP(rounds=…)`, `HGP(…)`, `ExactBackprop(…)`, `ITDForward()` or `ITDBackward()`.
    outer_steps
        How often λ is stepped.
    outer_lr
        Learning rate of λ: a number, or one for each part ({"ensemble": 1.0, "labels": 0.1}).
    optimizer
        "adam" (with `betas`) or "sgd".
    start
        "fresh": every inner problem begins at the initial model, as in the paper. "warm": where the last one
        ended.
    draws
        "fresh": every outer step sees minibatches and links of its own. "repeated": all see those of the
        first, as in the authors' code, so that they differ by λ alone.
    """

    inner: Inner
    hypergradient: Hypergradient
    outer_steps: OuterSteps
    outer_lr: OuterRate = 0.1
    optimizer: Literal["adam", "sgd"] = "adam"
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    start: StartFrom = "fresh"
    draws: Literal["fresh", "repeated"] = "fresh"

    def __post_init__(self) -> None:
        _check_together(self.inner, self.hypergradient)

    def parts(self) -> tuple[Part, ...]:
        step = OuterStep(self.outer_lr, self.optimizer, self.betas, self.start)
        once = (*self.hypergradient.with_inner(self.inner), step)
        last = self.inner.parts()
        if self.draws == "repeated":
            once, last = _from_the_first(once), _from_the_first(last)
        return (*(once * self.outer_steps), *last)

    def adaptation(self, problem: Problem, steps: int | None) -> Act:
        """New clients step their λ, and leave the model as it is."""
        step = OuterStep(self.outer_lr, self.optimizer, self.betas, "warm")
        return OuterFound(step, self.outer_steps if steps is None else steps)


@dataclass(frozen=True)
class OuterFound(Act):
    """Everybody is judged by the model as it is, with the λ_i that steps along ∂_λ F_i lead to: of the
    hypergradient only the direct part is left, for the model does not depend on it.
    """

    rule: OuterStep
    steps: int

    def carries(self, sizes: Sizes) -> dict[str, int]:
        return {}

    def judge(self, at: At, inbox: Inbox, memory: Tensors) -> Judged:
        carried: Tensors = {"inner": inbox["y"], "outer": inbox["lam"]}
        for _ in range(self.steps):
            _, carried["hypergradient"] = outer_terms(at, carried)
            begun = self.rule.start(at, carried)
            carried |= self.rule.finish(at, inbox, begun.memory)
        return Judged(carried["inner"], carried["outer"])


@register("method")
@dataclass(frozen=True)
class CDBO(AmongPeers):
    """One λ for all: SGP on λ with the hypergradient, `consensus` rounds per outer step (001 App. E).

    With `inner=Local(…)` every client solves its inner problem alone: CDBO-Local.
    """

    inner: Inner
    hypergradient: Hypergradient
    outer_steps: OuterSteps
    outer_lr: OuterRate = 0.1
    consensus: PositiveInt = 1
    start: StartFrom = "fresh"

    def __post_init__(self) -> None:
        _check_together(self.inner, self.hypergradient)

    def parts(self) -> tuple[Part, ...]:
        step = OuterPush(self.outer_lr, self.consensus, self.start)
        once = (*self.hypergradient.with_inner(self.inner), step)
        return (*(once * self.outer_steps), *self.inner.parts())


@register("method")
@dataclass(frozen=True)
class CompareHypergradients(AmongPeers):
    """Several methods at the same variables, after the same steps of `inner`: what method k finds is carried
    on as "hypergradient/k".
    """

    inner: Inner
    methods: tuple[HGP | VRHGP, ...]

    def parts(self) -> tuple[Part, ...]:
        backward = (Backward(method, self.inner, f"/{k}") for k, method in enumerate(self.methods))
        return (*self.inner.parts(), *backward)


@register("method")
@dataclass(frozen=True)
class EstimateHypergradient(AmongPeers):
    """The hypergradient once: after the steps of `inner`, or (`solve=False`) at the variables the run starts
    from.
    """

    inner: Inner
    hypergradient: Hypergradient
    solve: bool = True

    def __post_init__(self) -> None:
        _check_together(self.inner, self.hypergradient)

    @property
    def passes_on(self) -> tuple[str, ...]:
        """It may begin with all that steps of `inner` left, made or not."""
        return (*self.inner.passes_on, *super().passes_on)

    def parts(self) -> tuple[Part, ...]:
        if self.solve:
            return self.hypergradient.with_inner(self.inner)
        alone = getattr(self.hypergradient, "alone", None)
        if alone is None:
            raise ScenarioError(
                f"{type(self.hypergradient).__name__} differentiates the inner steps themselves, so it "
                "cannot estimate at given variables; let it solve the inner problem, or use HGP or VRHGP"
            )
        parts: tuple[Part, ...] = alone(self.inner)
        return parts


def _from_the_first(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The parts of an outer step with the draws of the first, which begins with the run."""
    lengths = [part.steps + part.closing for part in parts]
    begins = accumulate(lengths[:-1], initial=0)
    return tuple(drawing_from(part, begin) for part, begin in zip(parts, begins, strict=True))


def _check_together(inner: SGP, hypergradient: Estimator) -> None:
    """Refuse what cannot go together."""
    if isinstance(inner, PeerFedEM):
        raise ScenarioError(
            "inner is PeerFedEM(…), which finds the clients' weights itself; use it on its own, or "
            "EpochSGP(…) as inner"
        )
    if isinstance(inner, EpochSGP) and isinstance(hypergradient, (ITDBackward, ITDForward)):
        raise ScenarioError(
            f"{type(hypergradient).__name__} differentiates the inner steps one by one, and EpochSGP(…) "
            "makes whole epochs between two messages; use HGP or VRHGP"
        )
