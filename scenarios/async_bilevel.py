"""Bilevel methods at uneven paces: accuracy against virtual seconds and bytes, with a server and without.

The hyper-representation of `aggitd_table2` (MNIST, perceptron 784-200-10, clients with 300 + 300 samples of
two shards, ten of them at a time), with 20 clients instead of 100. A local step of the median client takes
one second of virtual time, the clients' factors are log-normal, a message takes `latency`. A server waits for
everybody it has asked, so a round takes as long as its slowest client.

Rates are those of `aggitd_table2`, nothing is tuned. FedNest and AggITD: five inner epochs in minibatches of
10 at 0.003, τ = 5 outer steps at 0.01, λ = 0.01. SimFBO takes the same rates (y: the inner one, v: λ, x: the
outer one) for τ simultaneous steps on minibatches of 60, one epoch, and its server goes as far as the clients
do (γ = τ η). The same with a buffer keeps as many clients at work as the others ask, moves on half as many
answers, and counts a stale one (1 + s)^−½. AggITD without a server makes every mean by `mean_rounds` rounds
of push-sum on links that come and go one way (StoD of 001), with everybody taking part, and its local steps
take time as theirs do.

Time is counted in steps, not in samples: a minibatch of 60 takes as long as one of 10, which is in favour of
SimFBO: an iteration of AggITD costs about ten times its round in steps, and about five times in samples.

With a server all make `rounds` communication rounds, and with a buffer twice as many, which are as many
answers; without a server, as many iterations as AggITD makes with them. Two seeds, but one for AggITD without
a server, which takes the longest; methods are compared in the seeds that both have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncfed import Result, Scenario, Study, Summary, SummaryTable, VirtualTime
from asyncfed.problems import Problem, hyper_representation
from asyncfed.protocols import (
    AggITD,
    Buffered,
    FedNest,
    LocalSteps,
    Neumann,
    PeerAggITD,
    PolynomialDecay,
    Server,
    SimFBO,
)
from asyncfed.rng import Streams
from scenarios._server_methods import (
    PARTITIONS,
    Finding,
    Level,
    at_end,
    average,
    compared,
    course,
    draw_costs,
    iterations,
    parts_of,
    percent,
    remembered,
    text,
)
from topologies import star, stochastic_directed

FEDNEST, AGGITD, SIMFBO, BUFFERED = "FedNest", "FBO-AggITD", "SimFBO", "SimFBO-buffered"
PEERS = "AggITD-without-server"
METHODS = (FEDNEST, AGGITD, SIMFBO, BUFFERED, PEERS)
PAIRS = ((AGGITD, FEDNEST), (SIMFBO, AGGITD), (BUFFERED, SIMFBO), (PEERS, AGGITD))
AXES = {"virtual_time": ("s", 1.0), "bytes": ("GB", 1e9)}

Runs = Mapping[str, Mapping[str, Result]]  # of every method, by seed


def study(
    seeds: int = 2,
    peer_seeds: int = 1,
    rounds: int = 200,
    clients: int = 20,
    samples: int = 600,
    dataset: str = "mnist",
    model: str = "mlp:200",
    partition: str = "non-iid",
    goal: float = 0.8,
    participation: float = 0.5,
    inner_lr: float = 0.003,
    outer_lr: float = 0.01,
    scale: float = 0.01,
    epochs: int = 5,
    batch: int = 10,
    tau: int = 5,
    simfbo_batch: int = 60,
    mean_rounds: int = 4,
    spread: float = 1.0,
    latency: float = 1.0,
) -> Study:
    """`samples` are those of a client, half of them for training; `spread` is the σ of the paces."""
    inner_steps = epochs * -(-samples // 2 // batch)

    @remembered
    def problem(seed: int) -> Problem:
        limit = clients * samples
        return hyper_representation(dataset, clients, model, PARTITIONS[partition], seed, limit=limit)

    def protocol(method: str) -> Any:
        inner = LocalSteps(inner_lr, steps=inner_steps, batch=batch)
        outer = LocalSteps(outer_lr, steps=tau)
        if method == PEERS:
            return PeerAggITD(rounds // 5, inner, mean_rounds, outer, scale=scale, timed=True)
        server: dict[str, Any] = {"server": Server(participation=participation), "max_rounds": rounds}
        if method == BUFFERED:
            at_work = max(1, int(participation * clients + 0.5))
            half = Buffered(max(1, at_work // 2), at_work, decay=PolynomialDecay(0.5))
            server = {"server": half, "max_rounds": 2 * rounds}
        if method in (SIMFBO, BUFFERED):
            return SimFBO(
                server["max_rounds"],
                LocalSteps(inner_lr, steps=tau, batch=simfbo_batch),
                outer_lr,
                v_lr=scale,
                server_rates=(tau * inner_lr, tau * scale, tau * outer_lr),
                **server,
            )
        if method == AGGITD:
            return AggITD(rounds, inner, outer, scale=scale, **server)
        series = Neumann(5, scale, "fixed")
        return FedNest(rounds, inner, outer, neumann=series, sampling="parts", **server)

    def scenario(method: str, seed: str) -> Scenario:
        number = int(seed.removeprefix("seed-"))
        paces = np.exp(spread * Streams(number).generator("paces").standard_normal(clients))
        links = stochastic_directed(clients, seed=number) if method == PEERS else star(clients)
        return Scenario(
            problem=problem(number),
            topology=links,
            protocol=protocol(method),
            timing=VirtualTime(1.0, factors=tuple(paces.tolist()), latency=latency),
            evaluate_every=1,
            seed=number,
        )

    names = [
        f"{method}/seed-{seed}"
        for seed in range(seeds)
        for method in METHODS
        if method != PEERS or seed < peer_seeds
    ]

    def summary(results: Mapping[str, Result]) -> Summary:
        return summarise(results, goal)

    return Study("async_bilevel", parts_of(scenario, names), summary)


def summarise(results: Mapping[str, Result], goal: float = 0.8) -> Summary:
    import pandas as pd

    runs: dict[str, dict[str, Result]] = {}
    for name, result in results.items():
        method, seed = name.split("/")
        runs.setdefault(method, {})[seed] = result
    table = SummaryTable(
        f"What it costs to come to {100 * goal:g}%, and in all",
        pd.DataFrame([_line(method, runs[method], goal) for method in METHODS if method in runs]),
        (
            "accuracy in % of the test samples: of the server's model, or of each client's own; at the end "
            "(mean of ten evaluations) ± two standard errors",
            "seconds are virtual; means over seeds",
        ),
    )

    def draw(path: Path) -> object:
        first = {method: next(iter(runs[method].values())) for method in METHODS if method in runs}
        return draw_costs(
            path,
            "Hyper-representation at log-normal paces, first seed",
            {"": first},
            first=("virtual_time", "virtual seconds"),
            logx=True,
        )

    return Summary([table], _findings(runs), {"accuracy": draw})


def _line(method: str, by_seed: Mapping[str, Result], goal: float) -> dict[str, Any]:
    runs = list(by_seed.values())
    level = _together([at_end(run) for run in runs])
    made = float(np.mean([iterations(run) for run in runs]))
    line: dict[str, Any] = {
        "method": method,
        "iterations": f"{made:.0f}",
        "accuracy": f"{percent(level.mean)} ± {percent(2 * level.error)}",
    }
    for column, (unit, size) in AXES.items():
        needed = average([_cost_to(run, column, goal) for run in runs])
        spent = float(np.mean([run.metrics[column].iloc[-1] for run in runs]))
        line |= {
            f"{unit} to {100 * goal:g}%": text(None if needed is None else needed / size, ".3g"),
            f"{unit} in all": f"{spent / size:.3g}",
            f"{unit}/iteration": f"{spent / size / max(1.0, made):.3g}",
        }
    return line | {"seeds": len(runs)}


def _cost_to(result: Result, column: str, goal: float) -> float | None:
    """What was spent at the first evaluation that reaches the goal."""
    reached = np.flatnonzero(course(result) >= goal)
    return float(result.metrics[column].iloc[reached[0]]) if len(reached) else None


def _findings(runs: Runs) -> list[Finding]:
    """Each pair where both have spent the same: as much as the one that is done first, in seeds of both."""
    findings: list[Finding] = []
    for better, other in PAIRS:
        seeds = [seed for seed in runs.get(better, {}) if seed in runs.get(other, {})]
        if not seeds:
            continue
        for column, (unit, size) in AXES.items():
            ours, theirs = ([runs[one][seed] for seed in seeds] for one in (better, other))
            most = min(float(run.metrics[column].iloc[-1]) for run in (*ours, *theirs))
            a, b = (_together([_at(run, column, most) for run in some]) for some in (ours, theirs))
            where = f"after {most / size:.3g} {unit}"
            if np.isnan(a.mean + b.mean):
                findings.append((f"{where}: too few evaluations of {better} or {other} to compare", None))
            else:
                findings += compared(f"{better} is above {other}: {{0}} against {{1}}", {where: (a, b)})
    return findings


def _at(result: Result, column: str, most: float) -> Level:
    """Where a run stood in the last third of what was spent, the same stretch for all methods, however often
    they are judged; NaN where that is fewer than four times.
    """
    spent = result.metrics[column]
    values = course(result)[(spent > most * 2 / 3) & (spent <= most)]
    if len(values) < 4:
        return Level(float("nan"), float("nan"))
    return Level(float(values.mean()), float(np.diff(values).std() / np.sqrt(2 * len(values))))


def _together(levels: Sequence[Level]) -> Level:
    """The mean over seeds; its error from how each course jumps, or from how seeds differ if that is more."""
    means, errors = np.array([one.mean for one in levels]), np.array([one.error for one in levels])
    within = float(np.sqrt(np.square(errors).sum()) / len(levels))
    between = float(means.std(ddof=1) / np.sqrt(len(levels))) if len(levels) > 1 else 0.0
    return Level(float(means.mean()), max(within, between))
