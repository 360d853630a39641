"""Participation ratios on MNIST (000, Fig. 1 right and Fig. 3): AggITD, FedNest and LFedNest, non-iid.

The hyper-representation of `aggitd_table2` with clients of two shards, τ = 1 and the same settings, but for
LFedNest's inner and outer rates, 0.001 and 0.005. All have SVRG as the lower-level solver, as the paper says
of these figures. The paper draws several participation ratios C and prints none of them; here they are 0.1,
0.2 and 0.5. Noise is the deviation of the changes of accuracy from one outer iteration to the next, over the
last twenty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncfed import Result, Scenario, Study, Summary, SummaryTable
from asyncfed.problems import Problem, hyper_representation
from asyncfed.protocols import LocalSteps, Neumann, Server
from scenarios._server_methods import (
    PARTITIONS,
    Finding,
    at_end,
    at_iteration,
    compared,
    draw_costs,
    iterations,
    method,
    noise,
    noisier,
    parts_of,
    percent,
    remembered,
    rounds_to,
    text,
)
from topologies import star

METHODS = ("FBO-AggITD", "FedNest", "LFedNest-SVRG")


def study(
    ratios: Sequence[float] = (0.1, 0.2, 0.5),
    rounds: int = 500,
    clients: int = 100,
    dataset: str = "mnist",
    model: str = "mlp:200",
    goal: float = 0.9,
    inner_lr: float = 0.003,
    outer_lr: float = 0.01,
    local_inner_lr: float = 0.001,
    local_outer_lr: float = 0.005,
    epochs: int = 5,
    batch: int | None = 10,
    seed: int = 0,
) -> Study:
    """The local rates are LFedNest's."""

    @remembered
    def problem() -> Problem:
        return hyper_representation(dataset, clients, model, PARTITIONS["non-iid"], seed)

    def scenario(ratio: str, name: str) -> Scenario:
        rates = (local_inner_lr, local_outer_lr) if name == "LFedNest-SVRG" else (inner_lr, outer_lr)
        protocol = method(
            name,
            neumann=Neumann(5, 0.01, "fixed"),
            outer_steps=rounds,
            inner=LocalSteps(rates[0], epochs=epochs, batch=batch),
            outer=LocalSteps(rates[1]),
            server=Server(participation=float(ratio.removeprefix("C="))),
            max_rounds=rounds,
        )
        return Scenario(
            problem=problem(), topology=star(clients), protocol=protocol, evaluate_every=1, seed=seed
        )

    names = [f"C={ratio:g}/{name}" for ratio in ratios for name in METHODS]

    def summary(results: Mapping[str, Result]) -> Summary:
        return summarise(results, goal)

    return Study("aggitd_participation", parts_of(scenario, names), summary)


def summarise(results: Mapping[str, Result], goal: float = 0.9) -> Summary:
    import pandas as pd

    groups: dict[str, dict[str, Result]] = {}
    for name, result in results.items():
        ratio, kind = name.split("/")
        groups.setdefault(ratio, {})[kind] = result
    common = min(iterations(run) for run in results.values())
    lines: list[dict[str, Any]] = [
        {
            "participation": ratio,
            "method": kind,
            f"rounds to {100 * goal:g}%": text(rounds_to(run, goal)),
            "accuracy": percent(at_end(run).mean),
            f"after {common} iterations": percent(at_iteration(run, common).mean),
            "noise": percent(noise(run)),
            "rounds": int(run.metrics["step"].iloc[-1]),
            "iterations": iterations(run),
            "MB sent": round(float(run.metrics["bytes"].iloc[-1]) / 1e6),
            "paper": {"LFedNest-SVRG": "lowest, noisiest", "FBO-AggITD": "fastest, highest"}.get(kind, "–"),
        }
        for ratio, runs in groups.items()
        for kind, run in runs.items()
    ]
    table = SummaryTable(
        "Participation, non-iid",
        pd.DataFrame(lines),
        (
            "accuracy in %, mean of the last ten outer iterations (or up to that one); noise in points",
            "the paper does not print its ratios",
        ),
    )

    def draw(path: Path) -> object:
        return draw_costs(path, "Participation, non-iid", groups, low=40.0)

    findings = [finding for ratio, runs in groups.items() for finding in _findings(ratio, runs, common)]
    return Summary([table], findings, {"accuracy": draw})


def _findings(ratio: str, runs: Mapping[str, Result], common: int) -> list[Finding]:
    if set(runs) != set(METHODS):
        return []
    ends = {kind: at_end(run) for kind, run in runs.items()}
    steadier = max(("FBO-AggITD", "FedNest"), key=lambda kind: noise(runs[kind]))
    light = runs["LFedNest-SVRG"]
    return [
        *compared(
            "after the same rounds AggITD ({0}) is above FedNest ({1})",
            {ratio: (ends["FBO-AggITD"], ends["FedNest"])},
        ),
        *compared(
            "after the same rounds FedNest ({0}) is above LFedNest-SVRG ({1})",
            {ratio: (ends["FedNest"], ends["LFedNest-SVRG"])},
        ),
        *compared(
            "after the same iterations FedNest ({0}) is above LFedNest-SVRG ({1})",
            {ratio: (at_iteration(runs["FedNest"], common), at_iteration(light, common))},
        ),
        (
            f"{ratio}: LFedNest-SVRG ({percent(noise(light))}) is noisier than {steadier} "
            f"({percent(noise(runs[steadier]))})",
            noisier(light, runs[steadier]),
        ),
    ]
