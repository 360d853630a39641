"""AggITD against its algorithm boxes (000 Alg. 1–4), transcribed line by line, and against Eq. 5 and Eq. 2.

On curved problems, where the Hessian is another one at every iterate y^t.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from asyncfed import ScenarioError
from asyncfed.problems import bilevel_quadratic, shared_hypergradient
from asyncfed.protocols import AggITD, LocalSteps, Server
from asyncfed.protocols.aggitd import Gather
from asyncfed.rng import Streams
from tests.protocols.served import Array, Quadratics, asked, fed_inn, fed_out_steps, iterates, serve, watched

N, LAM = 3, 0.35
BETA, TAU = 0.3, (1, 3, 2, 4)
ALPHA, TAU_OUT = 0.2, (2, 1, 3, 1)
START = {"x": np.array([0.4, -0.2]), "y": np.array([0.5, -1.0, 0.3])}


class Iteration(NamedTuple):
    x: Array
    y: Array
    p: Array
    h: Array


def curved() -> Any:
    return watched(bilevel_quadratic(clients=4, curved=True))


def aggitd(outer_steps: int = 1, **changes: Any) -> AggITD:
    settings: dict[str, Any] = {
        "inner": LocalSteps(BETA, steps=TAU),
        "outer": LocalSteps(ALPHA, steps=TAU_OUT),
        "inner_rounds": N,
        "scale": LAM,
    }
    return AggITD(outer_steps, **(settings | changes))


def transcription(
    o: Quadratics, x: Array, y: Array, Q: int, S: list[int] | None = None, svrg: bool = True
) -> Iteration:
    """One outer iteration of Alg. 1 (with λ in line 6 and z^N in line 15)."""
    clients = range(o.n) if S is None else S
    alphas, betas = [ALPHA] * o.n, [BETA] * o.n
    z = np.zeros_like(y)
    for t in range(N + 1):
        if t == Q:
            z = np.mean([o.f_y(i, x, y) for i in clients], axis=0)
        elif t > Q:
            z = np.mean([z - LAM * o.g_yy(i, x, y) @ z for i in clients], axis=0)
        if t < N:
            y = fed_inn(o, x, y, betas, TAU, clients) if svrg else _plain(o, x, y)
    p = LAM * (N + 1) * z
    h = np.mean([o.f_x(i, x, y) - o.g_xy(i, x, y) @ p for i in clients], axis=0)
    return Iteration(fed_out_steps(o, x, y, h, alphas, TAU_OUT, clients), y, p, h)


def _plain(o: Quadratics, x: Array, y: Array) -> Array:
    ends = []
    for i in range(o.n):
        y_i = y
        for _ in range(TAU[i]):
            y_i = y_i - BETA * o.g_y(i, x, y_i)
        ends.append(y_i)
    return np.asarray(np.mean(ends, axis=0))


def drawn(protocol: AggITD, iteration: int, streams: Streams) -> int:
    """Q, from the rounds of an iteration: how many passes of the loop come before the one that begins."""
    passes = [round for round in protocol.rounds(iteration, streams) if isinstance(round, Gather)]
    return [one.begins for one in passes].index(True)


@pytest.mark.parametrize("solver", ["svrg", "sgd"])
def test_every_q_gives_the_estimate_of_the_algorithm_box_and_their_mean_is_equation_5(
    solver: str, tmp_path: Path
) -> None:
    o = Quadratics.of(curved())
    found = []
    for Q in range(N + 1):
        result = serve(curved(), aggitd(q=Q, solver=solver), tmp_path / str(Q), start=START)
        expected = transcription(o, START["x"], START["y"], Q, svrg=solver == "svrg")
        for name, value in zip(("outer", "inner", "p", "h"), expected, strict=True):
            np.testing.assert_allclose(result.final[name][0].numpy(), value, rtol=0, atol=1e-13)
        found.append(result.final["p"][0].numpy())

    x, y = START["x"], [START["y"]]
    for _ in range(N):
        y.append(fed_inn(o, x, y[-1], [BETA] * 4, TAU) if solver == "svrg" else _plain(o, x, y[-1]))
    eq_5 = np.zeros(3)
    for Q in range(N + 1):
        product = np.eye(3)
        for t in range(N, Q, -1):  # the newest on the left
            product = product @ (np.eye(3) - LAM * o.mean(o.g_yy, x, y[t]))
        eq_5 += LAM * product @ o.mean(o.f_y, x, y[Q])
    np.testing.assert_allclose(np.mean(found, axis=0), eq_5, rtol=0, atol=1e-13)


def test_a_run_is_the_algorithm_box_iteration_by_iteration(tmp_path: Path) -> None:
    """With Q drawn anew, warm starts and two of four clients, the same through a whole iteration."""
    protocol = aggitd(6, server=Server(participation=0.5))
    result = serve(curved(), protocol, tmp_path / "run", start=START, seed=0)
    o, everybody = Quadratics.of(curved()), asked(result)
    xs, ys = iterates(result, "x"), iterates(result, "y")
    x, y = START["x"], START["y"]
    groups, numbers = set(), set()
    for k in range(6):
        sets = everybody[k * (2 * N + 3) : (k + 1) * (2 * N + 3)]
        assert sets == [sets[0]] * (2 * N + 3)
        Q = drawn(protocol, k, Streams(0))
        x, y, *_ = transcription(o, x, y, Q, sets[0])
        np.testing.assert_allclose(xs[k + 1], x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(ys[k + 1], y, rtol=0, atol=1e-12)
        groups.add(tuple(sets[0]))
        numbers.add(Q)
    assert len(groups) > 2
    assert numbers == set(range(N + 1))


def test_a_fresh_start_begins_every_inner_loop_where_the_first_began(tmp_path: Path) -> None:
    o = Quadratics.of(curved())
    result = serve(curved(), aggitd(3, q=1, start="fresh"), tmp_path / "run", start=START)
    x = START["x"]
    for k in range(3):
        x, y, *_ = transcription(o, x, START["y"], 1)
        np.testing.assert_allclose(iterates(result, "x")[k + 1], x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(iterates(result, "y")[k + 1], y, rtol=0, atol=1e-12)


def test_q_is_uniform_over_all_of_0_to_n() -> None:
    """χ² with 3 degrees of freedom is below 16.3 in all but one of a thousand cases."""
    protocol, streams = aggitd(), Streams(3)
    counts = np.bincount([drawn(protocol, k, streams) for k in range(4000)], minlength=N + 1)
    assert len(counts) == N + 1
    assert ((counts - 1000) ** 2 / 1000).sum() < 16.3


def test_as_n_grows_the_mean_over_q_becomes_the_hypergradient(tmp_path: Path) -> None:
    """Equation 2, here in closed form: all modes of both the inner loop and the series shrink to a tenth or
    less in every round, as the eigenvalues of the mean Hessian lie in (0.9, 1.1) and the step sizes are 1.
    """
    problem = bilevel_quadratic(clients=4, curvature=(0.9, 1.1), seed=1)
    truth = shared_hypergradient(problem, torch.from_numpy(START["x"])).numpy()
    errors = []
    for n in (1, 2, 3, 5, 7):
        found = []
        for Q in range(n + 1):
            protocol = AggITD(1, LocalSteps(1.0), LocalSteps(1e-9), inner_rounds=n, scale=1.0, q=Q)
            found.append(serve(problem, protocol, tmp_path / f"{n} {Q}", start=START).final["h"][0].numpy())
        errors.append(np.linalg.norm(np.mean(found, axis=0) - truth))
    assert (np.diff(errors) < 0).all()
    assert errors[0] > 1e-2
    assert errors[-1] < 1e-8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.0}, r"AggITD: scale is 0"),
        ({"q": 4}, r"q is 4; it must be 'random' or a number in 0\.\.3"),
        ({"q": -1}, "q is -1"),
        ({"q": 1.5}, r"q is 1\.5"),
        ({"solver": "adam"}, "solver is 'adam'; it must be 'svrg' or 'sgd'"),
        ({"inner_rounds": 0}, "inner_rounds is 0; it must be a whole number, at least 1"),
        ({"start": "cold"}, "AggITD: start is 'cold'; it must be 'fresh'"),
        ({"inner": 0.1}, r"inner is 0\.1; it must be LocalSteps"),
        ({"server": 3}, "server is 3; it must be Server"),
        ({"batch": 0}, "batch is 0"),
        ({"max_rounds": 0}, "max_rounds is 0"),
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        aggitd(**change)
