"""FedNest against its algorithm boxes (004 Alg. 1–4), line by line, and against closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncfed import ScenarioError
from asyncfed.data import client_data_from_lists
from asyncfed.problems import (
    Problem,
    bilevel_quadratic,
    compositional,
    compositional_solution,
    quadratic,
    shared_solution,
)
from asyncfed.protocols import (
    AggITD,
    Diminishing,
    FedAvgS,
    FedNest,
    FedNestSGD,
    LFedNest,
    LFedNestNonAlt,
    LFedNestSVRG,
    LocalSteps,
    Neumann,
    Server,
)
from asyncfed.rng import Streams
from tests.protocols.served import Array, Quadratics, asked, fed_inn, fed_out_steps, iterates, serve, watched

BETA, TAU, T = 0.3, (1, 3, 2, 4), 2
ALPHA, TAU_OUT = 0.2, (2, 1, 3, 1)
NEUMANN = Neumann(terms=4, scale=0.4)
START = {"x": np.array([0.4, -0.2]), "y": np.array([0.5, -1.0, 0.3])}


def curved() -> Any:
    return watched(bilevel_quadratic(clients=4, curved=True))


def fednest(outer_steps: int, kind: type[FedNest] = FedNest, **changes: Any) -> FedNest:
    settings: dict[str, Any] = {
        "inner": LocalSteps(BETA, steps=TAU),
        "outer": LocalSteps(ALPHA, steps=TAU_OUT),
        "inner_rounds": T,
        "neumann": NEUMANN,
    }
    return kind(outer_steps, **(settings | changes))


# --- line by line ------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["warm", "fresh"])
@pytest.mark.parametrize("divide", [False, True])
def test_a_run_is_the_algorithm_boxes_iteration_by_iteration(
    divide: bool, start: str, tmp_path: Path
) -> None:
    """With N' drawn anew, half of the clients anew for every factor, and everybody's own number of steps."""
    seed, outer_steps = 6, 5
    protocol = fednest(
        outer_steps,
        inner=LocalSteps(BETA, steps=TAU, divide=divide),
        outer=LocalSteps(Diminishing(ALPHA), steps=TAU_OUT, divide=divide),
        server=Server(participation=0.5),
        start=start,
    )
    result = serve(curved(), protocol, tmp_path / "run", start=START, seed=seed)
    o, sets = Quadratics.of(curved()), iter(asked(result))
    beta = [BETA / tau if divide else BETA for tau in TAU]
    x, y = START["x"], START["y"]
    numbers = set()
    for k in range(outer_steps):
        y = START["y"] if start == "fresh" else y
        alpha = [ALPHA / (1 + k) / (tau if divide else 1) for tau in TAU_OUT]
        for _ in range(T):  # Alg. 1 line 3
            S = next(sets)
            assert next(sets) == S
            y = fed_inn(o, x, y, beta, TAU, S)
        products = int(Streams(seed).uniforms("neumann", k, 0, 1)[0] * 4)
        p = 4 * 0.4 * o.mean(o.f_y, x, y, next(sets))  # Alg. 3
        for _ in range(products):
            p = p - 0.4 * o.mean(o.g_yy, x, y, next(sets)) @ p
        S = next(sets)  # Alg. 2
        h = o.mean(o.f_x, x, y, S) - o.mean(o.g_xy, x, y, S) @ p
        assert next(sets) == S
        x = fed_out_steps(o, x, y, h, alpha, TAU_OUT, S)
        np.testing.assert_allclose(iterates(result, "x")[k + 1], x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(iterates(result, "y")[k + 1], y, rtol=0, atol=1e-12)
        numbers.add(products)
    assert next(sets, None) is None
    assert len(numbers) > 2


def test_the_sgd_variant_differs_in_the_inner_steps_alone(tmp_path: Path) -> None:
    protocol = fednest(1, FedNestSGD, neumann=Neumann(4, 0.4, "fixed"))
    result = serve(curved(), protocol, tmp_path / "run", start=START)
    o, x, y = Quadratics.of(curved()), START["x"], START["y"]
    for _ in range(T):
        ends = []
        for i in range(4):
            y_i = y
            for _ in range(TAU[i]):
                y_i = y_i - BETA * o.g_y(i, x, y_i)
            ends.append(y_i)
        y = np.mean(ends, axis=0)
    p = 4 * 0.4 * o.mean(o.f_y, x, y)
    for _ in range(4):
        p = p - 0.4 * o.mean(o.g_yy, x, y) @ p
    h = o.mean(o.f_x, x, y) - o.mean(o.g_xy, x, y) @ p
    x = fed_out_steps(o, x, y, h, [ALPHA] * 4, TAU_OUT)
    np.testing.assert_allclose(result.final["inner"][0].numpy(), y, rtol=0, atol=1e-13)
    np.testing.assert_allclose(result.final["outer"][0].numpy(), x, rtol=0, atol=1e-13)


# --- rounds ------------------------------------------------------------------------------------------

STEPS = LocalSteps(0.1, steps=2)


@pytest.mark.parametrize(("n", "t"), [(1, 3), (4, 1)])
def test_rounds_of_an_outer_iteration_are_those_of_the_papers_counted_from_the_trace(
    n: int, t: int, tmp_path: Path
) -> None:
    common: dict[str, Any] = {"inner": STEPS, "outer": STEPS}
    nested = common | {"neumann": Neumann(n, 0.1, "fixed")}
    protocols = {
        FedNest(2, inner_rounds=t, **nested): 2 * t + n + 3,
        FedNestSGD(2, inner_rounds=t, **nested): t + n + 3,
        LFedNest(2, inner_rounds=t, **nested): t + 1,
        LFedNestSVRG(2, inner_rounds=t, **nested): 2 * t + 1,
        LFedNestNonAlt(2, **nested): 1,
        FedAvgS(2, **common): 1,
        AggITD(2, inner_rounds=t, **common): 2 * t + 3,
        FedNest(2, inner_rounds=t, setting="minimax", **nested): 2 * t + 2,
        FedNest(2, inner_rounds=t, setting="compositional", **nested): 2 * t + 3,
        FedNest(2, inner_rounds=t, setting="single", **nested): 2 * t,
        AggITD(2, inner_rounds=t, solver="sgd", q=0, **common): t + 3,
        AggITD(2, inner_rounds=t, solver="sgd", q=t, **common): t + 3,
    }
    for number, (protocol, rounds) in enumerate(protocols.items()):
        result = serve(bilevel_quadratic(clients=2), protocol, tmp_path / str(number))
        assert result.trace.communication_rounds() == 2 * rounds, protocol


def per_iteration(result: Any, last: str = "x") -> list[list[str]]:
    """What was answered in each round, up to and including the one that changes x."""
    iterations: list[list[str]] = [[]]
    for kind in result.trace.rounds()["kind"]:
        iterations[-1].append(kind)
        if kind == last:
            iterations.append([])
    return iterations[:-1]


def test_with_n_drawn_an_iteration_has_as_many_rounds_as_were_drawn(tmp_path: Path) -> None:
    result = serve(bilevel_quadratic(clients=2), fednest_of_two(8), tmp_path / "run", seed=4)
    drawn = [NEUMANN.count(Streams(4), k) for k in range(8)]
    assert len(set(drawn)) > 2
    assert [len(rounds) for rounds in per_iteration(result)] == [2 * T + number + 3 for number in drawn]
    assert per_iteration(result)[0] == ["q", "y"] * T + ["p"] * (drawn[0] + 1) + ["h", "x"]


def fednest_of_two(outer_steps: int) -> FedNest:
    return FedNest(outer_steps, inner=STEPS, outer=STEPS, inner_rounds=T, neumann=NEUMANN)


def test_whatever_q_is_drawn_an_iteration_has_as_many_rounds_and_z_travels_with_the_rest(
    tmp_path: Path,
) -> None:
    n = 3
    drawn = [int(Streams(4).uniforms("Q", k, 0, 1)[0] * (n + 1)) for k in range(8)]
    assert len(set(drawn)) > 2
    for solver, each in (("svrg", ["q", "y"]), ("sgd", ["y"])):
        protocol = AggITD(8, STEPS, STEPS, inner_rounds=n, solver=solver)  # type: ignore[arg-type]
        result = serve(bilevel_quadratic(clients=2), protocol, tmp_path / solver, seed=4)
        for q, rounds in zip(drawn, per_iteration(result), strict=True):
            plain = each * q
            both = ["q+z", "y"] if solver == "svrg" else ["z+y"]
            assert rounds == [*plain, *both * (n - q), "z", "h", "x"]


# --- where it ends -----------------------------------------------------------------------------------


def test_it_ends_at_the_bilevel_solution_however_different_the_clients(tmp_path: Path) -> None:
    """On quadratics an iteration is affine in (x, y), and what 18 of them leave is the largest eigenvalue of
    that map, 0.3, to the 18th power: 4e-10. Eigenvalues of Ā lie in (0.95, 1.03), and the series leaves
    0.05^7 = 8e-10.
    """
    problem, tau = bilevel_quadratic(clients=4, curvature=(0.85, 1.2), seed=10), (2, 1, 3, 2)
    o = Quadratics.of(problem)

    def iteration(z: Array) -> Array:
        x, y = z[:2], z[2:]
        for _ in range(2):
            y = fed_inn(o, x, y, [0.5] * 4, tau)
        p = np.linalg.solve(o.A.mean(0), o.mean(o.f_y, x, y))
        h = o.mean(o.f_x, x, y) - o.mean(o.g_xy, x, y) @ p
        return np.concatenate([fed_out_steps(o, x, y, h, [0.31] * 4, [2] * 4), y])

    slope = np.stack([iteration(unit) - iteration(np.zeros(5)) for unit in np.eye(5)], axis=1)
    assert np.abs(np.linalg.eigvals(slope)).max() < 0.3

    protocol = FedNest(
        18,
        inner=LocalSteps(0.5, steps=tau),
        outer=LocalSteps(0.62, steps=2, divide=True),
        inner_rounds=2,
        neumann=Neumann(6, 1.0, "sum"),
    )
    final = serve(problem, protocol, tmp_path / "run", every=18).final
    x, y = shared_solution(problem)
    torch.testing.assert_close(final["outer"][0], x, rtol=0, atol=1e-8)
    torch.testing.assert_close(final["inner"][0], y, rtol=0, atol=1e-8)


@pytest.mark.parametrize("method", ["fednest", "aggitd"])
def test_with_random_estimates_and_diminishing_steps_it_ends_there_too(method: str, tmp_path: Path) -> None:
    """FedNest with N = 4 and AggITD with N = 3 draw one of the same four terms, and in the mean have the same
    truncated series, so that both tend to the zero of the hypergradient with that series, 1.3e-4 from
    the bilevel solution. Around it x is linear stochastic approximation with steps α_k: its covariance C
    solves G C + C Gᵀ = α_K Σ up to O(α_K), with G the slope of the mean and Σ the covariance of the
    estimate. The distance lies within 3 √tr C, and the run began 100 times as far away.
    """
    problem, n, terms = bilevel_quadratic(clients=4, curvature=(0.7, 1.4), seed=16), 40, 4
    o = Quadratics.of(problem)
    A, R, t, s = o.A.mean(0), o.R.mean(0), o.t.mean(0), o.s.mean(0)
    series = [np.linalg.matrix_power(np.eye(3) - A, k) for k in range(terms)]  # with λ = 1
    J, y_0 = -np.linalg.solve(A, R), np.linalg.solve(A, np.einsum("nij,nj->i", o.A, o.b) / 4)
    K = R.T @ np.sum(series, axis=0)
    G = o.pull * np.eye(2) - K @ J
    limit = np.linalg.solve(G, o.pull * s + K @ (y_0 - t))
    truth = shared_solution(problem)[0].numpy()
    assert np.linalg.norm(limit - truth) == pytest.approx(1.3e-4, rel=0.01)

    schedule = Diminishing(1.0, after=6)
    if method == "fednest":
        protocol: Any = FedNest(
            n, inner=LocalSteps(1.0), outer=LocalSteps(schedule), neumann=Neumann(terms, 1.0)
        )
    else:
        protocol = AggITD(n, LocalSteps(1.0), LocalSteps(schedule), inner_rounds=terms - 1, scale=1.0)
    x = serve(problem, protocol, tmp_path / "run", every=n, start={"x": [4.0, -4.0]}, seed=1).final["outer"]

    residual = y_0 + J @ limit - t
    estimates = np.stack([terms * R.T @ power @ residual for power in series])
    covariance = np.cov(estimates.T, bias=True) * schedule.rates(np.array([n]))[0]
    both = np.kron(G, np.eye(2)) + np.kron(np.eye(2), G)
    C = np.linalg.solve(both, covariance.ravel()).reshape(2, 2)
    bound = 3 * np.sqrt(np.trace(C))
    assert np.linalg.norm(x[0].numpy() - limit) < bound
    assert np.linalg.norm(limit - [4.0, -4.0]) > 100 * bound


def test_a_composition_is_minimised(tmp_path: Path) -> None:
    """The inner Hessian is I, so that y is exact after a step of 1; the step on x is 2 over the sum of the
    extreme curvatures, which shrinks the error by (κ − 1)/(κ + 1) in every iteration.
    """
    problem = compositional(clients=4, dimension=4, outer_dimension=2, seed=5)
    M, _, W, _ = (tensor.mean(0).numpy() for tensor in problem.data.train.tensors)
    low, *_, high = np.linalg.eigvalsh(M.T @ W @ M)
    shrinks = (high - low) / (high + low)
    count = int(np.ceil(np.log(1e-10) / np.log(shrinks)))
    protocol = FedNest(
        count,
        inner=LocalSteps(1.0),
        outer=LocalSteps(2 / (low + high), steps=(1, 2, 3, 2), divide=True),
        setting="compositional",
    )
    result = serve(problem, protocol, tmp_path / "run", every=count)
    x, y = compositional_solution(problem)
    torch.testing.assert_close(result.final["outer"][0], x, rtol=0, atol=1e-8)
    torch.testing.assert_close(result.final["inner"][0], y, rtol=0, atol=1e-8)
    assert result.trace.communication_rounds() == count * 5


def test_the_hypergradient_of_a_bent_composition_is_the_chain_rule(tmp_path: Path) -> None:
    problem = compositional(clients=4, dimension=3, outer_dimension=2, bend=0.4)
    x = torch.tensor([0.3, -0.7], dtype=torch.float64)
    protocol = FedNest(1, inner=LocalSteps(1.0), outer=LocalSteps(0.1), setting="compositional")
    result = serve(problem, protocol, tmp_path / "run", start={"x": x})
    M, c, W, t = problem.data.train.tensors
    x.requires_grad_()
    straight = M @ x
    r = (straight + c + 0.4 * straight.sin()).mean(0)
    (0.5 * torch.einsum("ni,nij,nj->n", r - t, W, r - t)).mean().backward()
    assert x.grad is not None
    torch.testing.assert_close(result.final["h"][0], x.grad, rtol=0, atol=1e-13)
    torch.testing.assert_close(result.final["outer"][0], x.detach() - 0.1 * x.grad, rtol=0, atol=1e-13)


# --- unequal clients ---------------------------------------------------------------------------------


def unequal(validation: tuple[tuple[float, ...], ...] = ((1.0,), (2.0, 4.0, 6.0))) -> Problem:
    """g_i = mean ½(y − a x)² over a, f_i = mean ½(y − b)² + ½x² over b; (1, 2, 3) and (5) are the a."""

    def half_square(value: Tensor) -> Tensor:
        return 0.5 * value.square().mean()

    def shards(values: tuple[tuple[float, ...], ...]) -> list[tuple[Tensor, ...]]:
        return [(torch.tensor(some, dtype=torch.float64),) for some in values]

    return Problem(
        name="unequal",
        data=client_data_from_lists(shards(((1.0, 2.0, 3.0), (5.0,))), validation=shards(validation)),
        inner_loss=lambda y, x, batch: half_square(y - batch[0] * x),
        outer_loss=lambda y, x, batch: half_square(y - batch[0]) + half_square(x),
        outer_split="validation",
        init_inner=lambda generator: torch.zeros(1, dtype=torch.float64),
        init_outer=lambda generator: torch.zeros(1, dtype=torch.float64),
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["FedNest", "AggITD"])
def test_a_client_counts_the_same_in_every_mean(kind: str, weighted: bool, tmp_path: Path) -> None:
    """So that there is one problem, Σ w_i f_i and Σ w_i g_i. The inner Hessian is 1: a step of 1 gives
    y = x Σ w_i mean(a), and the whole series is its first term. AggITD's with N = Q = 1 is twice that.
    """
    w = np.array([0.75, 0.25]) if weighted else np.array([0.5, 0.5])
    a, b = w @ [2.0, 5.0], w @ [1.0, 4.0]
    common: dict[str, Any] = {
        "inner": LocalSteps(1.0), "outer": LocalSteps(0.1), "server": Server(weighted=weighted),
    }  # fmt: skip
    protocol: Any = FedNest(1, neumann=Neumann(1, 1.0), **common)
    if kind == "AggITD":
        protocol = AggITD(1, scale=1.0, q=1, **common)
    result = serve(unequal(), protocol, tmp_path / "run", start={"x": np.array([0.8]), "y": np.zeros(1)})
    y = 0.8 * a
    h = 0.8 + (1 if kind == "FedNest" else 2) * a * (y - b)
    assert result.final["inner"].item() == pytest.approx(y, abs=1e-14)
    assert result.final["h"].item() == pytest.approx(h, abs=1e-13)


def test_a_client_without_samples_of_the_outer_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"client 0 has none \(1 such clients in all\)"):
        serve(unequal(((), (2.0,))), FedNest(1, inner=STEPS), tmp_path / "never")
    assert not (tmp_path / "never").exists()


# --- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"setting": "trilevel"},
            "FedNest: setting is 'trilevel'; did you mean 'bilevel'",
        ),
        ({"sampling": "never"}, "sampling is 'never'; it must be 'products', 'parts' or 'iteration'"),
        ({"start": "cold"}, "FedNest: start is 'cold'; it must be 'fresh'"),
        ({"inner_rounds": 0}, "inner_rounds is 0; it must be a whole number, at least 1"),
        ({"outer": 0.1}, r"outer is 0\.1; it must be LocalSteps"),
        ({"batch": -1}, "batch is -1"),
        ({"outer_steps": 1.5}, r"outer_steps is 1\.5"),
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        FedNest(**({"outer_steps": 1, "inner": STEPS} | change))


def test_a_problem_with_one_level_is_refused_unless_that_is_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="outer"):
        serve(quadratic(clients=2), FedNest(1, inner=STEPS), tmp_path / "never")
    assert not (tmp_path / "never").exists()
    assert serve(quadratic(clients=2), FedNest(1, inner=STEPS, setting="single"), tmp_path / "run").complete
