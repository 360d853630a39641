"""What a method says that its clients compute is what they compute, counted by the losses that are called;
and what the tables of a run say is what the trace and the declarations add up to.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from asyncfed import Lockstep, Result, Scenario, run
from asyncfed.problems import bilevel_quadratic, quadratic
from asyncfed.scenario import check
from tests.laws.changed import with_method
from tests.laws.examples import Case, Example, examples_of, methods
from tests.laws.runs import Runs, every_case
from topologies import star

COSTS = ["gradients", "hessian_products"]
APART = {
    "CompareHypergradients": "what comes after the last part that is judged stands in no table",
    "EstimateHypergradient": "likewise",
    "FedEM": "what is differentiated is a loss of the mixture, which E steps call too",
    "PeerFedEM": "likewise",
    "GossipBilevel": "all columns of a Hessian share one loss",
}
"""Methods of which calls cannot be compared with the sum of both counts."""
DRAWN = {"LFedNest", "LFedNestNonAlt", "LFedNestSVRG"}  # every client draws how many products it makes
OF_MANY = {  # other examples than the first
    "CDBO": (1,),  # in VR-HGP's rounds two vectors share a loss
    "MetaFL": (0, 1, 2),  # every variant has costs of its own
}


class Called:
    """Problems whose losses count how often they are called, for one client at a time."""

    def __init__(self) -> None:
        self.times = 0

    def counted(self, scenario: Scenario) -> Scenario:
        problem = scenario.problem

        def told(loss: Any) -> Any:
            def called(inner: Any, outer: Any, batch: tuple[Tensor, ...]) -> Tensor:
                self.times += 1
                found: Tensor = loss(inner, outer, batch)
                return found

            return called

        watched = dataclasses.replace(
            problem,
            inner_loss=told(problem.inner_loss),
            outer_loss=told(problem.outer_loss),
            vectorize=False,
            recipe=None,
        )
        return dataclasses.replace(scenario, problem=watched)


def _longer(scenario: Scenario) -> Scenario:
    """Twice as many outer steps, or steps where there are no outer ones."""
    method: Any = scenario.protocol
    name = "outer_steps" if hasattr(method, "outer_steps") else "steps"
    twice = dataclasses.replace(method, **{name: 2 * getattr(method, name)})
    return dataclasses.replace(scenario, protocol=twice)


def _easy(example: Example) -> Scenario:
    """Everybody is asked and answers, so that nothing is declared which nobody has to compute; four samples
    each, which are one piece wherever all are wanted; and nobody is judged on the way.
    """
    few = dataclasses.replace(example, problem=example.problem or _four(example.protocol))
    everyone = {"participation": 1.0, "quorum": None, "size": 1.0, "at_work": 1.0}
    scenario = with_method(few.scenario("lockstep"), lambda name, value: everyone.get(name, value))
    if scenario.protocol.server is not None:
        scenario = dataclasses.replace(scenario, topology=star(scenario.clients), timing=Lockstep())
    return dataclasses.replace(scenario, evaluate_every=10**6)


def _four(protocol: Any) -> Any:
    if protocol.needs_outer:
        return lambda clients: bilevel_quadratic(clients=clients, seed=2, noise=0.3, samples=4, curved=True)
    return lambda clients: quadratic(clients=clients, dimension=3, seed=1, noise=0.5, samples=4)


def _cost(result: Result) -> int:
    last = result.metrics.iloc[-1]
    return int(last["gradients"] + last["hessian_products"])


def _counted() -> list[Any]:
    return [
        pytest.param(method, examples_of(method)[number], id=examples_of(method)[number].name)
        for method in methods()
        if method not in APART
        for number in OF_MANY.get(method, (0,))
    ]


@pytest.mark.parametrize(("method", "example"), _counted())
def test_as_many_losses_are_differentiated_as_a_method_declares(
    method: str, example: Example, tmp_path: Path
) -> None:
    """The difference of two runs, one of them twice as long: both are begun and judged alike."""
    called, declared = [], []
    for number, lengthen in enumerate((lambda scenario: scenario, _longer)):
        calls = Called()
        scenario = calls.counted(lengthen(_easy(example)))
        check(scenario)
        before = calls.times
        result = run(scenario, out=tmp_path / f"run {number}")
        called.append(calls.times - 2 * before)
        assert ("gradients" in result.metrics) == (method not in DRAWN)
        declared.append(0 if method in DRAWN else _cost(result))
    if method not in DRAWN:
        assert called[1] - called[0] == declared[1] - declared[0] > 0


@every_case
def test_tables_add_up_what_is_declared_of_the_steps_that_were_made(case: Case, told: Runs) -> None:
    run = told(case)
    metrics, clients = run.result.metrics, run.result.clients
    if COSTS[0] not in metrics:
        return
    scene = check(run.scenario)
    n = run.scenario.clients
    steps = run.result.trace.steps()
    steps = steps[steps["ended_at"] <= metrics["virtual_time"].iloc[-1]]
    expected = dict.fromkeys(COSTS, np.zeros(n, dtype=np.int64))
    if run.server is not None:
        rounds = [part for part in run.parts() if part.asks]
        sizes = run.scenario.problem.sample_sizes
        at_clients = steps[steps["client"] < n]
        for client, number in zip(at_clients["client"].tolist(), at_clients["step"].tolist(), strict=True):
            one = np.array([client])
            cost = rounds[number].cost({level: of[one] for level, of in sizes.items()}, one).of(1)
            expected = {name: expected[name] + np.eye(n, dtype=int)[client] * cost[name] for name in COSTS}
    else:
        made = Counter(zip(steps["client"].tolist(), steps["step"].tolist(), strict=True))
        first = 0
        parts = run.parts()
        judged = max((place for place, part in enumerate(parts) if part.judged), default=len(parts) - 1)
        for part in parts[: judged + 1]:
            own = [sum(made[i, first + step] for step in range(part.steps)) for i in range(n)]
            cost = part.cost(scene, np.array(own) + part.closing).of(n)
            expected = {name: expected[name] + cost[name] for name in COSTS}
            first += part.steps + part.closing
    for name in COSTS:
        assert metrics[name].iloc[-1] == expected[name].sum(), f"{case.name}: {name} in the metrics"
        assert clients[name].tolist() == expected[name].tolist(), f"{case.name}: {name} of the clients"
        assert metrics[name].is_monotonic_increasing, f"{case.name}: {name} shrinks"
