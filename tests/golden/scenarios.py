"""Small runs of every method, timing and option; `golden.json` holds what their traces and variables were.

They are written with public names alone, so that another core can be held against the same file, and they
avoid what a core may well decide differently:

    numbering    a server is the last node, after its clients 0..n-1 (`star` here, not that of topologies)
    overtaking   peers' messages may overtake each other, with a server they may not (`virtual`)
    requests     a slow client works on all the requests that have piled up (`server`)
    ties         where events can coincide, times are sums of powers of two: exact, in whatever order one adds
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import Tensor

from asyncfed import Lockstep, Scenario, VirtualTime
from asyncfed.data import client_data_from_lists
from asyncfed.network import Given, Metropolis, Table
from asyncfed.problems import (
    Problem,
    bilevel_quadratic,
    classification,
    compositional,
    hyper_representation,
    logistic_pair,
    loss_tuning,
    minimax_saddle,
    personalized_classification,
    quadratic,
    regularization_tuning,
)
from asyncfed.protocols import (
    CDBO,
    DSGD,
    HGP,
    PDBO,
    SGP,
    VRHGP,
    AggITD,
    CompareHypergradients,
    Diminishing,
    EstimateHypergradient,
    ExactBackprop,
    FedAvg,
    FedAvgS,
    FedNest,
    FedNestSGD,
    GossipBilevel,
    ITDBackward,
    ITDForward,
    LFedNest,
    LFedNestNonAlt,
    LFedNestSVRG,
    Local,
    LocalSteps,
    Neumann,
    PeerFedAvg,
    Server,
    StepDecay,
)
from topologies import (
    edgeless,
    erdos_renyi,
    fully_connected,
    ring,
    stochastic_directed,
    stochastic_undirected,
    with_links,
)

Scenarios = dict[str, Scenario]
Marks = Mapping[str, float | str | Callable[[int], float]]


def scenarios() -> Scenarios:
    """All of them, by name."""
    groups = (_sgp(), _sgp_in_virtual_time(), _hypergradients(), _outer_loops(), _servers(), _waiting())
    found = {name: scenario for group in groups for name, scenario in group.items()}
    assert len(found) == sum(map(len, groups)), "two scenarios have the same name"
    return {name: dataclasses.replace(scenario, name=name) for name, scenario in found.items()}


# --- what scenarios are made of ------------------------------------------------------------------------


def virtual(**options: Any) -> VirtualTime:
    """Virtual time among peers, whose messages may overtake each other."""
    return VirtualTime(**options, **_where_known(VirtualTime, ordered=False))


def server(**options: Any) -> Server:
    """A server whose clients work on every request, however many have piled up."""
    return Server(**options, **_where_known(Server, requests="all"))


def star(clients: int, down: Marks | None = None, up: Marks | None = None) -> nx.DiGraph:
    """Clients 0..clients-1, and a server behind them. A mark of the links down to or up from the clients is a
    value, or a function of the client.
    """
    graph = nx.DiGraph(name=f"star, {clients} clients", server=clients)
    graph.add_nodes_from(range(clients + 1))
    for client in range(clients):
        graph.add_edge(clients, client, **_marks(down, client))
        graph.add_edge(client, clients, **_marks(up, client))
    return graph


def two_way_star(clients: int, **marks: float) -> nx.Graph:
    """The same with undirected links: both directions are up, or down, together."""
    graph = nx.Graph(name=f"two-way star, {clients} clients", server=clients)
    graph.add_nodes_from(range(clients + 1))
    graph.add_edges_from((client, clients, _marks(marks, client)) for client in range(clients))
    return graph


def _marks(marks: Marks | None, client: int) -> dict[str, float | str]:
    given = {"probability": 1.0, **(marks or {})}
    return {name: value(client) if callable(value) else value for name, value in given.items()}


def _where_known(kind: type[Any], **option: Any) -> dict[str, Any]:
    """An option that only some cores have: without it they do what it says."""
    known = {f.name for f in dataclasses.fields(kind)}
    return {name: value for name, value in option.items() if name in known}


def _scenario(problem: Problem, topology: nx.Graph, protocol: Any, **others: Any) -> Scenario:
    return Scenario(problem, topology, protocol, **{"seed": 7, "precision": "float64", **others})


@cache
def _noisy(clients: int) -> Problem:
    return quadratic(clients=clients, dimension=3, seed=1, noise=0.5, samples=6)


@cache
def _bilevel(clients: int, noise: float = 0.0) -> Problem:
    return bilevel_quadratic(clients=clients, seed=2, noise=noise, samples=5, curved=True)


@cache
def _digits(clients: int) -> Problem:
    """Clients with different numbers of samples."""
    return classification("digits", clients=clients, partition="dirichlet:0.6", limit=150, seed=3)


@cache
def _uneven() -> Problem:
    """Ridge regression with a strength for each weight, as the outer variable; five clients with different
    numbers of samples, of training and of validation.
    """
    generator = np.random.Generator(np.random.Philox(5))

    def samples(counts: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
        draws = [generator.random((count, 4)) * 2 - 1 for count in counts]
        return [(torch.from_numpy(draw[:, :3]), torch.from_numpy(draw[:, 3])) for draw in draws]

    def errors(w: Tensor, lam: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        a, y = batch
        return 0.5 * (a @ w - y).square()

    train, validation = samples((2, 7, 3, 5, 1)), samples((3, 1, 4, 2, 6))
    return Problem(
        name="uneven ridge",
        data=client_data_from_lists(train, validation, validation),
        inner_loss=lambda w, lam, batch: errors(w, lam, batch).mean() + 0.5 * (lam.exp() * w.square()).sum(),
        outer_loss=lambda w, lam, batch: errors(w, lam, batch).mean(),
        init_inner=lambda generator: torch.randn(3, generator=generator, dtype=torch.float64),
        init_outer=lambda generator: torch.full((3,), -1.0, dtype=torch.float64),
        outer_split="validation",
        metrics={"loss": errors},
    )


# --- one level, among peers ----------------------------------------------------------------------------


def _sgp() -> Scenarios:
    rows = ((0.5, 0.2, 0.0, 0.3), (0.1, 0.6, 0.3, 0.0), (0.0, 0.25, 0.5, 0.25), (0.4, 0.0, 0.2, 0.4))
    return {
        "sgp_4b_minibatch_ring": _scenario(_noisy(5), ring(5), SGP(steps=12, lr=0.1, batch=4)),
        "sgp_4a_full_batch_directed_ring": _scenario(
            _noisy(8), ring(8, directed=True), SGP(steps=12, lr=0.1, order="4a", batch=None)
        ),
        "sgp_4b_weight_decay_step_decay_erdos_renyi": _scenario(
            _noisy(6),
            erdos_renyi(6, 0.5, seed=1),
            SGP(steps=12, lr=StepDecay(0.2, at=(4, 9), factor=0.5), batch=3, weight_decay=0.1),
        ),
        "sgp_4a_weight_decay_diminishing_stochastic_directed": _scenario(
            _digits(5),
            stochastic_directed(5, seed=2),
            SGP(steps=10, lr=Diminishing(0.2, after=4), order="4a", batch=8, weight_decay=0.01),
        ),
        "sgp_4b_uneven_full_batch_loss": _scenario(
            _digits(6),
            stochastic_directed(6, seed=3),
            SGP(steps=8, lr=0.1, batch=None),
            timing=Lockstep(loss=0.2),
        ),
        "sgp_4a_uneven_full_batch_small": _scenario(
            _uneven(), stochastic_directed(5, seed=4), SGP(steps=8, lr=0.2, order="4a", batch=None)
        ),
        "sgp_4b_stochastic_undirected_dense": _scenario(
            _noisy(6), stochastic_undirected(6, seed=5), SGP(steps=12, lr=0.1, batch=4)
        ),
        "sgp_4b_stochastic_undirected_sparse_loss": _scenario(
            _noisy(12),
            stochastic_undirected(ring(12), seed=6),
            SGP(steps=10, lr=0.1, batch=4),
            timing=Lockstep(loss=0.1),
        ),
        "sgp_4a_stochastic_directed_sparse": _scenario(
            _noisy(12), stochastic_directed(ring(12), seed=7), SGP(steps=10, lr=0.1, order="4a", batch=4)
        ),
        "sgp_4b_loss_of_some_links": _scenario(
            _noisy(4),
            with_links(fully_connected(4), loss=lambda i, j: 0.4 if i == 0 else 0.0),
            SGP(steps=12, lr=0.1, batch=4),
            seed=11,
        ),
        "sgp_4b_given_weights": _scenario(
            _noisy(4), fully_connected(4), SGP(steps=12, lr=0.1, batch=4), weights=Given(rows)
        ),
        "dsgd_metropolis_erdos_renyi": _scenario(
            _noisy(7), erdos_renyi(7, 0.4, seed=2), DSGD(steps=12, lr=0.1, batch=4), weights=Metropolis()
        ),
        "dsgd_metropolis_stochastic_undirected": _scenario(
            _digits(5),
            stochastic_undirected(5, seed=8),
            DSGD(steps=8, lr=0.1, order="4a", batch=None),
            weights=Metropolis(),
        ),
        "peer_fedavg": _scenario(_noisy(5), fully_connected(5), PeerFedAvg(steps=12, lr=0.1, batch=4)),
        "local": _scenario(_noisy(4), ring(4), Local(steps=12, lr=0.1, batch=4)),
    }


def _sgp_in_virtual_time() -> Scenarios:
    table = Table(((1.0, 0.5), (0.75,), (2.0, 1.0, 0.25), (1.5, 1.5)))
    return {
        "virtual_constant": _scenario(
            _noisy(5),
            stochastic_directed(5, seed=1),
            SGP(steps=12, lr=0.1, batch=4),
            timing=virtual(compute=1.0),
        ),
        "virtual_constant_latency_factors": _scenario(
            _noisy(5),
            stochastic_undirected(5, seed=2),
            SGP(steps=12, lr=0.1, order="4a", batch=4),
            timing=virtual(compute=1.0, latency=0.75, factors={0: 2.0, 3: 1.5}),
        ),
        "virtual_exponential_overtaking_loss": _scenario(
            _noisy(6),
            stochastic_directed(6, seed=3),
            SGP(steps=15, lr=0.05, batch=4),
            timing=virtual(
                compute="exponential(1.0)", latency="exponential(1.0)", loss=0.05, factors={2: 2.0}
            ),
        ),
        "virtual_table": _scenario(
            _noisy(4),
            ring(4),
            SGP(steps=12, lr=0.1, batch=4),
            timing=virtual(compute=table, latency=0.5, factors=(1.0, 1.0, 2.0, 1.0)),
        ),
        "virtual_bandwidth": _scenario(
            _noisy(5),
            stochastic_directed(5, seed=4),
            SGP(steps=12, lr=0.1, batch=4),
            timing=virtual(compute="uniform(0.5, 1.5)", bandwidth=25.6, latency=0.25),
        ),
        "virtual_bandwidth_of_some_links": _scenario(
            _noisy(5),
            with_links(
                ring(5, directed=True),
                bandwidth=lambda i, j: 16.0 if i == 1 else 256.0,
                latency=lambda i, j: 0.5 * i,
            ),
            SGP(steps=12, lr=0.1, order="4a", batch=4),
            timing=virtual(compute=1.0),
        ),
        "virtual_horizon_loss": _scenario(
            _noisy(5),
            stochastic_undirected(5, seed=5),
            SGP(steps=40, lr=0.1, batch=4),
            timing=virtual(compute="lognormal(1.0, 0.5)", latency="exponential(0.5)", loss=0.2, horizon=11.3),
        ),
        "virtual_uneven_full_batch_metropolis": _scenario(
            _digits(5),
            erdos_renyi(5, 0.6, seed=3),
            SGP(steps=8, lr=Diminishing(0.2, after=5), batch=None, weight_decay=0.01),
            timing=virtual(compute="exponential(1.0)", latency="uniform(0.0, 3.0)"),
            weights=Metropolis(),
        ),
        "virtual_local": _scenario(
            _noisy(4),
            edgeless(4),
            Local(steps=10, lr=0.1, batch=4),
            timing=virtual(compute="exponential(1.0)", factors={1: 4.0}),
        ),
    }


# --- two levels, among peers ---------------------------------------------------------------------------


def _hypergradients() -> Scenarios:
    steps = SGP(steps=12, lr=0.2, batch=None)
    steps_4a = dataclasses.replace(steps, order="4a")
    noisy, noisy_4a = (dataclasses.replace(inner, batch=3) for inner in (steps, steps_4a))
    delays = {"compute": "exponential(1.0)", "latency": "exponential(0.4)"}
    return {
        "hgp_alternating_estimated": _scenario(
            _bilevel(5),
            stochastic_directed(5, (0.5, 0.9), seed=1),
            EstimateHypergradient(steps, HGP(rounds=6)),
        ),
        "hgp_joint_exact_4a_minibatch_recorded": _scenario(
            _bilevel(5, noise=0.2),
            stochastic_directed(5, (0.5, 0.9), seed=2),
            EstimateHypergradient(
                noisy_4a, HGP(rounds=6, sampling="joint", expectations="exact", record=True, lr=0.1)
            ),
        ),
        "hgp_alternating_estimated_4a_weight_decay_loss": _scenario(
            _bilevel(5, noise=0.2),
            stochastic_undirected(5, (0.5, 0.9), seed=3),
            EstimateHypergradient(
                dataclasses.replace(noisy_4a, weight_decay=0.1), HGP(rounds=5, batch=None, record=True)
            ),
            timing=Lockstep(loss=0.1),
        ),
        "hgp_joint_exact_virtual": _scenario(
            _bilevel(4),
            stochastic_directed(4, (0.6, 0.9), seed=4),
            EstimateHypergradient(steps_4a, HGP(rounds=6, sampling="joint", expectations="exact")),
            timing=virtual(**delays, factors={1: 2.0}),
        ),
        "vrhgp_joint_exact_sparse": _scenario(
            _bilevel(12, noise=0.2),
            stochastic_directed(ring(12), (0.6, 0.9), seed=5),
            EstimateHypergradient(noisy, VRHGP(rounds=6, sampling="joint", expectations="exact")),
        ),
        "vrhgp_alternating_exact_4a": _scenario(
            _bilevel(5),
            stochastic_directed(5, (0.5, 0.9), seed=6),
            EstimateHypergradient(
                steps_4a, VRHGP(rounds=6, alpha=0.8, beta=0.2, expectations="exact", record=True)
            ),
        ),
        "vrhgp_joint_estimated_virtual": _scenario(
            _bilevel(4, noise=0.2),
            stochastic_directed(4, (0.6, 0.9), seed=7),
            EstimateHypergradient(
                dataclasses.replace(noisy, steps=20, lr=0.1), VRHGP(rounds=6, sampling="joint")
            ),
            timing=virtual(**delays, loss=0.05),
        ),
        "vrhgp_alternating_estimated_uneven": _scenario(
            _uneven(),
            stochastic_directed(5, (0.5, 0.9), seed=8),
            EstimateHypergradient(steps, VRHGP(rounds=5)),
        ),
        "exact_backprop_stochastic_undirected": _scenario(
            _bilevel(5, noise=0.2),
            stochastic_undirected(5, (0.5, 0.9), seed=9),
            EstimateHypergradient(noisy, ExactBackprop(rounds=6)),
        ),
        "exact_backprop_joint_4a_metropolis": _scenario(
            _bilevel(5),
            erdos_renyi(5, 0.6, seed=4),
            EstimateHypergradient(steps_4a, ExactBackprop(rounds=6, sampling="joint")),
            weights=Metropolis(),
        ),
        "itd_forward": _scenario(
            _bilevel(4, noise=0.2),
            stochastic_directed(4, seed=10),
            EstimateHypergradient(noisy, ITDForward(gather=3)),
        ),
        "itd_forward_4a_virtual": _scenario(
            _bilevel(4),
            stochastic_directed(4, seed=11),
            EstimateHypergradient(dataclasses.replace(steps_4a, weight_decay=0.1), ITDForward(gather=2)),
            timing=virtual(**delays),
        ),
        "itd_backward": _scenario(
            _bilevel(5, noise=0.2), ring(5), EstimateHypergradient(noisy, ITDBackward()), weights=Metropolis()
        ),
        "itd_backward_4a_step_decay": _scenario(
            _bilevel(5, noise=0.2),
            fully_connected(5),
            EstimateHypergradient(
                dataclasses.replace(noisy_4a, lr=StepDecay(0.2, at=(6,)), weight_decay=0.1), ITDBackward()
            ),
        ),
        "estimate_at_given_variables": _scenario(
            _bilevel(5),
            stochastic_directed(5, (0.5, 0.9), seed=12),
            EstimateHypergradient(steps, HGP(rounds=6, expectations="exact"), solve=False),
        ),
        "compare_hypergradients": _scenario(
            logistic_pair(clients=4, samples=20, digits=(3, 8), dataset="digits"),
            stochastic_undirected(4, (0.5, 0.9), seed=13),
            CompareHypergradients(
                SGP(steps=15, lr=0.5, batch=None),
                (
                    HGP(rounds=5, record=True),
                    VRHGP(rounds=5, expectations="exact"),
                    ExactBackprop(rounds=5),
                    HGP(rounds=5, sampling="joint", batch=4),
                ),
            ),
        ),
    }


def _outer_loops() -> Scenarios:
    inner = SGP(steps=8, lr=0.2, batch=None)
    minibatch = SGP(steps=8, lr=0.2, batch=3)
    ensemble = personalized_classification(
        "digits", clients=4, components=2, limit=80, partition="dirichlet:0.6", seed=4
    )
    return {
        "pdbo_adam_fresh_vrhgp": _scenario(
            _bilevel(5, noise=0.2),
            stochastic_directed(5, (0.5, 0.9), seed=1),
            PDBO(minibatch, VRHGP(rounds=4), outer_steps=3),
        ),
        "pdbo_adam_warm_hgp_loss": _scenario(
            _uneven(),
            stochastic_directed(5, (0.5, 0.9), seed=2),
            PDBO(inner, HGP(rounds=4), outer_steps=3, outer_lr=0.2, betas=(0.8, 0.9), start="warm"),
            timing=Lockstep(loss=0.1),
        ),
        "pdbo_sgd_warm_hgp_virtual": _scenario(
            _bilevel(4, noise=0.2),
            stochastic_directed(4, (0.6, 0.9), seed=3),
            PDBO(
                SGP(steps=15, lr=0.1, batch=3),
                HGP(rounds=4, sampling="joint"),
                outer_steps=3,
                outer_lr=0.5,
                optimizer="sgd",
                start="warm",
            ),
            timing=virtual(compute="uniform(0.5, 1.5)", latency="exponential(0.5)", factors={3: 1.25}),
        ),
        "pdbo_sgd_fresh_exact_backprop_personalized": _scenario(
            ensemble,
            stochastic_undirected(4, (0.5, 0.9), seed=4),
            PDBO(
                SGP(steps=4, lr=0.1, batch=None),
                ExactBackprop(rounds=3, batch=8),
                outer_steps=2,
                outer_lr={"ensemble": 1.0, "labels": 0.5},
                optimizer="sgd",
            ),
        ),
        "pdbo_itd_backward": _scenario(
            _bilevel(4, noise=0.2),
            ring(4),
            PDBO(dataclasses.replace(minibatch, order="4a"), ITDBackward(), outer_steps=2),
        ),
        "pdbo_itd_forward_local": _scenario(
            _bilevel(4), ring(4), PDBO(Local(steps=6, lr=0.2, batch=None), ITDForward(), outer_steps=2)
        ),
        "cdbo_consensus": _scenario(
            _bilevel(5, noise=0.2),
            stochastic_directed(5, (0.5, 0.9), seed=5),
            CDBO(minibatch, VRHGP(rounds=4, sampling="joint"), outer_steps=3, outer_lr=0.1, consensus=3),
        ),
        "cdbo_warm_virtual": _scenario(
            _bilevel(4),
            stochastic_directed(4, (0.6, 0.9), seed=6),
            CDBO(
                SGP(steps=15, lr=0.1, batch=None),
                HGP(rounds=4, sampling="joint"),
                outer_steps=2,
                consensus=2,
                start="warm",
            ),
            timing=virtual(compute="uniform(0.5, 1.5)", latency=0.3),
        ),
        "cdbo_local": _scenario(
            _bilevel(4),
            fully_connected(4),
            CDBO(Local(steps=6, lr=0.2, batch=None), HGP(rounds=4), outer_steps=2, consensus=2),
        ),
        "gossip_bilevel": _scenario(
            _uneven(),
            erdos_renyi(5, 0.6, seed=5),
            GossipBilevel(
                steps=8, lr=0.1, inner_lr=Diminishing(0.3, after=10), mixing=0.5, terms=3, bound=2.0
            ),
            weights=Metropolis(),
        ),
        "gossip_bilevel_minibatch": _scenario(
            _bilevel(5, noise=0.2),
            stochastic_undirected(5, seed=6),
            GossipBilevel(steps=8, lr=0.05, inner_lr=0.1, mixing=0.4, terms=2, bound=4.0, batch=2),
            weights=Metropolis(),
        ),
    }


# --- with a server -------------------------------------------------------------------------------------


def _servers() -> Scenarios:
    series = Neumann(terms=4, scale=0.3)
    represented = hyper_representation("digits", clients=4, model="mlp:4", limit=80, seed=5)
    tuned = loss_tuning("digits", clients=3, model="logistic", largest=24, ratio=0.3, seed=6)
    decay = regularization_tuning("digits", clients=4, limit=80, partition="shards:2", rate=0.1, seed=7)
    saddle = minimax_saddle(clients=4, dimension=3, curvature=(0.5, 2.0), seed=8)
    composed = compositional(clients=4, dimension=3, outer_dimension=2, bend=0.3, seed=9)
    return {
        "fedavg_weighted_epochs": _scenario(
            _digits(6),
            star(6),
            FedAvg(4, LocalSteps(0.1, epochs=2, batch=8), server=server(weighted=True, participation=0.5)),
        ),
        "fedavg_steps_of_each_step_decay": _scenario(
            _noisy(5),
            star(5),
            FedAvg(
                6,
                LocalSteps(StepDecay(0.2, at=(3,)), steps=(1, 2, 3, 4, 5), batch=4, divide=True),
                server=server(),
            ),
        ),
        "fedavg_full_batch_max_rounds": _scenario(
            _uneven(),
            star(5),
            FedAvg(9, LocalSteps(0.2, steps=3), server=server(weighted=True), max_rounds=4),
        ),
        "fednest_products": _scenario(
            _bilevel(6, noise=0.2),
            star(6),
            FedNest(
                4,
                LocalSteps(0.2, steps=3, batch=2),
                LocalSteps(0.1, steps=2, batch=2),
                inner_rounds=2,
                neumann=series,
                batch=3,
                server=server(participation=0.5),
            ),
        ),
        "fednest_parts_fixed_products_list_of_sets": _scenario(
            _bilevel(5),
            star(5),
            FedNest(
                4,
                LocalSteps(0.2, steps=3),
                LocalSteps(Diminishing(0.1, after=2), steps=2),
                neumann=dataclasses.replace(series, products="fixed"),
                sampling="parts",
                server=server(participation=[[0, 1, 4], [2, 3], [1, 3, 4]]),
            ),
        ),
        "fednest_iteration_sum_fresh": _scenario(
            _uneven(),
            star(5),
            FedNest(
                4,
                LocalSteps(0.2, steps=3, divide=True),
                LocalSteps(0.3),
                inner_rounds=2,
                neumann=dataclasses.replace(series, products="sum"),
                sampling="iteration",
                start="fresh",
                server=server(participation=0.6, weighted=True),
            ),
        ),
        "fednest_max_rounds": _scenario(
            _bilevel(4),
            star(4),
            FedNest(9, LocalSteps(0.2), LocalSteps(0.1), neumann=series, server=server(), max_rounds=17),
        ),
        "fednest_minimax": _scenario(
            saddle,
            star(4),
            FedNest(
                4, LocalSteps(0.2, steps=3), LocalSteps(0.05, steps=2), setting="minimax", server=server()
            ),
        ),
        "fednest_compositional": _scenario(
            composed,
            star(4),
            FedNest(
                4,
                LocalSteps(0.2, steps=3),
                LocalSteps(0.05, steps=2),
                setting="compositional",
                server=server(participation=0.5),
            ),
        ),
        "fednest_single": _scenario(
            _digits(5), star(5), FedNest(4, LocalSteps(0.1, steps=3), setting="single", server=server())
        ),
        "fednest_representation_epochs": _scenario(
            represented,
            star(4),
            FedNest(
                2,
                LocalSteps(0.1, epochs=2, batch=8),
                LocalSteps(0.1, epochs=1, batch=8),
                neumann=dataclasses.replace(series, scale=0.1),
                batch=10,
                server=server(),
            ),
        ),
        "fednest_sgd": _scenario(
            _bilevel(5, noise=0.2),
            star(5),
            FedNestSGD(
                4,
                LocalSteps(0.2, steps=3, batch=2),
                LocalSteps(0.1, steps=2, batch=2),
                inner_rounds=2,
                neumann=series,
                sampling="parts",
                server=server(participation=0.6),
            ),
        ),
        "lfednest_bilevel": _scenario(
            _bilevel(5, noise=0.2),
            star(5),
            LFedNest(
                4,
                LocalSteps(0.2, steps=3, batch=2),
                LocalSteps(0.1, steps=(1, 2, 3, 1, 2), batch=2),
                inner_rounds=2,
                neumann=series,
                server=server(participation=0.6),
            ),
        ),
        "lfednest_minimax": _scenario(
            saddle,
            star(4),
            LFedNest(
                4,
                LocalSteps(0.2, steps=3),
                LocalSteps(0.05, steps=2),
                setting="minimax",
                sampling="iteration",
                server=server(participation=0.5),
            ),
        ),
        "lfednest_compositional": _scenario(
            composed,
            star(4),
            LFedNest(
                4,
                LocalSteps(0.2, steps=3),
                LocalSteps(0.02, steps=2),
                setting="compositional",
                server=server(),
            ),
        ),
        "lfednest_svrg_fresh": _scenario(
            _uneven(),
            star(5),
            LFedNestSVRG(
                4,
                LocalSteps(0.2, steps=3, batch=2),
                LocalSteps(0.2, steps=2, divide=True),
                neumann=dataclasses.replace(series, products="sum"),
                start="fresh",
                batch=2,
                server=server(),
            ),
        ),
        "lfednest_nonalt": _scenario(
            represented,
            star(4),
            LFedNestNonAlt(
                3,
                LocalSteps(0.1, epochs=1, batch=8),
                LocalSteps(0.1, steps=2, batch=8),
                neumann=dataclasses.replace(series, scale=0.1, products="fixed"),
                server=server(participation=0.75),
            ),
        ),
        "fedavg_s": _scenario(
            saddle,
            star(4),
            FedAvgS(
                5, LocalSteps(0.2, steps=(1, 2, 3, 4)), LocalSteps(0.05, steps=(1, 2, 3, 4)), server=server()
            ),
        ),
        "aggitd_svrg_fixed_set": _scenario(
            _bilevel(5, noise=0.2),
            star(5),
            AggITD(
                4,
                LocalSteps(0.2, steps=3, batch=2),
                LocalSteps(0.1, steps=2, batch=2),
                inner_rounds=3,
                scale=0.3,
                batch=3,
                server=server(participation=[0, 2, 3]),
            ),
        ),
        "aggitd_sgd_fresh": _scenario(
            _uneven(),
            star(5),
            AggITD(
                4,
                LocalSteps(0.2, steps=3),
                LocalSteps(0.3, steps=2),
                inner_rounds=3,
                scale=0.3,
                solver="sgd",
                start="fresh",
                server=server(weighted=True, participation=0.6),
            ),
        ),
        "aggitd_fixed_q_loss_tuning": _scenario(
            tuned,
            star(3),
            AggITD(
                2, LocalSteps(0.1, epochs=1, batch=8), LocalSteps(0.1), inner_rounds=2, q=1, server=server()
            ),
        ),
        "aggitd_max_rounds_regularization": _scenario(
            decay,
            star(4),
            AggITD(
                9,
                LocalSteps(0.1, steps=2, batch=8),
                LocalSteps(0.3),
                inner_rounds=2,
                scale=0.2,
                q=0,
                solver="sgd",
                server=server(participation=0.5),
                max_rounds=12,
            ),
        ),
        "lockstep_lossy_links_attempts": _scenario(
            _bilevel(5),
            star(5, down={"probability": 0.6, "loss": 0.2}, up={"probability": 0.5}),
            FedNest(
                4,
                LocalSteps(0.2, steps=3),
                LocalSteps(0.1, steps=2),
                neumann=series,
                server=server(quorum=0.8, attempts=40),
            ),
        ),
        "lockstep_two_way_links": _scenario(
            _noisy(5),
            two_way_star(5, probability=0.6),
            FedAvg(6, LocalSteps(0.1, steps=2, batch=4), server=server(participation=0.6, quorum=2)),
            timing=Lockstep(loss=0.1),
        ),
        "lockstep_lossy_links_without_quorum": _scenario(
            _bilevel(4),
            star(4, down={"probability": lambda client: 0.4 + 0.1 * client}, up={"loss": 0.3}),
            AggITD(4, LocalSteps(0.2, steps=2), LocalSteps(0.1), inner_rounds=2, scale=0.3, server=server()),
        ),
    }


def _waiting() -> Scenarios:
    """Servers in virtual time: who is late, what becomes of it, and what is asked again."""
    series = Neumann(terms=3, scale=0.3)
    slow = {1: 4.0, 4: 2.5}
    return {
        "server_virtual_waits_for_all": _scenario(
            _noisy(5),
            star(5),
            FedAvg(5, LocalSteps(0.1, steps=(1, 2, 3, 4, 5), batch=4), server=server()),
            timing=VirtualTime(compute=Table(((1.0, 2.0), (0.5,), (1.0,), (0.25, 0.5), (1.0,))), latency=0.5),
        ),
        "server_virtual_random_latency_and_bandwidth": _scenario(
            _bilevel(4),
            star(
                4,
                down={"latency": "exponential(0.4)", "bandwidth": 40.0},
                up={"latency": lambda client: 0.25 * client},
            ),
            FedNest(
                3,
                LocalSteps(0.2, steps=2),
                LocalSteps(0.1),
                neumann=series,
                server=server(participation=0.5),
            ),
            timing=VirtualTime(compute="exponential(1.0)", bandwidth=50.0),
        ),
        "server_quorum_drop": _scenario(
            _noisy(6),
            star(6),
            FedAvg(8, LocalSteps(0.1, steps=2, batch=4), server=server(weighted=True, quorum=4, late="drop")),
            timing=VirtualTime(compute="exponential(1.0)", factors=slow),
        ),
        "server_quorum_next": _scenario(
            _digits(6),
            star(6),
            FedAvg(
                8, LocalSteps(0.1, steps=2, batch=8), server=server(weighted=True, quorum=0.5, late="next")
            ),
            timing=VirtualTime(compute=1.0, factors={0: 2.5, 5: 4.0}, latency=0.25),
        ),
        "aggitd_quorum_next_slow_clients": _scenario(
            _bilevel(6, noise=0.2),
            star(6),
            AggITD(
                5,
                LocalSteps(0.2, steps=2, batch=2),
                LocalSteps(0.1, steps=2, batch=2),
                inner_rounds=2,
                scale=0.3,
                server=server(quorum=4, late="next"),
            ),
            timing=VirtualTime(compute="exponential(1.0)", factors=slow, latency="exponential(2.0)"),
        ),
        "aggitd_sgd_quorum_next_participation": _scenario(
            _bilevel(6),
            star(6),
            AggITD(
                6,
                LocalSteps(0.2, steps=2),
                LocalSteps(0.1),
                inner_rounds=3,
                scale=0.3,
                solver="sgd",
                server=server(participation=0.7, quorum=0.5, late="next"),
            ),
            timing=VirtualTime(compute=1.0, factors=(1.0, 1.5, 1.0, 6.0, 1.25, 1.0)),
        ),
        "fednest_quorum_next_slow_clients": _scenario(
            _bilevel(6, noise=0.2),
            star(6),
            FedNest(
                5,
                LocalSteps(0.2, steps=2, batch=2),
                LocalSteps(0.1, steps=2, batch=2),
                inner_rounds=2,
                neumann=series,
                server=server(quorum=3, late="next"),
            ),
            timing=VirtualTime(compute="lognormal(1.0, 0.4)", factors=slow, bandwidth=60.0),
        ),
        "lfednest_quorum_next_lossy": _scenario(
            _bilevel(6),
            star(6, down={"probability": 0.8}, up={"probability": 0.8, "loss": 0.1}),
            LFedNest(
                6,
                LocalSteps(0.2, steps=2),
                LocalSteps(0.1, steps=2),
                neumann=series,
                server=server(quorum=3, late="next"),
            ),
            timing=VirtualTime(compute="exponential(1.0)", factors=slow, latency=0.2),
        ),
        "fednest_deadline_drop": _scenario(
            _bilevel(5),
            star(5),
            FedNest(
                4,
                LocalSteps(0.2, steps=2),
                LocalSteps(0.1),
                neumann=dataclasses.replace(series, products="fixed"),
                server=server(deadline=3.0, late="drop"),
            ),
            timing=VirtualTime(compute="exponential(1.0)", factors={2: 3.0}),
        ),
        "fednest_sgd_deadline_next_lossy_attempts": _scenario(
            _bilevel(5),
            star(5, down={"probability": 0.7}, up={"loss": 0.2}),
            FedNestSGD(
                4,
                LocalSteps(0.2, steps=2),
                LocalSteps(0.1),
                neumann=series,
                server=server(deadline=2.0, quorum=3, late="next", attempts=30),
            ),
            timing=VirtualTime(compute="exponential(0.5)", factors={2: 3.0}, latency="exponential(0.8)"),
        ),
        "fedavg_s_deadline_repeats_requests": _scenario(
            minimax_saddle(clients=4, dimension=3, seed=8),
            two_way_star(4, probability=0.7),
            FedAvgS(
                6,
                LocalSteps(0.2, steps=2),
                LocalSteps(0.05, steps=2),
                server=server(deadline=1.5, quorum=2, attempts=30),
            ),
            timing=VirtualTime(compute="uniform(0.4, 1.4)", factors={3: 2.0}),
        ),
    }
