"""Runs of methods with a server: who is asked, what it costs, when it ends, and that it repeats."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch

from asyncfed import AtLeast, AtMost, Lockstep, Result, Scenario, ScenarioError, VirtualTime, load, run
from asyncfed.data import client_data_from_lists
from asyncfed.errors import DivergenceError, QuorumError, TopologyError, UnknownNameError
from asyncfed.problems import (
    Problem,
    bilevel_quadratic,
    classification,
    hyper_representation,
    minimax_saddle,
    quadratic,
)
from asyncfed.protocols import (
    AggITD,
    Diminishing,
    FedAvg,
    FedAvgS,
    FedNest,
    FedNestSGD,
    LFedNest,
    LFedNestNonAlt,
    LFedNestSVRG,
    LocalSteps,
    Neumann,
    Server,
)
from asyncfed.runtime.block import Observation
from topologies import ring, star

STEP = LocalSteps(0.05, steps=2)
BUSY = VirtualTime(
    compute="exponential(1.0)", latency="exponential(0.5)", bandwidth=400.0, loss=0.1, factors={1: 4.0}
)
PATIENT = Server(0.7, quorum=0.5, late="next")
SERIES = Neumann(terms=3, scale=0.2, products="fixed")
PROTOCOLS: dict[str, Any] = {
    "FedAvg": FedAvg(4, LocalSteps(0.05, epochs=1, batch=3)),
    "FedNest": FedNest(3, STEP, STEP, inner_rounds=2, neumann=SERIES),
    "FedNestSGD": FedNestSGD(3, STEP, STEP, neumann=Neumann(4, 0.2)),
    "LFedNest": LFedNest(3, STEP, STEP, neumann=SERIES),
    "LFedNestSVRG": LFedNestSVRG(3, LocalSteps(Diminishing(0.05, after=2), steps=[1, 2, 3, 1]), STEP),
    "LFedNestNonAlt": LFedNestNonAlt(3, STEP, STEP, neumann=SERIES),
    "FedAvgS": FedAvgS(3, STEP, STEP),
    "AggITD": AggITD(3, STEP, STEP, inner_rounds=2, scale=0.2),
}


def problem(clients: int = 4) -> Problem:
    return bilevel_quadratic(clients=clients, dimension=3, outer_dimension=2, noise=0.3, samples=8)


def scenario(protocol: Any, clients: int = 4, **changes: Any) -> Scenario:
    base = Scenario(
        problem=problem(clients), topology=star(clients), protocol=protocol, precision="float64", seed=3
    )
    return dataclasses.replace(base, **changes)


def messages(result: Result) -> pd.DataFrame:
    return result.trace.to_pandas()


def requests(result: Result) -> pd.DataFrame:
    rows = messages(result)
    return rows[rows.kind == "request"]


def asked(result: Result) -> dict[int, list[int]]:
    """Client numbers by round."""
    rows = requests(result)
    return {int(step): sorted(set(some.receiver)) for step, some in rows.groupby("step")}


# --- the mean is over what arrived -----------------------------------------------------------------------


def mean_problem() -> Problem:
    """One step of size 1 from y leads client i to its own number, 10^i."""
    return Problem(
        name="numbers",
        data=client_data_from_lists([(torch.full((i + 1, 1), 10.0**i).double(),) for i in range(4)]),
        inner_loss=lambda y, x, batch: 0.5 * ((y - batch[0]) ** 2).sum(-1).mean(),
        init_inner=lambda generator: torch.zeros(1),
    )  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("late", ["drop", "next"])
def test_the_mean_is_over_what_arrived_as_the_trace_says(weighted: bool, late: Any, tmp_path: Path) -> None:
    """Rebuilt from the trace alone: y is the mean, by the weights there, of the numbers of the clients."""
    for rounds in range(1, 9):
        server = Server(weighted=weighted, deadline=2.0, late=late)
        result = run(
            scenario(FedAvg(rounds, LocalSteps(1.0), server), problem=mean_problem(), timing=BUSY),
            out=tmp_path / str(rounds),
        )
        rows = messages(result)
        used = rows[(rows.kind == "y") & (rows.status == "delivered")]
        now = used[used.absorbed_step == rounds - 1]
        assert now.weight.sum() == pytest.approx(1.0)
        expected = (now.weight * 10.0**now.sender).sum()
        assert result.final["inner"][0, 0].item() == pytest.approx(expected)
        if weighted:
            ratio = now.weight / (now.sender + 1)  # client i has i + 1 samples
            assert ratio.tolist() == pytest.approx([ratio.iloc[0]] * len(ratio))


def test_minibatches_do_not_depend_on_losses_or_on_who_else_is_asked(tmp_path: Path) -> None:
    """A client's answer in round 2 shows its minibatch; the first two rounds have no influence on it."""

    def answer(name: str, **changes: Any) -> float:
        samples = torch.arange(20, dtype=torch.float64)[:, None]
        data = client_data_from_lists([(samples + 100 * i,) for i in range(4)])
        own = dataclasses.replace(mean_problem(), data=data)
        timing = changes.pop("timing", Lockstep())
        server = Server([[0, 1, 2, 3], changes.pop("second", [0, 1, 2, 3]), [2]], attempts=1000)
        protocol = FedAvg(3, LocalSteps(1.0, batch=5), server)
        result = run(scenario(protocol, problem=own, timing=timing, **changes), out=tmp_path / name)
        return float(result.final["inner"][0, 0])

    first = answer("a")
    assert first == answer("b", timing=Lockstep(loss=0.4))
    assert first == answer("c", timing=BUSY, second=[3, 0])
    assert first == answer("d", topology=star(4, up=0.3, down=0.3, seed=1))
    assert first != answer("e", seed=4)


# --- whom it asks ----------------------------------------------------------------------------------------


def test_rounds_of_a_cohort_ask_the_same_clients_and_iterations_draw_anew(tmp_path: Path) -> None:
    protocol = FedNest(6, STEP, STEP, neumann=SERIES, server=Server(0.5))
    found = asked(run(scenario(protocol, 8), out=tmp_path / "r"))
    per_iteration = 2 + 4 + 2
    assert len(found) == 6 * per_iteration
    draws = []
    for k in range(6):
        q, y, *products, h, x = (found[k * per_iteration + place] for place in range(per_iteration))
        assert q == y
        assert h == x
        assert all(len(some) == 4 for some in (q, h, *products))
        draws += [tuple(some) for some in (q, h, *products)]
    assert len(set(draws)) > 20  # of 36 draws from 70
    lossy = run(scenario(protocol, 8, timing=Lockstep(loss=0.3)), out=tmp_path / "lossy")
    assert asked(lossy) == found
    assert asked(run(scenario(protocol, 8, seed=4), out=tmp_path / "other")) != found


@pytest.mark.parametrize(
    ("protocol", "draws"),
    [
        (AggITD(2, STEP, STEP, inner_rounds=2, scale=0.2, q=0), [0] * 7),
        (FedNest(2, STEP, STEP, neumann=SERIES, sampling="iteration"), [0] * 8),
        (FedNest(2, STEP, STEP, neumann=SERIES, sampling="parts"), [0, 0, 1, 1, 1, 1, 1, 1]),
        (FedNest(2, STEP, STEP, neumann=SERIES), [0, 0, 1, 2, 3, 4, 5, 5]),
        (LFedNest(2, STEP, STEP, inner_rounds=2), [0, 0, 1]),
        (LFedNest(2, STEP, STEP, inner_rounds=2, sampling="iteration"), [0] * 3),
    ],
)
def test_sets_of_clients_are_taken_in_turn_at_every_draw(
    protocol: Any, draws: list[int], tmp_path: Path
) -> None:
    sets = [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]]
    protocol = dataclasses.replace(protocol, server=Server(sets))
    found = asked(run(scenario(protocol), out=tmp_path / "r"))
    again = [1 + max(draws) + turn for turn in draws]
    assert [found[number] for number in range(len(found))] == [sets[t % 7] for t in draws + again]


# --- bytes -----------------------------------------------------------------------------------------------

Y, X = 3 * 8, 2 * 8  # bytes of the inner and of the outer variable


def by_round(result: Result, column: str) -> list[int]:
    return [int(value) for value in result.trace.rounds()[column]]


def test_bytes_of_fednest_by_hand(tmp_path: Path) -> None:
    """Four clients, everybody asked. A request carries what is new since: at first x and y, later the mean
    of the round before; p is new with every product; y came with the second round.
    """
    protocol = FedNest(2, STEP, STEP, neumann=Neumann(2, 0.2, "fixed"))
    result = run(scenario(protocol), out=tmp_path / "r")
    up = [Y, Y, Y, Y, Y, X, X]  # q, y, p0, p1, p2, h, x
    down = [X + Y, Y, Y, Y, Y, Y, X]  # (x y) q y p0 p1 p2 h
    later = [X, *down[1:]]  # y has not changed since
    assert by_round(result, "bytes_up") == [4 * b for b in up * 2]
    assert by_round(result, "bytes_down") == [4 * b for b in down + later]


def test_bytes_of_aggitd_by_hand(tmp_path: Path) -> None:
    """N = 2, Q = 1: q; y; q and z; y; z; h; x."""
    protocol = AggITD(2, STEP, STEP, inner_rounds=2, scale=0.2, q=1)
    result = run(scenario(protocol), out=tmp_path / "r")
    up = [Y, Y, 2 * Y, Y, Y, X, X]
    down = [X + Y, Y, Y, Y, 2 * Y, Y, X]  # (x y) q y q (y z) p h
    assert by_round(result, "bytes_up") == [4 * b for b in up * 2]
    assert by_round(result, "bytes_down") == [4 * b for b in [*down, X, *down[1:]]]


def test_a_fresh_start_is_sent_again(tmp_path: Path) -> None:
    protocol = LFedNest(2, STEP, STEP, start="fresh")
    result = run(scenario(protocol), out=tmp_path / "r")
    assert by_round(result, "bytes_down") == [4 * b for b in (X + Y, Y, X + Y, Y)]


def test_what_was_not_answered_is_sent_again(tmp_path: Path) -> None:
    """Rebuilt from the trace: a client is known to have what it was sent once an answer of it has come."""
    protocol = LFedNest(6, STEP, STEP, server=Server(0.7))
    result = run(scenario(protocol, timing=Lockstep(loss=0.3)), out=tmp_path / "r")
    rows = messages(result)
    version = {"x": 0, "y": 0}
    known: dict[tuple[int, str], int] = {}
    sizes = {"x": X, "y": Y}
    for _, round in rows.groupby("step"):
        for request in round[(round.kind == "request") & (round.status != "link_down")].itertuples():
            new = [name for name in "xy" if known.get((request.receiver, name)) != version[name]]
            assert request.bytes == sum(sizes[name] for name in new)
        answers = round[round.kind != "request"]
        for client in answers[answers.status == "delivered"].sender:
            known |= {(client, name): version[name] for name in "xy"}
        version[answers.kind.iloc[0]] += 1
    assert (rows.status == "lost").sum() > 5


def test_a_late_answer_says_what_its_client_has(tmp_path: Path) -> None:
    """Client 1 takes 2.5 units for what takes the other one. It is at work on the first request until 2.5,
    and that answer is used in the third round, which closes at 3. So the fourth request has no x for it.
    """
    server = Server(quorum=1, late="next")
    protocol = FedNest(1, LocalSteps(0.05), inner_rounds=3, setting="minimax", server=server)
    slow = VirtualTime(compute=1.0, latency=0.0, factors={1: 2.5})
    result = run(scenario(protocol, clients=2, timing=slow), out=tmp_path / "r")
    rows = requests(result)
    straggler = rows[rows.receiver == 1].bytes.tolist()
    assert straggler[:4] == [X + Y, X + 2 * Y, X + Y, 2 * Y]


# --- ends ------------------------------------------------------------------------------------------------


def test_a_quorum_that_is_not_met_ends_the_run_and_leaves_it_readable(tmp_path: Path) -> None:
    server = Server(quorum=4, attempts=3)
    unlucky = scenario(FedAvg(50, STEP, server), topology=star(4, up=0.7, down=0.7, seed=1))
    with pytest.raises(QuorumError, match=r"of the 4 answers it needs, though the server asked 4 clients 3"):
        run(unlucky, out=tmp_path / "r")
    partial = load(tmp_path / "r")
    assert partial.status == "failed"
    assert "answers it needs" in partial.manifest["error"]
    rounds = partial.trace.rounds()
    assert rounds["arrived"].iloc[-1] < 4
    assert (rounds["arrived"].iloc[:-1] == 4).all()
    rows = requests(partial)
    assert rows[rows.step == rounds["round"].iloc[-1]].sent_at.nunique() == 3
    assert len(partial.metrics) >= 1
    assert partial.clients.empty


def test_a_network_that_is_hardly_there_is_got_through(tmp_path: Path) -> None:
    server = Server(attempts=10_000)
    protocol = FedNest(2, STEP, STEP, server=server)
    result = run(scenario(protocol, topology=star(4, up=0.05, down=0.2)), out=tmp_path / "r")
    assert result.complete
    rounds = result.trace.rounds()
    assert (rounds["arrived"] >= 1).all()
    assert rounds["asked"].sum() == len(requests(result)) > 20 * len(rounds)


@pytest.mark.parametrize(("most", "made"), [(1, 0), (7, 0), (8, 8), (20, 16), (24, 24), (99, 24)])
def test_rounds_never_go_beyond_max_rounds(most: int, made: int, tmp_path: Path) -> None:
    protocol = FedNest(3, STEP, STEP, neumann=SERIES, max_rounds=most)
    result = run(scenario(protocol), out=tmp_path / "r")
    assert result.trace.communication_rounds() == made
    assert result.metrics["step"].iloc[-1] == made
    assert len(result.clients) == 4


def test_steps_of_a_client_are_the_rounds_it_worked_in(tmp_path: Path) -> None:
    server = Server(participation=[[0, 1], [1, 2]])
    result = run(scenario(FedAvg(5, STEP, server=server)), out=tmp_path / "r")
    assert result.clients["steps"].tolist() == [3, 5, 2, 0]
    assert result.metrics["step"].tolist()[-1] == 5
    lossy = run(scenario(FedAvg(5, STEP), topology=star(4, down=0.5)), out=tmp_path / "lossy")
    worked = lossy.trace.nodes()["steps"].to_numpy()
    assert lossy.clients["steps"].tolist() == worked[np.arange(5) != lossy.trace.server].tolist()
    assert lossy.clients["steps"].nunique() > 1


def test_until_ends_at_the_first_evaluation_that_is_good_enough(tmp_path: Path) -> None:
    base = Scenario(
        problem=classification("digits", clients=4, model="logistic"),
        topology=star(4),
        protocol=FedAvg(30, LocalSteps(0.05, steps=2, batch=16)),
        evaluate_every=2,
    )
    whole = run(base, out=tmp_path / "whole")
    good = float(whole.metrics["accuracy"].iloc[4])
    stopped = run(dataclasses.replace(base, until={"accuracy": AtLeast(good)}), out=tmp_path / "until")
    first = int((whole.metrics["accuracy"] >= good).idxmax())
    assert stopped.complete
    pd.testing.assert_frame_equal(stopped.metrics, whole.metrics.iloc[: first + 1])
    assert len(stopped.clients) == 4
    assert stopped.trace.communication_rounds() == 2 * first
    small = float(whole.metrics["loss"].iloc[2])
    both = dataclasses.replace(base, until={"accuracy": AtLeast(0.0), "loss": AtMost(small)})
    assert run(both, out=tmp_path / "loss").metrics["loss"].iloc[-1] <= small
    never = run(dataclasses.replace(base, until={"accuracy": AtLeast(1.1)}), out=tmp_path / "never")
    pd.testing.assert_frame_equal(never.metrics, whole.metrics)


def test_a_metric_falls_or_rises_as_the_goal_says_whatever_its_name(tmp_path: Path) -> None:
    """A mean square error is small at once for whoever takes its name for something that is to grow."""
    problem = quadratic(clients=4)
    renamed = dataclasses.replace(problem, metrics={"mse": problem.metrics["loss"]})
    protocol = FedAvg(9, LocalSteps(0.05))
    whole = run(scenario(protocol, problem=renamed), out=tmp_path / "whole").metrics["mse"]
    assert whole.is_monotonic_decreasing
    goal = float(whole.iloc[5])
    for until, rows in (({"mse": AtMost(goal)}, 6), ({"mse": AtLeast(goal)}, 1)):
        stopped = run(scenario(protocol, problem=renamed, until=until), out=tmp_path / f"{rows}")
        assert stopped.metrics["mse"].tolist() == whole.tolist()[:rows]


@pytest.mark.parametrize("goal", [AtLeast, AtMost])
def test_a_goal_is_a_finite_number(goal: Any) -> None:
    for value in (float("nan"), float("inf"), True, "0.9", None):
        with pytest.raises(ScenarioError, match=r"value is .*; it must be a finite number"):
            goal(value)
    assert goal(np.float32(0.5)) == goal(0.5)
    assert goal(0.5).met(0.5)
    assert not goal(0.5).met(float("nan"))


def test_no_iterations_are_a_run_as_well(tmp_path: Path) -> None:
    result = run(scenario(FedAvg(0, STEP)), out=tmp_path / "r")
    assert result.complete
    assert result.metrics["step"].tolist() == [0]
    assert len(result.clients) == 4
    assert result.trace.communication_rounds() == 0


def test_divergence_names_client_and_round(tmp_path: Path) -> None:
    wild = scenario(FedAvg(2000, LocalSteps(1e6)), problem=quadratic(clients=4))
    with pytest.raises(DivergenceError, match=r"y of client \d became .* at step \d+") as error:
        run(wild, out=tmp_path / "r")
    partial = load(tmp_path / "r")
    assert partial.status == "failed"
    assert partial.trace.rounds()["round"].iloc[-1] == error.value.step


# --- anywhere in the graph -------------------------------------------------------------------------------


def own_graph(kind: type[nx.Graph], nodes: str = "ab*cd", between: bool = True) -> nx.Graph:
    """Clients a to d and a server, called hub, somewhere among them."""
    graph = kind(server="hub")
    names = ["hub" if node == "*" else node for node in nodes]
    graph.add_nodes_from(names)
    clients = [node for node in names if node != "hub"]
    for node in clients:
        graph.add_edge("hub", node, probability=1.0)
        graph.add_edge(node, "hub", probability=1.0)
    if between:
        for a, b in pairwise(clients):
            graph.add_edge(a, b, probability=0.5)
    return graph


@pytest.mark.parametrize("kind", [nx.DiGraph, nx.Graph])
@pytest.mark.parametrize("nodes", ["*abcd", "ab*cd", "abcd*"])
def test_the_server_may_stand_anywhere(kind: type[nx.Graph], nodes: str, tmp_path: Path) -> None:
    protocol = FedNest(2, STEP, STEP, neumann=SERIES, server=Server(0.5))
    usual = run(scenario(protocol), out=tmp_path / "star")
    other = run(scenario(protocol, topology=own_graph(kind, nodes)), out=tmp_path / "own")
    assert other.metrics.equals(usual.metrics)
    assert torch.equal(other.final["outer"], usual.final["outer"])
    assert other.trace.to_arrow().equals(usual.trace.to_arrow())  # links between clients are left alone
    assert other.trace.server == 4
    again = load(tmp_path / "own").scenario
    assert again.topology.graph["server"] == "hub"
    assert run(again, out=tmp_path / "again").metrics.equals(other.metrics)


def test_in_an_undirected_graph_whoever_is_asked_can_answer(tmp_path: Path) -> None:
    graph = own_graph(nx.Graph)
    nx.set_edge_attributes(graph, 0.4, "probability")
    rows = messages(run(scenario(FedAvg(20, STEP), topology=graph), out=tmp_path / "r"))
    assert set(rows[rows.kind == "y"].status) == {"delivered"}
    assert 0.2 < (rows[rows.kind == "request"].status == "delivered").mean() < 0.6


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"topology": ring(5)}, TopologyError, "needs a server"),
        ({"topology": star(5)}, TopologyError, "has 5 clients and a server, but the problem has 4 clients"),
        ({"topology": star(3)}, TopologyError, "has 3 clients and a server"),
        ({"timing": VirtualTime(horizon=5.0)}, ScenarioError, "horizon of 5.0 would cut"),
        ({"evaluate_every": 0.5}, ScenarioError, "evaluate_every is 0.5"),
        ({"evaluate_every": 1.5, "timing": VirtualTime()}, ScenarioError, "whole number of outer iterations"),
        ({"protocol": FedAvg(2, STEP, Server(deadline=1.0))}, ScenarioError, "needs virtual time"),
        ({"protocol": FedAvg(2, STEP, Server(quorum=5))}, ScenarioError, "quorum of 5 answers cannot be met"),
        ({"protocol": FedAvg(2, STEP, Server([4]))}, ScenarioError, "the clients are 0 to 3"),
        ({"until": {"acuracy": AtLeast(0.5)}}, UnknownNameError, "metric in until"),
        (
            {"until": {"loss": 0.01}},
            ScenarioError,
            r"until\['loss'\] is 0.01; it must be AtLeast\(…\) or AtMost\(…\)",
        ),
        ({"until": {"loss": "low"}}, ScenarioError, r"until\['loss'\] is 'low'; it must be"),
        ({"until": 0.5}, ScenarioError, "until is 0.5; it must be a mapping"),
        ({"timing": VirtualTime(factors={4: 2.0})}, ScenarioError, "clients are 0 to 3"),
        ({"timing": VirtualTime(factors=[1.0] * 5)}, ScenarioError, "5 compute-time factors .* 4 clients"),
        ({"protocol": FedAvg(2, LocalSteps(0.1, steps=[1, 2]))}, ScenarioError, "2 numbers of steps"),
        ({"problem": quadratic(clients=4), "protocol": LFedNest(1, STEP)}, ScenarioError, "no outer"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(
    changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        run(scenario(changes.pop("protocol", FedAvg(2, STEP)), **changes), out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_slow_client_is_the_one_named(tmp_path: Path) -> None:
    timing = VirtualTime(compute=1.0, factors={2: 3.0})
    result = run(scenario(FedAvg(2, LocalSteps(0.1)), timing=timing), out=tmp_path / "r")
    busy = result.trace.nodes().set_index("client").busy_time
    assert busy.tolist() == [2.0, 2.0, 6.0, 2.0, 0.0]  # the server comes last
    assert result.metrics["virtual_time"].iloc[-1] == 6.0


# --- one run and another -----------------------------------------------------------------------------------


@pytest.mark.parametrize("timing", [Lockstep(loss=0.2), BUSY], ids=["lockstep", "virtual time"])
def test_another_seed_is_another_run_and_looking_seldom_changes_nothing(timing: Any, tmp_path: Path) -> None:
    once = scenario(dataclasses.replace(PROTOCOLS["FedNest"], server=PATIENT), timing=timing)
    first = run(once, out=tmp_path / "a")
    other = run(dataclasses.replace(once, seed=4), out=tmp_path / "b")
    assert not other.trace.to_arrow().equals(first.trace.to_arrow())
    assert not torch.equal(other.final["inner"], first.final["inner"])
    seldom = run(dataclasses.replace(once, evaluate_every=2), out=tmp_path / "c")
    assert seldom.trace.to_arrow().equals(first.trace.to_arrow())
    for key, value in first.final.items():
        assert torch.equal(value, seldom.final[key])


def test_a_run_goes_on_from_the_final_of_another(tmp_path: Path) -> None:
    """Without anything drawn, two and three iterations are five."""
    full = FedNest(5, STEP, STEP, neumann=SERIES)
    whole = run(scenario(full), out=tmp_path / "whole")
    first = run(scenario(dataclasses.replace(full, outer_steps=2)), out=tmp_path / "a", save_final=True)
    kept = load(first.path).final
    rest = run(scenario(dataclasses.replace(full, outer_steps=3)), out=tmp_path / "b", initial=kept)
    for key in ("inner", "outer"):
        assert kept[key].shape[0] == 1
        torch.testing.assert_close(rest.final[key], whole.final[key], rtol=0, atol=1e-14)
    assert "initial" in rest.manifest
    with pytest.raises(ScenarioError, match="with a server: one row in all"):
        run(scenario(full), out=tmp_path / "c", initial={"inner": torch.zeros(4, 3)})


@pytest.mark.parametrize("kind", [FedNest, LFedNestSVRG])
@pytest.mark.parametrize("batch", [16, None])
def test_samples_encoded_once_are_encoded_anew_for_a_new_outer_variable(
    kind: type[FedNest | LFedNestSVRG], batch: int | None, tmp_path: Path
) -> None:
    """A problem with stages keeps what its first stage makes of the samples while x lasts; without stages
    every product begins from the samples, and the numbers are the same. So they are where clients compute one
    by one, and all together in the second stage.
    """
    staged = hyper_representation("digits", clients=4, model="mlp:4", limit=200)
    assert staged.stages is not None
    assert staged.stages.vectorize
    step = LocalSteps(0.05, steps=2, batch=8)
    outer = LocalSteps(0.05, steps=2, batch=batch)
    protocol = kind(3, step, outer, neumann=Neumann(2, 0.1, "sum"), server=Server(0.5), batch=batch)
    problems = (
        staged, dataclasses.replace(staged, stages=None), dataclasses.replace(staged, vectorize=False),
    )  # fmt: skip
    results = [
        run(scenario(protocol, problem=one), out=tmp_path / str(place)) for place, one in enumerate(problems)
    ]
    for result in results[1:]:
        for key, value in results[0].final.items():
            torch.testing.assert_close(result.final[key], value, rtol=0, atol=1e-12)


def test_a_minimax_problem_comes_nearer_to_its_saddle(tmp_path: Path) -> None:
    protocol = FedNest(15, STEP, STEP, setting="minimax", server=Server(quorum=0.7, late="next"))
    own = minimax_saddle(clients=4, dimension=2)
    distance = run(scenario(protocol, problem=own, timing=BUSY), out=tmp_path / "r").metrics["distance"]
    assert distance.iloc[-1] < 0.9 * distance.iloc[0]
    assert np.isfinite(distance).all()


@pytest.mark.parametrize("name", PROTOCOLS)
def test_all_that_a_run_leaves_behind_may_be_where_another_begins(name: str, tmp_path: Path) -> None:
    first = run(scenario(PROTOCOLS[name]), out=tmp_path / "a")
    assert run(scenario(PROTOCOLS[name]), out=tmp_path / "b", initial=first.final).complete


def test_a_tap_sees_what_clients_answer_and_what_the_server_makes_of_it(tmp_path: Path) -> None:
    seen: list[Observation] = []
    result = run(
        scenario(FedAvg(3, LocalSteps(1.0), Server([[0, 1], [1, 3], [2]])), problem=mean_problem()),
        out=tmp_path / "r",
        tap=seen.append,
    )
    clients, server = ([step for step in seen if (4 in step.clients) == at] for at in (False, True))
    assert [(step.clients.tolist(), step.steps.tolist()) for step in clients] == [
        ([0, 1], [0, 0]), ([1, 3], [1, 1]), ([2], [2]),
    ]  # fmt: skip
    assert [step.made.payload["y"].flatten().tolist() for step in clients] == [[1, 10], [10, 1000], [100]]
    folded = [step.made.payload["y"].item() for step in server if "y" in step.absorbed]
    assert folded == [5.5, 505.0, 100.0]
    assert result.final["inner"].item() == 100.0
