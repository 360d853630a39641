"""SimFBO against its update written out in numpy, and against the closed form of bilevel quadratics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncfed import Scenario, ScenarioError, VirtualTime, run
from asyncfed.data.sampling import Sampler
from asyncfed.problems import bilevel_quadratic
from asyncfed.problems.bilevel_quadratic import shared_solution
from asyncfed.protocols import LocalSteps, Server, SimFBO
from asyncfed.rng import Streams
from tests.protocols.served import Array, Quadratics, iterates, serve, watched
from topologies import star

TAU = (1, 3, 2, 4)
ETA = (0.3, 0.2, 0.1)  # of y, v, x
START = {"x": np.array([0.4, -0.2]), "y": np.array([0.5, -1.0, 0.3])}


def simfbo(rounds: int, **changes: Any) -> SimFBO:
    settings: dict[str, Any] = {"inner": LocalSteps(ETA[0], steps=TAU), "v_lr": ETA[1], "outer_lr": ETA[2]}
    return SimFBO(rounds, **(settings | changes))


def transcription(
    o: Quadratics, x: Array, y: Array, v: Array, S: list[int], gamma: Any, normalise: bool, divide: bool
) -> tuple[Array, Array, Array]:
    """One round, line by line."""
    sums = []
    for i in S:
        x_i, y_i, v_i = x, y, v
        eta_y, eta_v, eta_x = (eta / TAU[i] if divide else eta for eta in ETA)
        total = [np.zeros_like(y), np.zeros_like(v), np.zeros_like(x)]
        for _ in range(TAU[i]):
            d_y = o.g_y(i, x_i, y_i)
            d_v = o.g_yy(i, x_i, y_i) @ v_i - o.f_y(i, x_i, y_i)
            d_x = o.f_x(i, x_i, y_i) - o.g_xy(i, x_i, y_i) @ v_i
            y_i, v_i, x_i = y_i - eta_y * d_y, v_i - eta_v * d_v, x_i - eta_x * d_x
            total = [total[0] + d_y, total[1] + d_v, total[2] + d_x]
        sums.append([one / TAU[i] for one in total] if normalise else total)
    d_y, d_v, d_x = (np.mean([own[place] for own in sums], axis=0) for place in range(3))
    return x - gamma[2] * d_x, y - gamma[0] * d_y, v - gamma[1] * d_v


@pytest.mark.parametrize(
    ("gamma", "normalise", "divide"),
    [(None, True, False), ((0.5, 0.4, 0.2), True, True), ((0.1, 0.2, 0.05), False, False)],
)
def test_rounds_are_those_of_the_algorithm(gamma: Any, normalise: bool, divide: bool, tmp_path: Path) -> None:
    """On a curved problem, with some clients at a time and different numbers of local steps."""
    problem = watched(bilevel_quadratic(clients=4, curved=True))
    sets = [[0, 2, 3], [1, 2], [0, 1, 2, 3]]
    protocol = simfbo(
        7,
        inner=LocalSteps(ETA[0], steps=TAU, divide=divide),
        server_rates=gamma,
        normalise=normalise,
        server=Server(sets),
    )
    result = serve(problem, protocol, tmp_path / "run", start=START)
    o, x, y, v = Quadratics.of(problem), START["x"], START["y"], np.zeros(3)
    xs, ys = iterates(result, "x"), iterates(result, "y")
    for k in range(7):
        x, y, v = transcription(o, x, y, v, sets[k % 3], gamma or ETA, normalise, divide)
        np.testing.assert_allclose(xs[k + 1], x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(ys[k + 1], y, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.final["v"][0].numpy(), v, rtol=0, atol=1e-12)


def test_one_local_step_leads_to_the_bilevel_solution_in_one_round_per_iteration(tmp_path: Path) -> None:
    """Different quadratics, everybody asked: x, y, and v = (mean A)⁻¹ (y − mean t)."""
    problem = bilevel_quadratic(clients=4, seed=9)
    protocol = SimFBO(90, LocalSteps(1.0), outer_lr=0.5)
    result = serve(problem, protocol, tmp_path / "run", every=90)
    x, y = shared_solution(problem)
    A, _, _, t, _ = (tensor.mean(0) for tensor in problem.data.train.tensors)
    for name, expected in {"outer": x, "inner": y, "v": torch.linalg.solve(A, y - t)}.items():
        np.testing.assert_allclose(result.final[name][0], expected, rtol=0, atol=1e-10)
    assert result.trace.communication_rounds() == 90
    last = result.metrics.iloc[-1]
    assert (last["step"], last["outer_step"]) == (90, 90)
    assert set(result.trace.to_pandas().bytes) == {8 * (3 + 3 + 2)}  # three vectors, down and up


def test_more_local_steps_count_no_more_unless_the_sums_are_left_as_they_are(tmp_path: Path) -> None:
    """As local rates go to 0, the fixed point is the solution of the mean; without the division that of the
    clients weighed by τ_i. At local rates that stay both are off by a drift of the order of the rates.
    """
    problem = bilevel_quadratic(clients=4, seed=9)
    solutions = {True: shared_solution(problem), False: shared_solution(problem, TAU)}
    assert float((solutions[True][0] - solutions[False][0]).abs().max()) > 0.1
    for normalise, (x, y) in solutions.items():
        gamma = tuple(rate / (1 if normalise else np.mean(TAU)) for rate in (1.0, 1.0, 0.8))
        errors = []
        for eta in (4e-3, 2e-3):
            local = LocalSteps(eta, steps=TAU)
            protocol = SimFBO(30, local, eta, server_rates=gamma, normalise=normalise)
            start = {"x": x, "y": y}
            final = serve(problem, protocol, tmp_path / f"{normalise} {eta}", start=start, every=30).final
            errors.append(
                max(float((final["outer"][0] - x).abs().max()), float((final["inner"][0] - y).abs().max()))
            )
        assert errors[0] < 0.05
        assert errors[1] == pytest.approx(errors[0] / 2, rel=0.1)


def test_every_direction_has_minibatches_of_its_own(tmp_path: Path) -> None:
    """One round of one local step by hand, with the samples of each draw."""
    problem = bilevel_quadratic(clients=3, noise=0.5, samples=6, seed=1)
    start = {"inner": torch.ones(1, 3).double(), "outer": torch.ones(1, 2).double()}
    scenario = Scenario(
        problem,
        star(3),
        SimFBO(1, LocalSteps(0.3, batch=2), 0.1, v_lr=0.2),
        precision="float64",
        seed=5,
    )
    v = torch.full((1, 3), 0.5).double()
    final = run(scenario, out=tmp_path / "run", initial=start | {"v": v}).final
    sampler = Sampler(Streams(5), np.full(3, 6), np.arange(3))
    A, b, R, t, s = (array.numpy().reshape(3, 6, *array.shape[1:]) for array in problem.data.train.tensors)
    x, y, v_0 = np.ones(2), np.ones(3), np.full(3, 0.5)
    d_y, d_v, d_x, seen = [], [], [], set()
    for i in range(3):
        y_g, v_g, v_f, x_f, x_g = (
            sampler.without_replacement(i, 0, 2, f"minibatch {what} 0")
            for what in ("y of g", "v of g", "v of f", "x of f", "x of g")
        )
        seen |= {tuple(draw) for draw in (y_g, v_g, v_f, x_f, x_g)}
        d_y.append(np.mean([A[i, k] @ (y - b[i, k]) + R[i, k] @ x for k in y_g], axis=0))
        d_v.append(A[i, v_g].mean(0) @ v_0 - (y - t[i, v_f].mean(0)))
        d_x.append(0.1 * (x - s[i, x_f].mean(0)) - R[i, x_g].mean(0).T @ v_0)
    assert len(seen) > 5
    for name, expected in {
        "inner": y - 0.3 * np.mean(d_y, axis=0),
        "v": v_0 - 0.2 * np.mean(d_v, axis=0),
        "outer": x - 0.1 * np.mean(d_x, axis=0),
    }.items():
        np.testing.assert_allclose(final[name][0].numpy(), expected, rtol=0, atol=1e-13)


def test_a_round_takes_three_times_its_local_steps(tmp_path: Path) -> None:
    problem = bilevel_quadratic(clients=4)
    protocol = simfbo(2, inner=LocalSteps(0.1, steps=(1, 2, 2, 5)))
    result = serve(problem, protocol, tmp_path / "run", timing=VirtualTime(0.5))
    assert result.metrics["virtual_time"].iloc[-1] == 2 * 3 * 5 * 0.5


def test_a_run_goes_on_where_another_ended(tmp_path: Path) -> None:
    problem = bilevel_quadratic(clients=4, curved=True)
    scenario = Scenario(problem, star(4), simfbo(5), precision="float64")
    half = run(replace(scenario, protocol=simfbo(3)), out=tmp_path / "half").final
    rest = run(replace(scenario, protocol=simfbo(2)), out=tmp_path / "rest", initial=half).final
    whole = run(scenario, out=tmp_path / "whole").final
    assert whole.keys() == rest.keys() == {"inner", "outer", "v"}
    for name, value in whole.items():
        assert torch.equal(value, rest[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"server_rates": (0.1, 0.1)}, r"SimFBO: server_rates"),
        ({"server_rates": (0.1, 0.0, 0.1)}, "SimFBO: server_rates"),
        ({"v_lr": -1.0}, "SimFBO: v_lr is -1"),
        ({"outer_lr": "fast"}, "SimFBO: outer_lr is 'fast'; it must be a finite number above 0, StepDecay"),
        ({"inner": 0.1}, r"inner is 0\.1; it must be LocalSteps"),
        ({"outer_steps": -1}, "outer_steps is -1"),
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        replace(simfbo(1), **change)
