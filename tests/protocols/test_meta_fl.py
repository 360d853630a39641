"""Meta FL against the algorithm boxes of 002 in numpy, the true meta-gradient, and its closed forms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncfed import ScenarioError, VirtualTime
from asyncfed.data import client_data_from_lists
from asyncfed.problems import Problem, quadratic
from asyncfed.protocols import Buffered, FedAvg, LocalSteps, MetaFL, PerFedAvg, Server, StepDecay
from asyncfed.protocols.at import JUDGING
from asyncfed.protocols.meta_fl import MetaUpdates, Minibatches, Room
from asyncfed.rng import Streams
from tests.protocols.served import Array, serve
from tests.protocols.test_local_steps import SEED, SIZES, Y0, data, gradient, problem

SETS = [[0, 2, 3], [1, 2], [0, 1, 2, 3]]
BATCH = 3
ALPHA, BETA, DELTA = 0.4, 0.3, 1e-3
VARIANTS = ["exact", "fo", "hf"]


def delta_of(variant: str) -> float | None:
    return DELTA if variant == "hf" else None


def drawn(client: int, round_: int, purpose: str) -> Array:
    """A minibatch with replacement, of the run's own draws."""
    uniforms = Streams(SEED).uniforms(purpose, round_, client * BATCH, (client + 1) * BATCH)
    return (uniforms * SIZES[client]).astype(np.int64)


def hessian(i: int, y: Array, index: Array | slice = slice(None)) -> Array:
    a, t = (part[index] for part in data()[i])
    p = 1 / (1 + np.exp(t - a @ y))
    return np.asarray((a.T * (p * (1 - p))) @ a / len(t) + 0.1 * np.eye(len(y)))


def local_update(w: Array, i: int, batch: Callable[[str], Any], t: int, nu: int, variant: str) -> Array:
    """002 Alg. 2, 3 and 4, line by line; returns d."""
    path = [w]
    for step in range(1, nu + 1):
        path.append(path[-1] - ALPHA * gradient(i, path[-1], batch(f"update {t}, D {step - 1}")))
    d = gradient(i, path[nu], batch(f"update {t}"))
    for step in range(1, nu + 1) if variant != "fo" else ():
        primed, here = batch(f"update {t}, D' {nu - step}"), path[nu - step]
        if variant == "exact":
            d = (np.eye(len(w)) - ALPHA * hessian(i, here, primed)) @ d
        else:
            above, below = gradient(i, here + DELTA * d, primed), gradient(i, here - DELTA * d, primed)
            d = d - ALPHA / (2 * DELTA) * (above - below)
    return d


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("nu", [0, 1, 3])
def test_rounds_are_those_of_the_boxes(nu: int, variant: Any, tmp_path: Path) -> None:
    """On a logistic problem, whose Hessians do not commute; some clients at a time."""
    method = MetaFL(
        4, nu, 2, ALPHA, StepDecay(BETA, at=(2,)), BATCH, variant, delta_of(variant), server=Server(SETS)
    )
    result = serve(problem(), method, tmp_path / "run", start={"y": Y0}, seed=SEED)
    w = Y0
    for k in range(4):
        ends = []
        for i in SETS[k % 3]:
            own = w
            for t in range(2):
                d = local_update(own, i, lambda purpose, i=i, k=k: drawn(i, k, purpose), t, nu, variant)  # type: ignore[misc]
                own = own - (BETA if k < 2 else BETA / 10) * d
            ends.append(own)
        w = np.mean(ends, axis=0)
    np.testing.assert_allclose(result.final["inner"][0].numpy(), w, rtol=0, atol=1e-12)


def meta_gradient(given: Problem, w: Array, out: Path, **settings: Any) -> Array:
    """mean ∇F_i(w) over all samples, from one step of length 1."""
    method = MetaFL(1, settings.pop("nu"), 1, ALPHA, 1.0, None, **settings)
    moved = serve(given, method, out, start={"y": w}).final["inner"][0].numpy()
    return np.asarray(w - moved)


def unrolled(given: Problem, nu: int) -> Callable[[Tensor], Tensor]:
    """mean F_i, by steps that can be differentiated."""

    def mean_loss(w: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i in range(given.clients):
            batch, own = given.data.train.of(i), w
            for _ in range(nu):
                (step,) = torch.autograd.grad(
                    given.inner_loss(own, {}, batch), own, create_graph=True, allow_unused=True
                )
                own = own - ALPHA * step
            total = total + given.inner_loss(own, {}, batch)
        return total / given.clients

    return mean_loss


@pytest.mark.parametrize("nu", [1, 2, 4])
def test_where_all_samples_are_used_it_is_the_gradient_of_what_is_minimised(nu: int, tmp_path: Path) -> None:
    found = meta_gradient(problem(), Y0, tmp_path / "run", nu=nu)
    F = unrolled(problem(), nu)
    start = torch.tensor(Y0, requires_grad=True)
    (exact,) = torch.autograd.grad(F(start), start)
    np.testing.assert_allclose(found, exact.numpy(), rtol=0, atol=1e-12)
    h = 1e-5  # h² F''' is 1e-10, and rounding 1e-16 / h
    shifts = h * np.eye(3)
    up, down = (
        [F(torch.tensor(Y0 + sign * s, requires_grad=True)).item() for s in shifts] for sign in (1, -1)
    )
    np.testing.assert_allclose(found, (np.array(up) - down) / (2 * h), rtol=0, atol=1e-9)


def test_the_leftmost_factor_is_that_of_the_first_model(tmp_path: Path) -> None:
    """The other way round it is another vector, by more than rounding could explain."""
    path, nu = [Y0], 3
    for _ in range(nu):
        path.append(path[-1] - ALPHA * gradient(2, path[-1]))
    factors = [np.eye(3) - ALPHA * hessian(2, w) for w in path[:nu]]
    tail = gradient(2, path[nu])
    right = factors[0] @ factors[1] @ factors[2] @ tail
    wrong = factors[2] @ factors[1] @ factors[0] @ tail
    only = replace(problem(), data=client_data_from_lists([problem().data.train.of(2)]))
    found = meta_gradient(only, Y0, tmp_path / "run", nu=nu)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-13)
    assert np.abs(found - wrong).max() > 1e-6


class Enumerated(Minibatches):
    """All ways in which one-sample minibatches can be drawn, a row each, of samples ½ (w−c)ᵀ A (w−c)."""

    def __init__(self, A: Array, c: Array, purposes: int) -> None:
        ways = np.array(list(itertools.product(range(len(A)), repeat=purposes)))
        object.__setattr__(self, "ways", torch.from_numpy(ways))
        object.__setattr__(self, "names", [])
        object.__setattr__(self, "A", torch.from_numpy(A))
        object.__setattr__(self, "c", torch.from_numpy(c))

    def chosen(self, purpose: str) -> Tensor:
        names: list[str] = self.names  # type: ignore[attr-defined]
        if purpose not in names:
            names.append(purpose)
        which: Tensor = self.ways[:, names.index(purpose)]  # type: ignore[attr-defined]
        return which

    def descend(self, w: Tensor, purpose: str, rate: float, into: Tensor) -> Tensor:
        into.sub_(self.gradient(w, purpose)[0], alpha=rate)
        return w[:, 0]

    def gradient(self, w: Tensor, purpose: str, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        found = self.product(w - self.c[self.chosen(purpose)], purpose)  # type: ignore[attr-defined]
        return found if out is None else out.copy_(found), w[:, 0]

    def less_hessian(self, w: Tensor, d: Tensor, purpose: str, alpha: float) -> None:
        d.sub_(self.product(d, purpose), alpha=alpha)

    def product(self, d: Tensor, purpose: str) -> Tensor:
        return torch.einsum("kij,kj->ki", self.A[self.chosen(purpose)], d)  # type: ignore[attr-defined]


@pytest.mark.parametrize("nu", [1, 2])
@pytest.mark.parametrize(("variant", "batches"), [("exact", 2), ("hf", 2), ("fo", 1)])
def test_independent_minibatches_have_no_bias(variant: Any, batches: int, nu: int) -> None:
    """Gradients are affine in w here, so the mean over all draws is what the mean of the samples gives: with
    the number of minibatches of the table, and with one fewer (D for D') it is not.
    """
    generator = np.random.default_rng(3)
    roots = generator.standard_normal((3, 2, 2))
    A, c = roots @ roots.transpose(0, 2, 1) + 0.5 * np.eye(2), generator.standard_normal((3, 2))
    w = np.array([0.7, -1.2])
    mean, rhs = A.mean(0), np.einsum("sij,sj->i", A, c) / 3
    gap = np.eye(2) - 0.2 * mean
    path = [w]
    for _ in range(nu):
        path.append(path[-1] - 0.2 * (mean @ path[-1] - rhs))
    true = np.linalg.matrix_power(gap, 0 if variant == "fo" else nu) @ (mean @ path[nu] - rhs)
    meta = MetaUpdates(nu, 1, 0.2, 1.0, 1, variant, 0.1)
    draws = Enumerated(A, c, batches * nu + 1)
    start = torch.from_numpy(w).repeat(3 ** (batches * nu + 1), 1)
    room, moved = Room.like(start, nu, variant), start.clone()
    meta.update(draws, moved, 0, room)
    d = start - moved  # β is 1
    assert len(draws.names) == batches * nu + 1  # type: ignore[attr-defined]
    np.testing.assert_allclose(d.mean(0).numpy(), true, rtol=0, atol=1e-13)
    if variant == "exact":
        again = Enumerated(A, c, 2 * nu + 1)
        reused = [name.replace("'", "") for name in draws.names]  # type: ignore[attr-defined]
        again.chosen = lambda purpose: draws.ways[:, reused.index(purpose.replace("'", ""))]  # type: ignore
        moved = start.clone()
        meta.update(again, moved, 0, room)
        assert np.abs((start - moved).mean(0).numpy() - true).max() > 0.01 * np.abs(true).max()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("nu", [1, 3])
def test_on_quadratics_it_has_its_closed_form_and_its_fixed_point(
    nu: int, variant: Any, tmp_path: Path
) -> None:
    """A (I − αA)^{2ν} (w − c); first-order only ν times, and so it ends elsewhere."""
    given = quadratic(clients=4, dimension=3, seed=1)
    A, c = (tensor.numpy() for tensor in given.data.train.tensors)
    assert np.linalg.eigvalsh(A).max() * 0.1 < 1
    times = {"exact": 2 * nu, "hf": 2 * nu, "fo": nu}
    M = {
        which: np.array([a @ np.linalg.matrix_power(np.eye(3) - 0.1 * a, power) for a in A])
        for which, power in times.items()
    }
    method = MetaFL(1, nu, 1, 0.1, 0.5, None, variant, delta_of(variant))
    once = serve(given, method, tmp_path / "once", start={"y": Y0}).final["inner"][0].numpy()
    mean = np.mean([m @ (Y0 - own) for m, own in zip(M[variant], c, strict=True)], axis=0)
    np.testing.assert_allclose(once, Y0 - 0.5 * mean, rtol=0, atol=1e-10)
    ends = {which: np.linalg.solve(m.mean(0), np.einsum("nij,nj->i", m, c) / 4) for which, m in M.items()}
    method = MetaFL(3, nu, 1, 0.1, 0.5, None, variant, delta_of(variant))
    stays = serve(given, method, tmp_path / "run", start={"y": ends[variant]}).final["inner"][0].numpy()
    np.testing.assert_allclose(stays, ends[variant], rtol=0, atol=1e-10)
    assert np.abs(ends["fo"] - ends["exact"]).max() > 1e-3


def tanh_problem() -> Problem:
    """tanh units on two inputs."""
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(3, 8, 2, generator=generator, dtype=torch.float64)

    def each(w: Tensor, x: Any, batch: tuple[Tensor, ...]) -> Tensor:
        inputs, targets = batch
        return (torch.tanh(inputs @ w[:4].view(2, 2)) @ w[4:] - targets).square()

    return Problem(
        name="tanh",
        data=client_data_from_lists([(own, own[:, 0] * own[:, 1]) for own in a]),
        inner_loss=lambda w, x, batch: each(w, x, batch).mean(),
        init_inner=lambda g: torch.zeros(6, dtype=torch.float64),
        metrics={"loss": each},
    )


def test_differences_of_gradients_come_close_on_a_smooth_network(tmp_path: Path) -> None:
    """As δ²: central differences."""
    w = np.array([0.4, -0.7, 0.2, 0.9, 1.0, -0.6])
    exact = meta_gradient(tanh_problem(), w, tmp_path / "exact", nu=3)
    errors = [
        np.abs(
            meta_gradient(tanh_problem(), w, tmp_path / f"{delta}", nu=3, variant="hf", delta=delta) - exact
        ).max()
        / np.abs(exact).max()
        for delta in (0.02, 0.01)
    ]
    assert errors[1] < 1e-3
    assert 3.5 < errors[0] / errors[1] < 4.5


@pytest.mark.parametrize(
    ("server", "timing"),
    [
        (Server(0.5), {}),
        (Buffered(2, 0.7), {"timing": VirtualTime("exponential(1.0)", latency=0.3)}),
        (Server(quorum=2, late="next"), {"timing": VirtualTime("exponential(1.0)", factors={1: 4.0})}),
    ],
)
def test_without_fine_tuning_it_is_fedavg_on_the_same_draws(
    server: Any, timing: dict[str, Any], tmp_path: Path
) -> None:
    methods = {
        "fedavg": FedAvg(5, LocalSteps(BETA, steps=3, batch=BATCH, independent=True), server),
        "meta": MetaFL(5, 0, 3, ALPHA, BETA, BATCH, server=server),
    }
    results = {
        name: serve(problem(), method, tmp_path / name, seed=SEED, **timing)
        for name, method in methods.items()
    }
    fedavg, meta = results["fedavg"], results["meta"]
    torch.testing.assert_close(meta.final["inner"], fedavg.final["inner"], rtol=0, atol=1e-14)
    same = ["train_loss", "loss", "bytes", "gradients"]
    np.testing.assert_allclose(meta.metrics[same], fedavg.metrics[same], rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("variant", "nu", "gradients", "products"),
    [("exact", 3, 4, 3), ("fo", 3, 4, 0), ("hf", 3, 10, 0), ("exact", 0, 1, 0), ("exact", 1, 2, 1)],
)
def test_derivatives_are_counted_as_in_the_table(
    variant: Any, nu: int, gradients: int, products: int, tmp_path: Path
) -> None:
    method = MetaFL(3, nu, 2, ALPHA, BETA, BATCH, variant, delta_of(variant), server=Server(SETS))
    result = serve(problem(), method, tmp_path / "run", seed=SEED)
    asked = np.array([2, 2, 3, 2])  # rounds that each client is in
    updates = 2 * asked
    assert result.clients["gradients"].tolist() == (updates * gradients).tolist()
    assert result.clients["hessian_products"].tolist() == (updates * products).tolist()
    assert result.metrics["gradients"].tolist() == [2 * n * gradients for n in (0, 3, 5, 9)]
    assert result.metrics["hessian_products"].tolist() == [2 * n * products for n in (0, 3, 5, 9)]


@pytest.mark.parametrize("nu", [0, 1, 3])
def test_everybody_is_judged_after_fine_tuning_on_its_own_samples(nu: int, tmp_path: Path) -> None:
    result = serve(problem(), MetaFL(2, nu, 1, ALPHA, BETA, BATCH), tmp_path / "run", seed=SEED)
    w, a = result.final["inner"][0].numpy(), data()
    for i, row in enumerate(result.clients.to_dict("records")):
        path = [w]
        for step in range(3):
            path.append(path[-1] - ALPHA * gradient(i, path[-1], drawn(i, JUDGING, f"tuning {step}")))
        loss = [np.logaddexp(0, a[i][0] @ own - a[i][1]).mean() + 0.05 * own @ own for own in path]
        assert row["loss"] == pytest.approx(loss[nu], abs=1e-12)
        assert row["loss_tuned_0"] == pytest.approx(loss[0], abs=1e-12)
        assert row["loss_tuned_1"] == pytest.approx(loss[1], abs=1e-12)
    last, sizes = result.metrics.iloc[-1], np.array(SIZES)
    assert last["loss_tuned_1"] == pytest.approx(sizes @ result.clients["loss_tuned_1"] / sizes.sum())
    assert last["bytes"] == 2 * 4 * 2 * 3 * 8  # rounds, clients, there and back, numbers


def test_any_model_can_be_judged_after_as_many_steps(tmp_path: Path) -> None:
    """To be fair, as the paper says: FedAvg too."""
    results = [
        serve(
            problem(), MetaFL(2, 0, 1, ALPHA, BETA, BATCH, tuning=tuning), tmp_path / f"{tuning}", seed=SEED
        )
        for tuning in (None, 1)
    ]
    assert results[0].metrics["loss_tuned_1"].equals(results[1].metrics["loss"].rename("loss_tuned_1"))


def test_per_fedavg_is_the_case_of_one_step(tmp_path: Path) -> None:
    methods = (PerFedAvg(2, 2, ALPHA, BETA, BATCH), MetaFL(2, 1, 2, ALPHA, BETA, BATCH))
    finals = [serve(problem(), m, tmp_path / type(m).__name__, seed=SEED).final["inner"] for m in methods]
    assert torch.equal(*finals)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nu": -1}, "nu is -1; it must be a whole number, at least 0"),
        ({"tau": 0}, "tau is 0; it must be a whole number, at least 1"),
        ({"tuning": 1.5}, "tuning is 1.5; it must be a whole number, at least 0"),
        ({"variant": "hf"}, "delta is None; variant 'hf' needs a number above 0"),
        ({"variant": "hf", "delta": 0.0}, "delta is 0.0; it must be a finite number above 0 or None"),
        ({"delta": 0.1}, "delta is 0.1, and variant 'exact' takes no differences"),
        ({"alpha": 0.0}, "alpha is 0.0; it must be a finite number above 0"),
        ({"batch": 0}, "batch is 0"),
        ({"variant": "second"}, "variant is 'second'; it must be 'exact', 'fo' or 'hf'"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        MetaFL(**({"outer_steps": 1, "nu": 1, "tau": 1, "alpha": 0.1, "beta": 0.1} | change))
