"""pFedMe in both forms against their boxes, and its inner solution against the proximal point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncfed import Result, ScenarioError
from asyncfed.problems import quadratic
from asyncfed.protocols import LocalSteps, PFedMe, Server
from tests.protocols.served import Array, serve
from tests.protocols.test_local_steps import SEED, SIZES, Y0, data, gradient, minibatches, problem

SETS = [[0, 2], [0, 1, 2]]  # client 3 is never asked
SERVER = Server(SETS, weighted=True)


def judged(result: Result, models: list[Array], w: Array, atol: float = 1e-12) -> None:
    """Everybody by its own model, and by the server's."""
    np.testing.assert_allclose(result.final["inner"][0].numpy(), w, rtol=0, atol=atol)
    for i, row in enumerate(result.clients.to_dict("records")):
        a, t = data()[i]
        for name, y in (("loss", models[i]), ("loss_global", w)):
            assert row[name] == pytest.approx(np.logaddexp(0, a @ y - t).mean() + 0.05 * y @ y, abs=atol)


@pytest.mark.parametrize("beta", [1.0, 0.7])
def test_rounds_are_those_of_the_original(beta: float, tmp_path: Path) -> None:
    lam, eta, prox_lr = 2.0, 0.1, 0.2
    local = LocalSteps(eta, steps=3, batch=4)
    method = PFedMe(3, local, lam=lam, prox_lr=prox_lr, prox_steps=4, beta=beta, server=SERVER)
    result = serve(problem(), method, tmp_path / "run", start={"y": Y0}, seed=SEED)
    w, models = Y0, [np.zeros(3)] * 4
    for k in range(3):
        S, ends = SETS[k % 2], []
        for i in S:
            w_i, theta = w, w
            for _, index in zip(range(3), minibatches(i, k), strict=False):
                for _ in range(4):
                    theta = theta - prox_lr * (gradient(i, theta, index) + lam * (theta - w_i))
                w_i = w_i - eta * lam * (w_i - theta)
            models[i] = theta
            ends.append(w_i)
        w = (1 - beta) * w + beta * np.average(ends, axis=0, weights=[SIZES[i] for i in S])
    judged(result, [*models[:3], w], w)
    assert result.clients["gradients"].tolist() == [3 * 3 * 4, 3 * 4, 3 * 3 * 4, 0]


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.1)])
def test_rounds_are_those_of_fedems_form(momentum: float, decay: float, tmp_path: Path) -> None:
    method = PFedMe(
        3, LocalSteps(0.2, epochs=1, batch=4), "fedem", momentum=momentum, weight_decay=decay, server=SERVER
    )
    result = serve(problem(), method, tmp_path / "run", start={"y": Y0}, seed=SEED)
    w, models, m = Y0, [Y0] * 4, [np.zeros(3)] * 4
    for k in range(3):
        S = SETS[k % 2]
        for i in S:
            if k == 1 and i == 1:  # first asked: it begins at the w of that round
                models[1] = w
            for _, index in zip(range(-(-SIZES[i] // 4)), minibatches(i, k), strict=False):
                theta = models[i]
                m[i] = momentum * m[i] + gradient(i, theta, index) + decay * theta + 1.0 * (theta - w)
                models[i] = theta - 0.2 * m[i]
        w = np.average([models[i] for i in S], axis=0, weights=[SIZES[i] for i in S])
    judged(result, [*models[:3], w], w)


def test_the_inner_solution_is_the_proximal_point(tmp_path: Path) -> None:
    """On quadratics: θ = (A + λI)⁻¹ (A b + λ w), from which w_i moves by ηλ (w − θ)."""
    given = quadratic(clients=4, dimension=3, seed=1)
    A, b = (tensor.numpy() for tensor in given.data.train.tensors)
    lam = 3.0
    method = PFedMe(1, LocalSteps(0.1, steps=1), lam=lam, prox_lr=0.2, prox_steps=60, server=Server())
    result = serve(given, method, tmp_path / "run", start={"y": Y0})
    theta = [np.linalg.solve(A[i] + lam * np.eye(3), A[i] @ b[i] + lam * Y0) for i in range(4)]
    np.testing.assert_allclose(result.final["clients/theta"].numpy(), theta, rtol=0, atol=1e-10)
    w = np.mean([Y0 - 0.1 * lam * (Y0 - own) for own in theta], axis=0)
    np.testing.assert_allclose(result.final["inner"][0].numpy(), w, rtol=0, atol=1e-10)
    messages = result.trace.to_pandas()
    assert messages["bytes"].unique().tolist() == [3 * 8], "no θ_i travels"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"form": "fedem", "beta": 0.5}, "beta is 0.5, and the form 'fedem' has none; leave it out"),
        ({"momentum": 0.9}, "momentum is 0.9, and the form 'original' has none; leave it out"),
        ({"lam": -1.0}, "lam is -1.0; it must be a finite number, at least 0, or None"),
        ({"form": "other"}, "form is 'other'; it must be 'original' or 'fedem'"),
        ({"prox_steps": 0}, "prox_steps is 0; it must be a whole number, at least 1"),
        ({"prox_lr": 0.0}, "prox_lr is 0.0; it must be a finite number above 0 or None"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        PFedMe(1, LocalSteps(0.1), **change)
