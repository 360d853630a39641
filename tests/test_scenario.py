"""Scenarios as data, and the refusals before anything runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

from asyncfed import (
    AtLeast,
    AtMost,
    Lockstep,
    Scenario,
    ScenarioError,
    TopologyError,
    UnknownNameError,
    VirtualTime,
    load,
    run,
)
from asyncfed.data import client_data_from_lists, load_dataset
from asyncfed.network import Exponential, Given, LogNormal, Metropolis, Table
from asyncfed.problems import Problem, bilevel_quadratic, classification, quadratic
from asyncfed.protocols import (
    CDBO,
    DSGD,
    HGP,
    PDBO,
    SGP,
    VRHGP,
    AggITD,
    Diminishing,
    FedAvg,
    FedAvgS,
    FedNest,
    ITDForward,
    LFedNestSVRG,
    Local,
    LocalSteps,
    Neumann,
    PeerFedAvg,
    Server,
    StepDecay,
)
from asyncfed.scenario import check
from asyncfed.scenario_data import scenario_from_data, scenario_to_data
from tests.helpers import files_of
from topologies import (
    Device,
    fully_connected,
    random_geometric,
    ring,
    star,
    stochastic_directed,
    with_devices,
    with_links,
)

SCENARIOS = [
    Scenario(
        problem=quadratic(clients=3), topology=stochastic_directed(3, seed=1), protocol=SGP(steps=3, lr=0.1)
    ),
    Scenario(
        problem=classification("digits", clients=4, partition="shards:3", seed=9),
        topology=with_links(ring(4), latency=0.25, bandwidth=1e6, loss=0.01),
        protocol=SGP(steps=3, lr=StepDecay(0.1, at=(1, 2)), order="4a", batch=None),
        timing=VirtualTime(
            compute=LogNormal(1.0, 0.5), latency=Exponential(0.3), factors={2: 10.0}, horizon=7.5
        ),
        weights=Metropolis(),
        seed=7,
        precision="float64",
        evaluate_every=1.5,
        name="everything",
    ),
    Scenario(
        problem=quadratic(clients=2),
        topology=fully_connected(2),
        protocol=PeerFedAvg(steps=1, lr=Diminishing(0.1, after=3.0)),
        timing=VirtualTime(compute=Table(((1.0, 2.0), (3.0,)))),
        weights=Given(((0.5, 0.5), (0.5, 0.5))),
    ),
    Scenario(
        problem=quadratic(clients=3), topology=ring(3), protocol=DSGD(steps=1, lr=0.1), weights=Metropolis()
    ),
    Scenario(
        problem=quadratic(clients=2),
        topology=fully_connected(2),
        protocol=Local(steps=2, lr=0.1),
        timing=Lockstep(loss=0.0),
    ),
    Scenario(
        problem=bilevel_quadratic(clients=4),
        topology=star(4, up=0.9, down=0.8),
        protocol=FedAvg(
            4,
            LocalSteps(Diminishing(0.05, after=2), steps=[1, 2, 3, 1]),
            Server([[0, 1], [2, 3]], weighted=True, quorum=1, late="next", attempts=7, requests="all"),
            max_rounds=40,
        ),
        until={"loss": AtMost(-1.0), "outer_loss": AtLeast(0.5)},
    ),
    Scenario(
        problem=quadratic(clients=4),
        topology=star(4),
        protocol=FedAvg(4, LocalSteps(0.05, epochs=1), Server((2, 0), quorum=0.5, deadline=9.0)),
        timing=VirtualTime(),
    ),
    Scenario(
        problem=quadratic(clients=4),
        topology=with_devices(star(4), {"phone": Device(4, uplink=1e5), "desktop": Device(downlink=1e6)}),
        protocol=FedAvg(4, LocalSteps(0.05)),
        timing=VirtualTime(per="sample"),
        name="devices",
    ),
    Scenario(
        problem=quadratic(clients=4),
        topology=random_geometric(4, 0.9, seed=1, latency=(0.1, 1.0)),
        protocol=SGP(steps=3, lr=0.1),
        timing=VirtualTime(),
        name="places",
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: f"{type(s.protocol).__name__}-{s.name}")
def test_a_scenario_survives_being_written_down(scenario: Scenario) -> None:
    data = json.loads(json.dumps(scenario_to_data(scenario), allow_nan=False))
    again = scenario_from_data(data)
    assert scenario_to_data(again) == data
    for part in ("protocol", "timing", "weights", "seed", "precision", "evaluate_every", "until", "name"):
        assert getattr(again, part) == getattr(scenario, part), part
    assert nx.utils.graphs_equal(again.topology, scenario.topology)
    for mine, theirs in zip(
        again.problem.data.train.tensors, scenario.problem.data.train.tensors, strict=True
    ):
        assert torch.equal(mine, theirs)


def test_a_run_directory_can_be_run_again_to_the_same_bytes(tmp_path: Path) -> None:
    first = run(SCENARIOS[1], out=tmp_path / "first")
    second = run(load(tmp_path / "first").scenario, out=tmp_path / "second")
    assert (first.path / "scenario.json").read_bytes() == (second.path / "scenario.json").read_bytes()
    assert first.trace.to_arrow().equals(second.trace.to_arrow())
    assert torch.equal(first.final["inner"], second.final["inner"])
    assert first.scenario_data["versions"]["torch"] == torch.__version__


def test_foreign_data_builds_nothing() -> None:
    data = scenario_to_data(SCENARIOS[0])
    with pytest.raises(UnknownNameError, match="did you mean 'SGP'"):
        scenario_from_data(data | {"protocol": {"type": "SGPP", "steps": 1, "lr": 0.1}})
    with pytest.raises(UnknownNameError, match="did you mean 'steps'"):
        scenario_from_data(data | {"protocol": {"type": "SGP", "step": 1, "lr": 0.1}})
    with pytest.raises(UnknownNameError, match="did you mean 'protocol'"):
        scenario_from_data(data | {"protocoll": {}})
    with pytest.raises(ScenarioError, match="lacks topology"):
        scenario_from_data({key: value for key, value in data.items() if key != "topology"})


def _own_problem(clients: int = 3) -> Problem:
    return Problem(
        name="mean of numbers",
        data=client_data_from_lists([(torch.full((4, 1), float(i)),) for i in range(clients)]),
        inner_loss=lambda x, lam, batch: 0.5 * (batch[0] - x["centre"]).square().mean(),
        init_inner=lambda generator: {"centre": torch.zeros(1)},
        metrics={"distance": lambda x, lam, batch: (batch[0] - x["centre"]).abs()[:, 0]},
    )


def test_a_users_own_problem_runs_and_says_that_it_cannot_be_rebuilt(tmp_path: Path) -> None:
    scenario = Scenario(
        problem=_own_problem(),
        topology=fully_connected(3),
        protocol=PeerFedAvg(steps=60, lr=0.5, batch=None),
        precision="float64",
    )
    result = run(scenario, out=tmp_path / "run")
    torch.testing.assert_close(
        result.final["inner"], torch.ones(3, 1, dtype=torch.float64), rtol=0, atol=1e-10
    )
    assert result.metrics.distance.iloc[-1] == pytest.approx(2 / 3)
    with pytest.raises(ScenarioError, match="'mean of numbers' was made of a user's own functions"):
        _ = load(tmp_path / "run").scenario


def _graph(*edges: tuple[int, int], nodes: int = 3) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(edges, probability=1.0)
    return graph


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"topology": ring(4)}, TopologyError, "the topology has 4 nodes, but the problem has 3 clients"),
        ({"topology": _graph((0, 1), (1, 0))}, TopologyError, "client 2 cannot be reached from client 0"),
        ({"topology": _graph((0, 1), (1, 0), (0, 2))}, TopologyError, "client 2 cannot reach client 0"),
        ({"topology": nx.Graph([(0, 1), (1, 2)])}, TopologyError, "edge 0→1 carries no `probability`"),
        ({"seed": 1.5}, ScenarioError, "seed is 1.5"),
        ({"precision": "float16"}, ScenarioError, "precision is 'float16'"),
        ({"evaluate_every": 0}, ScenarioError, "evaluate_every is 0"),
        ({"evaluate_every": "often"}, ScenarioError, "evaluate_every is 'often'"),
        ({"topology": star(3)}, TopologyError, "this method has no server, so every node must be a client"),
        ({"evaluate_every": 2.5}, ScenarioError, "whole number of steps"),
        (
            {"timing": VirtualTime(factors={3: 2.0})},
            ScenarioError,
            "factor names client 3; the clients are 0 to 2",
        ),
        ({"timing": VirtualTime(compute=Table(((1.0,),)))}, ScenarioError, "1 rows, but there are 3 clients"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(
    changes: dict[str, object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    good = Scenario(problem=quadratic(clients=3), topology=ring(3), protocol=SGP(steps=1, lr=0.1))
    check(good)
    with pytest.raises(error, match=message):
        run(dataclasses.replace(good, **changes), out=tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "rey"}, "did you mean 'ray'"),
        ({"clients_per_actor": 0}, "clients_per_actor is 0"),
        ({"device": "gpu0"}, "device is 'gpu0'"),
        ({"device": "cuda"}, "no usable GPU"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    good = Scenario(problem=quadratic(clients=3), topology=ring(3), protocol=SGP(steps=1, lr=0.1))
    with pytest.raises(ScenarioError, match=message):
        run(good, out=tmp_path / "run", **options)  # type: ignore[arg-type]


def test_something_else_than_a_scenario_is_refused() -> None:
    wrong: Any = SGP(steps=1, lr=0.1)
    with pytest.raises(ScenarioError, match=r"run: scenario is SGP"):
        run(wrong)


@pytest.mark.parametrize("lr", ["fast", None, True])
def test_a_learning_rate_that_is_no_number_is_refused(lr: Any) -> None:
    with pytest.raises(ScenarioError, match=f"SGP: lr is {lr!r}; it must be a finite number above 0"):
        SGP(steps=1, lr=lr)


def test_isolated_clients_are_fine_for_local(tmp_path: Path) -> None:
    lonely = nx.empty_graph(3)
    run(
        Scenario(problem=quadratic(clients=3), topology=lonely, protocol=Local(steps=2, lr=0.1, batch=None)),
        out=tmp_path / "run",
    )


def test_an_output_directory_that_holds_a_run_is_left_alone(tmp_path: Path) -> None:
    scenario = Scenario(
        problem=quadratic(clients=3), topology=ring(3), protocol=SGP(steps=2, lr=0.1, batch=None)
    )
    run(scenario, out=tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ScenarioError, match="already holds a run"):
        run(scenario, out=tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_users_own_graph_with_names_for_nodes(tmp_path: Path) -> None:
    graph = nx.DiGraph()
    graph.add_edge("ann", "bob", probability=0.9)
    graph.add_edge("bob", "cid", probability=0.5)
    graph.add_edge("cid", "ann", probability=1.0, loss=0.1)
    scenario = Scenario(
        problem=quadratic(clients=3), topology=graph, protocol=SGP(steps=5, lr=0.1, batch=None)
    )
    result = run(scenario, out=tmp_path / "run")
    assert list(zip(result.trace.edges().sender, result.trace.edges().receiver, strict=True)) == [
        ("ann", "bob"),
        ("bob", "cid"),
        ("cid", "ann"),
    ]
    assert list(load(tmp_path / "run").scenario.topology.nodes) == ["ann", "bob", "cid"]


@pytest.mark.parametrize("hub", [("hub", 0), "hub", 4, np.int64(4)])
def test_a_server_of_any_name_survives_being_written_down(hub: object, tmp_path: Path) -> None:
    graph = nx.DiGraph(server=hub)
    for client in ("a", "b", "c"):
        graph.add_edge(hub, client, probability=1.0)
        graph.add_edge(client, hub, probability=1.0)
    scenario = Scenario(
        problem=quadratic(clients=3), topology=graph, protocol=FedAvg(2, LocalSteps(0.1)), seed=1
    )
    again = scenario_from_data(json.loads(json.dumps(scenario_to_data(scenario))))
    first, second = run(scenario, out=tmp_path / "a"), run(again, out=tmp_path / "b")
    assert first.trace.server == second.trace.server == 3
    assert first.metrics.equals(second.metrics)


def test_numpy_numbers_and_infinite_bandwidth_survive_being_written_down() -> None:
    graph = with_links(ring(3), loss=0.25)
    for _, _, marks in graph.edges(data=True):
        marks["loss"], marks["bandwidth"] = np.float32(0.25), float("inf")
    scenario = Scenario(
        problem=quadratic(clients=3), topology=graph, protocol=SGP(steps=1, lr=0.1), seed=np.int64(3)
    )  # type: ignore[arg-type]
    check(scenario)
    again = scenario_from_data(json.loads(json.dumps(scenario_to_data(scenario), allow_nan=False)))
    check(again)
    assert again.seed == 3
    assert {(m["loss"], m["bandwidth"]) for _, _, m in again.topology.edges(data=True)} == {
        (0.25, float("inf"))
    }


def in_numpy(value: Any) -> Any:
    """The same with every whole number as NumPy's."""
    if isinstance(value, tuple):
        return tuple(in_numpy(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{name: in_numpy(getattr(value, name)) for name in fields})
    return np.int64(value) if type(value) is int else value


STEPS = LocalSteps(0.05, steps=2, batch=3)
PUSH = SGP(steps=4, lr=0.02, batch=3)


@pytest.mark.parametrize(
    "protocol",
    [
        FedAvg(2, LocalSteps(1, epochs=1, batch=3), Server(quorum=2, attempts=3), max_rounds=50),
        FedNest(2, STEPS, STEPS, inner_rounds=2, neumann=Neumann(3, 0.2, "fixed"), server=Server((0, 1, 2))),
        LFedNestSVRG(2, LocalSteps(Diminishing(0.05, after=2), steps=[1, 2, 3, 1]), STEPS),
        FedAvgS(2, STEPS, LocalSteps(StepDecay(0.1, at=(1,)), steps=2, batch=3)),
        AggITD(2, STEPS, STEPS, inner_rounds=2, scale=0.2, q=1, batch=3),
        SGP(steps=3, lr=1, batch=2),
        DSGD(steps=3, lr=0.02),
        PDBO(PUSH, VRHGP(2, batch=3), outer_steps=2),
        PDBO(PUSH, ITDForward(), outer_steps=1),
        CDBO(PUSH, HGP(2), outer_steps=2),
    ],
    ids=lambda protocol: type(protocol).__name__,
)
def test_whole_numbers_of_numpy_are_whole_numbers(protocol: Any, tmp_path: Path) -> None:
    scenario = Scenario(
        problem=bilevel_quadratic(clients=4, dimension=3, outer_dimension=2, noise=0.3, samples=8),
        topology=fully_connected(4) if protocol.server is None else star(4),
        protocol=protocol,
        precision="float64",
        seed=3,
        evaluate_every=1,
    )
    changes = {name: in_numpy(getattr(scenario, name)) for name in ("protocol", "seed", "evaluate_every")}
    results = [
        run(one, out=tmp_path / name)
        for name, one in (("plain", scenario), ("numpy", dataclasses.replace(scenario, **changes)))
    ]
    assert files_of(results[0].path) == files_of(results[1].path)


@pytest.mark.parametrize(
    ("part", "given", "allowed"),
    [
        ("problem", "digits", "it must be a Problem"),
        ("topology", "ring", "it must be a networkx graph"),
        ("protocol", "sgp", r"'sgp'; it must be a method with its parameters, such as SGP"),
        ("protocol", SGP, "it must be a method with its parameters"),
        ("protocol", HGP(3), "it must be a method with its parameters"),
        ("timing", "lockstep", r"Lockstep\(…\) or VirtualTime\(…\)"),
        ("weights", "metropolis", r"Uniform\(\), Metropolis\(\)"),
    ],
)
def test_a_part_that_is_of_another_kind_is_refused(part: str, given: object, allowed: str) -> None:
    scenario = Scenario(problem=quadratic(clients=3), topology=ring(3), protocol=SGP(steps=1, lr=0.1))
    with pytest.raises(ScenarioError, match=f"{part} is .*{allowed}"):
        run(dataclasses.replace(scenario, **{part: given}))  # type: ignore[arg-type]


def test_a_scenario_prints_in_a_few_lines(tmp_path: Path) -> None:
    """Tensors used to fill pages."""
    scenario = Scenario(problem=quadratic(clients=300), topology=ring(300), protocol=SGP(steps=1, lr=0.1))
    data = scenario.problem.data
    for value, said in (
        (scenario, "topology  ring, 300 clients"),
        (scenario.problem, "300 + 300 + 300 samples of float64 (5, 5), float64 (5,)"),
        (data, "300 clients"),
        (data.train, "300 clients, 300 samples"),
        (load_dataset("digits"), "1,797 samples (64,), 10 classes"),
        (run(scenario, out=tmp_path / "run"), "(complete)"),
    ):
        assert said in repr(value)
        assert len(repr(value)) < 1000
        assert len(repr(value).splitlines()) < 12
