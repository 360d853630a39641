"""The inner optimizers on quadratics: where local SGD and local SVRG come to rest, in closed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncfed.problems import average_minimiser, quadratic
from asyncfed.protocols import FedAvg, FedNest, LocalSteps, Server
from tests.protocols.served import Array, serve

N, D, BETA, ROUNDS = 4, 3, 0.8, 30
TAU = (1, 2, 5, 3)


def problem() -> Any:
    return quadratic(clients=N, dimension=D, seed=1, curvature=(0.8, 1.25))


def parts() -> tuple[Array, Array]:
    A, b = (tensor.numpy() for tensor in problem().data.train.tensors)
    return A, b


def sgd(outer_steps: int, steps: LocalSteps) -> FedAvg:
    return FedAvg(outer_steps, steps, server=Server())


def svrg(outer_steps: int, steps: LocalSteps) -> FedNest:
    return FedNest(outer_steps, inner=steps, setting="single")


def sgd_rests_at(rates: Array, tau: tuple[int, ...]) -> Array:
    """y = mean [M_i y + (I − M_i) b_i] with M_i = (I − β_i A_i)^τ_i, where τ_i steps of client i lead."""
    A, b = parts()
    M = np.stack([np.linalg.matrix_power(np.eye(D) - rates[i] * A[i], tau[i]) for i in range(N)])
    right = np.einsum("nij,nj->i", np.eye(D) - M, b) / N
    return np.linalg.solve(np.eye(D) - M.mean(0), right)


@pytest.mark.parametrize("method", [sgd, svrg])
def test_with_one_step_it_is_gradient_descent_on_the_mean_loss(method: Any, tmp_path: Path) -> None:
    A, b = parts()
    y = np.array([0.3, -2.0, 1.0])
    result = serve(problem(), method(1, LocalSteps(BETA)), tmp_path / "run", start={"y": y})
    expected = y - BETA * np.mean([A[i] @ (y - b[i]) for i in range(N)], axis=0)
    np.testing.assert_allclose(result.final["inner"][0].numpy(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("divide", [False, True])
def test_several_steps_of_svrg_are_fedlin_line_by_line(divide: bool, tmp_path: Path) -> None:
    A, b = parts()
    y = np.array([0.3, -2.0, 1.0])
    steps = LocalSteps(BETA, steps=TAU, divide=divide)
    result = serve(problem(), svrg(3, steps), tmp_path / "run", start={"y": y})
    for _ in range(3):
        q = np.mean([A[i] @ (y - b[i]) for i in range(N)], axis=0)
        ends = []
        for i in range(N):
            y_i = y
            for _ in range(TAU[i]):
                y_i = y_i - (BETA / TAU[i] if divide else BETA) * (
                    A[i] @ (y_i - b[i]) - A[i] @ (y - b[i]) + q
                )
            ends.append(y_i)
        y = np.mean(ends, axis=0)
    np.testing.assert_allclose(result.final["inner"][0].numpy(), y, rtol=0, atol=1e-13)
    assert result.trace.communication_rounds() == 6


@pytest.mark.parametrize("tau", [(4, 4, 4, 4), TAU])
@pytest.mark.parametrize("divide", [False, True])
def test_local_sgd_rests_beside_the_minimiser_where_the_closed_form_says_and_svrg_at_it(
    divide: bool, tau: tuple[int, ...], tmp_path: Path
) -> None:
    """The largest eigenvalue of mean M_i, and of the map of SVRG, is 0.42 at most: 0.42^30 = 5e-12."""
    rates = BETA / np.array(tau) if divide else np.full(N, BETA)
    steps = LocalSteps(BETA, steps=tau[0] if len(set(tau)) == 1 else tau, divide=divide)
    truth, rest = average_minimiser(problem()).numpy(), sgd_rests_at(rates, tau)
    plain = serve(problem(), sgd(ROUNDS, steps), tmp_path / "sgd", every=ROUNDS).final["inner"][0].numpy()
    np.testing.assert_allclose(plain, rest, rtol=0, atol=1e-10)
    assert np.linalg.norm(rest - truth) > 1e-2
    corrected = (
        serve(problem(), svrg(ROUNDS, steps), tmp_path / "svrg", every=ROUNDS).final["inner"][0].numpy()
    )
    np.testing.assert_allclose(corrected, truth, rtol=0, atol=1e-10)


def test_with_one_step_each_local_sgd_has_no_bias(tmp_path: Path) -> None:
    plain = serve(problem(), sgd(ROUNDS, LocalSteps(BETA)), tmp_path / "run", every=ROUNDS).final["inner"][0]
    np.testing.assert_allclose(plain.numpy(), average_minimiser(problem()).numpy(), rtol=0, atol=1e-10)


def test_the_bias_vanishes_with_the_step_size(tmp_path: Path) -> None:
    """In the closed form to first order: halving β halves it."""
    truth = average_minimiser(problem()).numpy()
    bias = [np.linalg.norm(sgd_rests_at(np.full(N, beta), (4,) * N) - truth) for beta in (2e-3, 1e-3)]
    assert bias[0] / bias[1] == pytest.approx(2, rel=0.01)
