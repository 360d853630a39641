"""AsyncSGP: what it minimises at uneven paces, what becomes of what is owed, and when it is SGP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from asyncfed import Scenario, ScenarioError, VirtualTime, run
from asyncfed.problems import Problem, average_minimiser, quadratic
from asyncfed.protocols import SGP, AsyncSGP, Diminishing, StepDecay
from asyncfed.runtime.block import Observation
from topologies import stochastic_directed

Precision = Literal["float32", "float64"]
FACTORS = (0.37, 0.71, 1.0, 1.9, 6.3)
PER = sum(FACTORS) / len(FACTORS)
N = len(FACTORS)


def pace_weighted_minimiser(problem: Problem) -> torch.Tensor:
    """Where Σ λ_i ∇f_i is zero, with λ_i the steps of i per unit of time."""
    A, b = problem.data.train.tensors
    weight = 1 / torch.tensor(FACTORS, dtype=torch.float64)
    return torch.linalg.solve(torch.einsum("i,ijk->jk", weight, A), torch.einsum("i,ijk,ik->j", weight, A, b))


def uneven(protocol: Any, horizon: float = 400.0) -> Scenario:
    return Scenario(
        problem=quadratic(clients=N, dimension=3, seed=2, heterogeneity=3.0),
        topology=stochastic_directed(N, probability=(0.5, 0.9), seed=4),
        protocol=protocol,
        timing=VirtualTime(compute="uniform(0.5, 1.5)", factors=FACTORS, latency=0.3, horizon=horizon),
        precision="float64",
        evaluate_every=horizon,
    )


def mean_model(protocol: Any, out: Path) -> torch.Tensor:
    """The mean of all models at the end, weighed by ω."""
    final = run(uneven(protocol), out=out).final
    return final["z"].sum(0) / final["omega"].sum()


@pytest.mark.parametrize(("owed", "omega0"), [("gradient", 1.0), ("gradient", None), ("time", 0.2)])
def test_its_fixed_point_is_the_minimiser_of_the_average_loss_whatever_the_paces(
    owed: Literal["gradient", "time"], omega0: float | None, tmp_path: Path
) -> None:
    """Up to O(rate), so the gap shrinks as the rate does."""
    problem = uneven(SGP(1, 0.1)).problem
    truth = average_minimiser(problem)
    assert (truth - pace_weighted_minimiser(problem)).norm() > 1.2
    constant = AsyncSGP(5000, 0.2, PER, omega0, owed, batch=None)
    coarse = (mean_model(constant, tmp_path / "constant") - truth).norm()
    falling = replace(constant, lr=Diminishing(0.2, after=20))
    fine = (mean_model(falling, tmp_path / "falling") - truth).norm()
    assert fine < 0.06
    assert fine < coarse / 2


@pytest.mark.parametrize(
    "method", [SGP(5000, 0.01, order="4a", batch=None), AsyncSGP(5000, 0.01, per=None, batch=None)]
)
def test_where_every_step_counts_the_same_paces_decide_what_is_minimised(method: Any, tmp_path: Path) -> None:
    problem = uneven(method).problem
    found = mean_model(method, tmp_path / "r")
    assert (found - pace_weighted_minimiser(problem)).norm() < 0.1
    assert (found - average_minimiser(problem)).norm() > 1.0


@pytest.mark.parametrize("lr", [0.3, StepDecay(0.3, at=(4,)), Diminishing(0.3, after=3)])
@pytest.mark.parametrize("owed", ["gradient", "time"])
def test_in_lockstep_where_no_weight_is_small_it_is_sgp_to_the_bit(
    lr: Any, owed: Literal["gradient", "time"], tmp_path: Path
) -> None:
    precisions: tuple[Precision, ...] = ("float32", "float64")
    for precision in precisions:
        scenario = Scenario(
            problem=quadratic(clients=4, dimension=3, seed=1, noise=0.3),
            topology=stochastic_directed(4, probability=(0.5, 0.9), seed=3),
            protocol=SGP(12, lr, order="4a", batch=2, weight_decay=0.1),
            precision=precision,
        )
        ours = AsyncSGP(12, lr, omega0=1e-3, owed=owed, batch=2, weight_decay=0.1)
        expected = run(scenario, out=tmp_path / f"sgp {precision}").final
        found = run(replace(scenario, protocol=ours), out=tmp_path / f"ours {precision}").final
        for name in ("z", "omega", "inner"):
            assert torch.equal(found[name], expected[name])
        assert not found["owed"].any()


def test_every_gradient_is_paid_once_or_owed(tmp_path: Path) -> None:
    """By hand, for each client: what was put into z, and what is owed at the end, are Σ α τ ∇f."""
    seen: list[Observation] = []
    scenario = uneven(AsyncSGP(5000, 0.1, PER, omega0=2.0, batch=None), horizon=30.0)
    result = run(scenario, out=tmp_path / "r", tap=seen.append)
    A, b = scenario.problem.data.train.tensors
    starts = {
        (int(row.client), int(row.step)): float(row.started_at) for row in result.trace.steps().itertuples()
    }
    due, paid = torch.zeros(N, 3, dtype=torch.float64), torch.zeros(N, 3, dtype=torch.float64)
    for o in seen:
        for row, (i, step) in enumerate(zip(o.clients.tolist(), o.steps.tolist(), strict=True)):
            z, omega = o.absorbed["z"][row], o.absorbed["omega"][row]
            tau = (starts[i, step] - starts[i, step - 1]) / PER if step else 1.0
            due[i] -= 0.1 * tau * (A[i] @ (z / omega - b[i]))
            paid[i] += o.made.payload["z"][row] - z
    owed = result.final["owed"]
    assert (owed.norm(dim=1)[:4] > 0.01).all()
    torch.testing.assert_close(paid + owed, due, rtol=0, atol=1e-12)


def test_time_owed_is_paid_in_fresh_gradients_and_no_model_moves_further_than_its_bound(
    tmp_path: Path,
) -> None:
    """Written out by hand, with an ω₀ that lets debts grow."""
    seen: list[Observation] = []
    omega0 = 0.6
    scenario = uneven(AsyncSGP(5000, 0.1, PER, omega0, "time", batch=None), horizon=30.0)
    result = run(scenario, out=tmp_path / "r", tap=seen.append)
    A, b = scenario.problem.data.train.tensors
    paid = np.zeros(N)
    bound = 0
    for o in seen:
        for row, i in enumerate(o.clients.tolist()):
            z, omega = o.absorbed["z"][row], float(o.absorbed["omega"][row])
            gradient = A[i] @ (z / omega - b[i])
            moved = o.made.payload["z"][row] - z
            spent = -float(moved @ gradient / (gradient @ gradient)) / 0.1
            torch.testing.assert_close(moved, -0.1 * spent * gradient, rtol=1e-9, atol=1e-12)
            assert spent <= omega / omega0 * (1 + 1e-9)
            bound += spent > omega / omega0 * (1 - 1e-9)
            paid[i] += spent
    steps = result.trace.steps()
    began = steps.groupby("client")["started_at"].max().to_numpy()
    assert 0 < bound < len(steps)
    np.testing.assert_allclose(paid + result.final["owed"][:, 0].numpy(), 1 + began / PER, atol=1e-9)


def test_at_uneven_paces_it_stays_calm_where_sgp_blows_up(tmp_path: Path) -> None:
    """A rate at which lockstep is calm too; the largest model on the way."""

    def largest(protocol: Any, out: Path) -> float:
        seen: list[Observation] = []
        run(uneven(protocol, horizon=60.0), out=out, tap=seen.append)
        return max(float((o.absorbed["z"] / o.absorbed["omega"]).norm(dim=1).max()) for o in seen)

    assert largest(AsyncSGP(5000, 0.3, PER, 1.0, "gradient", batch=None), tmp_path / "gradient") < 12
    assert largest(AsyncSGP(5000, 0.3, PER, 0.5, "time", batch=None), tmp_path / "time") < 12
    assert largest(SGP(5000, 0.3, order="4a", batch=None), tmp_path / "sgp") > 100


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"per": 0.0}, "AsyncSGP: per is 0"),
        ({"omega0": -1.0}, "AsyncSGP: omega0 is -1"),
        ({"owed": "money"}, "owed is 'money'; it must be 'gradient' or 'time'"),
        ({"steps": -1}, "steps is -1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        AsyncSGP(**{"steps": 3, "lr": 0.1} | settings)
