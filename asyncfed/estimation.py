"""A hypergradient once, for those who only want the estimator.

estimate = asyncfed.hypergradient(problem, topology, method=VRHGP(rounds=200), inner=SGP(steps=500, lr=0.1))
estimate.values     # every client's, (n, d_outer)
estimate.error      # distance from the dense truth, where that is affordable
estimate.rounds, estimate.bytes     # of communication, from the trace
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import networkx as nx
import numpy as np
import torch
from torch import Tensor

from asyncfed.checks import NonNegativeInt, PathLike, checked
from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.markup import panel
from asyncfed.network.expectations import require_stationary
from asyncfed.network.timing import Lockstep, Timing
from asyncfed.network.weights import Uniform, Weights
from asyncfed.problems import Derivatives, Params, Problem
from asyncfed.protocols import (
    HGP,
    VRHGP,
    EpochSGP,
    EstimateHypergradient,
    ExactBackprop,
    ITDBackward,
    ITDForward,
)
from asyncfed.protocols.pdbo import Estimator, Hypergradient, Inner
from asyncfed.result import Result
from asyncfed.runner import run
from asyncfed.scenario import Scenario
from asyncfed.truth import (
    InnerMap,
    Point,
    affordable,
    dense_hypergradient,
    expected_matrix,
    stationary_omega,
    stationary_point,
)

if TYPE_CHECKING:
    import pandas as pd

_PUSH = "push"  # messages of the inner steps


@dataclass(frozen=True, eq=False)
class HypergradientEstimate:
    """What came out, and what it cost."""

    values: Tensor  # (n, d_outer): of (1/n) Σ F in every client's own outer variable
    point: Point  # where it was estimated
    truth: Tensor | None  # the dense hypergradient at the same point, where it is affordable
    history: Tensor | None  # (rounds, n, d_outer): the estimate after every round, where it was recorded
    result: Result
    _problem: Problem

    @property
    def error(self) -> float | None:
        """‖values − truth‖ over all clients."""
        return None if self.truth is None else float((self.values.double() - self.truth).norm())

    @property
    def relative_error(self) -> float | None:
        if self.truth is None or self.error is None:
            return None
        return self.error / max(float(self.truth.norm()), 1e-300)

    @property
    def rounds(self) -> int:
        """Rounds of communication that the estimate took, beside those of the inner steps."""
        return int(self._cost["steps"].sum())

    @property
    def bytes(self) -> int:
        return int(self._cost["bytes"].sum())

    @property
    def messages(self) -> int:
        return int(self._cost["sent"].sum())

    @cached_property
    def _cost(self) -> pd.DataFrame:
        phases = self.result.trace.phases()
        return phases[phases["kind"] != _PUSH]

    def of(self, client: int) -> Params:
        """One client's, in the names and shapes of the outer variable."""
        return Derivatives.of(self._problem).outer.views_one(self.values[client])

    def __repr__(self) -> str:
        known = "" if self.error is None else f", error {self.error:.3g} of {float(self.truth.norm()):.3g}"  # type: ignore[union-attr]
        return f"<HypergradientEstimate of {len(self.values)} clients{known}, {self.rounds} rounds>"

    def _repr_html_(self) -> str:
        known = {}
        if self.truth is not None:
            known["error"] = f"{self.error:.3g} of {float(self.truth.norm()):.3g} ({self.relative_error:.1%})"
        cost = f"{self.rounds:,} rounds, {self.messages:,} messages, {self.bytes:,} bytes"
        about = {"clients": f"{len(self.values):,}", "outer variables of each": f"{self.values.shape[1]:,}"}
        return panel("Hypergradient estimate", about | known | {"cost": cost, "run": str(self.result.path)})


@checked
def hypergradient(
    problem: Problem,
    topology: nx.Graph,
    method: Hypergradient | str = "vr-hgp",
    *,
    inner: Inner,
    rounds: NonNegativeInt = 100,
    at: Literal["solve", "stationary"] | Mapping[str, Any] = "solve",
    weights: Weights | None = None,
    timing: Timing | None = None,
    seed: int = 0,
    precision: Literal["float32", "float64"] = "float64",
    truth: bool | Literal["auto"] = "auto",
    record: bool = False,
    out: PathLike | None = None,
    **options: Any,
) -> HypergradientEstimate:
    """Estimate every client's hypergradient once.

    Parameters
    ----------
    method
        `HGP(…)`, `VRHGP(…)`, `ExactBackprop(…)`, `ITDForward(…)`, `ITDBackward()`, or one of their names
        ("hgp", "vr-hgp", "exact", "itd-forward", "itd-backward") with `rounds`.
    inner
        The inner steps, which decide order, learning rate, minibatches and weight decay.
    at
        Where: "solve" runs the inner steps first. "stationary" solves the expected iteration densely (small
        problems). A mapping gives the variables: "inner" (n, d), "outer" (n, d_outer), and "omega" (n, 1),
        which without saying is the stationary one. At given variables nobody has seen the network yet, so
        p̄ and δ̄ are exact.
    truth
        Whether to compute B̄ (I − Ā)⁻¹ c^y + c^λ at the same point; "auto" does where n·d is small enough,
        the network loses nothing and all clients have the same mean pace.
    record
        Keep the estimate after every round (`history`).
    options
        Of `asyncfed.run`: backend, clients_per_actor, device, address, progress.
    """
    method = _named(method, rounds) if isinstance(method, str) else method
    if record:
        if not isinstance(method, (HGP, VRHGP)):
            raise ScenarioError(
                f"{type(method).__name__} has no estimate before its last round; leave out record, or use "
                "HGP or VRHGP"
            )
        method = replace(method, record=True)
    timing, weights = timing or Lockstep(), weights or Uniform()
    network = timing.network(topology)
    heard, sharing = (network, weights) if inner.sends else (network.silent(), Uniform())
    p_bar = expected_matrix(heard, *sharing.prepare(heard).expected())
    step = InnerMap(inner.backward_lr, inner.order, inner.weight_decay)
    pace = timing.pace(network, network.n, inner.samples_per_step(problem))
    in_step = not inner.sends or bool(np.ptp(pace) <= 1e-9 * pace.max())
    alike = not (isinstance(inner, EpochSGP) and inner.weighted)  # all clients count the same
    if not alike and not (isinstance(at, str) and at == "solve"):
        raise ScenarioError(
            f"{type(inner).__name__}(weighted=True) has push-sum weights of its own, which only its steps "
            "lead to; estimate at='solve', or with weighted=False"
        )
    comparable = network.lossless and in_step and heard.stationary and alike
    if truth is True and not (comparable and affordable(problem)):
        raise ScenarioError(
            "there is no dense truth to compare with: it is that of the lockstep iteration, for networks "
            "that lose nothing and do not change with time, clients of the same mean pace that count the "
            "same, and small problems; leave out truth=True"
        )
    initial: dict[str, Tensor] = {}
    solve = isinstance(at, str) and at == "solve"
    if not solve:
        require_stationary(heard)
        if isinstance(method, (HGP, VRHGP)):
            method = replace(method, expectations="exact")
        if isinstance(at, Mapping):
            initial = _given(at)
            if "omega" not in initial:
                initial["omega"] = stationary_omega(p_bar) if inner.sends else torch.ones(network.n, 1)
        elif not inner.sends:
            raise ScenarioError(
                f"{type(inner).__name__} has no stationary point in common: everybody is alone; let it solve "
                "the inner problems (at='solve'), or give the variables"
            )
        elif not in_step:
            raise ScenarioError(
                "where clients go at different paces the stationary point is not that of the lockstep "
                "iteration; let SGP solve the inner problem (at='solve'), or give the variables"
            )
        else:
            point = stationary_point(problem, p_bar, step)
            initial = {"inner": point.x, "outer": point.lam, "omega": point.omega}
    scenario = Scenario(
        problem=problem,
        topology=topology,
        protocol=EstimateHypergradient(inner, method, solve),
        timing=timing,
        weights=weights,
        seed=seed,
        precision=precision,
        name="hypergradient",
    )
    result = run(scenario, out=out, initial=initial, **{"progress": False} | options)
    final = result.final
    x = final["inner"]
    there = Point(x, final.get("omega", torch.ones_like(x[:, :1])), final["outer"])
    wanted = truth is True or (truth == "auto" and affordable(problem) and comparable)
    return HypergradientEstimate(
        final["hypergradient"],
        there,
        dense_hypergradient(problem, p_bar, _as_used(step, method), there) if wanted else None,
        final["history"].transpose(0, 1) if record else None,
        result,
        problem,
    )


def _named(name: str, rounds: int) -> Estimator:
    makers: dict[str, Callable[[], Estimator]] = {
        "hgp": lambda: HGP(rounds),
        "vr-hgp": lambda: VRHGP(rounds),
        "exact": lambda: ExactBackprop(rounds),
        "itd-forward": lambda: ITDForward(gather=rounds),
        "itd-backward": ITDBackward,
    }
    if name not in makers:
        raise UnknownNameError("hypergradient method", name, makers)
    return makers[name]()


def _given(at: Mapping[str, Tensor]) -> dict[str, Tensor]:
    known = ("inner", "outer", "omega")
    for name in at:
        if name not in known:
            raise UnknownNameError("variable to estimate at", name, known)
    return dict(at)


def _as_used(step: InnerMap, method: Estimator) -> InnerMap:
    """With the method's own learning rate, where it has one."""
    own = getattr(method, "lr", None)
    return step if own is None else replace(step, lr=own)
