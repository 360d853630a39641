"""Running time of FedNest, AggITD and a gossip method with full Hessians (000, Fig. 7), and how the cost of
the last grows with the size of the problem.

The paper's problem, a perceptron 784-200-10 on MNIST, has 157,000 outer and 2,010 inner numbers: a message of
the gossip method (Yang et al. 2022; `GossipBilevel`) would be 336 million numbers, 1.3 GB. So hidden layers
have 2 to 16 units here, and ten clients (300 + 300 iid samples each) take part in every round of every
method, so that times compare. FedNest and AggITD have the settled settings of `aggitd_table2` with τ = 1; the
gossip method's are ours, for the paper prints none: a ring with Metropolis weights, all of a client's
samples, α = 0.01 (the outer rate of the others), γ = 0.1, β = 0.5, and a series of five Hessians with L = 10.

At `width` all methods make `iterations` outer steps, a round of gossip being one; at the other sizes `few`,
to see what one costs. Times are wall time on the machine at hand, so run nothing beside it; an evaluation is
placed at its share of its run's time. Gradients and products are counted, and bytes are the trace's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncfed import Result, Scenario, Study, Summary, SummaryTable
from asyncfed.network import Metropolis
from asyncfed.problems import Problem, hyper_representation
from asyncfed.protocols import GossipBilevel, LocalSteps, Neumann, Server
from scenarios._server_methods import (
    Finding,
    FloatArray,
    course,
    ending,
    method,
    parts_of,
    percent,
    remembered,
    text,
)
from topologies import ring, star

AGGITD, FEDNEST, GOSSIP = "FBO-AggITD", "FedNest", "gossip"
METHODS = (AGGITD, FEDNEST, GOSSIP)
_CLASSES = 10
_COMPARABLE = 1.5  # times as long
_SIMILAR = 1.1  # times as many gradients
_FASTER = 1.7  # times the others' exponent: a square has 2

Runs = Mapping[str, Mapping[int, Result]]  # by method and width


def study(
    widths: Sequence[int] = (2, 4, 8, 16),
    width: int = 8,
    iterations: int = 300,
    few: int = 30,
    clients: int = 10,
    dataset: str = "mnist",
    samples: int | None = 6000,
    inner_lr: float = 0.003,
    outer_lr: float = 0.01,
    epochs: int = 5,
    batch: int | None = 10,
    gossip_lr: float = 0.01,
    gossip_inner_lr: float = 0.1,
    mixing: float = 0.5,
    terms: int = 5,
    bound: float = 10.0,
    seed: int = 0,
) -> Study:
    """`samples` are those of all clients, None for all there are."""

    @remembered
    def problem(size: int) -> Problem:
        return hyper_representation(dataset, clients, f"mlp:{size}", "iid", seed, limit=samples)

    def scenario(size: str, kind: str) -> Scenario:
        units = int(size.removeprefix("width="))
        steps = iterations if units == width else few
        common: dict[str, Any] = {
            "problem": problem(units),
            "evaluate_every": max(1, steps // 60),
            "seed": seed,
        }
        if kind == GOSSIP:
            gossip = GossipBilevel(steps, gossip_lr, gossip_inner_lr, mixing, terms, bound)
            return Scenario(topology=ring(clients), weights=Metropolis(), protocol=gossip, **common)
        protocol = method(
            kind,
            neumann=Neumann(5, 0.01, "fixed"),
            outer_steps=steps,
            inner=LocalSteps(inner_lr, epochs=epochs, batch=batch),
            outer=LocalSteps(outer_lr),
            server=Server(),
        )
        return Scenario(topology=star(clients), protocol=protocol, **common)

    names = [f"width={size}/{kind}" for size in widths for kind in METHODS]

    def summary(results: Mapping[str, Result]) -> Summary:
        return summarise(results, width)

    return Study("aggitd_gossip", parts_of(scenario, names), summary)


def steps_of(result: Result) -> int:
    """Outer steps that were made."""
    last = result.metrics.iloc[-1]
    return int(last["outer_step"] if "outer_step" in result.metrics else last["step"])


def seconds(result: Result) -> FloatArray:
    """Wall time at each evaluation, if all steps took equally long."""
    share = course(result, "step") / max(1.0, float(course(result, "step")[-1]))
    return float(result.manifest["wall_seconds"]) * share


def each_step(result: Result, column: str) -> float:
    """What an outer step takes of that: of "seconds", or of a column that adds up."""
    total = float(result.manifest["wall_seconds"]) if column == "seconds" else course(result, column)[-1]
    return float(total) / steps_of(result)


def seconds_to(result: Result, goal: float) -> float | None:
    """Until the first evaluation that reaches an accuracy."""
    reached = np.flatnonzero(course(result) >= goal)
    return float(seconds(result)[reached[0]]) if len(reached) else None


def exponent(runs: Mapping[int, Result], column: str) -> float | None:
    """p where a step's cost grows as the p-th power of the inner variable's size; of two sizes or more."""
    if len(runs) < 2:
        return None
    sizes = np.log([inner_size(width) for width in runs])
    return float(np.polyfit(sizes, np.log([each_step(run, column) for run in runs.values()]), 1)[0])


def inner_size(width: int) -> int:
    """Numbers in a head of so many inputs."""
    return _CLASSES * (width + 1)


def summarise(results: Mapping[str, Result], width: int = 8) -> Summary:
    import pandas as pd

    by_method: dict[str, dict[int, Result]] = {}
    for name, result in results.items():
        size, kind = name.split("/")
        by_method.setdefault(kind, {})[int(size.removeprefix("width="))] = result
    widths = sorted({size for runs in by_method.values() for size in runs})
    lines = [
        _line(size, kind, by_method[kind][size])
        for size in widths
        for kind in METHODS
        if size in by_method.get(kind, {})
    ]
    table = SummaryTable(
        "What an outer step costs",
        pd.DataFrame(lines),
        (
            "inner: numbers in the inner variable; seconds, MB, gradients and Hessian-vector products of all "
            "clients together, for one outer step (a round of gossip)",
            "KB/message: the mean of all messages; seconds are wall time, start-up and evaluations included",
        ),
    )

    def draw(path: Path) -> object:
        return _draw(path, by_method, width)

    return Summary([table], _findings(by_method, width), {"time": draw})


def _line(size: int, kind: str, run: Result) -> dict[str, Any]:
    return {
        "width": size,
        "inner": inner_size(size),
        "method": kind,
        "seconds": f"{each_step(run, 'seconds'):.3f}",
        "MB": f"{each_step(run, 'bytes') / 1e6:.3g}",
        "KB/message": f"{course(run, 'bytes')[-1] / course(run, 'messages')[-1] / 1e3:.3g}",
        "gradients": f"{each_step(run, 'gradients'):.0f}",
        "products": f"{each_step(run, 'hessian_products'):.0f}",
        "steps": steps_of(run),
        "accuracy": percent(ending(run)),
        "paper": {GOSSIP: "much slower"}.get(kind, "comparable to one another"),
    }


def _findings(runs: Runs, width: int) -> list[Finding]:
    findings: list[Finding] = []
    here = {kind: sizes[width] for kind, sizes in runs.items() if width in sizes}
    if {AGGITD, FEDNEST} <= set(here):
        times, counts = (
            [each_step(here[kind], column) for kind in (AGGITD, FEDNEST)]
            for column in ("seconds", "gradients")
        )
        products = [each_step(here[kind], "hessian_products") for kind in (AGGITD, FEDNEST)]
        findings += [
            (
                f"AggITD takes about as long as FedNest for an outer step, within {_COMPARABLE} times: "
                f"{times[0]:.3f} and {times[1]:.3f} s",
                bool(max(times) <= _COMPARABLE * min(times)),
            ),
            (
                f"they compute about as many gradients, within {_SIMILAR} times: {counts[0]:.0f} and "
                f"{counts[1]:.0f} in a step (and {products[0]:.0f} and {products[1]:.0f} products)",
                bool(max(counts) <= _SIMILAR * min(counts)),
            ),
        ]
    if set(METHODS) <= set(here):
        goal = min(float(course(run).max()) for run in here.values())
        needed = {kind: seconds_to(run, goal) for kind, run in here.items()}
        told = ", ".join(f"{kind} {text(time, '.1f')} s" for kind, time in needed.items())
        gossip, aggitd = needed[GOSSIP], needed[AGGITD]
        words = f"AggITD gets sooner than gossip to {percent(goal)}%, which all reach: {told}"
        findings.append((words, None if gossip is None or aggitd is None else bool(aggitd < gossip)))
    if GOSSIP in runs:
        for column in ("bytes", "seconds"):
            powers = {kind: exponent(sizes, column) for kind, sizes in runs.items()}
            others = [power for kind, power in powers.items() if kind != GOSSIP and power is not None]
            own = powers[GOSSIP]
            if own is not None and others:
                told = ", ".join(f"{kind} {text(power, '.2f')}" for kind, power in powers.items())
                words = f"gossip's {column} grow as a power of the inner variable's size that is at least "
                words += f"{_FASTER} times the others' (exponents: {told})"
                findings.append((words, bool(own >= _FASTER * max(*others, 0.1))))
    return findings


def _draw(path: Path, runs: Runs, width: int) -> object:
    from asyncfed.report import add_curves
    from asyncfed.report.style import new_figure, save

    figure = new_figure("FedNest, AggITD and gossip with full Hessians", 14.0, 4.2)
    first, second, third = figure.subplots(1, 3)
    here = {kind: sizes[width] for kind, sizes in runs.items() if width in sizes}
    courses: dict[str, Any] = {kind: (seconds(run), 100 * course(run)) for kind, run in here.items()}
    title = f"{width} hidden units"
    add_curves(first, courses, xlabel="seconds", ylabel="test accuracy, %", title=title, legend=False)
    for axes, column, label, divisor in (
        (second, "seconds", "seconds an outer step", 1.0),
        (third, "bytes", "MB an outer step", 1e6),
    ):
        growth: dict[str, Any] = {
            kind: (
                [inner_size(size) for size in sizes],
                [each_step(run, column) / divisor for run in sizes.values()],
            )
            for kind, sizes in runs.items()
        }
        xlabel = "numbers in the inner variable"
        add_curves(axes, growth, xlabel=xlabel, ylabel=label, logx=True, logy=True, legend=axes is third)
    return save(figure, path)
