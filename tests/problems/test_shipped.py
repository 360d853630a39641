"""The problems that come with asyncfed, against formulas written out by hand."""

from __future__ import annotations

import pytest
import torch

from asyncfed.errors import DataError
from asyncfed.problems import Derivatives, average_minimiser, classification, quadratic
from asyncfed.problems.whole import evaluate


def test_classification_is_mean_cross_entropy_plus_l2() -> None:
    problem = classification(clients=4, partition="iid", l2=0.3)
    x = problem.init_inner(torch.Generator().manual_seed(0))
    assert isinstance(x, dict)
    images, labels = problem.data.train.of(1)
    logits = images @ x["head.weight"].T + x["head.bias"]
    each = torch.logsumexp(logits, 1) - logits[torch.arange(len(labels)), labels]
    penalty = 0.15 * (x["head.weight"].square().sum() + x["head.bias"].square().sum())
    torch.testing.assert_close(problem.inner_loss(x, {}, (images, labels)), each.mean() + penalty)
    torch.testing.assert_close(problem.metrics["loss"](x, {}, (images, labels)), each)
    assert torch.equal(
        problem.metrics["accuracy"](x, {}, (images, labels)), (logits.argmax(1) == labels).to(torch.float32)
    )


def test_the_seed_of_a_classification_decides_who_holds_what() -> None:
    first, again, other = (classification(clients=5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.data.train.tensors[0], again.data.train.tensors[0])
    assert first.data.train.sizes.tolist() != other.data.train.sizes.tolist()


def test_gradient_descent_learns_the_digits() -> None:
    problem = classification(clients=4, model="mlp:32", partition="iid")
    d = Derivatives.of(problem)
    x = d.inner.flatten(problem.init_inner(torch.Generator().manual_seed(0))).repeat(4, 1)
    lam, train = x.new_empty(4, 0), problem.data.train
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        index = torch.randint(int(train.sizes.min()), (4, 32), generator=generator)
        step, _ = d.inner_gradient(x, lam, train.gather(torch.arange(4), index), scale=-0.5)
        x = (x + step).mean(0, keepdim=True).repeat(4, 1)
    correct, count = evaluate(d, x, lam, problem.data.test)["accuracy"]
    assert (correct.sum() / count.sum()).item() > 0.93


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_the_average_minimiser_has_zero_average_gradient(noise: float) -> None:
    problem = quadratic(clients=6, dimension=4, seed=1, heterogeneity=2.0, noise=noise)
    d = Derivatives.of(problem)
    x = average_minimiser(problem).repeat(6, 1)
    size = int(problem.data.train.sizes[0])
    batch = problem.data.train.gather(torch.arange(6), torch.arange(size).repeat(6, 1))
    gradient, _ = d.inner_gradient(x, x.new_empty(6, 0), batch)
    assert gradient.dtype == torch.float64
    assert gradient.mean(0).abs().max() < 1e-12
    assert gradient.abs().max() > 0.1


def test_a_quadratic_is_what_it_says() -> None:
    problem = quadratic(clients=5, dimension=4, seed=0, curvature=(0.3, 3.0))
    d = Derivatives.of(problem)
    g = torch.Generator().manual_seed(0)
    x, u = (torch.randn(5, 4, generator=g, dtype=torch.float64) for _ in range(2))
    lam = x.new_empty(5, 0)
    batch = problem.data.train.gather(torch.arange(5), torch.zeros(5, 1, dtype=torch.long))
    gradient, loss = d.inner_gradient(x, lam, batch)
    hvp = d.inner_hessian_vector(x, lam, batch, u)
    for i in range(5):
        A, b = (t[0] for t in problem.data.train.of(i))
        assert torch.equal(A, A.T)
        eigenvalues = torch.linalg.eigvalsh(A)
        assert eigenvalues.min() >= 0.3 - 1e-9
        assert eigenvalues.max() <= 3.0 + 1e-9
        torch.testing.assert_close(gradient[i], A @ (x[i] - b))
        torch.testing.assert_close(hvp[i], A @ u[i])
        torch.testing.assert_close(loss[i], 0.5 * (x[i] - b) @ A @ (x[i] - b))


def test_heterogeneity_spreads_the_minimisers_and_noise_the_samples() -> None:
    same = quadratic(clients=8, dimension=3, seed=0, heterogeneity=0.0).data.train
    assert same.sizes.tolist() == [1] * 8
    assert torch.equal(same.tensors[1], same.tensors[1][:1].repeat(8, 1))
    noisy = quadratic(clients=8, dimension=3, seed=0, heterogeneity=0.0, noise=0.1, samples=500).data.train
    assert noisy.sizes.tolist() == [500] * 8
    assert noisy.of(3)[1].std(0).tolist() == pytest.approx([0.1] * 3, rel=0.15)
    assert torch.equal(noisy.of(3)[0][0], noisy.of(3)[0][-1])


def test_quadratics_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"quadratic: curvature\[0\] is 0\.0; it must be a finite number above 0"
    ):
        quadratic(curvature=(0.0, 1.0))
    with pytest.raises(DataError, match="dimension is 0; it must be a whole number, at least 1"):
        quadratic(dimension=0)
    with pytest.raises(DataError, match=r"noise is -0\.1; it must be a finite number, at least 0"):
        quadratic(noise=-0.1)
