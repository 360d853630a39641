"""Derivatives against finite differences, torch.autograd and dense Hessians, in float64."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncfed.data import IID, ClientShards, client_data_from_lists
from asyncfed.problems import Derivatives, Problem, classification, whole
from asyncfed.problems.whole import evaluate
from tests.data.idx import small_images

K, B = 4, 6


def bilevel(vectorize: bool = True) -> Problem:
    """A small problem, nonlinear in both variables: a weighted logistic loss with a penalty."""
    generator = torch.Generator().manual_seed(3)
    shards = [
        (torch.randn(size, 3, generator=generator), torch.randint(2, (size,), generator=generator))
        for size in (6, 9, 7, 12)
    ]

    def per_sample(x: dict[str, Tensor], lam: dict[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        features, labels = batch
        score = torch.tanh(features @ x["w"]) @ x["v"] + x["c"]
        return torch.nn.functional.softplus(score * (1 - 2 * labels.to(score.dtype)))

    def inner_loss(x: dict[str, Tensor], lam: dict[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        weights = torch.exp(lam["labels"])[batch[1]]
        return (weights * per_sample(x, lam, batch)).mean() + torch.exp(lam["decay"]) * x["w"].square().sum()

    def outer_loss(x: dict[str, Tensor], lam: dict[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return per_sample(x, lam, batch).mean() + 0.1 * lam["labels"].square().sum() * x["c"]

    return Problem(
        name="bilevel",
        data=client_data_from_lists(shards).to(torch.float64),
        inner_loss=inner_loss,
        outer_loss=outer_loss,
        init_inner=lambda g: {
            "w": torch.randn(3, 2, generator=g),
            "v": torch.randn(2, generator=g),
            "c": torch.randn((), generator=g),
        },
        init_outer=lambda g: {"labels": torch.randn(2, generator=g), "decay": torch.randn((), generator=g)},
        metrics={"loss": per_sample, "score": lambda x, lam, batch: batch[0] @ x["w"][:, 0] + lam["decay"]},
        vectorize=vectorize,
    )


class Case:
    """A block of K clients at random points, in one precision."""

    def __init__(self, problem: Problem, dtype: torch.dtype = torch.float64) -> None:
        self.problem = problem
        self.d = Derivatives.of(problem)
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(K, self.d.inner.d, generator=g, dtype=torch.float64).to(dtype)
        self.lam = torch.randn(K, self.d.outer.d, generator=g, dtype=torch.float64).to(dtype)
        self.u = torch.randn(K, self.d.inner.d, generator=g, dtype=torch.float64).to(dtype)
        self.w = torch.randn(K, self.d.outer.d, generator=g, dtype=torch.float64).to(dtype)
        shards = problem.data.train.to(dtype)
        self.batch = shards.gather(torch.arange(K), torch.randint(6, (K, B), generator=g))

    def loss(self, which: str, i: int) -> object:
        """Client i's loss as a function of its flat (x, λ), the way a reader of the paper would write it."""
        function = getattr(self.problem, which)
        own = tuple(t[i] for t in self.batch)
        inner, outer = self.d.inner, self.d.outer
        return lambda x, lam: function(inner.views_one(x), outer.views_one(lam), own)

    def hessian(self, i: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Dense second derivatives of client i's inner loss by torch.autograd (no torch.func)."""
        return torch.autograd.functional.hessian(self.loss("inner_loss", i), (self.x[i], self.lam[i]))  # type: ignore[arg-type]

    def methods(self) -> dict[str, Tensor]:
        x, lam, batch = self.x, self.lam, self.batch
        gradient, loss = self.d.inner_gradient(x, lam, batch)
        by_x, by_lam, value = self.d.outer_gradients(x, lam, batch)
        return {
            "gradient": gradient,
            "loss": loss,
            "inner_outer": self.d.inner_outer_gradient(x, lam, batch),
            "hessian": self.d.inner_hessian_vector(x, lam, batch, self.u),
            "cross": self.d.inner_cross_vector(x, lam, batch, self.u),
            "transposed": self.d.inner_cross_transposed(x, lam, batch, self.w),
            "by_x": by_x,
            "by_lam": by_lam,
            "value": value,
        }


@pytest.fixture(params=[True, False], ids=["vmap", "loop"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(bilevel(vectorize=request.param))


def test_first_derivatives_agree_with_autograd(case: Case) -> None:
    found = case.methods()
    for i in range(K):
        x, lam = case.x[i].clone().requires_grad_(), case.lam[i].clone().requires_grad_()
        f = case.loss("inner_loss", i)(x, lam)  # type: ignore[operator]
        f_x, f_lam = torch.autograd.grad(f, (x, lam))
        F = case.loss("outer_loss", i)(x, lam)  # type: ignore[operator]
        F_x, F_lam = torch.autograd.grad(F, (x, lam))
        expected = {
            "loss": f,
            "gradient": f_x,
            "inner_outer": f_lam,
            "value": F,
            "by_x": F_x,
            "by_lam": F_lam,
        }
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name][i], tensor.detach(), rtol=1e-12, atol=1e-12)


def test_the_gradient_agrees_with_finite_differences(case: Case) -> None:
    gradient, _ = case.d.inner_gradient(case.x, case.lam, case.batch)
    h = 1e-6
    for i in range(K):
        f = case.loss("inner_loss", i)
        for j in range(case.d.inner.d):
            e = torch.zeros(case.d.inner.d, dtype=torch.float64)
            e[j] = h
            slope = (f(case.x[i] + e, case.lam[i]) - f(case.x[i] - e, case.lam[i])) / (2 * h)  # type: ignore[operator]
            assert gradient[i, j].item() == pytest.approx(slope.item(), rel=1e-6, abs=1e-8)


def test_second_derivatives_agree_with_dense_hessians(case: Case) -> None:
    found = case.methods()
    for i in range(K):
        (H_xx, H_xl), (H_lx, _) = case.hessian(i)
        torch.testing.assert_close(found["hessian"][i], H_xx @ case.u[i], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(found["cross"][i], H_lx @ case.u[i], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(found["transposed"][i], H_xl @ case.w[i], rtol=1e-11, atol=1e-12)


def test_the_loop_and_vmap_agree() -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        vmapped, looped = (Case(bilevel(v), dtype).methods() for v in (True, False))
        for name, tensor in vmapped.items():
            assert tensor.dtype == dtype
            torch.testing.assert_close(tensor, looped[name], rtol=tolerance, atol=tolerance)


def test_single_precision_follows_double_precision() -> None:
    double, single = Case(bilevel()).methods(), Case(bilevel(), torch.float32).methods()
    for name, tensor in single.items():
        torch.testing.assert_close(tensor.double(), double[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scale", [-0.25, torch.tensor([[1.0], [0.0], [-2.0], [0.5]], dtype=torch.float64)])
def test_gradients_arrive_scaled_in_the_rows_given(case: Case, scale: float | Tensor) -> None:
    plain, _ = case.d.inner_gradient(case.x, case.lam, case.batch)
    rows = torch.full((K + 2, case.d.inner.d), 7.0, dtype=torch.float64)
    scaled, _ = case.d.inner_gradient(case.x, case.lam, case.batch, scale=scale, out=rows[1:-1])
    assert scaled.data_ptr() == rows[1:-1].data_ptr()
    torch.testing.assert_close(rows[1:-1], plain * scale, rtol=1e-14, atol=0)
    assert (rows[[0, -1]] == 7).all()


def test_nothing_that_comes_back_remembers_a_graph(case: Case) -> None:
    case.x.requires_grad_()
    assert not any(tensor.requires_grad for tensor in case.methods().values())


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_single_level_problem_has_empty_outer_derivatives(vectorize: bool) -> None:
    problem = dataclasses.replace(classification(clients=K, partition="iid", l2=0.1), vectorize=vectorize)
    case = Case(problem, torch.float32)
    found = case.methods()
    assert found["inner_outer"].shape == found["cross"].shape == found["by_lam"].shape == (K, 0)
    assert torch.equal(found["transposed"], torch.zeros_like(case.x))
    torch.testing.assert_close(found["by_x"], found["gradient"])
    torch.testing.assert_close(found["value"], found["loss"])


def test_a_loss_that_ignores_a_variable_has_zero_derivatives_there() -> None:
    problem = dataclasses.replace(
        bilevel(),
        inner_loss=lambda x, lam, batch: batch[0].mean() * x["v"].sum(),
        outer_loss=lambda x, lam, batch: lam["decay"].square(),
    )
    case = Case(problem)
    found = case.methods()
    for name in ("inner_outer", "hessian", "cross", "transposed", "by_x"):
        assert (found[name] == 0).all(), name
    torch.testing.assert_close(found["by_lam"][:, -1], 2 * case.lam[:, -1])


def naive(
    problem: Problem, d: Derivatives, x: Tensor, lam: Tensor, shards: ClientShards
) -> dict[str, list[float]]:
    return {
        name: [
            metric(d.inner.views_one(x[i]), d.outer.views_one(lam[i]), shards.of(i)).sum().item()
            for i in range(shards.clients)
        ]
        for name, metric in problem.metrics.items()
    }


@pytest.mark.parametrize(
    "budget", [64 * 2**20, 8_000, 1], ids=["one piece", "some pieces", "sample by sample"]
)
def test_evaluation_is_the_sum_over_each_clients_samples(
    case: Case, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "_BUDGET", budget)
    shards = case.problem.data.train
    found = evaluate(case.d, case.x, case.lam, shards)
    expected = naive(case.problem, case.d, case.x, case.lam, shards)
    assert found.keys() == expected.keys()
    for name, (total, count) in found.items():
        assert count.tolist() == [6, 9, 7, 12]
        assert total.tolist() == pytest.approx(expected[name], rel=1e-12)


def test_clients_without_samples_count_nothing(case: Case) -> None:
    train = case.problem.data.train
    shards = ClientShards(tuple(t[:9] for t in train.tensors), np.array([0, 5, 0, 4]))
    total, count = evaluate(case.d, case.x, case.lam, shards)["loss"]
    assert count.tolist() == [0, 5, 0, 4]
    assert total[[0, 2]].tolist() == [0, 0]
    assert (total[[1, 3]] > 0).all()
    assert evaluate(case.d, case.x, case.lam, case.problem.data.test)["loss"][0].tolist() == [0, 0, 0, 0]


def test_ten_thousand_small_clients_are_evaluated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = classification(clients=20)
    d = Derivatives.of(problem)
    generator = np.random.default_rng(0)
    sizes = generator.integers(2, 21, 10_000)
    rows = torch.from_numpy(generator.integers(0, problem.data.train.total, int(sizes.sum())))
    shards = ClientShards(tuple(t[rows] for t in problem.data.train.tensors), sizes)
    x = torch.from_numpy(generator.standard_normal((10_000, d.inner.d)).astype(np.float32))
    calls = []
    kernel = d.kernels["metrics"]
    monkeypatch.setitem(d.kernels._functions, "metrics", lambda *a: calls.append(1) or kernel(*a))
    found = evaluate(d, x, x.new_empty(10_000, 0), shards)
    assert len(calls) < 40
    some = [0, 17, 9_999]
    expected = naive(problem, d, x[some], x.new_empty(3, 0), shards.select(some))
    assert found["loss"][0][some].tolist() == pytest.approx(expected["loss"], rel=1e-4)
    assert found["accuracy"][0][some].tolist() == expected["accuracy"]


def test_a_convolutional_network_runs_client_by_client_and_agrees_with_vmap(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_images(tmp_path / "EMNIST" / "raw", "emnist-byclass-test", packed=True)
    monkeypatch.setenv("ASYNCFED_DATA", str(tmp_path))
    looped = classification("emnist", clients=2, model="cnn", partition=IID())
    assert not looped.vectorize
    found = []
    for problem in (looped, dataclasses.replace(looped, vectorize=True)):
        d = Derivatives.of(problem)
        x = d.inner.flatten(problem.init_inner(torch.Generator().manual_seed(1))).repeat(2, 1)
        batch = problem.data.train.gather(torch.arange(2), torch.tensor([[0, 1, 2], [3, 2, 1]]))
        lam = x.new_empty(2, 0)
        gradient, loss = d.inner_gradient(x, lam, batch)
        found.append((gradient, loss, evaluate(d, x, lam, problem.data.test)["loss"][0]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
