"""FedNest on a saddle point with different clients (004, Fig. 4): linear convergence, and who stops short.

    f_i(x, y) = −[½‖y‖² − b_iᵀy + t_i yᵀx] + (λ/2)‖x‖²,   λ = 10, t_i ~ U(0, 0.1), b_i normal and centred

100 clients, all of them in every round, full gradients, five local steps at rates 0.1 (y) and 0.01 (x): the
paper prints neither. Both variables then shrink by 0.9 a local step, whatever the method, and all methods get
the same number of communication rounds, of which FedNest needs 4 for an iteration, LFedNest 2, FedAvg-S 1.

In the paper's problem every client has the same curvature, 1 in y and λ in x. Local steps on one variable
then commute with averaging, and LFedNest, which steps on one at a time, has nothing to stall at; FedAvg-S,
whose local x and y act on one another through t_i, has. Clients with curvatures of their own (½ to 1½ instead
of 1 in y) show what the paper says of LFedNest. With 10 of the 100 clients a round (as in the paper's other
experiments) the b_i of those asked do not cancel, and no method gets beyond that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncfed import Result, Scenario, Study, Summary, SummaryTable
from asyncfed.problems import minimax_saddle
from asyncfed.protocols import FedAvgS, FedNest, LFedNest, LocalSteps, Server
from asyncfed.protocols.rounds import WithServer
from scenarios._server_methods import (
    Finding,
    course,
    draw_costs,
    ending,
    parts_of,
    rounds_per_iteration,
    text,
)
from topologies import star

METHODS = ("FedNest", "LFedNest", "FedAvg-S")
VARIANTS = {
    "same-curvature": "the paper's problem",
    "own-curvature": "every client has its own curvature in y",
    "some-clients": "the paper's problem, 10 of 100 clients a round",
}
_PRECISION = 1e-12  # of the distance at the start: as close as it gets, with 16 digits
_STALLED = 0.5  # a distance that shrinks by less than this over the last half of the rounds


def study(
    rounds: int = 400,
    clients: int = 100,
    dimension: int = 10,
    spread: float = 1.0,
    local_steps: int = 5,
    inner_lr: float = 0.1,
    outer_lr: float = 0.01,
    curvature: tuple[float, float] = (0.5, 1.5),
    participation: float = 0.1,
    seed: int = 0,
) -> Study:
    """`curvature` and `participation` are for the variants that are named after them."""

    def scenario(variant: str, method: str) -> Scenario:
        inner, outer = (LocalSteps(lr, steps=local_steps) for lr in (inner_lr, outer_lr))
        server = Server(participation=participation if variant == "some-clients" else 1.0)
        common: dict[str, Any] = {
            "outer_steps": rounds,
            "inner": inner,
            "outer": outer,
            "server": server,
            "max_rounds": rounds,
        }
        kinds: dict[str, Callable[..., WithServer]] = {
            "FedNest": functools.partial(FedNest, setting="minimax"),
            "LFedNest": functools.partial(LFedNest, setting="minimax"),
            "FedAvg-S": FedAvgS,
        }
        between = curvature if variant == "own-curvature" else (1.0, 1.0)
        return Scenario(
            problem=minimax_saddle(clients, dimension, spread, seed=seed, curvature=between),
            topology=star(clients),
            protocol=kinds[method](**common),
            precision="float64",
            evaluate_every=1,
            seed=seed,
        )

    names = [f"{variant}/{method}" for variant in VARIANTS for method in METHODS]
    return Study("fednest_minimax", parts_of(scenario, names), summarise)


def floor_of(result: Result) -> float | None:
    """Where the distance stops shrinking, if it does before precision ends: its median at the end."""
    distance = course(result, "distance")
    middle, last = (np.median(distance[len(distance) * k // 4 :][: len(distance) // 4 + 1]) for k in (1, 3))
    if last <= _PRECISION * distance[0] or last < _STALLED * middle:
        return None
    return float(last)


def rate_of(result: Result) -> tuple[float, float]:
    """Factor per communication round by which the distance shrinks until floor or precision, and how straight
    that is: the r² of its logarithm over the rounds.
    """
    distance, rounds = course(result, "distance"), course(result, "step")
    end = max(2 * (floor_of(result) or 0.0), _PRECISION * distance[0])
    below = np.flatnonzero(distance <= end)
    stretch = slice(0, max(3, int(below[0]) + 1 if len(below) else len(distance)))
    x, y = rounds[stretch], np.log(np.maximum(distance[stretch], np.finfo(float).tiny))
    slope = float(np.polyfit(x, y, 1)[0])
    return float(np.exp(slope)), float(np.corrcoef(x, y)[0, 1] ** 2)


def summarise(results: Mapping[str, Result]) -> Summary:
    import pandas as pd

    lines: list[dict[str, Any]] = []
    groups: dict[str, dict[str, Result]] = {}
    for name, result in results.items():
        variant, method = name.split("/")
        groups.setdefault(variant, {})[method] = result
        rate, straight = rate_of(result)
        lines.append(
            {
                "problem": variant,
                "method": method,
                "rounds/iteration": f"{rounds_per_iteration(result):g}",
                "distance": f"{course(result, 'distance')[-1]:.1e}",
                "floor": text(floor_of(result), ".1e"),
                "factor/round": f"{rate:.3f}",
                "r²": f"{straight:.4f}",
                "paper": {"FedNest": "linear"}.get(method, "stops at a floor"),
            }
        )
    table = SummaryTable(
        "Distance from the saddle",
        pd.DataFrame(lines),
        (
            "floor: where the distance stops shrinking, – where it does not; the factor per communication "
            "round until then, and how straight its logarithm is",
            *(f"{variant}: {words}" for variant, words in VARIANTS.items() if variant in groups),
            "paper: what its Fig. 4 shows, for its own problem",
        ),
    )

    def draw(path: Path) -> object:
        return draw_costs(
            path,
            "Distance from the saddle",
            groups,
            metric="distance",
            ylabel="distance",
            scale=1.0,
            logy=True,
        )

    findings = [finding for variant, runs in groups.items() for finding in _findings(variant, runs)]
    return Summary([table], findings, {"distance": draw})


def _findings(variant: str, runs: Mapping[str, Result]) -> list[Finding]:
    findings: list[Finding] = []
    floors = {method: floor_of(run) for method, run in runs.items()}
    if "FedNest" in runs:
        rate, straight = rate_of(runs["FedNest"])
        words = f"{variant}: FedNest converges linearly (r² {straight:.4f}), to no floor"
        findings.append((words, floors["FedNest"] is None and rate < 1 and straight > 0.99))
    for method in ("LFedNest", "FedAvg-S"):
        if method in runs:
            words = f"{variant}: {method} stops at a floor ({text(floors[method], '.1e')})"
            findings.append((words, floors[method] is not None))
    if {"LFedNest", "FedAvg-S"} <= set(runs):
        ends = [floors[method] or ending(runs[method], "distance") for method in ("LFedNest", "FedAvg-S")]
        words = f"{variant}: LFedNest ({ends[0]:.2e}) ends closer than FedAvg-S ({ends[1]:.2e})"
        findings.append((words, ends[0] < ends[1]))
    return findings
