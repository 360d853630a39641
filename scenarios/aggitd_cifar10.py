"""CIFAR-10 with a perceptron and with a convolutional network (000, Fig. 5): does FedNest converge?

Clients are iid, inner rate 0.002, outer rate 0.01, τ = 1, "while the other options keep the same": 100
clients (250 + 250 samples here), ten at a time, SVRG, and the settled settings of `aggitd_table2`. Backbones
are the perceptron 3072-200-10, whose head is the inner variable, and LeNet, of which the last two layers are.
The paper shows AggITD alone: "FedNest could not converge in this task after an extensive grid search", of
which it prints nothing; AggITD converges, to a test accuracy that is "not satisfactory". So FedNest is run at
AggITD's rates.

Before any run it was settled that FedNest does not converge where it diverges or stays at chance, below 20%.
As important is whether AggITD differs from it at the same outer iteration: of these it makes two where
FedNest makes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncfed import Result, Scenario, Study, Summary, SummaryTable
from asyncfed.problems import Problem, hyper_representation
from asyncfed.protocols import LocalSteps, Neumann, Server
from scenarios._server_methods import (
    PARTITIONS,
    Finding,
    course,
    differences,
    draw_costs,
    ending,
    fate,
    iterations,
    iterations_in,
    method,
    parts_of,
    percent,
    remembered,
    rise,
    text,
)
from topologies import star

AGGITD, FEDNEST = "FBO-AggITD", "FedNest"
BACKBONES = {"mlp": ("mlp:200", 1), "cnn": ("lenet", 2)}  # the network, and its inner layers
_EQUAL = 0.01  # accuracy


def study(
    rounds: int = 2000,
    clients: int = 100,
    dataset: str = "cifar10",
    mlp: str = BACKBONES["mlp"][0],
    cnn: str = BACKBONES["cnn"][0],
    participation: float = 0.1,
    inner_lr: float = 0.002,
    outer_lr: float = 0.01,
    tau: int = 1,
    epochs: int = 5,
    batch: int | None = 10,
    every: int = 20,
    seed: int = 0,
) -> Study:
    """`mlp` and `cnn` are the two networks, judged about every so many rounds."""
    networks = {"mlp": mlp, "cnn": cnn}

    @remembered
    def problem(backbone: str) -> Problem:
        inner_layers = BACKBONES[backbone][1]
        return hyper_representation(
            dataset, clients, networks[backbone], PARTITIONS["iid"], seed, inner_layers=inner_layers
        )

    def scenario(backbone: str, kind: str) -> Scenario:
        protocol = method(
            kind,
            neumann=Neumann(5, 0.01, "fixed"),
            outer_steps=rounds,
            inner=LocalSteps(inner_lr, epochs=epochs, batch=batch),
            outer=LocalSteps(outer_lr, steps=tau),
            server=Server(participation=participation),
            max_rounds=rounds,
        )
        return Scenario(
            problem=problem(backbone),
            topology=star(clients),
            protocol=protocol,
            evaluate_every=iterations_in(kind, every),
            seed=seed,
        )

    names = [f"{backbone}/{kind}" for backbone in BACKBONES for kind in (AGGITD, FEDNEST)]
    return Study("aggitd_cifar10", parts_of(scenario, names), summarise, with_diverged=True)


def summarise(results: Mapping[str, Result]) -> Summary:
    import pandas as pd

    groups: dict[str, dict[str, Result]] = {}
    for name, result in results.items():
        backbone, kind = name.split("/")
        groups.setdefault(backbone, {})[kind] = result
    lines: list[dict[str, Any]] = [
        {
            "backbone": backbone,
            "method": kind,
            "accuracy": percent(ending(run)),
            "best": percent(float(course(run).max())),
            "loss": text(ending(run, "loss"), ".3f"),
            "rise": percent(rise(run)),
            "at its end": fate(run),
            "iterations": iterations(run),
            "rounds": int(run.metrics["step"].iloc[-1]),
            "paper": {FEDNEST: "could not converge"}.get(kind, "converges, not satisfactory"),
        }
        for backbone, runs in groups.items()
        for kind, run in runs.items()
    ]
    table = SummaryTable(
        "CIFAR-10, iid",
        pd.DataFrame(lines),
        (
            "test accuracy in %, at the last evaluation, one seed; rise: points from the third to the last "
            "quarter of the rounds",
            "at its end: diverged, at chance (below 20%), rising (by more than a point) or level",
        ),
    )

    def draw(path: Path) -> object:
        return draw_costs(path, "CIFAR-10, iid", groups)

    findings = [finding for backbone, runs in groups.items() for finding in _findings(backbone, runs)]
    return Summary([table], findings, {"accuracy": draw})


def _findings(backbone: str, runs: Mapping[str, Result]) -> list[Finding]:
    findings: list[Finding] = []
    for kind, learns in ((AGGITD, True), (FEDNEST, False)):
        if kind in runs:
            end = fate(runs[kind])
            lost = end in ("diverged", "at chance")
            words = "converges: it gets off chance" if learns else "does not converge: it stays at chance"
            findings.append(
                (f"{backbone}: {kind} {words} ({percent(ending(runs[kind]))}, {end})", lost != learns)
            )
    if {AGGITD, FEDNEST} <= set(runs):
        apart = differences(runs[AGGITD], runs[FEDNEST])
        if len(apart):
            mean, size = apart.mean(), np.abs(apart).mean()
            words = "at the same outer iteration AggITD differs from FedNest by less than a point (mean "
            words += f"{100 * mean:+.2f}, mean |difference| {100 * size:.2f}, {len(apart)} evaluations)"
            findings.append((f"{backbone}: {words}", bool(size <= _EQUAL)))
    return findings
