"""Replayed derivatives are the plain ones, to the last bit; and so is a run with an encoded first stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from asyncfed.data import IID, client_data_from_lists
from asyncfed.errors import ScenarioError
from asyncfed.problems import Derivatives, Problem, hyper_representation, quadratic
from asyncfed.problems import replay as replay_module
from asyncfed.problems.replay import Replay
from asyncfed.protocols import AggITD, LocalSteps
from tests.problems.test_derivatives import bilevel
from tests.protocols.served import serve

EARLY = 3  # the call that records, in these tests


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "_WORTH_IT", EARLY)


class Counted:
    """A function of two tensors that counts how often it is really called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        return (x * y.sin()).sum(-1), torch.cat([x, y], 1)

    def expected(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x * y.sin()).sum(-1), torch.cat([x, y], 1)


def pair(
    rows: int, columns: int, seed: int, *, across: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = (columns, rows) if across else (rows, columns)
    x, y = (torch.randn(shape, generator=g, dtype=dtype) for _ in range(2))
    return (x.T, y.T) if across else (x, y)


@pytest.mark.usefixtures("_soon")
def test_it_records_once_and_then_calls_no_more() -> None:
    function = Counted()
    replayed = Replay(function)
    for seed in range(EARLY + 6):
        x, y = pair(3, 2, seed)
        for found, expected in zip(replayed(x, y), function.expected(x, y), strict=True):
            assert torch.equal(found, expected)
    assert function.calls == EARLY + 1 + 3  # the third time twice, to record; 1, 2 and 4 later, to compare


@pytest.mark.usefixtures("_soon")
def test_later_it_is_compared_at_powers_of_two_and_every_so_often() -> None:
    function = Counted()
    replayed = Replay(function)
    really = []
    for call in range(1, EARLY + 1000):
        before = function.calls
        replayed(*pair(3, 2, 0))
        if function.calls > before:
            really.append(call - EARLY)
    assert really[EARLY:] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768]


class Constant:
    """A loss that reads more than its arguments."""

    def __init__(self) -> None:
        self.number, self.array = 1.0, np.ones(2)
        self.tensor = torch.from_numpy(self.array)  # the same memory
        self.before = lambda: None

    def __call__(self, x: Tensor, lam: object, batch: tuple[Tensor, ...]) -> Tensor:
        self.before()
        return self.number * ((batch[0] - x).square() * self.tensor).mean() + torch.tensor(self.number)

    def count(self) -> None:
        self.number += 1.0

    def count_slowly(self) -> None:
        self.number *= 1 + 1e-12

    def count_in_place(self) -> None:
        self.array += 1.0  # behind the back of torch, which refuses it inside of a derivative

    def count_anew(self) -> None:
        self.tensor = self.tensor + 1.0


def stepping(loss: Constant, k: int = 3, vectorize: bool = True) -> Callable[[], Tensor]:
    data = client_data_from_lists([(torch.full((4, 2), float(i)).double(),) for i in range(k)])
    problem = Problem(
        name="moving", data=data, inner_loss=loss, init_inner=lambda g: torch.zeros(2), vectorize=vectorize
    )
    derivatives, x = Derivatives.of(problem), torch.ones(k, 2, dtype=torch.float64)
    batch = data.train.gather(torch.arange(k), torch.arange(4).expand(k, 4))
    return lambda: derivatives.descend("inner", x, x[:, :0], batch, 1e-4)


CHANGED = "the inner loss of problem 'moving' changed between calls for the same arguments; it must be a pure"


@pytest.mark.parametrize("how", ["count", "count_slowly", "count_in_place", "count_anew"])
def test_a_loss_that_moves_with_every_call_is_refused_when_it_would_be_recorded(how: str) -> None:
    loss = Constant()
    loss.before = getattr(loss, how)
    step = stepping(loss)
    for _ in range(replay_module._WORTH_IT - 1):
        step()
    with pytest.raises(ScenarioError, match=CHANGED):
        step()


@pytest.mark.parametrize("how", ["count", "count_slowly", "count_anew"])
@pytest.mark.parametrize("after", [30, 500])
def test_a_loss_that_is_changed_once_is_refused_soon(how: str, after: int) -> None:
    loss = Constant()
    step = stepping(loss)
    for _ in range(after):
        step()
    getattr(loss, how)()
    with pytest.raises(ScenarioError, match=CHANGED):  # noqa: PT012
        for _ in range(256):
            step()


def test_a_constant_tensor_that_somebody_changes_in_place_is_read_anew() -> None:
    """As without a recording: it refers to the tensor, and not to what was in it."""
    loss, other = Constant(), Constant()
    step, plain = stepping(loss), stepping(other, vectorize=False)
    for number in range(200):
        if number % 40 == 0:
            loss.count_in_place()
            other.count_in_place()
        torch.testing.assert_close(step(), plain(), rtol=1e-12, atol=0)


@pytest.mark.usefixtures("_soon")
def test_a_recording_that_does_not_round_alike_is_given_up() -> None:
    """It takes another way while somebody watches; so from then on it is called as it is."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        if _get_current_dispatch_mode() is None:
            return (x.sum(-1) * y.sum(-1) / 3,)
        return (x.sum(-1) * (y.sum(-1) / 3),)

    replayed = Replay(function)
    exact = []
    for seed in range(EARLY + 8):
        x, y = pair(50, 7, seed)
        (found,), (expected,) = replayed(x, y), function(x, y)
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
        exact.append(torch.equal(found, expected))
    assert exact == [True] * (EARLY - 1) + [False] * 2 + [True] * 7


@pytest.mark.usefixtures("_soon")
def test_shapes_strides_and_precisions_do_not_mix() -> None:
    function = Counted()
    replayed = Replay(function)
    forms = [
        {"rows": 3, "columns": 2},
        {"rows": 2, "columns": 3},
        {"rows": 3, "columns": 3},
        {"rows": 3, "columns": 3, "across": True},
        {"rows": 3, "columns": 2, "dtype": torch.float32},
    ]
    for seed in range(EARLY + 4):  # in turn, so that a mixed-up recording would show
        for form in forms:
            x, y = pair(**form, seed=seed)  # type: ignore[arg-type]
            for found, expected in zip(replayed(x, y), function.expected(x, y), strict=True):
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)
    assert function.calls == len(forms) * (EARLY + 1 + 3)
    one = pair(1, 2, 0)[0].expand(3, 2)  # a row that stands for three has a stride of 0
    for seed in range(EARLY + 3):
        y = pair(3, 2, seed)[1]
        assert torch.equal(replayed(one, y)[0], function.expected(one, y)[0])


@pytest.mark.usefixtures("_soon")
def test_results_of_one_call_survive_the_next() -> None:
    replayed = Replay(Counted())
    kept = [replayed(*pair(3, 2, seed)) for seed in range(EARLY + 4)]
    for seed, (first, second) in enumerate(kept):
        expected = Counted().expected(*pair(3, 2, seed))
        assert torch.equal(first, expected[0])
        assert torch.equal(second, expected[1])


def block(
    problem: Problem, k: int, samples: int, seed: int
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor]:
    """x, lam, a batch and a direction for the first k clients."""
    d, g = Derivatives.of(problem), torch.Generator().manual_seed(seed)
    x, lam, u = (
        torch.randn(k, length, generator=g, dtype=torch.float64)
        for length in (d.inner.d, d.outer.d, d.inner.d)
    )
    index = torch.randint(int(problem.data.train.sizes.min()), (k, samples), generator=g)
    return x, lam, problem.data.train.gather(torch.arange(k), index), u


@pytest.mark.usefixtures("_soon")
def test_a_long_list_of_operations_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "_MOST", 2)
    function = Counted()
    replayed = Replay(function)
    for seed in range(EARLY + 3):
        assert torch.equal(replayed(*pair(3, 2, seed))[0], function.expected(*pair(3, 2, seed))[0])
    assert function.calls == EARLY + 3


MAKERS = {
    "dicts": bilevel,
    "one level": lambda: quadratic(clients=4, noise=1.0),
}


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_replayed_derivatives_are_the_plain_ones_exactly(name: str, vectorize: bool) -> None:
    """Those of a problem that has been asked often, and of one that is asked for the first time: in turn for
    several shapes, and for rows that all clients share, as the server-based methods pass them.
    """
    problem = dataclasses.replace(MAKERS[name](), vectorize=vectorize)
    replayed = Derivatives.of(problem)
    for seed in range(EARLY + 2):
        for k, samples in ((4, 3), (3, 2), (1, 3)):
            x, lam, batch, u = block(problem, k, samples, seed)
            shared = lam[:1].expand(k, -1)
            rate = torch.linspace(0.1, 0.4, k, dtype=torch.float64)[:, None]
            found, expected = (
                results(d, x, shared, batch, u, rate) for d in (replayed, Derivatives.of(problem))
            )
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            plain, loss = replayed.inner_gradient(x, shared, batch)
            torch.testing.assert_close(found[0], x - rate * plain, rtol=0, atol=1e-14)
            torch.testing.assert_close(found[1], loss, rtol=0, atol=1e-14)


def results(
    d: Derivatives, x: Tensor, lam: Tensor, batch: tuple[Tensor, ...], u: Tensor, rate: Tensor
) -> list[Tensor]:
    """All that is replayed: inner steps with a rate of everybody's own, outer ones with one for all, and
    Hessian-vector products.
    """
    stepped = x.clone()
    losses = d.descend("inner", stepped, lam, batch, rate)
    found = [stepped, losses, d.inner_hessian_vector(x, lam, batch, u, -0.5)]
    if d.outer.d:
        own = lam.clone()
        found += [d.descend("outer", x[:1].expand(len(x), -1), own, batch, 0.3), own]
    return found


def test_encoding_once_changes_no_number_of_a_run(tmp_path: Path) -> None:
    """A problem whose inner loss has two stages, and the same without saying so, through AggITD with
    minibatches and local epochs: equal up to rounding.
    """
    problem = hyper_representation(
        "digits", clients=4, model="mlp:6", partition=IID(), limit=120, fractions=(0.4, 0.4, 0.2), l2=0.01
    )
    assert problem.stages is not None
    protocol = AggITD(
        2,
        LocalSteps(0.2, epochs=2, batch=5),
        LocalSteps(0.1, steps=2, batch=7),
        inner_rounds=3,
        scale=0.2,
        q=1,
        batch=6,
    )
    whole = dataclasses.replace(problem, stages=None)
    d, g = Derivatives.of(problem), torch.Generator().manual_seed(0)
    start = {"x": d.outer.flatten(problem.init_outer(g)), "y": d.inner.flatten(problem.init_inner(g))}
    first, second = (
        serve(one, protocol, tmp_path / name, seed=5, start=start).final
        for one, name in ((problem, "staged"), (whole, "whole"))
    )
    assert set(first) == set(second)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-12)
    assert (first["outer"] - start["x"]).abs().max() > 1e-3
    assert (first["inner"] - start["y"]).abs().max() > 1e-3
