"""Local steps over minibatches, against loops written by hand over the same shuffles.

Shards of 7, 4, 10 and 3 samples in minibatches of 4: last ones are smaller, and one client has not even one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncfed import Scenario, ScenarioError, VirtualTime, run
from asyncfed.data import client_data_from_lists
from asyncfed.problems import Problem, quadratic
from asyncfed.protocols import Diminishing, FedAvg, FedNest, LFedNest, LocalSteps, Server, StepDecay
from asyncfed.rng import Streams
from tests.protocols.served import Array, serve
from topologies import star

SIZES, D, BATCH, SEED = (7, 4, 10, 3), 3, 4, 11
Y0 = np.array([0.5, -1.0, 0.2])


def data() -> list[tuple[Array, Array]]:
    """Features and offsets of every client."""
    generator = np.random.default_rng(0)
    return [(generator.standard_normal((n, D)), generator.standard_normal(n)) for n in SIZES]


def problem() -> Problem:
    """mean softplus(a·y − t) + ½ · 0.1 ‖y‖²"""

    def each(y: Tensor, x: Any, batch: tuple[Tensor, ...]) -> Tensor:
        a, t = batch
        return torch.nn.functional.softplus(a @ y - t) + 0.05 * y.square().sum()

    tensors = [tuple(torch.from_numpy(part) for part in one) for one in data()]
    return Problem(
        name="softplus",
        data=client_data_from_lists(tensors),
        inner_loss=lambda y, x, batch: each(y, x, batch).mean(),
        init_inner=lambda g: torch.zeros(D, dtype=torch.float64),
        metrics={"loss": each},
    )


def gradient(i: int, y: Array, index: Array | slice = slice(None)) -> Array:
    a, t = (part[index] for part in data()[i])
    return np.asarray((1 / (1 + np.exp(t - a @ y))) @ a / len(t) + 0.1 * y)


def minibatches(client: int, round_: int) -> Iterator[Array]:
    """One after another, epoch after epoch, in the orders that the run draws."""
    size, epoch = SIZES[client], 0
    while True:
        drawn = Streams(SEED).uniforms("shuffle inner", round_, epoch * size, (epoch + 1) * size, lane=client)
        order = np.argsort(drawn, kind="stable")
        assert sorted(order) == list(range(size))
        for first in range(0, size, BATCH):
            yield order[first : first + BATCH]
        epoch += 1


def sgd(y: Array, i: int, round_: int, rate: float, count: int) -> Array:
    for _, index in zip(range(count), minibatches(i, round_), strict=False):
        y = y - rate * gradient(i, y, index)
    return y


def final(protocol: Any, out: Path) -> Array:
    return np.asarray(serve(problem(), protocol, out, start={"y": Y0}, seed=SEED).final["inner"][0].numpy())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("divide", [False, True])
def test_epochs_over_minibatches_are_the_loops_written_by_hand(
    divide: bool, weighted: bool, tmp_path: Path
) -> None:
    local = LocalSteps(0.4, epochs=2, batch=BATCH, divide=divide)
    found = final(FedAvg(3, local, server=Server(weighted=weighted)), tmp_path / "run")
    y, counts = Y0, [2 * -(-size // BATCH) for size in SIZES]
    assert counts == [4, 2, 6, 2]
    weights = np.array(SIZES) / sum(SIZES) if weighted else np.full(4, 0.25)
    for round_ in range(3):
        rates = [0.4 / count if divide else 0.4 for count in counts]
        y = weights @ np.stack([sgd(y, i, round_, rates[i], counts[i]) for i in range(4)])
    np.testing.assert_allclose(found, y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("steps", [5, (1, 4, 7, 2)])
def test_steps_go_on_over_as_many_epochs_as_it_takes(steps: Any, tmp_path: Path) -> None:
    local = LocalSteps(StepDecay(0.4, at=(1,), factor=0.5), steps=steps, batch=BATCH)
    found = final(FedAvg(2, local, server=Server()), tmp_path / "run")
    y, counts = Y0, [steps] * 4 if isinstance(steps, int) else steps
    for round_, rate in enumerate((0.4, 0.2)):  # a schedule is read at the outer iteration
        y = np.mean([sgd(y, i, round_, rate, counts[i]) for i in range(4)], axis=0)
    np.testing.assert_allclose(found, y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("batch", [None, 2])
def test_corrected_steps_use_one_minibatch_at_both_points(batch: int | None, tmp_path: Path) -> None:
    """Local SVRG; the mean gradient q over all samples, or over a minibatch of its own."""
    steps, counts = LocalSteps(0.4, steps=(1, 4, 7, 2), batch=BATCH), (1, 4, 7, 2)
    found = final(FedNest(2, inner=steps, setting="single", batch=batch), tmp_path / "run")
    y = Y0
    for k in range(2):
        q = np.mean([gradient(i, y, _minibatch(i, 2 * k, batch)) for i in range(4)], axis=0)
        ends = []
        for i in range(4):
            y_i = y
            for _, index in zip(range(counts[i]), minibatches(i, 2 * k + 1), strict=False):
                y_i = y_i - 0.4 * (gradient(i, y_i, index) - gradient(i, y, index) + q)
            ends.append(y_i)
        y = np.mean(ends, axis=0)
    np.testing.assert_allclose(found, y, rtol=0, atol=1e-13)


def _minibatch(client: int, round_: int, batch: int | None) -> Array | slice:
    if batch is None:
        return slice(None)
    drawn = Streams(SEED).uniforms("minibatch q", round_, 0, SIZES[client], lane=client)
    return np.argsort(drawn, kind="stable")[:batch]


def test_the_training_loss_is_the_mean_over_clients_of_their_mean_over_steps(tmp_path: Path) -> None:
    result = serve(
        problem(), FedAvg(1, LocalSteps(0.4, steps=3), server=Server()), tmp_path / "run", start={"y": Y0}
    )
    means = []
    for i, (a, t) in enumerate(data()):
        y, losses = Y0, []
        for _ in range(3):
            losses.append(np.logaddexp(0, a @ y - t).mean() + 0.05 * y @ y)
            y = y - 0.4 * gradient(i, y)
        means.append(np.mean(losses))
    assert result.metrics.train_loss.iloc[-1] == pytest.approx(np.mean(means), abs=1e-13)


def test_an_epoch_of_either_variable_takes_as_long_as_its_own_loss_has_minibatches(tmp_path: Path) -> None:
    """Six samples for the inner loss and three for the outer, in minibatches of two: 3 and 2 steps."""
    shards = [[(torch.ones(size, 1, dtype=torch.float64),)] * 2 for size in (6, 3)]
    saddle = Problem(
        name="unequal splits",
        data=client_data_from_lists(*shards),
        inner_loss=lambda y, x, batch: 0.5 * ((y - x) * batch[0]).square().mean(),
        outer_loss=lambda y, x, batch: 0.5 * ((x + y) * batch[0]).square().mean(),
        init_inner=lambda g: torch.zeros(1, dtype=torch.float64),
        init_outer=lambda g: torch.ones(1, dtype=torch.float64),
        outer_split="validation",
    )
    steps = LocalSteps(0.1, epochs=1, batch=2)
    for kind in (FedNest, LFedNest):
        protocol = kind(1, steps, steps, setting="minimax")
        result = serve(saddle, protocol, tmp_path / kind.__name__, timing=VirtualTime(compute=1.0))
        work = result.trace.steps().query("client > 0")
        lasted = (work.ended_at - work.started_at).groupby([work.step, work.phase], sort=True).max()
        each = (
            {"inner": [1.0, 3.0], "outer": [1.0, 2.0]}
            if kind is FedNest
            else {"inner": [3.0], "outer": [2.0]}
        )
        for phase, expected in each.items():
            assert lasted[lasted.index.get_level_values("phase") == phase].tolist() == expected


def test_who_computes_with_whom_does_not_matter(tmp_path: Path) -> None:
    """A client alone, asked in the same round, goes the same way."""
    local = LocalSteps(0.4, epochs=2, batch=BATCH)
    for i in range(4):
        found = final(FedAvg(1, local, server=Server(participation=[i])), tmp_path / str(i))
        np.testing.assert_allclose(found, sgd(Y0, i, 0, 0.4, 2 * -(-SIZES[i] // BATCH)), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.0}, r"LocalSteps: lr is 0"),
        (
            {"steps": 0},
            "LocalSteps: steps is 0; it must be a whole number, at least 1, a list, each",
        ),
        ({"steps": ()}, r"steps is an empty list; give a number for each client, or one for all"),
        ({"steps": (1, 0)}, r"LocalSteps: steps"),
        ({"steps": 2.5}, r"steps is 2\.5"),
        ({"epochs": 0}, "epochs is 0; it must be a whole number, at least 1, or None"),
        ({"batch": 0}, "batch is 0; it must be a whole number, at least 1, or None"),
        ({"steps": 2, "epochs": 1}, "steps is 2 and epochs is 1; give one of the two"),
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        LocalSteps(**({"lr": 0.1} | change))


def test_numbers_of_steps_for_other_clients_than_there_are_are_refused(tmp_path: Path) -> None:
    scenario = Scenario(
        problem=quadratic(clients=3),
        topology=star(3),
        protocol=FedAvg(1, LocalSteps(Diminishing(0.1), steps=(1, 2))),
    )
    with pytest.raises(ScenarioError, match="2 numbers of steps are given for 3 clients; give one each"):
        run(scenario, out=tmp_path / "never")
    assert not (tmp_path / "never").exists()
