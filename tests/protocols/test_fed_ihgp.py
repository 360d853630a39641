"""FedIHGP (004 Alg. 3) against powers of the mean Hessian, dense, at wherever the run stands.

The inner step size of these runs is too small to change y at all (1e-30), the outer one (1e-9) so small that
x stays where it is for every derivative but moves, from 0, by exactly −1e-9 · h in every iteration: so the
hypergradient h of each is read from x.
"""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncfed import ScenarioError
from asyncfed.problems import bilevel_quadratic
from asyncfed.protocols import FedNest, LocalSteps, Neumann, Server
from asyncfed.rng import Streams
from tests.protocols.served import Array, Quadratics, asked, iterates, serve, watched

N, SCALE, ALPHA = 4, 0.4, 1e-9
START = {"x": np.zeros(2), "y": np.array([0.5, -1.0, 0.3])}
X, Y = START["x"], START["y"]
Pair = tuple[int, int]


def problem(clients: int = 4) -> Any:
    return watched(bilevel_quadratic(clients=clients, curved=True))


def fednest(neumann: Neumann, outer_steps: int = 1, **changes: Any) -> FedNest:
    return FedNest(outer_steps, inner=LocalSteps(1e-30), outer=LocalSteps(ALPHA), neumann=neumann, **changes)


def powers(o: Quadratics, count: int) -> list[Array]:
    """(1/ℓ) (I − H̄/ℓ)ⁿ r̄ for n = 0, …, count − 1."""
    H, r = o.mean(o.g_yy, X, Y), o.mean(o.f_y, X, Y)
    return [SCALE * np.linalg.matrix_power(np.eye(3) - SCALE * H, n) @ r for n in range(count)]


def hypergradient(o: Quadratics, p: Array) -> Array:
    return np.asarray(o.mean(o.f_x, X, Y) - o.mean(o.g_xy, X, Y) @ p)


def seed_that_draws(products: int) -> int:
    return next(s for s in range(100) if Neumann(N, SCALE).count(Streams(s), 0) == products)


def test_every_number_of_products_gives_its_power_and_their_mean_is_the_truncated_series(
    tmp_path: Path,
) -> None:
    o, found = Quadratics.of(problem()), []
    terms = powers(o, N)
    for products in range(N):
        seed = seed_that_draws(products)
        result = serve(
            problem(), fednest(Neumann(N, SCALE)), tmp_path / str(products), start=START, seed=seed
        )
        assert result.trace.rounds()["kind"].tolist().count("p") == products + 1
        found.append(result.final["p"][0].numpy())
        np.testing.assert_allclose(found[-1], N * terms[products], rtol=0, atol=1e-13)
        np.testing.assert_allclose(
            result.final["h"][0].numpy(), hypergradient(o, N * terms[products]), rtol=0, atol=1e-13
        )
    np.testing.assert_allclose(np.mean(found, axis=0), np.sum(terms, axis=0), rtol=0, atol=1e-13)


def test_fixed_takes_all_products_and_sum_adds_up_one_term_more(tmp_path: Path) -> None:
    terms = powers(Quadratics.of(problem()), N + 1)
    for products, expected in (("fixed", N * terms[N]), ("sum", np.sum(terms, axis=0))):
        neumann = Neumann(N, SCALE, products)  # type: ignore[arg-type]
        result = serve(problem(), fednest(neumann), tmp_path / products, start=START)
        np.testing.assert_allclose(result.final["p"][0].numpy(), expected, rtol=0, atol=1e-13)


def test_as_terms_are_added_the_sum_becomes_the_solution(tmp_path: Path) -> None:
    """The slowest mode shrinks by 1 − 0.4 · (smallest eigenvalue of H̄) with every term."""
    o = Quadratics.of(problem())
    H = o.mean(o.g_yy, X, Y)
    truth = np.linalg.solve(H, o.mean(o.f_y, X, Y))
    slowest = 1 - SCALE * np.linalg.eigvalsh(H)[0]
    for terms in (3, 40):
        result = serve(problem(), fednest(Neumann(terms, SCALE, "sum")), tmp_path / str(terms), start=START)
        away = np.linalg.norm(result.final["p"][0].numpy() - truth)
        assert away <= slowest ** (terms + 1) * np.linalg.norm(truth) + 1e-13
    assert away < 1e-8


def test_n_is_drawn_uniformly_and_anew_in_every_iteration() -> None:
    """χ² with 3 degrees of freedom is below 16.3 in all but one of a thousand cases."""
    streams, neumann = Streams(5), Neumann(N, SCALE)
    drawn = np.array([neumann.count(streams, k) for k in range(4000)])
    counts = np.bincount(drawn, minlength=N)
    assert len(counts) == N
    assert ((counts - 1000) ** 2 / 1000).sum() < 16.3
    pairs = np.bincount(drawn[:-1] * N + drawn[1:], minlength=N * N)  # 15 degrees of freedom: 37.7
    assert ((pairs - 250) ** 2 / 250).sum() < 37.7


def test_over_iterations_the_mean_is_the_series(tmp_path: Path) -> None:
    """Every h is one of N, with a known mean and deviation: 40 of them within 3 standard errors."""
    o, count = Quadratics.of(problem()), 40
    result = serve(problem(), fednest(Neumann(N, SCALE), count), tmp_path / "run", start=START, seed=1)
    h = -np.diff(iterates(result, "x"), axis=0) / ALPHA
    each = np.stack([hypergradient(o, N * term) for term in powers(o, N)])
    nearest = np.abs(h[:, None] - each).max(2)
    assert nearest.min(1).max() < 1e-7  # x has moved by some 1e-8, and derivatives with it
    assert set(nearest.argmin(1)) == set(range(N))
    error = each.std(0) / np.sqrt(count)
    assert (np.abs(h.mean(0) - hypergradient(o, np.sum(powers(o, N), axis=0))) < 3 * error).all()


@pytest.mark.parametrize("sampling", ["products", "parts", "iteration"])
def test_with_some_of_the_clients_every_factor_is_the_mean_over_those_that_were_asked(
    sampling: str, tmp_path: Path
) -> None:
    o = Quadratics.of(problem(5))
    protocol = fednest(Neumann(3, SCALE, "fixed"), server=Server(participation=0.4), sampling=sampling)
    result = serve(problem(5), protocol, tmp_path / "run", start=START, seed=7)
    q, y, *products, h, x = asked(result)
    assert q == y
    assert h == x
    p = 3 * SCALE * o.mean(o.f_y, X, Y, products[0])
    for S in products[1:]:
        p = p - SCALE * o.mean(o.g_yy, X, Y, S) @ p
    np.testing.assert_allclose(result.final["p"][0].numpy(), p, rtol=0, atol=1e-13)
    np.testing.assert_allclose(
        result.final["h"][0].numpy(), o.mean(o.f_x, X, Y, h) - o.mean(o.g_xy, X, Y, h) @ p, rtol=0, atol=1e-13
    )
    different = len({tuple(S) for S in (q, *products, h)})
    assert {"products": different > 2, "parts": different == 2, "iteration": different == 1}[sampling]
    if sampling == "parts":
        assert products == [h] * 4


def test_with_fresh_clients_for_every_factor_the_mean_is_still_the_series(tmp_path: Path) -> None:
    """Two of four clients at a time. Factors are independent, so that the mean of their product is the
    product of their means; going through all 6⁴ draws of pairs gives the same, and the deviation of one
    estimate. The mean of 80 lies within 3 standard errors. Were it the same pair that serves all factors of
    an estimate, the mean of one coordinate would be more than 3 standard errors away: by going through the 6
    pairs.
    """
    some, count = watched(bilevel_quadratic(clients=4, curved=True, seed=2)), 80
    o, pairs = Quadratics.of(some), list(combinations(range(4), 2))

    def estimate(first: Pair, second: Pair, third: Pair, last: Pair) -> Array:
        p = 2 * SCALE * o.mean(o.f_y, X, Y, first)
        for S in (second, third):
            p = p - SCALE * o.mean(o.g_yy, X, Y, S) @ p
        return np.asarray(o.mean(o.f_x, X, Y, last) - o.mean(o.g_xy, X, Y, last) @ p)

    every = np.stack([estimate(*four) for four in product(pairs, repeat=4)])
    series = hypergradient(o, 2 * powers(o, 3)[2])
    np.testing.assert_allclose(every.mean(0), series, rtol=0, atol=1e-13)
    error = every.std(0) / np.sqrt(count)

    protocol = fednest(Neumann(2, SCALE, "fixed"), count, server=Server(participation=0.5))
    result = serve(some, protocol, tmp_path / "run", start=START, seed=3)
    h = -np.diff(iterates(result, "x"), axis=0) / ALPHA
    assert (np.abs(h.mean(0) - series) < 3 * error).all()
    assert (np.abs(np.mean([estimate(S, S, S, S) for S in pairs], axis=0) - series) > 3 * error).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"terms": 0}, "Neumann: terms is 0; it must be a whole number, at least 1"),
        ({"terms": 1.5}, r"terms is 1\.5"),
        ({"scale": 0.0}, r"Neumann: scale is 0"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"products": "all"}, "products is 'all'; it must be 'random', 'fixed' or 'sum'"),
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        Neumann(**change)
