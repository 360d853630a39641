"""SVRG or SGD as the lower-level solver (000, Fig. 4): AggITD and FedNest with both, LFedNest; iid and not.

The hyper-representation of `aggitd_table2`, τ = 1 and C = 0.1; on non-iid clients LFedNest's rates are 0.001
and 0.005, as in the paper. The SGD variants save the round in which gradients are averaged before the local
steps, so they are compared after the same rounds and after the same outer iterations. Noise is the deviation
of the changes of accuracy from one outer iteration to the next, over the last twenty.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncfed import Result, Scenario, Study, Summary, SummaryTable
from asyncfed.problems import Problem, hyper_representation
from asyncfed.protocols import LocalSteps, Neumann, Server
from scenarios._server_methods import (
    PARTITIONS,
    Finding,
    at_end,
    compared,
    differences,
    draw_costs,
    iterations,
    method,
    noise,
    noisier,
    parts_of,
    percent,
    remembered,
    rounds_per_iteration,
    rounds_to,
    text,
)
from topologies import star

_SAME = 0.1  # points of accuracy that say nothing
METHODS = ("FBO-AggITD", "FBO-AggITD-SGD", "FedNest", "FedNest-SGD", "LFedNest")


def study(
    rounds: int = 1000,
    clients: int = 100,
    dataset: str = "mnist",
    model: str = "mlp:200",
    goal: float = 0.9,
    participation: float = 0.1,
    inner_lr: float = 0.003,
    outer_lr: float = 0.01,
    local_inner_lr: float = 0.001,
    local_outer_lr: float = 0.005,
    epochs: int = 5,
    batch: int | None = 10,
    seed: int = 0,
) -> Study:
    """The local rates are LFedNest's on non-iid clients."""

    @remembered
    def problem(partition: str) -> Problem:
        return hyper_representation(dataset, clients, model, PARTITIONS[partition], seed)

    def scenario(partition: str, name: str) -> Scenario:
        gentle = name == "LFedNest" and partition == "non-iid"
        rates = (local_inner_lr, local_outer_lr) if gentle else (inner_lr, outer_lr)
        protocol = method(
            name,
            neumann=Neumann(5, 0.01, "fixed"),
            outer_steps=rounds,
            inner=LocalSteps(rates[0], epochs=epochs, batch=batch),
            outer=LocalSteps(rates[1]),
            server=Server(participation=participation),
            max_rounds=rounds,
        )
        return Scenario(
            problem=problem(partition), topology=star(clients), protocol=protocol, evaluate_every=1, seed=seed
        )

    names = [f"{partition}/{name}" for partition in PARTITIONS for name in METHODS]

    def summary(results: Mapping[str, Result]) -> Summary:
        return summarise(results, goal)

    return Study("aggitd_sgd", parts_of(scenario, names), summary)


def summarise(results: Mapping[str, Result], goal: float = 0.9) -> Summary:
    import pandas as pd

    groups: dict[str, dict[str, Result]] = {}
    for name, result in results.items():
        partition, kind = name.split("/")
        groups.setdefault(partition, {})[kind] = result
    lines: list[dict[str, Any]] = [
        {
            "data": partition,
            "method": kind,
            f"rounds to {100 * goal:g}%": text(rounds_to(run, goal)),
            "accuracy": percent(at_end(run).mean),
            "noise": percent(noise(run)),
            "rounds/iteration": f"{rounds_per_iteration(run):.3g}",
            "iterations": iterations(run),
        }
        for partition, runs in groups.items()
        for kind, run in runs.items()
    ]
    table = SummaryTable(
        "SVRG and SGD as lower-level solver",
        pd.DataFrame(lines),
        (
            "accuracy in %, mean of the last ten outer iterations; noise in points",
            "paper: SGD is worse and fluctuates more; with it, too, AggITD is fastest",
        ),
    )

    def draw(path: Path) -> object:
        return draw_costs(path, "SVRG and SGD as lower-level solver", groups, low=40.0)

    findings = [finding for partition, runs in groups.items() for finding in _findings(partition, runs)]
    return Summary([table], findings, {"accuracy": draw})


def _findings(partition: str, runs: Mapping[str, Result]) -> list[Finding]:
    findings: list[Finding] = []
    for kind in ("FBO-AggITD", "FedNest"):
        if kind not in runs or f"{kind}-SGD" not in runs:
            continue
        svrg, sgd = runs[kind], runs[f"{kind}-SGD"]
        ends = at_end(svrg), at_end(sgd)
        ahead = 100 * differences(svrg, sgd).mean()
        words = f"{kind} ends higher with SVRG ({{0}}) than with SGD ({{1}}) after the same rounds"
        findings += [
            *compared(words, {partition: ends}),
            (
                f"{partition}: {kind} is ahead with SVRG at the same outer iteration, by {ahead:+.2f} points",
                bool(ahead > 0) if abs(ahead) > _SAME else None,
            ),
            (
                f"{partition}: {kind} is noisier with SGD ({percent(noise(sgd))}) than with SVRG "
                f"({percent(noise(svrg))})",
                noisier(sgd, svrg),
            ),
        ]
    for rival in ("FedNest-SGD", "LFedNest"):
        if {"FBO-AggITD-SGD", rival} <= set(runs):
            pair = at_end(runs["FBO-AggITD-SGD"]), at_end(runs[rival])
            words = f"with SGD, AggITD ({{0}}) is above {rival} ({{1}}) after the same rounds"
            findings += compared(words, {partition: pair})
    return findings
