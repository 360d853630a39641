"""Light FedNest (004 Alg. 5, 6) against loops written by hand, and where it ends: not where FedNest does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncfed import ScenarioError
from asyncfed.data import ClientData, ClientShards
from asyncfed.problems import (
    bilevel_quadratic,
    compositional,
    local_hypergradient_solution,
    shared_solution,
)
from asyncfed.protocols import LFedNest, LFedNestNonAlt, LFedNestSVRG, LocalSteps, Neumann, Server
from asyncfed.rng import Streams
from tests.protocols.served import Array, Quadratics, asked, fed_inn, iterates, serve, watched

BETA, TAU, T = 0.3, (1, 3, 2, 4), 2
ALPHA, TAU_OUT = 0.2, (2, 1, 3, 1)
SCALE, TERMS, SEED = 0.4, 4, 5
ROUNDS = 16
START = {"x": np.array([0.4, -0.2]), "y": np.array([0.5, -1.0, 0.3])}
LIGHT = [LFedNest, LFedNestSVRG, LFedNestNonAlt]


def curved() -> Any:
    return watched(bilevel_quadratic(clients=4, curved=True))


def sgd(o: Quadratics, i: int, x: Array, y: Array, beta: float = BETA, tau: int | None = None) -> Array:
    for _ in range(TAU[i] if tau is None else tau):
        y = y - beta * o.g_y(i, x, y)
    return y


def local_outer(o: Quadratics, i: int, x: Array, y: Array, products: str, round_: int) -> Array:
    """Alg. 5 (with ∇_y f in line 6) for one client."""
    for nu in range(TAU_OUT[i]):
        count = TERMS
        if products == "random":
            drawn = Streams(SEED).uniforms("local neumann", round_, nu, nu + 1, lane=i)[0]
            count = int(drawn * TERMS)
        factor = np.eye(3) - SCALE * o.g_yy(i, x, y)
        powers = [np.linalg.matrix_power(factor, n) for n in range(count + 1)]
        inverse = SCALE * np.sum(powers, axis=0) if products == "sum" else SCALE * TERMS * powers[count]
        x = x - ALPHA * (o.f_x(i, x, y) - o.g_xy(i, x, y) @ inverse @ o.f_y(i, x, y))
    return x


@pytest.mark.parametrize("products", ["random", "fixed", "sum"])
@pytest.mark.parametrize("kind", LIGHT)
def test_a_run_is_the_algorithm_box_iteration_by_iteration(
    kind: type[LFedNest], products: str, tmp_path: Path
) -> None:
    """Each on half of the clients: of its own for the outer part, but where both parts are one round."""
    together = kind is LFedNestNonAlt
    protocol = kind(
        2,
        inner=LocalSteps(BETA, steps=TAU),
        outer=LocalSteps(ALPHA, steps=TAU_OUT),
        inner_rounds=1 if together else T,
        neumann=Neumann(TERMS, SCALE, products),  # type: ignore[arg-type]
        server=Server(participation=0.5),
    )
    result = serve(curved(), protocol, tmp_path / "run", start=START, seed=SEED)
    o, sets = Quadratics.of(curved()), list(enumerate(asked(result)))
    x, y = START["x"], START["y"]
    rounds, others = iter(sets), 0
    for k in range(2):
        if together:
            number, S = next(rounds)
            own = [sgd(o, i, x, y) for i in S]
            x = np.mean(
                [local_outer(o, i, x, y_i, products, number) for i, y_i in zip(S, own, strict=True)], axis=0
            )
            y = np.mean(own, axis=0)
        else:
            for _ in range(T):
                inner = next(rounds)[1]
                if kind is LFedNest:
                    y = np.mean([sgd(o, i, x, y) for i in inner], axis=0)
                else:
                    assert next(rounds)[1] == inner
                    y = fed_inn(o, x, y, [BETA] * 4, TAU, inner)
            number, S = next(rounds)
            others += inner != S
            x = np.mean([local_outer(o, i, x, y, products, number) for i in S], axis=0)
        np.testing.assert_allclose(iterates(result, "x")[k + 1], x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(iterates(result, "y")[k + 1], y, rtol=0, atol=1e-12)
    assert next(rounds, None) is None
    assert together or others > 0


def test_one_draw_of_clients_can_serve_a_whole_iteration(tmp_path: Path) -> None:
    steps = LocalSteps(0.1)
    protocol = LFedNest(5, steps, steps, sampling="iteration", server=Server(participation=0.5))
    sets = asked(serve(curved(), protocol, tmp_path / "run"))
    assert [sets[2 * k] for k in range(5)] == [sets[2 * k + 1] for k in range(5)]
    assert len({tuple(S) for S in sets}) > 1


# --- where it ends -----------------------------------------------------------------------------------


def different() -> Any:
    """Eigenvalues of the A_i in (0.85, 1.2); mean local hypergradients have slopes of 1.55 and 1.70."""
    return bilevel_quadratic(clients=4, curvature=(0.85, 1.2), seed=10)


def light(kind: type[LFedNest], inner: LocalSteps, outer: LocalSteps, inner_rounds: int = 1) -> LFedNest:
    """The local series leave 0.18^10 = 4e-8 of what they begin with."""
    return kind(ROUNDS, inner, outer, inner_rounds=inner_rounds, neumann=Neumann(9, 0.98, "sum"))


def test_with_exact_inner_solutions_it_ends_at_the_zero_of_the_mean_local_hypergradient(
    tmp_path: Path,
) -> None:
    """The distance to the bilevel solution is that between the closed forms, 0.49."""
    protocol = light(LFedNestSVRG, LocalSteps(0.5, steps=(2, 1, 3, 2)), LocalSteps(0.62), inner_rounds=2)
    final = serve(different(), protocol, tmp_path / "run", every=ROUNDS).final
    x, y = local_hypergradient_solution(different())
    torch.testing.assert_close(final["outer"][0], x, rtol=0, atol=1e-6)
    torch.testing.assert_close(final["inner"][0], y, rtol=0, atol=1e-6)
    apart = float((x - shared_solution(different())[0]).norm())
    assert apart == pytest.approx(0.49, abs=0.005)
    assert float((final["outer"][0] - shared_solution(different())[0]).norm()) == pytest.approx(
        apart, abs=1e-6
    )


def test_clients_with_equal_second_derivatives_end_at_the_bilevel_solution(tmp_path: Path) -> None:
    """The same A and R for all, while b_i, t_i and s_i differ: nothing drifts, whatever the local steps.

    Where only the A_i are equal x still follows mean R_iᵀ A⁻¹ (y − t_i), not R̄ᵀ A⁻¹ (y − t̄).
    """
    some = bilevel_quadratic(clients=4, curvature=(1.0, 1.0), seed=16)
    A, b, R, t, s = some.data.train.tensors
    shards = ClientShards((A, b, R.mean(0).expand_as(R).clone(), t, s), np.ones(4, dtype=np.int64))
    problem = replace(some, data=ClientData(shards, shards, shards))
    protocol = LFedNest(
        30,
        LocalSteps(0.5, steps=3),
        LocalSteps(1.0, steps=2, divide=True),
        inner_rounds=2,
        neumann=Neumann(1, 1.0, "sum"),
    )
    final = serve(problem, protocol, tmp_path / "run", every=30).final
    x, y = shared_solution(problem)
    torch.testing.assert_close(final["outer"][0], x, rtol=0, atol=1e-8)
    torch.testing.assert_close(final["inner"][0], y, rtol=0, atol=1e-8)
    apart = local_hypergradient_solution(some)[0] - shared_solution(some)[0]
    assert float(apart.norm()) > 0.1


@pytest.mark.parametrize("kind", [LFedNest, LFedNestNonAlt])
def test_with_local_sgd_it_ends_at_the_fixed_point_of_its_affine_map(
    kind: type[LFedNest], tmp_path: Path
) -> None:
    """On quadratics an iteration is affine in (x, y): with M_i = (I − βA_i)^τ, K_i = R_iᵀA_i⁻¹ and
    c = (1 − αρ)^τ' it is

        y_i = M_i y + (I − M_i)(b_i − A_i⁻¹R_i x),   x_i = c x + (1 − c)(s_i + K_i (ŷ_i − t_i)/ρ),

    where ŷ_i is the mean of the y_i in LFedNest and y_i itself in LFedNest-NonAlt.
    """
    o, beta, tau, tau_out = Quadratics.of(different()), 0.5, 3, 2
    alpha = 0.15 if kind is LFedNestNonAlt else 0.3  # it sees y_i move with x_i's own R_i, and is steeper

    def iteration(x: Array, y: Array) -> tuple[Array, Array]:
        ys, xs = [], []
        for i in range(4):
            M = np.linalg.matrix_power(np.eye(3) - beta * o.A[i], tau)
            ys.append(M @ y + (np.eye(3) - M) @ (o.b[i] - np.linalg.solve(o.A[i], o.R[i] @ x)))
        for i in range(4):
            seen = ys[i] if kind is LFedNestNonAlt else np.mean(ys, axis=0)
            c = (1 - alpha * o.pull) ** tau_out
            K = o.R[i].T @ np.linalg.inv(o.A[i])
            xs.append(c * x + (1 - c) * (o.s[i] + K @ (seen - o.t[i]) / o.pull))
        return np.mean(xs, axis=0), np.mean(ys, axis=0)

    def flat(z: Array) -> Array:
        return np.concatenate(iteration(z[:2], z[2:]))

    zero = flat(np.zeros(5))
    slope = np.stack([flat(unit) - zero for unit in np.eye(5)], axis=1)
    assert np.abs(np.linalg.eigvals(slope)).max() ** ROUNDS < 1e-7
    z = np.linalg.solve(np.eye(5) - slope, zero)

    protocol = light(kind, LocalSteps(beta, steps=tau), LocalSteps(alpha, steps=tau_out))
    final = serve(different(), protocol, tmp_path / "run", every=ROUNDS).final
    np.testing.assert_allclose(final["outer"][0].numpy(), z[:2], rtol=0, atol=1e-6)
    np.testing.assert_allclose(final["inner"][0].numpy(), z[2:], rtol=0, atol=1e-6)
    for other in (shared_solution(different()), local_hypergradient_solution(different())):
        assert np.linalg.norm(z[:2] - other[0].numpy()) > 1e-2


# --- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"setting": "single"}, "setting is 'single'; it must be 'bilevel', 'minimax' or 'compositional'"),
        ({"sampling": "products"}, "sampling is 'products'; did you mean 'parts'"),
        ({"start": None}, "start is None; it must be 'fresh'"),
        ({"inner_rounds": 1.5}, r"inner_rounds is 1\.5; it must be a whole number"),
        ({"inner": 3}, "inner is 3; it must be LocalSteps"),
    ],
)
@pytest.mark.parametrize("kind", LIGHT)
def test_bad_settings_are_refused_by_name(kind: type[LFedNest], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        kind(**({"outer_steps": 1, "inner": LocalSteps(0.1)} | change))


def test_without_alternation_there_are_no_inner_rounds() -> None:
    with pytest.raises(
        ScenarioError, match="inner_rounds is 2; LFedNest-NonAlt has no inner rounds of its own"
    ):
        LFedNestNonAlt(1, LocalSteps(0.1), inner_rounds=2)


@pytest.mark.parametrize("kind", [LFedNest, LFedNestSVRG])
def test_in_a_composition_everybody_follows_its_own_chain_rule(kind: Any, tmp_path: Path) -> None:
    """Alg. 5, line 8, once, by automatic differentiation of f_i(r_i(x)) with ∇f_i taken at the common y."""
    problem = compositional(clients=4, dimension=3, outer_dimension=2, bend=0.4)
    x = torch.tensor([0.3, -0.7], dtype=torch.float64)
    protocol = kind(1, inner=LocalSteps(1.0), outer=LocalSteps(0.1), setting="compositional")
    result = serve(problem, protocol, tmp_path / "run", start={"x": x})
    M, c, W, t = problem.data.train.tensors
    x.requires_grad_()
    straight = M @ x
    r = straight + c + 0.4 * straight.sin()
    y = r.detach().mean(0)
    slopes = torch.einsum("nij,nj->ni", W, y - t)
    (r * slopes).sum(1).mean().backward()
    assert x.grad is not None
    torch.testing.assert_close(result.final["inner"][0], y, rtol=0, atol=1e-13)
    torch.testing.assert_close(result.final["outer"][0], x.detach() - 0.1 * x.grad, rtol=0, atol=1e-13)


def test_the_work_of_both_is_counted_by_the_samples_of_each() -> None:
    protocol = LFedNestNonAlt(1, LocalSteps(0.1, epochs=1, batch=2), LocalSteps(0.1, epochs=3, batch=2))
    (both,) = protocol.rounds(0, Streams(0))
    sizes = {"inner": np.array([10, 5]), "outer": np.array([4, 1])}
    assert both.work(sizes, np.arange(2)).tolist() == [5 + 6, 3 + 3]  # type: ignore[arg-type]
