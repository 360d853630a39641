"""The saddle of 004 §4.3: who reaches it, who stalls and exactly where.

An iteration of any of these methods is affine in (x, y), and the same in every coordinate of them: a 2 × 2
matrix, and a vector for what the b_i add. With c_i the curvature in y,

    one client's simultaneous gradients    [λ −t_i; t_i c_i] (x, y) − (0, b_i).

On the paper's own problem all c_i are 1, and LFedNest with full batches has no drift: a finding, tested here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncfed import ScenarioError
from asyncfed.problems import minimax_saddle, saddle_point
from asyncfed.protocols import FedAvgS, FedNest, LFedNest, LocalSteps
from tests.protocols.served import Array, iterates, serve, watched

LAM, ALPHA, BETA = 10.0, 0.07, 0.7
N, D = 5, 2
PAPER, OTHER = (1.0, 1.0), (0.4, 1.6)


def problem(curvature: tuple[float, float] = PAPER) -> Any:
    return minimax_saddle(clients=N, dimension=D, spread=2.0, centred=False, curvature=curvature, seed=1)


def parts(curvature: tuple[float, float]) -> tuple[Array, Array, Array]:
    t, b, c = (tensor.numpy() for tensor in problem(curvature).data.train.tensors)
    return t, b, c


def saddle(curvature: tuple[float, float]) -> Array:
    """x and y, one below the other (2, D)."""
    return np.stack([part.numpy() for part in saddle_point(problem(curvature))])


def rests_at(step: Any) -> Array:
    """The fixed point (2, D) of an affine map of (2, D)."""
    zero = step(np.zeros((2, D)))
    slope = np.empty((2, 2))
    for j in range(2):
        unit = np.zeros((2, D))
        unit[j, 0] = 1
        slope[:, j] = (step(unit) - zero)[:, 0]
    assert np.abs(np.linalg.eigvals(slope)).max() < 0.35  # 0.35^25 = 4e-12
    return np.linalg.solve(np.eye(2) - slope, zero)


def final(result: Any) -> Array:
    return np.stack([result.final[name][0].numpy() for name in ("outer", "inner")])


@pytest.mark.parametrize("curvature", [PAPER, OTHER])
def test_fednest_approaches_the_saddle_linearly(curvature: tuple[float, float], tmp_path: Path) -> None:
    """With one local step and T = 2 the modes of x and y, nearly uncoupled, are 1 − αλ = 0.3 and
    (1 − βc̄)² ≈ 0.1: the slower one is the ratio of distances, after a while.
    """
    protocol = FedNest(20, LocalSteps(BETA), LocalSteps(ALPHA), inner_rounds=2, setting="minimax")
    result = serve(problem(curvature), protocol, tmp_path / "run")
    distance = result.metrics.distance.to_numpy()
    assert distance[0] > 1
    assert distance[-1] < 1e-8
    ratios = distance[6:16] / distance[5:15]
    assert ratios == pytest.approx(np.full(10, 1 - ALPHA * LAM), abs=0.01)
    np.testing.assert_allclose(final(result), saddle(curvature), rtol=0, atol=1e-8)


@pytest.mark.parametrize("curvature", [PAPER, OTHER])
def test_fednest_reaches_it_with_many_local_steps_too(curvature: tuple[float, float], tmp_path: Path) -> None:
    protocol = FedNest(
        20, LocalSteps(BETA, steps=(1, 5, 2, 4, 3)), LocalSteps(ALPHA, steps=3), setting="minimax"
    )
    result = serve(problem(curvature), protocol, tmp_path / "run", every=20)
    assert result.metrics.distance.iloc[-1] < 1e-8


def test_fedavg_s_stalls_where_the_closed_form_says(tmp_path: Path) -> None:
    """The fixed point of the mean over clients of τ simultaneous steps: clients differ in t_i alone, and that
    is enough, for in several steps the coupling is squared.
    """
    t, b, c = parts(PAPER)

    def iteration(z: Array, tau: int) -> Array:
        ends = []
        for i in range(N):
            own, M = z, np.array([[LAM, -t[i]], [t[i], c[i]]])
            for _ in range(tau):
                own = own - np.diag([ALPHA, BETA]) @ (M @ own - np.stack([np.zeros(D), b[i]]))
            ends.append(own)
        return np.asarray(np.mean(ends, axis=0))

    for tau in (1, 5):
        protocol = FedAvgS(25, LocalSteps(BETA, steps=tau), LocalSteps(ALPHA, steps=tau))
        result = serve(problem(), protocol, tmp_path / str(tau), every=25)
        rest = rests_at(lambda z, tau=tau: iteration(z, tau))
        np.testing.assert_allclose(final(result), rest, rtol=0, atol=1e-10)
        floor = np.linalg.norm(rest - saddle(PAPER))
        assert result.metrics.distance.iloc[-1] == pytest.approx(floor, abs=1e-10)
        assert floor == pytest.approx(0.0 if tau == 1 else 0.0043, abs=5e-5)


def test_lfednest_has_no_drift_on_the_papers_problem_and_does_what_fednest_does(tmp_path: Path) -> None:
    """Equal Hessians: where local SGD leads in the mean is where local SVRG does, in every iteration."""
    settings: dict[str, Any] = {
        "inner": LocalSteps(BETA, steps=5),
        "outer": LocalSteps(ALPHA, steps=3),
        "setting": "minimax",
    }
    start = {"x": np.array([1.0, -1.0]), "y": np.array([2.0, 0.5])}
    light, full = (
        serve(watched(problem()), kind(12, **settings), tmp_path / kind.__name__, start=start)
        for kind in (LFedNest, FedNest)
    )
    for name in "xy":
        np.testing.assert_allclose(iterates(light, name), iterates(full, name), rtol=0, atol=1e-13)
    np.testing.assert_allclose(final(light), saddle(PAPER), rtol=0, atol=1e-8)
    assert full.trace.communication_rounds() == 4 * 12
    assert light.trace.communication_rounds() == 2 * 12


def test_where_curvatures_differ_lfednest_stalls_where_the_closed_form_says(tmp_path: Path) -> None:
    """y ← mean [m_i y + (1 − m_i)(b_i − t_i x)/c_i] with m_i = (1 − βc_i)^τ, then x likewise at that y, where
    nothing drifts. FedNest reaches the saddle of the same problem, above.
    """
    t, b, c = parts(OTHER)
    tau, tau_out = 5, 3

    def iteration(z: Array) -> Array:
        x, y = z
        m = ((1 - BETA * c) ** tau)[:, None]
        y = (m * y + (1 - m) * (b - np.outer(t, x)) / c[:, None]).mean(0)
        kept = (1 - ALPHA * LAM) ** tau_out
        return np.stack([kept * x + (1 - kept) * t.mean() * y / LAM, y])

    protocol = LFedNest(25, LocalSteps(BETA, steps=tau), LocalSteps(ALPHA, steps=tau_out), setting="minimax")
    result = serve(problem(OTHER), protocol, tmp_path / "run", every=25)
    rest = rests_at(iteration)
    np.testing.assert_allclose(final(result), rest, rtol=0, atol=1e-10)
    floor = np.linalg.norm(rest - saddle(OTHER))
    assert result.metrics.distance.iloc[-1] == pytest.approx(floor, abs=1e-10)
    assert floor == pytest.approx(0.13, abs=0.005)


def test_fedavg_s_takes_as_many_steps_on_both_variables() -> None:
    with pytest.raises(ScenarioError, match="the same steps or epochs, not 2 and 3"):
        FedAvgS(1, LocalSteps(0.1, steps=2), LocalSteps(0.1, steps=3))
    with pytest.raises(ScenarioError, match="batches of 5 and None samples are not equally many steps"):
        FedAvgS(1, LocalSteps(0.1, epochs=2, batch=5), LocalSteps(0.1, epochs=2))
