"""The rows and columns of 001's personalization tables, for the studies that rebuild them at some scale.

A row is a method, a column a network; `Scale` is everything that is smaller here than in the paper. Outer
settings are those of its Table 2, the hypergradient those of its App. D: (VR-)HGP with joint sampling and
expectations that each client estimates from its own rounds of SGP. On fixed networks (FC, FixU) a client
communicates once per local epoch (`Epochs`), those who are alone make as many, and FC has the rows of the
methods with a server. SGP on FC is FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncfed import Scenario
from asyncfed.errors import UnknownNameError
from asyncfed.network import FastestMixing, Metropolis, Uniform, Weights
from asyncfed.problems import Problem
from asyncfed.protocols import (
    HGP,
    PDBO,
    SGP,
    VRHGP,
    ClusteredFL,
    EpochSGP,
    FedAvgPlus,
    FedEM,
    FedProx,
    Local,
    LocalEpochs,
    LocalSteps,
    PFedMe,
    StepDecay,
)
from topologies import erdos_renyi, fully_connected, star, stochastic_directed, stochastic_undirected

if TYPE_CHECKING:
    import networkx as nx

NETWORKS = ("FC", "FixU", "StoU", "StoD")
PDBOS = {"PDBO-MTL&DA": "mtl+da", "PDBO-MTL": "mtl", "PDBO-DA": "da"}
BEGINNINGS = {"SGP": "PDBO-DA", "SGP-MTL": "PDBO-MTL"}
"""Rows that another begins with: λ = 0 weighs all labels alike, and all models of an ensemble."""
ROWS = (*PDBOS, "SGP-MTL", "SGP", "Local-MTL", "Local")
SERVED = ("FedAvg+", "FedProx", "pFedMe", "Clustered-FL", "FedEM")
"""Methods with a server, of the table's first column."""

FASTER = 2.6
"""Mean weight of a sample where λ of label weights is ±1: what label weights do to the learning rate."""
FASTER_ROW = f"SGP-x{FASTER:g}"


@dataclass(frozen=True)
class Epochs:
    """One communication per local epoch of SGD with momentum; `lr_mtl` is for ensembles."""

    rounds: int
    batch: int
    lr: float
    lr_mtl: float
    decay_at: tuple[int, ...]
    momentum: float = 0.9


@dataclass(frozen=True)
class Scale:
    """How large it all is, and the rates that go with it."""

    clients: int
    steps: int
    batch: int
    lr: float
    lr_mtl: float
    decay_at: tuple[int, ...]
    outer_steps: int
    rounds: int
    hypergradient_lr: float
    hypergradient_lr_mtl: float
    outer_lr: float = 0.1
    weight_decay: float = 1e-3
    repeated: bool = False
    epochs: Epochs | None = None
    fastest_mixing: bool = False
    seed: int = 0


def scaled(
    clients: int,
    steps: int,
    batch: int,
    lr: float,
    lr_mtl: float,
    outer_steps: int,
    outer_lr: float,
    rounds: int,
    seed: int,
    **more: Any,
) -> Scale:
    """As the authors' code has it: rates ×0.1 at 5/6 and 11/12 of the steps, the hypergradient of a step at
    the last rate, and outer steps that all see the same minibatches and links.
    """
    return Scale(
        clients=clients,
        steps=steps,
        batch=batch,
        lr=lr,
        lr_mtl=lr_mtl,
        decay_at=(steps * 5 // 6, steps * 11 // 12),
        outer_steps=outer_steps,
        rounds=rounds,
        hypergradient_lr=0.01 * lr,
        hypergradient_lr_mtl=0.01 * lr_mtl,
        outer_lr=outer_lr,
        repeated=True,
        seed=seed,
        **more,
    )


# A problem of a personalization and outer L2 rates.
ProblemMaker = Callable[[str, "float | Mapping[str, float]"], Problem]


def network(name: str, clients: int, *, fastest: bool = False) -> tuple[nx.Graph, Weights]:
    """One of the paper's four (§6.1, App. D), drawn once; FixU with Metropolis or fastest mixing."""
    if name == "FC":
        return fully_connected(clients), Uniform()
    if name == "FixU":
        return erdos_renyi(clients, 0.4, seed=1), FastestMixing() if fastest else Metropolis()
    if name == "StoU":
        return stochastic_undirected(clients, probability=(0.4, 0.8), seed=1), Uniform()
    if name == "StoD":
        return stochastic_directed(clients, probability=(0.4, 0.8), seed=1), Uniform()
    raise UnknownNameError("network", name, (*NETWORKS, "all"))


def networks_of(name: str) -> Sequence[str]:
    """ "all", or one of them."""
    if name != "all" and name not in NETWORKS:
        raise UnknownNameError("network", name, (*NETWORKS, "all"))
    return NETWORKS if name == "all" else (name,)


def rows_of(where: str, *, faster: bool = False, served: bool = False) -> tuple[str, ...]:
    """What has to be run for a column whose outer steps repeat their draws: `BEGINNINGS` come with it. Where
    they communicate every step, `faster` adds SGP at the rate that label weights amount to.
    """
    extra = (FASTER_ROW,) if faster and where in ("StoU", "StoD") else ()
    return (*PDBOS, *extra, "Local-MTL", "Local", *(SERVED if served and where == "FC" else ()))


def row(method: str, where: str, problem: ProblemMaker, scale: Scale) -> Scenario:
    """One cell of the table."""
    graph, weights = network(where, scale.clients, fastest=scale.fastest_mixing)
    common: dict[str, Any] = {"weights": weights, "seed": scale.seed, "name": f"{where}/{method}"}
    ensemble = "MTL" in method or method == "FedEM"
    if method in SERVED:
        assert scale.epochs is not None, "asked only of a scale that has epochs"
        made = problem("mtl" if ensemble else "none", 0.0)
        return Scenario(problem=made, topology=star(scale.clients), protocol=_served(method, scale), **common)
    fixed = scale.epochs is not None and where in ("FC", "FixU")
    settings = _epoch_settings(scale, ensemble) if fixed else _step_settings(scale, method, ensemble)
    alone = method.startswith("Local")
    inner: SGP
    if fixed:  # on FC clients count by their samples, as in FedAvg
        inner = LocalEpochs(**settings) if alone else EpochSGP(**settings, weighted=where == "FC")
    else:
        inner = Local(**settings) if alone else SGP(**settings)
    common["topology"] = graph
    if method not in PDBOS:
        made = problem("mtl" if ensemble else "none", 0.0)
        return Scenario(problem=made, protocol=inner, evaluate_every=inner.steps, **common)
    kind = PDBOS[method]
    parts = {"da": ("labels",), "mtl": ("ensemble",), "mtl+da": ("ensemble", "labels")}[kind]
    # Of λ^K on FC and FixU it is ten times that (1.0 in the authors' code), read as: in PDBO-MTL&DA, too.
    rates = {"ensemble": scale.outer_lr * (10 if where in ("FC", "FixU") else 1), "labels": scale.outer_lr}
    decay = {"ensemble": 0.01, "labels": 0.0005 if ensemble else 0.0}
    lr = scale.hypergradient_lr_mtl if ensemble else scale.hypergradient_lr
    estimator = (HGP if where in ("FC", "FixU") else VRHGP)(
        rounds=scale.rounds, sampling="joint", lr=None if fixed else lr
    )
    protocol = PDBO(
        inner=inner,
        hypergradient=estimator,
        outer_steps=scale.outer_steps,
        outer_lr={part: rates[part] for part in parts},
        draws="repeated" if scale.repeated else "fresh",
    )
    made = problem(kind, {part: decay[part] for part in parts})
    return Scenario(problem=made, protocol=protocol, **common)


def parts(
    methods: Sequence[str], where: Sequence[str], problem: ProblemMaker, scale: Scale
) -> dict[str, Callable[[], Scenario]]:
    """All cells, each made when its turn comes."""

    def part(method: str, name: str) -> Callable[[], Scenario]:
        return lambda: row(method, name, problem, scale)

    return {f"{name}/{method}": part(method, name) for name in where for method in methods}


def _step_settings(scale: Scale, method: str, ensemble: bool) -> dict[str, Any]:
    lr = (FASTER if method == FASTER_ROW else 1.0) * (scale.lr_mtl if ensemble else scale.lr)
    return {
        "steps": scale.steps,
        "lr": StepDecay(lr, at=scale.decay_at),
        "batch": scale.batch,
        "weight_decay": scale.weight_decay,
    }


def _epoch_settings(scale: Scale, ensemble: bool) -> dict[str, Any]:
    epochs = scale.epochs
    assert epochs is not None
    return {
        "steps": epochs.rounds,
        "lr": StepDecay(epochs.lr_mtl if ensemble else epochs.lr, at=epochs.decay_at),
        "batch": epochs.batch,
        "momentum": epochs.momentum,
        "weight_decay": scale.weight_decay,
    }


def _served(method: str, scale: Scale) -> Any:
    """As the table's runs had them: FedProx without momentum, pFedMe in the form of FedEM's code, FedAvg+
    tuned at the last rate.
    """
    epochs = scale.epochs
    assert epochs is not None
    lr = epochs.lr_mtl if method == "FedEM" else epochs.lr
    local = LocalSteps(StepDecay(lr, at=epochs.decay_at), epochs=1, batch=epochs.batch)
    settings: dict[str, Any] = {"momentum": epochs.momentum, "weight_decay": scale.weight_decay}
    match method:
        case "FedAvg+":
            last = LocalSteps(0.1 ** len(epochs.decay_at) * lr, epochs=1, batch=epochs.batch)
            return FedAvgPlus(epochs.rounds, local, tuning=last, **settings)
        case "FedProx":
            return FedProx(epochs.rounds, local, mu=0.1, weight_decay=scale.weight_decay)
        case "pFedMe":
            return PFedMe(epochs.rounds, local, form="fedem", lam=1.0, **settings)
        case "Clustered-FL":
            return ClusteredFL(epochs.rounds, local, **settings)
    return FedEM(epochs.rounds, local, **settings)
