"""Hypergradient estimators where all of the hypergradient is indirect: FedNest's three, AggITD's, local ones.

On the hyper-representation of `aggitd_table2` the indirect part is next to nothing, so that nothing can be
said there about how it is estimated. Here the outer variable acts through the inner one alone:

    loss    loss tuning on long-tailed MNIST (a perceptron 784-64-10), 100 clients, ten at a time
    decay   weight decay per class of a logistic model on digits, 20 clients, too strong at the start

iid and with two shards per client. All make the same outer iterations. FedNest takes N = 5 terms of the
series (N' drawn at random; always 5 products; the sum of all terms), AggITD one inner round as in Table 2
(two terms) and five of a fifth of the local epochs (six terms); LFedNest local Hessians. Without tuning is
FedNest without the indirect part, so that the outer variable stays. λ = 1/ℓ is 0.4 for the weight decay,
whose largest curvature is about 1.6; for the loss 0.02 (curvatures 6 to 10), with an outer rate of 1, as in
`fednest_loss_tuning`.

AggITD asks the same clients for all of an iteration, FedNest others for the outer part: clients who have just
trained, and clients whose labels may not have been among them. FedNest-one-draw is FedNest-random with
AggITD's sampling, to tell that from the estimator. It matters on non-iid clients where steps are large: with
λ = 0.1, after 60 iterations, FedNest had lost it (25%; with one draw 77%, AggITD 77%, no tuning 80%).

An estimator with fewer terms is shorter: N terms times λ, where little is lost by the Hessian. The column
`terms` is that length; where it explains the order, it is the step size that differs and not the direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncfed import Result, Scenario, Study, Summary, SummaryTable
from asyncfed.problems import Problem, loss_tuning, regularization_tuning
from asyncfed.protocols import AggITD, FedNest, LFedNest, LocalSteps, Neumann, Server
from asyncfed.protocols.rounds import WithServer
from scenarios._server_methods import (
    PARTITIONS,
    Finding,
    at_end,
    at_round,
    compared,
    draw_costs,
    iterations,
    noise,
    parts_of,
    percent,
    remembered,
    rounds_per_iteration,
)
from topologies import star

N = 5
ESTIMATORS = (
    "FedNest-random",
    "FedNest-fixed",
    "FedNest-sum",
    "FedNest-one-draw",
    "FBO-AggITD,N=1",
    "FBO-AggITD,N=5",
    "LFedNest",
    "untuned",
)
_TERMS = {"FedNest-sum": N + 1, "FBO-AggITD,N=1": 2, "FBO-AggITD,N=5": 6, "untuned": 0}
_SAME = 1.0  # points of accuracy that tell estimators apart


@dataclass(frozen=True)
class Setting:
    """What goes with a problem."""

    clients: int
    participation: float
    inner_lr: float
    outer_lr: float
    scale: float
    metric: str
    iterations: int


def study(
    loss_iterations: int = 200,
    decay_iterations: int = 60,
    dataset: str = "mnist",
    model: str = "mlp:64",
    largest: int = 6000,
    clients: int = 100,
    participation: float = 0.1,
    loss_inner_lr: float = 0.1,
    loss_outer_lr: float = 1.0,
    loss_scale: float = 0.02,
    decay_clients: int = 20,
    decay_rate: float = 0.1,
    decay_inner_lr: float = 0.3,
    decay_outer_lr: float = 30.0,
    decay_scale: float = 0.4,
    seed: int = 0,
) -> Study:
    """Settings of both problems; `dataset`, `model`, `largest`, `clients` are those of the loss tuning."""
    settings = {
        "loss": Setting(
            clients,
            participation,
            loss_inner_lr,
            loss_outer_lr,
            loss_scale,
            "balanced_accuracy",
            loss_iterations,
        ),
        "decay": Setting(
            decay_clients, 1.0, decay_inner_lr, decay_outer_lr, decay_scale, "accuracy", decay_iterations
        ),
    }

    @remembered
    def problem(what: str, partition: str) -> Problem:
        dealt = PARTITIONS[partition]
        if what == "loss":
            return loss_tuning(dataset, clients, model, dealt, seed, largest=largest)
        return regularization_tuning("digits", decay_clients, partition=dealt, seed=seed, rate=decay_rate)

    def scenario(what: str, partition: str, name: str) -> Scenario:
        chosen = settings[what]
        return Scenario(
            problem=problem(what, partition),
            topology=star(chosen.clients),
            protocol=estimator(name, chosen),
            evaluate_every=1,
            seed=seed,
        )

    names = [
        f"{what}/{partition}/{name}" for what in settings for partition in PARTITIONS for name in ESTIMATORS
    ]

    def summary(results: Mapping[str, Result]) -> Summary:
        return summarise(results, {what: chosen.metric for what, chosen in settings.items()})

    return Study("aggitd_indirect", parts_of(scenario, names), summary)


def estimator(name: str, setting: Setting) -> WithServer:
    common: dict[str, Any] = {
        "outer_steps": setting.iterations,
        "outer": LocalSteps(setting.outer_lr),
        "server": Server(participation=setting.participation),
    }
    kind, _, rounds = name.partition(",N=")
    inner_rounds = int(rounds or 1)
    inner = LocalSteps(setting.inner_lr, epochs=N // inner_rounds, batch=64)
    if kind == "FBO-AggITD":
        return AggITD(inner=inner, inner_rounds=inner_rounds, scale=setting.scale, **common)
    if kind == "LFedNest":
        return LFedNest(inner=inner, neumann=Neumann(N, setting.scale), **common)
    if kind == "untuned":
        return FedNest(inner=inner, setting="minimax", sampling="parts", **common)
    if kind == "FedNest-one-draw":
        return FedNest(inner=inner, neumann=Neumann(N, setting.scale), sampling="iteration", **common)
    products: Any = kind.removeprefix("FedNest-")
    return FedNest(inner=inner, neumann=Neumann(N, setting.scale, products), sampling="parts", **common)


def summarise(results: Mapping[str, Result], metrics: Mapping[str, str]) -> Summary:
    import pandas as pd

    groups: dict[tuple[str, str], dict[str, Result]] = {}
    for name, result in results.items():
        what, partition, kind = name.split("/")
        groups.setdefault((what, partition), {})[kind] = result
    lines: list[dict[str, Any]] = []
    findings: list[Finding] = []
    for (what, partition), runs in groups.items():
        metric = metrics[what]
        rounds = min(int(run.metrics["step"].iloc[-1]) for run in runs.values())
        for kind, run in runs.items():
            lines.append(
                {
                    "problem": what,
                    "data": partition,
                    "estimator": kind,
                    "terms": _TERMS.get(kind, N),
                    "rounds/iteration": f"{rounds_per_iteration(run):.3g}",
                    "accuracy": percent(_end(run, metric)),
                    "noise": percent(noise(run, metric)),
                    "loss": f"{_end(run, 'loss'):.3g}",
                    "accuracy, same rounds": percent(at_round(run, rounds, metric).mean),
                    "iterations": iterations(run),
                }
            )
        findings += _findings(f"{what}, {partition}", runs, metric)
    table = SummaryTable(
        "Where all of the hypergradient is indirect",
        pd.DataFrame(lines),
        (
            "test accuracy in % (loss tuning: balanced over classes) and test loss after the same outer "
            "iterations; same rounds: within the rounds of the one that needs fewest; means of ten",
        ),
    )

    def picture(what: str) -> Any:
        chosen = {partition: runs for (problem, partition), runs in groups.items() if problem == what}
        metric = metrics[what]

        def draw(path: Path) -> object:
            words = metric.replace("_", " ")
            return draw_costs(
                path, f"Tuning: {what}", chosen, metric=metric, ylabel=f"test {words}, %", low=40.0
            )

        return draw

    return Summary([table], findings, {what: picture(what) for what in dict.fromkeys(g[0] for g in groups)})


def _end(run: Result, metric: str) -> float:
    return at_end(run, metric).mean


def _findings(where: str, runs: Mapping[str, Result], metric: str) -> list[Finding]:
    ends = {kind: 100 * _end(run, metric) for kind, run in runs.items()}
    untuned = ends.pop("untuned", None)
    findings: list[Finding] = []
    if untuned is not None and ends:
        better = [kind for kind, value in ends.items() if value > untuned]
        words = f"{where}: every estimator ends above no tuning ({untuned:.2f}): {len(better)} of {len(ends)}"
        findings.append((words, len(better) == len(ends)))
    if len(ends) > 1:
        best, worst = max(ends, key=ends.__getitem__), min(ends, key=ends.__getitem__)
        least = max(_SAME, *(100 * noise(runs[kind], metric) for kind in (best, worst)))
        words = (
            f"{where}: estimators differ by more than noise and {_SAME:g} point, {least:.2f}: "
            f"{best} {ends[best]:.2f}, {worst} {ends[worst]:.2f}"
        )
        findings.append((words, ends[best] - ends[worst] > least))
    if "FBO-AggITD,N=1" in runs and "FedNest-random" in runs:
        a, b = runs["FBO-AggITD,N=1"], runs["FedNest-random"]
        rounds = min(int(run.metrics["step"].iloc[-1]) for run in (a, b))
        pair = at_round(a, rounds, metric), at_round(b, rounds, metric)
        findings += compared(f"after {rounds} rounds AggITD ({{0}}) is above FedNest ({{1}})", {where: pair})
    if "LFedNest" in runs and "FedNest-random" in runs:
        pair = at_end(runs["FedNest-random"], metric), at_end(runs["LFedNest"], metric)
        words = "FedNest ({0}) is above LFedNest ({1}) at the same iterations"
        findings += compared(words, {where: pair})
    return findings
