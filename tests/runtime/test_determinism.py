"""Nothing that somebody else draws changes anything here; and virtual time without delays is lockstep.

That the same scenario gives the same bytes is among the laws (tests/laws).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncfed import Lockstep, Scenario, ScenarioError, VirtualTime, run
from asyncfed.data import client_data_from_lists
from asyncfed.problems import Problem, classification
from asyncfed.protocols import SGP
from tests.helpers import run_tapped
from topologies import stochastic_directed, stochastic_undirected


def _scenario(**changes: object) -> Scenario:
    base = Scenario(
        problem=classification("digits", clients=7, seed=1),
        topology=stochastic_directed(7, seed=5),
        protocol=SGP(steps=12, lr=0.05, batch=8),
        seed=3,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    first, second = run(_scenario(), out=tmp_path / "a"), run(_scenario(seed=4), out=tmp_path / "b")
    assert not first.trace.to_arrow().equals(second.trace.to_arrow())
    assert not torch.equal(first.final["inner"], second.final["inner"])


@pytest.mark.parametrize("order", ["4a", "4b"])
@pytest.mark.parametrize("kind", [stochastic_directed, stochastic_undirected])
@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_virtual_time_without_delays_is_lockstep_exactly(
    order: str, kind: object, loss: float, tmp_path: Path
) -> None:
    """Bit for bit: sixteen clients and up make the same matrix products in both."""
    common = {
        "problem": classification("digits", clients=20, seed=1),
        "topology": kind(20, seed=5),  # type: ignore[operator]
        "protocol": SGP(steps=12, lr=0.05, batch=8, order=order),  # type: ignore[arg-type]
        "evaluate_every": 3,
    }
    rounds = run(_scenario(**common, timing=Lockstep(loss=loss)), out=tmp_path / "lockstep")
    events = run(
        _scenario(**common, timing=VirtualTime(compute=1.0, latency=0.0, loss=loss)), out=tmp_path / "virtual"
    )
    assert rounds.trace.to_arrow().equals(events.trace.to_arrow())
    assert rounds.trace.steps().equals(events.trace.steps())
    assert rounds.metrics.equals(events.metrics)
    for key, value in rounds.final.items():
        assert torch.equal(value, events.final[key]), key


def test_a_straggler_slows_nobody_else_down(tmp_path: Path) -> None:
    timing = VirtualTime(compute="exponential(1.0)", latency="exponential(0.3)")
    even = run(_scenario(timing=timing), out=tmp_path / "even")
    slow = run(_scenario(timing=dataclasses.replace(timing, factors={2: 10.0})), out=tmp_path / "slow")
    columns = ["client", "step", "started_at", "ended_at"]

    def others(result: object) -> object:
        steps = result.trace.steps()  # type: ignore[attr-defined]
        return steps[steps.client != 2][columns].sort_values(columns).reset_index(drop=True)

    assert others(even).equals(others(slow))  # type: ignore[attr-defined]
    straggler = {
        name: r.trace.nodes().set_index("client").busy_time[2] for name, r in (("even", even), ("slow", slow))
    }
    assert straggler["slow"] == pytest.approx(10 * straggler["even"])


def test_more_draws_of_one_client_change_nobody_elses(tmp_path: Path) -> None:
    """Client 0 has more samples and another pace, so everything it draws is different; the links of the
    others, and the minibatches they draw, are not.
    """

    def problem(samples_of_zero: int) -> Problem:
        lists = [
            (torch.arange(samples_of_zero if i == 0 else 9, dtype=torch.float64)[:, None] + 100 * i,)
            for i in range(4)
        ]
        return Problem(
            name="which samples",
            data=client_data_from_lists(lists),
            inner_loss=lambda x, lam, batch: (
                x * batch[0].mean()
            ).sum(),  # its gradient tells the minibatch's mean
            init_inner=lambda generator: torch.zeros(1),
        )

    def minibatches(samples_of_zero: int, factor: float, name: str) -> tuple[np.ndarray, object]:
        scenario = Scenario(
            problem=problem(samples_of_zero),
            topology=stochastic_directed(4, seed=1),
            protocol=SGP(steps=6, lr=1e-3, batch=5),
            timing=VirtualTime(compute="exponential(1.0)", factors={0: factor}),
            precision="float64",
        )
        result, steps = run_tapped(scenario, tmp_path / name)
        means = np.array([[float(steps.residue[i, t]["z"] / -1e-3) for t in range(6)] for i in range(1, 4)])
        messages = result.trace.to_pandas()
        mine = messages[(messages.sender != 0) & (messages.receiver != 0)]
        return means, {(r.sender, r.receiver, r.step): r.status == "link_down" for r in mine.itertuples()}

    means, links = minibatches(9, 1.0, "before")
    changed_means, changed_links = minibatches(30, 2.5, "after")
    np.testing.assert_allclose(means, changed_means, rtol=0, atol=1e-9)
    common = set(links) & set(changed_links)  # type: ignore[call-overload]
    assert len(common) > 20
    assert all(links[key] == changed_links[key] for key in common)  # type: ignore[index]


def _counting_problem(vectorize: bool) -> Problem:
    """Its gradient counts how often each of 9 samples stands in the minibatch; vmap cannot do `one_hot`."""

    def count(x: torch.Tensor, lam: object, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return (x * torch.nn.functional.one_hot(batch[0].long(), 9).double().sum(0)).sum()

    return Problem(
        name="counts",
        data=client_data_from_lists([(torch.arange(9, dtype=torch.float64),)] * 2),
        inner_loss=count,
        init_inner=lambda generator: torch.zeros(9),
        vectorize=vectorize,
    )


def test_minibatches_are_uniform_over_a_clients_samples(tmp_path: Path) -> None:
    """2,000 draws from 9 samples: counts within 4 standard errors of uniform."""
    seen = np.zeros(9)
    protocol = SGP(steps=100, lr=1.0, batch=20)
    scenario = Scenario(
        problem=_counting_problem(False),
        topology=stochastic_directed(2, seed=0),
        protocol=protocol,
        precision="float64",
    )
    _, steps = run_tapped(scenario, tmp_path / "run")
    for t in range(100):
        seen += -steps.residue[1, t]["z"].numpy()
    assert seen.sum() == 2000
    assert (np.abs(seen - 2000 / 9) < 4 * np.sqrt(2000 * (1 / 9) * (8 / 9))).all()


def test_functions_that_vmap_refuses_are_pointed_to_the_loop(tmp_path: Path) -> None:
    scenario = Scenario(
        problem=_counting_problem(True),
        topology=stochastic_directed(2, seed=0),
        protocol=SGP(steps=1, lr=1.0),
        precision="float64",
    )
    with pytest.raises(
        ScenarioError, match="'counts' cannot be run for many clients at once; give it vectorize=False"
    ):
        run(scenario, out=tmp_path / "run")
