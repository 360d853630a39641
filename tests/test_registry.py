"""The registry: every name stands for one thing, on disk, on the command line and in the lists of names."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import topologies
from asyncfed import (
    Lockstep,
    Scenario,
    ScenarioError,
    UnknownNameError,
    VirtualTime,
    load,
    network,
    problems,
    protocols,
    registry,
    run,
)
from asyncfed import data as data_package
from asyncfed.cli.scenarios import load_scenario
from asyncfed.data import LabelShards
from asyncfed.network import Exponential, Given, Metropolis, Table, Uniform, UniformTime
from asyncfed.problems import Problem, problem_factory, problem_from_recipe, quadratic
from asyncfed.protocols import (
    HGP,
    PDBO,
    SGP,
    VRHGP,
    CompareHypergradients,
    Diminishing,
    FedAvg,
    FedNest,
    ITDBackward,
    LocalSteps,
    Neumann,
    Server,
    StepDecay,
)
from asyncfed.registry import KINDS, from_data, has_call, kind_of, read, register, registered, to_data
from asyncfed.scenario_data import scenario_from_data, scenario_to_data
from tests.examples import example
from topologies import ring

CLASSES = {name: thing for name, thing in registered().items() if isinstance(thing, type)}


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(to_data(value), allow_nan=False))


@pytest.fixture
def clean() -> Iterator[None]:
    """What a test registers is forgotten again."""
    things = {kind: dict(registry._THINGS[kind]) for kind in KINDS}
    names = dict(registry._NAMES)
    yield
    for kind in KINDS:
        registry._THINGS[kind].clear()
        registry._THINGS[kind].update(things[kind])
    registry._NAMES.clear()
    registry._NAMES.update(names)


# ---- data


@pytest.mark.parametrize("name", CLASSES)
def test_everything_registered_survives_being_written_down(name: str) -> None:
    value = example(CLASSES[name])
    data = through_json(value)
    if kind_of(value) == "duration":
        assert data == str(value)
        assert VirtualTime(compute=from_data(data)).compute == value
    else:
        assert data["type"] == name
        assert from_data(data) == value
        assert type(from_data(data)) is type(value)
        assert to_data(from_data(data)) == data


@pytest.mark.parametrize(
    "value",
    [
        PDBO(SGP(3, StepDecay(0.1, at=(1,))), HGP(2, lr=0.5), 4, outer_lr={"labels": 0.1, "ensemble": 1.0}),
        FedNest(
            2,
            LocalSteps(0.1, steps=(1, 2, 3)),
            neumann=Neumann(3, products="sum"),
            server=Server(participation=((0, 1), (2,)), quorum=0.5),
        ),
        VirtualTime(compute=Table(((1.0, 2.0), (3.0,))), factors={1: 4.0}, latency="lognormal(0.1, 0.5)"),
        [None, True, 3, 0.5, "text", float("inf"), float("-inf"), {"a": (1, {"b": 2})}],
    ],
)
def test_nested_values_survive_being_written_down(value: Any) -> None:
    again = from_data(through_json(value))
    assert again == (tuple(value) if isinstance(value, list) else value)


def test_numpy_numbers_become_plain_ones() -> None:
    data = to_data({"a": np.float32(0.25), "b": (np.int64(3), np.bool_(True)), "c": np.float64("inf")})
    assert data == {"a": 0.25, "b": [3, True], "c": "inf"}
    assert [type(item) for item in (data["a"], *data["b"])] == [float, int, bool]


def test_data_written_before_there_was_a_registry_still_loads() -> None:
    protocol = """{
        "type": "PDBO",
        "inner": {"type": "SGP", "steps": 3, "lr": {"type": "StepDecay", "lr": 0.1, "at": [1], "factor": 0.1},
                  "order": "4b", "batch": 64, "weight_decay": 0.0},
        "hypergradient": {"type": "HGP", "rounds": 2, "sampling": "alternating", "expectations": "estimated",
                          "batch": "inner", "lr": null, "record": false},
        "outer_steps": 1, "outer_lr": {"labels": 0.1}, "optimizer": "adam", "betas": [0.9, 0.999],
        "start": "fresh"
    }"""
    timing = """{
        "type": "VirtualTime", "compute": "exponential(1.0)", "factors": {"2": 10.0},
        "latency": "constant(0.0)", "bandwidth": "inf", "loss": 0.0, "horizon": null
    }"""
    expected = PDBO(SGP(3, StepDecay(0.1, at=(1,))), HGP(2), 1, outer_lr={"labels": 0.1})
    assert from_data(json.loads(protocol)) == expected
    assert to_data(expected) == json.loads(protocol) | {"draws": "fresh"}
    assert from_data(json.loads(timing)) == VirtualTime("exponential(1.0)", factors={2: 10.0})
    recipe = '{"factory": "quadratic", "arguments": {"clients": 3, "dimension": 2}}'
    assert problem_from_recipe(json.loads(recipe)).clients == 3


def test_unknown_names_in_data_are_refused() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown type in a file 'SGPP'; did you mean 'SGP'\?.*import"
    ):
        from_data({"type": "SGPP", "steps": 1}, "a file")
    with pytest.raises(UnknownNameError, match="unknown field of SGP 'step'; did you mean 'steps'"):
        from_data({"type": "SGP", "step": 1, "lr": 0.1})
    with pytest.raises(ScenarioError, match=r"SGP.*missing.*'lr'; its fields are: steps, lr, order"):
        from_data({"type": "SGP", "steps": 1})
    with pytest.raises(UnknownNameError, match="unknown type in data 'quadratic'"):
        from_data({"type": "quadratic", "clients": 3})  # a function is no type


def test_a_mapping_that_looks_like_a_type_is_not_taken_for_one() -> None:
    assert to_data({"type": 0.1}) == {"own": "{'type': 0.1}"}


# ---- a user's own


@dataclass(frozen=True)
class Unregistered:
    steps: int


def test_what_is_not_registered_says_what_to_do_when_it_is_read(tmp_path: Path) -> None:
    assert to_data(Unregistered(3)) == {"own": "Unregistered(steps=3)"}
    with pytest.raises(ScenarioError, match=r"Unregistered\(steps=3\) is of a type.*@register"):
        from_data(to_data(Unregistered(3)))


def test_a_subclass_of_ours_is_not_taken_for_ours() -> None:
    class Mine(SGP):
        pass

    assert set(to_data(Mine(1, 0.1))) == {"own"}


def test_a_users_own_method_that_is_registered_can_be_run_again(clean: None, tmp_path: Path) -> None:
    @register("method")
    @dataclass(frozen=True)
    class Slower(SGP):
        slower: float = 2.0

    scenario = Scenario(problem=quadratic(clients=3), topology=ring(3), protocol=Slower(2, 0.1, batch=None))
    run(scenario, out=tmp_path / "run")
    assert load(tmp_path / "run").scenario.protocol == scenario.protocol
    assert read("slower(2, 0.1)", "method") == Slower(2, 0.1)
    del registry._THINGS["method"]["Slower"]  # as in another process, which has not imported it
    with pytest.raises(ScenarioError, match=r"'Slower' is not registered; it was defined in .*import"):
        _ = load(tmp_path / "run").scenario


def test_a_users_own_problem_that_is_not_there_says_what_to_do(clean: None) -> None:
    @problem_factory
    def my_problem(clients: int) -> Problem:
        return quadratic(clients)

    data = scenario_to_data(Scenario(problem=my_problem(3), topology=ring(3), protocol=SGP(1, 0.1)))
    assert scenario_from_data(data).problem.clients == 3
    del registry._THINGS["problem"]["my_problem"]
    with pytest.raises(ScenarioError, match=r"'my_problem' is not registered; it was defined in .*import"):
        scenario_from_data(data)


# ---- registering


def test_a_clash_of_names_is_refused(clean: None) -> None:
    with pytest.raises(ScenarioError, match=r"'SGP' of a rate is taken.*method asyncfed.protocols.sgp.SGP"):
        register("rate", "SGP")(Unregistered)
    with pytest.raises(ScenarioError, match="'fedavg' of a method is taken"):
        register("method", "fedavg")(Unregistered)  # --set knows no capitals
    with pytest.raises(ScenarioError, match="'quadratic' of a problem is taken"):

        @problem_factory
        def quadratic() -> Problem:
            raise AssertionError

    assert registered("problem")["quadratic"] is problems.quadratic


def test_what_is_defined_again_takes_its_place(clean: None) -> None:
    def define(default: int) -> type[Any]:
        @register("option")
        @dataclass(frozen=True)
        class Again:
            value: int = default

        return Again

    first, second = define(1), define(2)
    assert registered("option")["Again"] is second
    assert from_data(to_data(first())) == second(1)


def test_what_cannot_be_registered() -> None:
    bare: Any = register
    with pytest.raises(ScenarioError, match="stands bare above"):
        bare(SGP)
    with pytest.raises(UnknownNameError, match="unknown kind of thing 'methods'; did you mean 'method'"):
        register("methods")
    with pytest.raises(UnknownNameError, match="unknown kind of thing 'methods'"):
        registered("methods")

    class Plain:
        pass

    @dataclass
    class Thawed:
        pass

    for thing in (Plain, Thawed):
        with pytest.raises(ScenarioError, match="is not a frozen dataclass"):
            register("method")(thing)
    with pytest.raises(ScenarioError, match="registered as the function that makes it"):
        register("problem")(Unregistered)


def test_things_are_listed_in_the_order_of_their_registration(clean: None) -> None:
    before = list(registered("option"))
    listed = registered("option")
    register("option")(Unregistered)
    assert list(listed) == [*before, "Unregistered"]
    with pytest.raises(TypeError):
        listed["more"] = Unregistered  # type: ignore[index]


# ---- public names


HOMES: dict[str, ModuleType] = {
    "method": protocols,
    "estimator": protocols,
    "rate": protocols,
    "option": protocols,
    "timing": network,
    "presence": network,
    "link": network,
    "weights": network,
    "duration": network,
    "times": network,
    "problem": problems,
    "partition": data_package,
    "topology": topologies,
}


@pytest.mark.parametrize("kind", HOMES)
def test_what_is_registered_is_exported(kind: str) -> None:
    exported = [getattr(HOMES[kind], name) for name in HOMES[kind].__all__]
    ours = [thing for thing in registered(kind).values() if not thing.__module__.startswith("tests")]
    assert len(ours) > 0
    assert [thing for thing in ours if thing not in exported] == []


def test_every_public_name_of_protocols_is_registered() -> None:
    known = {name for kind in ("method", "estimator", "option", "rate") for name in registered(kind)}
    assert [name for name in protocols.__all__ if name not in known] == []


def test_every_file_of_a_method_is_imported() -> None:
    """A method whose line is missing in protocols/__init__.py could not be named."""
    for path in Path(protocols.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
            if isinstance(node, ast.ClassDef) and any(mark.startswith("register(") for mark in marks):
                assert node.name in protocols.__all__, path.name


# ---- text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("FedAvg(3, LocalSteps(0.1))", FedAvg(3, LocalSteps(0.1))),
        ("fedavg(3, localsteps(0.1, batch=None))", FedAvg(3, LocalSteps(0.1))),
        (
            "PDBO(inner=SGP(3, 0.1), hypergradient=HGP(2), outer_steps=1)",
            PDBO(inner=SGP(3, 0.1), hypergradient=HGP(2), outer_steps=1),
        ),
        (
            "pdbo(sgp(3, stepdecay(0.1, (1, 2))), ITDBackward, 2, {'labels': 0.1}, betas=[0.5, 0.9])",
            PDBO(SGP(3, StepDecay(0.1, (1, 2))), ITDBackward(), 2, {"labels": 0.1}, betas=(0.5, 0.9)),
        ),
        (
            "FedNest(2, LocalSteps(Diminishing(0.1)), neumann=Neumann(terms=3), server=Server([0, 2]))",
            FedNest(2, LocalSteps(Diminishing(0.1)), neumann=Neumann(terms=3), server=Server([0, 2])),
        ),
        (
            "CompareHypergradients(SGP(3, 0.1), [HGP(2), VRHGP(2)])",
            CompareHypergradients(SGP(3, 0.1), (HGP(2), VRHGP(2))),
        ),
    ],
)
def test_methods_are_read_from_calls(text: str, value: Any) -> None:
    assert has_call(text)
    assert read(text, "method") == value


def test_other_kinds_are_read_too() -> None:
    assert read("metropolis", "weights") == Metropolis()
    assert read("Given(((0.5, 0.5), (0.5, 0.5)))", "weights") == Given(((0.5, 0.5), (0.5, 0.5)))
    assert read("Lockstep(loss=0.1)", "timing") == Lockstep(loss=0.1)
    timing = read("VirtualTime(exponential(2), latency=uniform(0, 1), bandwidth=inf)", "timing")
    assert timing == VirtualTime(Exponential(2), latency=UniformTime(0, 1))
    assert read("uniform", "weights") == Uniform()  # there is a duration of that name as well
    assert read("quadratic(clients=4)", "problem").clients == 4
    assert read("stochastic_directed(ring(5), 0.5)", "topology").number_of_edges() == 10
    assert read("-3") == -3
    assert read("[HGP(2), 'HGP(2)']") == [HGP(2), "HGP(2)"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SGD(3, 0.1)", "unknown method 'SGD'; did you mean"),
        ("Lockstep()", "unknown method 'Lockstep'"),
        ("FedAvg(3, LocalStep(0.1))", "unknown method 'LocalStep'; did you mean 'LocalSteps'"),
        ("FedAvg(3, locals=LocalSteps(0.1))", "unknown argument of FedAvg 'locals'; did you mean 'local'"),
        ("FedAvg(3)", r"FedAvg\(…\): missing .*'local'; its arguments are: outer_steps, local, server"),
        ("FedAvg(3, LocalSteps(0.1), Server(), 1, 2)", "too many positional arguments"),
        ("FedAvg(3, HGP(2))", "it must be LocalSteps"),
        ("PDBO(SGP(3, 0.1), SGP(3, 0.1), 1)", "hypergradient"),
        ("SGP(3, 0.1, order=late)", "unknown method 'late'"),
        ("SGP(3, 1 + lr)", r"cannot read '1 \+ lr'.*'text' in quotes"),
        ("SGP(*[3, 0.1])", "cannot read"),
        ("SGP(**{'steps': 3})", "cannot read"),
        ("PDBO(SGP(3, 0.1), HGP(2), 1, {**{}})", "cannot read"),
        ("SGP(open('x').read(), 0.1)", "cannot read"),
        ("SGP((lambda: 3)(), 0.1)", "cannot read"),
        ("__import__('os').system('true')", "cannot read"),
        ("3", r"cannot read '3' as method; write for instance .*\(…\)"),
        ("SGP(3,", "cannot read"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        read(text, "method")


def test_a_name_of_two_spellings_is_not_guessed() -> None:
    with pytest.raises(UnknownNameError, match="UNIFORM"):
        read("VirtualTime(latency=UNIFORM(0, 1))", "timing")


# ---- --set


def changed(*settings: str, name: str = "sgp_digits") -> Scenario:
    return load_scenario(name, ["clients=4", *settings])


@pytest.mark.parametrize("name", registered("method"))
def test_every_method_can_be_set(name: str) -> None:
    protocol = example(registered("method")[name])
    assert changed(f"protocol={protocol!r}").protocol == protocol  # a frozen dataclass prints as its call


def test_set_replaces_parts_with_nested_calls() -> None:
    assert changed("protocol=FedAvg(3, LocalSteps(0.1))").protocol == FedAvg(3, LocalSteps(0.1))
    protocol = changed(
        "protocol=pdbo(sgp(3, 0.1), hgp(2), outer_steps=1)", "protocol.inner.lr=StepDecay(1, (2,))"
    )
    assert protocol.protocol == PDBO(SGP(3, StepDecay(1, (2,))), HGP(2), 1)
    nested = changed(
        "protocol=FedNest(2, LocalSteps(0.1))", "protocol.neumann=Neumann(3)", "protocol.server=server"
    )
    assert nested.protocol == FedNest(2, LocalSteps(0.1), neumann=Neumann(3), server=Server())
    timing = changed("timing=VirtualTime()", "timing.latency=uniform(0, 1)", "timing.bandwidth=inf").timing
    assert timing == VirtualTime(latency=UniformTime(0, 1))
    problem = changed("problem.partition=LabelShards(3)").problem
    assert problem.recipe is not None
    assert problem.recipe.arguments["partition"] == to_data(LabelShards(3))
    assert changed("topology.n_or_base=ring(4)").topology.number_of_edges() == 8


def test_set_replaces_a_table_of_compute_times_by_a_number() -> None:
    settings = ("timing=VirtualTime(Table(((1, 2), (1,), (1,), (3,))))", "timing.compute=2.5")
    assert changed(*settings).timing == VirtualTime(2.5)


def test_set_keeps_text_that_has_the_name_of_something() -> None:
    """`iid` and `local` alone are text, though `IID()` and `Local(…)` are registered."""
    assert changed("problem.partition=iid").problem.recipe.arguments["partition"] == "iid"  # type: ignore[union-attr]
    assert changed("name=local").name == "local"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["protocol=FedAvg(3, LocalSteps(0.1))", "protocol.local=5"],
            "protocol.local is 5; write for instance",
        ),
        (["protocol=FedAvg(3, LocalSteps(0.1))", "protocol.local=HGP(2)"], "it must be LocalSteps"),
        (["protocol.lr=Dimishing(0.2)"], "unknown protocol.lr 'Dimishing'; did you mean 'Diminishing'"),
        (["protocol.steps=few"], "SGP: steps is 'few'; it must be a whole number"),
        (["protocol.lr=abc"], "SGP: lr is 'abc'; it must be a finite number above 0, StepDecay"),
        (["seed=0.5"], "seed is 0.5; it must be a whole number"),
        (["protocol=" + "-" * 10**5 + "1"], "nested too deeply"),
        (["protocol.lr=" + "[" * 150 + "]" * 150], "nested too deeply"),
        (
            ["timing=VirtualTime()", "timing.bandwidth=fast"],
            "VirtualTime: bandwidth is 'fast'; it must be a number above 0",
        ),
        (["problem=quadratik(3)"], "unknown problem 'quadratik'; did you mean 'quadratic'"),
        (["topology=SGP(3, 0.1)"], "unknown topology 'SGP'"),
        (["topology=load('x')"], "unknown topology 'load'"),
    ],
)
def test_set_refuses_what_does_not_fit(settings: list[str], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        changed(*settings)
