"""Tuning a loss on long-tailed MNIST (004, Fig. 3): FedNest, LFedNest and FedNest-SGD, iid and not.

Class c keeps 6000 · 0.01^(c/9) samples, 100 clients, ten at a time, 80% of their samples for training and 20%
for validation, a perceptron 784-200-100-10, batches of 64, five local epochs, T = 1, N = 5. The outer
variable, 20 numbers, acts through the inner one alone. Two lines stand beside it, as in the paper: the same
code with one client who holds everything, tuning or not. Without tuning is FedNest without the indirect part
of the hypergradient, which is all of it here, so that the outer variable stays where it is.

The paper prints no learning rates. The authors' public code (ucr-optml/FedNest, reproduce/fig3.sh) steps the
outer variable by 0.02 along the sum of all terms of the series, each of them with 0.02 before the Hessian:
that is 1/ℓ = 0.02 and an outer rate of 1 here. Its other settings are not those of the paper's text, which
are the defaults here; to have them, --set inner_rounds=3 --set terms=3 --set batch=10 --set inner_lr=0.01
--set iterations=250 (and time). With the text's own, which make a twentieth of the local steps, the inner
rate is 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from asyncfed import Result, Scenario, Study, Summary, SummaryTable
from asyncfed.problems import Problem, loss_tuning
from asyncfed.protocols import FedNest, LocalSteps, Neumann, Server
from asyncfed.protocols.rounds import WithServer
from scenarios._server_methods import (
    PARTITIONS,
    Finding,
    Level,
    at_end,
    compared,
    draw_costs,
    iterations,
    method,
    noise,
    parts_of,
    percent,
    remembered,
    rounds_per_iteration,
)
from topologies import star

METHODS = ("FedNest", "LFedNest", "FedNest-SGD", "untuned")
CENTRAL = ("FedNest", "untuned")
_METRIC = "balanced_accuracy"
_NEAR = 0.02  # of accuracy


def study(
    iterations: int = 250,
    clients: int = 100,
    dataset: str = "mnist",
    model: str = "mlp:200,100",
    largest: int = 6000,
    ratio: float = 0.01,
    participation: float = 0.1,
    inner_lr: float = 0.1,
    outer_lr: float = 1.0,
    inner_rounds: int = 1,
    epochs: int = 5,
    batch: int | None = 64,
    terms: int = 5,
    scale: float = 0.02,
    products: Literal["random", "fixed", "sum"] = "sum",
    central_steps: int = 10,
    central_batch: int = 640,
    evaluate_every: int = 1,
    seed: int = 0,
) -> Study:
    """The central ones are the one client's inner steps of an iteration: as many as those of the clients who
    hold a hundredth each, on as many samples as ten of them.
    """

    @remembered
    def problem(partition: str) -> Problem:
        held = 1 if partition == "one-client" else clients
        dealt = PARTITIONS.get(partition, "iid")
        return loss_tuning(dataset, held, model, dealt, seed, largest=largest, ratio=ratio)

    def scenario(partition: str, name: str) -> Scenario:
        alone = partition == "one-client"
        common: dict[str, Any] = {
            "outer_steps": iterations,
            "inner": LocalSteps(inner_lr, steps=central_steps, batch=central_batch)
            if alone
            else LocalSteps(inner_lr, epochs=epochs, batch=batch),
            "outer": LocalSteps(outer_lr),
            "inner_rounds": inner_rounds,
            "server": Server(participation=1.0 if alone else participation),
        }
        if name == "untuned":
            protocol: WithServer = FedNest(setting="minimax", sampling="parts", **common)
        else:
            protocol = method(name, neumann=Neumann(terms, scale, products), **common)
        return Scenario(
            problem=problem(partition),
            topology=star(1 if alone else clients),
            protocol=protocol,
            evaluate_every=evaluate_every,
            seed=seed,
        )

    names = [f"{partition}/{name}" for partition in PARTITIONS for name in METHODS]
    names += [f"one-client/{name}" for name in CENTRAL]
    return Study("fednest_loss_tuning", parts_of(scenario, names), summarise)


def summarise(results: Mapping[str, Result]) -> Summary:
    import pandas as pd

    groups: dict[str, dict[str, Result]] = {}
    for name, result in results.items():
        partition, kind = name.split("/")
        groups.setdefault(partition, {})[kind] = result
    lines: list[dict[str, Any]] = [
        {
            "data": partition,
            "method": kind,
            "balanced accuracy": percent(_end(run).mean),
            "best": percent(float(run.metrics[_METRIC].max())),
            "noise": percent(noise(run, _METRIC)),
            "rounds/iteration": f"{rounds_per_iteration(run):.3g}",
            "iterations": iterations(run),
            "rounds": int(run.metrics["step"].iloc[-1]),
            "paper": _PAPER.get((partition, kind), "–"),
        }
        for partition, runs in groups.items()
        for kind, run in runs.items()
    ]
    table = SummaryTable(
        "Loss tuning on long-tailed data",
        pd.DataFrame(lines),
        (
            "mean over classes of the test accuracy of each in %, mean of the last ten evaluations; noise: "
            "the deviation of its changes between the last twenty",
            "one-client: the same code with one client who holds everything",
        ),
    )

    def draw(path: Path) -> object:
        return draw_costs(
            path,
            "Loss tuning on long-tailed data",
            groups,
            metric=_METRIC,
            ylabel="balanced test accuracy, %",
            low=30.0,
        )

    return Summary([table], _findings(groups), {"accuracy": draw})


_PAPER = {
    ("iid", "FedNest"): "near one-client tuning",
    ("non-iid", "FedNest"): "near one-client tuning",
    ("non-iid", "FedNest-SGD"): "lower, less stable",
    ("one-client", "FedNest"): "brown line",
    ("one-client", "untuned"): "black line",
}


def _end(run: Result) -> Level:
    return at_end(run, _METRIC)


def _findings(groups: Mapping[str, Mapping[str, Result]]) -> list[Finding]:
    ends = {f"{group}/{kind}": _end(run) for group, runs in groups.items() for kind, run in runs.items()}
    findings: list[Finding] = []
    for group in groups:
        tuned, untuned = ends.get(f"{group}/FedNest"), ends.get(f"{group}/untuned")
        if tuned is not None and untuned is not None:
            findings += compared("FedNest {0} is above no tuning {1}", {group: (tuned, untuned)})
    for group in PARTITIONS:
        tuned, central = ends.get(f"{group}/FedNest"), ends.get("one-client/FedNest")
        if tuned is not None and central is not None:
            near = tuned.mean >= central.mean - _NEAR
            words = f"within {100 * _NEAR:g} points of one client's {percent(central.mean)}"
            findings.append((f"{group}: FedNest {percent(tuned.mean)} is {words}", near))
        for other in ("FedNest-SGD", "LFedNest"):
            if tuned is not None and f"{group}/{other}" in ends:
                pair = {group: (tuned, ends[f"{group}/{other}"])}
                findings += compared(f"FedNest {{0}} is above {other} {{1}}", pair)
    return findings
