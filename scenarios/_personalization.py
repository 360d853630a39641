"""The rows and columns of 001's personalization tables, for the studies that rebuild them at some scale.

A row is a method, a column a network; `Scale` is everything that is smaller here than in the paper. Outer
settings are those of its Table 2, the hypergradient those of its App. D: (VR-)HGP with joint sampling and
expectations that each client estimates from its own rounds of SGP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from asyncfed import Result, Scenario, Summary, SummaryTable
from asyncfed.errors import UnknownNameError
from asyncfed.network import FastestMixing, Metropolis, Uniform, Weights
from asyncfed.problems import Problem
from asyncfed.protocols import HGP, PDBO, SGP, VRHGP, Local, StepDecay
from topologies import erdos_renyi, fully_connected, stochastic_directed, stochastic_undirected

if TYPE_CHECKING:
    import networkx as nx

NETWORKS = ("FC", "FixU", "StoU", "StoD")
ROWS = ("SGP", "SGP-MTL", "Local", "Local-MTL", "PDBO-DA", "PDBO-MTL", "PDBO-MTL&DA")
_PERSONALIZE = {"PDBO-DA": "da", "PDBO-MTL": "mtl", "PDBO-MTL&DA": "mtl+da"}
# The order of Table 1 and Table 4 on stochastic directed links, best first.
_RANKING = ("PDBO-MTL&DA", "PDBO-MTL", "PDBO-DA", "SGP", "Local")


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
    weight_decay: float = 1e-3
    fastest_mixing: bool = False
    seed: int = 0


ProblemMaker = Callable[
    [str, "float | Mapping[str, float]"], Problem
]  # of a personalization and outer L2 rates


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


def row(method: str, where: str, problem: ProblemMaker, scale: Scale) -> Scenario:
    """One cell of the table."""
    graph, weights = network(where, scale.clients, fastest=scale.fastest_mixing)
    ensemble = "MTL" in method
    lr = scale.lr_mtl if ensemble else scale.lr
    settings: dict[str, Any] = {
        "steps": scale.steps,
        "lr": StepDecay(lr, at=scale.decay_at),
        "batch": scale.batch,
        "weight_decay": scale.weight_decay,
    }
    common: dict[str, Any] = {
        "topology": graph,
        "weights": weights,
        "seed": scale.seed,
        "name": f"{where}/{method}",
    }
    if not method.startswith("PDBO"):
        protocol = (Local if method.startswith("Local") else SGP)(**settings)
        made = problem("mtl" if ensemble else "none", 0.0)
        return Scenario(problem=made, protocol=protocol, evaluate_every=scale.steps, **common)
    fixed = where in ("FC", "FixU")
    rates = {"ensemble": 1.0 if fixed else 0.1, "labels": 0.1}
    decay = {"ensemble": 0.01, "labels": 0.0005 if ensemble else 0.0}
    kind = _PERSONALIZE[method]
    parts = {"da": ("labels",), "mtl": ("ensemble",), "mtl+da": ("ensemble", "labels")}[kind]
    estimator = (HGP if fixed else VRHGP)(
        rounds=scale.rounds,
        sampling="joint",
        lr=scale.hypergradient_lr_mtl if ensemble else scale.hypergradient_lr,
    )
    protocol_pdbo = PDBO(
        inner=SGP(**settings),
        hypergradient=estimator,
        outer_steps=scale.outer_steps,
        outer_lr={part: rates[part] for part in parts},
    )
    made = problem(kind, {part: decay[part] for part in parts})
    return Scenario(problem=made, protocol=protocol_pdbo, **common)


def parts(
    methods: Sequence[str], where: Sequence[str], problem: ProblemMaker, scale: Scale
) -> dict[str, Callable[[], Scenario]]:
    """All cells, each made when its turn comes."""

    def part(method: str, name: str) -> Callable[[], Scenario]:
        return lambda: row(method, name, problem, scale)

    return {f"{name}/{method}": part(method, name) for name in where for method in methods}


def reported(result: Result) -> dict[str, Any]:
    """The figures of a run that count: at the outer step of the best validation accuracy, or at the end."""
    if "outer_step" in result.metrics and result.metrics["outer_step"].notna().any():
        return result.best
    return dict(result.metrics.iloc[-1])


def summarise(
    results: Mapping[str, Result],
    paper: Mapping[str, Mapping[str, tuple[float, float]]],
    title: str,
    notes: Sequence[str] = (),
) -> Summary:
    """Accuracy and 10th percentile, ours and the paper's; whether its order holds; curves."""
    import pandas as pd

    lines: list[dict[str, Any]] = []
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for name, result in results.items():
        where, method = name.split("/")
        figures = reported(result)
        ours = 100 * float(figures["accuracy"]), 100 * float(figures["accuracy_p10"])
        found.setdefault(where, {})[method] = ours
        theirs = paper.get(where, {}).get(method)
        lines.append(
            {
                "network": where,
                "method": method,
                "accuracy": f"{ours[0]:.1f} / {ours[1]:.1f}",
                **({"paper": f"{theirs[0]:.1f} / {theirs[1]:.1f}" if theirs else "–"} if paper else {}),
                "outer step": str(int(figures["outer_step"])) if "outer_step" in figures else "–",
                "MB sent": round(float(result.metrics["bytes"].iloc[-1]) / 1e6),
                "seconds": round(float(result.manifest["wall_seconds"])),
            }
        )
    table = SummaryTable(
        title,
        pd.DataFrame(lines),
        (
            "accuracy in %, mean over test samples / client at the 10th percentile; for PDBO at the outer "
            "step of the best validation accuracy",
            *notes,
        ),
    )
    findings = [finding for where in found for finding in _order(where, found[where])]
    curves = _accuracies(results, short=len(found) == 1)

    def draw(path: Any) -> object:
        from asyncfed.report import draw_curves

        return draw_curves(path, curves, xlabel="outer step", ylabel="test accuracy, %", title=title)

    return Summary([table], findings, {"outer-steps": draw} if curves else {})


def _accuracies(results: Mapping[str, Result], short: bool) -> dict[str, tuple[Any, Any]]:
    """Accuracy over outer steps, by method; of one without them, what it came to, all along. Nothing where no
    method has any.
    """
    ends = [r.metrics["outer_step"].iloc[-1] for r in results.values() if "outer_step" in r.metrics]
    if not ends:
        return {}
    curves: dict[str, tuple[Any, Any]] = {}
    for name, result in results.items():
        metrics, shown = result.metrics, name.split("/")[1] if short else name
        if "outer_step" in metrics:
            curves[shown] = metrics["outer_step"], 100 * metrics["accuracy"]
        else:
            curves[shown] = (0, max(ends)), [100 * float(reported(result)["accuracy"])] * 2
    return curves


def _order(where: str, found: Mapping[str, tuple[float, float]]) -> list[tuple[str, bool | None]]:
    """The paper's finding, pair by pair, in the mean and in the 10th percentile."""
    ranked = [method for method in _RANKING if method in found]
    findings: list[tuple[str, bool | None]] = []
    for better, worse in pairwise(ranked):
        for place, what in enumerate(("mean", "10th percentile")):
            a, b = found[better][place], found[worse][place]
            findings.append((f"{where}: {better} ({a:.1f}) ≥ {worse} ({b:.1f}), {what}", a >= b))
    return findings
