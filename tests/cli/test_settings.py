"""`--set`: what each kind of path changes."""

from __future__ import annotations

from typing import Any

import pytest

from asyncfed.cli.scenarios import load_scenario
from asyncfed.errors import UnknownNameError
from asyncfed.network import Metropolis, VirtualTime
from asyncfed.network.distributions import Exponential
from asyncfed.protocols import DSGD, PDBO, VRHGP, Diminishing, StepDecay


def changed(*settings: str) -> Any:
    return load_scenario("sgp_digits", ["clients=6", *settings])


def test_a_parameter_of_the_function_comes_first() -> None:
    scenario = changed("steps=7", "lr=1")
    assert scenario.clients == len(scenario.topology) == 6
    assert scenario.protocol.steps == 7
    assert scenario.protocol.lr == StepDecay(1, at=(5,))


def test_parts_of_the_protocol_and_the_scenario() -> None:
    scenario = changed("protocol.order=4a", "protocol.batch=None", "evaluate_every=10", "precision=float64")
    assert (scenario.protocol.order, scenario.protocol.batch) == ("4a", None)
    assert (scenario.evaluate_every, scenario.precision) == (10, "float64")


def test_parts_within_parts() -> None:
    settings = ["protocol.inner.steps=3", "protocol.inner.lr=0.5", "protocol.hypergradient.rounds=2"]
    protocol = load_scenario("pdbo_digits", ["clients=6", *settings]).protocol
    assert isinstance(protocol, PDBO)
    assert (protocol.inner.steps, protocol.inner.lr) == (3, 0.5)
    assert protocol.hypergradient == VRHGP(rounds=2, sampling="joint", lr=0.06)


def test_problem_and_topology_are_made_again() -> None:
    scenario = changed("problem.model=logistic", "problem.partition=iid", "topology.probability=(0.9, 1.0)")
    assert scenario.problem.recipe.arguments["model"] == "logistic"
    assert scenario.problem.recipe.arguments["clients"] == 6
    assert min(p for _, _, p in scenario.topology.edges(data="probability")) >= 0.9


def test_calls_of_our_own_types_replace_whole_parts() -> None:
    scenario = changed(
        "timing=VirtualTime(compute='exponential(1.0)')",
        "timing.latency=exponential(0.2)",
        "weights=Metropolis",
        "topology=ring(6)",
        "protocol=DSGD(steps=3, lr=0.1)",
        "protocol.lr=Diminishing(0.2, after=5)",
    )
    assert scenario.timing == VirtualTime(compute=Exponential(1.0), latency=Exponential(0.2))
    assert scenario.weights == Metropolis()
    assert scenario.topology.number_of_edges() == 6
    assert scenario.protocol == DSGD(steps=3, lr=Diminishing(0.2, after=5))


def test_the_seed_option_wins() -> None:
    assert load_scenario("sgp_digits", ["seed=3"]).seed == 3
    assert load_scenario("sgp_digits", ["seed=3"], seed=4).seed == 4


@pytest.mark.parametrize("name", ["sgp_mnist", "sgp-mnist"])
def test_names_may_be_written_with_hyphens(name: str) -> None:
    from asyncfed.errors import ScenarioError

    with pytest.raises(ScenarioError, match="clients"):
        load_scenario(name, ["clients=many"])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "protocol.inner.rate=1",
            r"nown: (protocol\.inner\.\w+(, )?)+$",
        ),
        ("protocl=1", r"did you mean 'protocol'\? Known: [^.]+; what is inside of these has a dotted path"),
        ("until.accuracy=1", "Known: until; nothing inside of until can be set by itself"),
        ("timing.latency=1", r"Known: timing\.loss, timing\.presence, timing\.running_sums$"),
    ],
)
def test_an_unknown_name_is_told_what_stands_beside_it_and_no_more(setting: str, said: str) -> None:
    with pytest.raises(UnknownNameError, match=said):
        load_scenario("pdbo_digits", ["clients=6", setting])
