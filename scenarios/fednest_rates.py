"""Learning rates on non-iid clients, against communication rounds (004, Fig. 6): FedNest and its variants.

The hyper-representation of `fednest_hyperrep` (MNIST, 100 clients of two shards, ten at a time, T = 1, N = 5,
five local epochs with batches of 64, τ = 1) at four learning rates from (a), the largest, to (d). The paper
says that SVRG and FedOut (the global Hessian) stabilise the training; that "the algorithms with more
communications are easier to achieve convergence", and LFedNest "successfully converges in (d) with a very
small learning rate"; and that in (a) FedNest has the better test accuracy after the same rounds.

Neither the paper's text nor the authors' public code gives the four rates (the code has 0.01 for both levels
in Fig. 2). Here both levels have 0.1, 0.03, 0.01 and 0.003, settled before any run. So was what to converge
is: not to diverge, to end at 80% at least, and no more than two points below one's best, in the mean of the
last ten iterations. Noise is the deviation of the changes of accuracy from one outer iteration to the next,
over the last twenty.
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
    compared,
    course,
    draw_costs,
    iterations,
    method,
    noise,
    noisier,
    parts_of,
    percent,
    remembered,
)
from topologies import star

METHODS = ("FedNest", "FedNest-SGD", "LFedNest-SVRG", "LFedNest")  # with ever fewer rounds an iteration
_ENOUGH, _FALLEN = 0.8, 0.02


def study(
    rates: Sequence[float] = (0.1, 0.03, 0.01, 0.003),
    rounds: int = 1000,
    clients: int = 100,
    dataset: str = "mnist",
    model: str = "mlp:200",
    participation: float = 0.1,
    epochs: int = 5,
    batch: int | None = 64,
    seed: int = 0,
) -> Study:
    @remembered
    def problem() -> Problem:
        return hyper_representation(dataset, clients, model, PARTITIONS["non-iid"], seed)

    def scenario(rate: str, kind: str) -> Scenario:
        lr = float(rate.removeprefix("lr="))
        protocol = method(
            kind,
            neumann=Neumann(5, 0.01, "fixed"),
            outer_steps=rounds,
            inner=LocalSteps(lr, epochs=epochs, batch=batch),
            outer=LocalSteps(lr),
            server=Server(participation=participation),
            max_rounds=rounds,
        )
        return Scenario(
            problem=problem(), topology=star(clients), protocol=protocol, evaluate_every=1, seed=seed
        )

    names = [f"lr={rate:g}/{kind}" for rate in sorted(rates, reverse=True) for kind in METHODS]
    return Study("fednest_rates", parts_of(scenario, names), summarise, with_diverged=True)


def converges(result: Result) -> bool:
    level = at_end(result).mean
    return bool(result.complete and level >= _ENOUGH and level >= course(result).max() - _FALLEN)


def summarise(results: Mapping[str, Result]) -> Summary:
    import pandas as pd

    groups: dict[str, dict[str, Result]] = {}
    for name, result in results.items():
        rate, kind = name.split("/")
        groups.setdefault(rate, {})[kind] = result
    lines: list[dict[str, Any]] = [
        {
            "rate": rate.removeprefix("lr="),
            "method": kind,
            "accuracy": percent(at_end(run).mean) if run.complete else "diverged",
            "best": percent(float(course(run).max())),
            "noise": percent(noise(run)),
            "converges": "yes" if converges(run) else "no",
            "iterations": iterations(run),
            "rounds": int(run.metrics["step"].iloc[-1]),
        }
        for rate, runs in groups.items()
        for kind, run in runs.items()
    ]
    table = SummaryTable(
        "Learning rates, non-iid",
        pd.DataFrame(lines),
        (
            "test accuracy in %, mean of the last ten outer iterations; noise in points; one seed",
            "converges: ends at 80% at least, and no more than two points below its best",
            "the paper prints neither rates nor accuracies",
        ),
    )

    def draw(path: Path) -> object:
        shown = {f"rate {rate.removeprefix('lr=')}, both levels": runs for rate, runs in groups.items()}
        return draw_costs(path, "Learning rates, non-iid", shown)

    return Summary([table], _findings(groups), {"accuracy": draw})


def _findings(groups: Mapping[str, Mapping[str, Result]]) -> list[Finding]:
    findings = [finding for rate, runs in groups.items() for finding in _stabilised(rate, runs)]
    order = sorted(groups, key=lambda rate: -float(rate.removeprefix("lr=")))
    complete = [rate for rate in order if set(groups[rate]) == set(METHODS)]
    if len(complete) < 2:
        return findings
    largest, smallest = groups[complete[0]], groups[complete[-1]]
    for rival in METHODS[1:]:
        if all(largest[kind].complete for kind in ("FedNest", rival)):
            pair = at_end(largest["FedNest"]), at_end(largest[rival])
            words = f"after the same rounds FedNest ({{0}}) is above {rival} ({{1}})"
            findings += compared(words, {f"{complete[0]}, the largest rate": pair})
        else:
            words = f"{complete[0]}, the largest rate: FedNest is above {rival}, one of which diverged"
            findings.append((words, largest["FedNest"].complete))
    who = {rate: [converges(groups[rate][kind]) for kind in METHODS] for rate in complete}
    told = ", ".join(f"{rate.removeprefix('lr=')}: {sum(flags)}" for rate, flags in who.items())
    numbers = list(map(sum, who.values()))
    findings += [
        (
            f"the smaller the rate, the more of the four methods converge ({told})",
            numbers == sorted(numbers) and numbers[0] < numbers[-1],
        ),
        (
            "at every rate, who converges has more communications an iteration than who does not",
            all(flags == sorted(flags, reverse=True) for flags in who.values()),
        ),
        (f"LFedNest converges at the smallest rate ({complete[-1]})", converges(smallest["LFedNest"])),
        (
            "LFedNest does not converge at any larger rate",
            not any(converges(groups[rate]["LFedNest"]) for rate in complete[:-1]),
        ),
    ]
    return findings


def _stabilised(rate: str, runs: Mapping[str, Result]) -> list[Finding]:
    """That SVRG, and FedOut, make it steadier."""
    findings: list[Finding] = []
    for what, steady, other in (
        ("SVRG", "FedNest", "FedNest-SGD"),
        ("SVRG", "LFedNest-SVRG", "LFedNest"),
        ("FedOut", "FedNest", "LFedNest-SVRG"),
        ("FedOut", "FedNest-SGD", "LFedNest"),
    ):
        if steady in runs and other in runs:
            a, b = runs[steady], runs[other]
            both = a.complete and b.complete
            holds = noisier(b, a) if both else (None if a.complete == b.complete else a.complete)
            told = f"{percent(noise(a))} and {percent(noise(b))}" if both else _survivors(a, b)
            findings.append((f"{rate}: {what} makes {steady} steadier than {other} (noise {told})", holds))
    return findings


def _survivors(a: Result, b: Result) -> str:
    if a.complete == b.complete:
        return "– both diverged"
    return "– the second diverged" if a.complete else "– the first diverged"
