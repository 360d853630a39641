"""Servers that wait and servers that do not, at heavy-tailed paces: accuracy against virtual time and bytes.

FedAvg waits for everybody it has asked, so a round takes as long as its slowest client. How many times sooner
is a server at 90% that waits for half of them (a quorum), for any K answers (FedBuff), or for one (FedAsync)?

Fixed before the first run, and nothing tuned since. A look beforehand, at another seed and with a rate at
which nothing is learned, was for the size of model that fits into a few minutes.

- MNIST, perceptron 784-50-10, 100 clients with 500 samples for training and 100 for testing on average (all
  are tested together): dealt out evenly ("iid"), or each class over the clients by Dirichlet(0.3).
- Local work: 16 steps on minibatches of 32 at rate 0.1, as many as an epoch of 500 samples has. All answers
  count the same, however many samples a client has.
- A step takes 1/16 s of virtual time on average, times a client's factor, which is log-normal with σ = 1; how
  long a client's work takes on one request is exponential. A message takes 0.05 s, and 0.1 s per MB.
- FedAvg: 10 clients asked in a round. FedAvg-quorum: the same, and a round ends with the fifth answer; later
  ones are dropped, but have been computed and sent. FedBuff: 10 at work, the server moves on 5 answers,
  η_g = 1. FedAsync: 10 at work, every answer is mixed in with a = 0.6. Stale answers count (1 + s)^−½.
- Three seeds (of data, paces, and everything else), the same for all methods. A run ends after `answers`
  answers were used, and is judged after every ten of them.
- A goal is reached at the first evaluation that is there. Methods are compared within seeds; what holds for
  their mean is said with Student's 95% interval, of the logarithm where it is a ratio.

With a quorum more than 10 are at work: who is late goes on, while others are asked. How many are is said in
the second table (a column that was added after the run, when a quorum had turned out to be the fastest).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncfed import Result, Scenario, Study, Summary, SummaryTable, VirtualTime
from asyncfed.network import Exponential
from asyncfed.problems import Problem, classification
from asyncfed.protocols import Buffered, FedAsync, FedAvg, FedBuff, LocalSteps, PolynomialDecay, Server
from asyncfed.rng import Streams
from scenarios._server_methods import Finding, at_end, course, draw_costs, parts_of, percent, remembered
from topologies import star

FEDAVG, QUORUM, FEDBUFF, FEDASYNC = "FedAvg", "FedAvg-quorum", "FedBuff", "FedAsync"
METHODS = (FEDAVG, QUORUM, FEDBUFF, FEDASYNC)
PAIRS = ((QUORUM, FEDAVG), (FEDBUFF, FEDAVG), (FEDASYNC, FEDAVG), (FEDBUFF, QUORUM))
PARTITIONS = {"iid": "iid", "dirichlet": "dirichlet:0.3"}
AXES = {"virtual_time": ("s", 1.0), "bytes": ("MB", 1e6)}
FRACTIONS = (5 / 6, 0.0, 1 / 6)

FloatArray = npt.NDArray[np.float64]
Cell = tuple[str, str]  # partition, method
Runs = Mapping[Cell, Mapping[str, Result]]  # by seed


def study(
    seeds: int = 3,
    answers: int = 800,
    clients: int = 100,
    dataset: str = "mnist",
    model: str = "mlp:50",
    goal: float = 0.9,
    lr: float = 0.1,
    steps: int = 16,
    batch: int = 32,
    at_work: int = 10,
    size: int = 5,
    mixing: float = 0.6,
    power: float = 0.5,
    spread: float = 1.0,
    latency: float = 0.05,
    bandwidth: float = 1e7,
) -> Study:
    """`size` is K, of a quorum and of a buffer; `power` that of the decay; `spread` the σ of the paces."""
    local = LocalSteps(lr, steps=steps, batch=batch)
    decay = PolynomialDecay(power)

    @remembered
    def problem(partition: str, seed: int) -> Problem:
        return classification(dataset, clients, model, PARTITIONS[partition], seed, FRACTIONS)

    def protocol(method: str) -> tuple[FedAvg | FedBuff | FedAsync, int]:
        """And the answers that it moves on."""
        asked = at_work / clients
        if method == FEDAVG:
            return FedAvg(answers // at_work, local, server=Server(asked)), at_work
        if method == QUORUM:
            return FedAvg(answers // size, local, server=Server(asked, quorum=size)), size
        if method == FEDBUFF:
            return FedBuff(answers // size, local, server=Buffered(size, at_work, decay=decay)), size
        return FedAsync(answers, local, mixing, server=Buffered(1, at_work, decay=decay)), 1

    def scenario(partition: str, method: str, seed: str) -> Scenario:
        number = int(seed.removeprefix("seed-"))
        made, per_move = protocol(method)
        return Scenario(
            problem=problem(partition, number),
            topology=star(clients),
            protocol=made,
            timing=VirtualTime(
                Exponential(1 / steps),
                factors=tuple(paces(seed, clients, spread).tolist()),
                latency=latency,
                bandwidth=bandwidth,
            ),
            evaluate_every=max(1, at_work // per_move),
            seed=number,
        )

    names = [
        f"{partition}/{method}/seed-{seed}"
        for seed in range(seeds)
        for partition in PARTITIONS
        for method in METHODS
    ]

    def summary(results: Mapping[str, Result]) -> Summary:
        return summarise(results, goal, spread)

    return Study("async_server", parts_of(scenario, names), summary)


def paces(seed: str, clients: int, spread: float) -> FloatArray:
    """How many times slower each client is, by the name of a seed."""
    number = int(seed.removeprefix("seed-"))
    return np.exp(spread * Streams(number).generator("paces").standard_normal(clients))


def summarise(results: Mapping[str, Result], goal: float = 0.9, spread: float = 1.0) -> Summary:
    import pandas as pd

    runs: dict[Cell, dict[str, Result]] = {}
    for name, result in results.items():
        partition, method, seed = name.split("/")
        runs.setdefault((partition, method), {})[seed] = result
    cells = [(p, m) for p in PARTITIONS for m in METHODS if (p, m) in runs]
    costs = SummaryTable(
        f"What it costs to come to {100 * goal:g}%",
        pd.DataFrame([_line(cell, runs, goal) for cell in cells]),
        (
            "means over seeds ± standard error; seconds are virtual; bytes are of all requests so far and of "
            "their answers, also of those that clients are still at work on",
            "sooner, fewer: FedAvg's cost divided by this one's (geometric mean over seeds, 95% interval)",
        ),
    )
    used = SummaryTable(
        "Answers that were used, and where they led",
        pd.DataFrame([_use(cell, runs[cell], spread) for cell in cells]),
        (
            "at work: clients, on average over the run, of whom a quorum leaves many behind; stale: moves of "
            "the server between request and use; slower half: their share of the answers",
            "accuracy in % at the end (mean of ten evaluations), mean over seeds ± standard error",
        ),
    )
    each = SummaryTable(
        f"To {100 * goal:g}%, seed by seed",
        pd.DataFrame([_by_seed(cell, runs[cell], goal) for cell in cells]),
        "virtual seconds / MB",
    )

    def draw(path: Path) -> object:
        groups: dict[str, dict[str, Result]] = {}
        for partition, method in cells:
            first = next(iter(runs[partition, method].values()))
            groups.setdefault(partition, {})[method] = first
        title = "Servers that wait and servers that do not, log-normal paces, first seed"
        low = None if goal < 0.5 else 100 * goal - 20
        seconds = ("virtual_time", "virtual seconds")
        return draw_costs(path, title, groups, first=seconds, low=low, logx=True)

    return Summary([costs, used, each], _findings(runs, goal), {"accuracy": draw})


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and how far off it may be: Student's, at 95%; one seed says nothing."""

    mean: float
    margin: float

    @classmethod
    def of(cls, values: FloatArray) -> Interval:
        from scipy.special import stdtrit

        if len(values) < 2:
            return cls(float(values.mean()) if len(values) else float("nan"), float("inf"))
        return cls(float(values.mean()), float(stdtrit(len(values) - 1, 0.975)) * _error(values))

    def above(self, value: float) -> bool | None:
        """None where it could be either way."""
        return None if not abs(self.mean - value) > self.margin else self.mean > value


def cost_to(result: Result, column: str, goal: float) -> float:
    """What was spent at the first evaluation that reaches the goal; NaN without one."""
    reached = np.flatnonzero(course(result) >= goal)
    return float(result.metrics[column].iloc[reached[0]]) if len(reached) else float("nan")


def _costs(runs: Mapping[str, Result], column: str, goal: float) -> FloatArray:
    return np.array([cost_to(run, column, goal) for run in runs.values()])


def _ratio(runs: Runs, better: Cell, other: Cell, column: str, goal: float) -> Interval:
    """log(other's cost / the better one's), over the seeds that both have; NaN where one never got there."""
    common = [seed for seed in runs[better] if seed in runs.get(other, {})]
    a, b = (
        np.array([cost_to(runs[cell][seed], column, goal) for seed in common]) for cell in (better, other)
    )
    return Interval.of(np.log(b / a))


def _line(cell: Cell, runs: Runs, goal: float) -> dict[str, Any]:
    line: dict[str, Any] = {"data": cell[0], "method": cell[1]}
    for (column, (unit, size)), word in zip(AXES.items(), ("sooner", "fewer"), strict=True):
        line[f"{unit} to {100 * goal:g}%"] = _mean(_costs(runs[cell], column, goal) / size)
        plain = cell[1] == FEDAVG or (cell[0], FEDAVG) not in runs
        line[word] = "–" if plain else _times(_ratio(runs, cell, (cell[0], FEDAVG), column, goal))
    return line | {"seeds": len(runs[cell])}


def _use(cell: Cell, runs: Mapping[str, Result], spread: float) -> dict[str, Any]:
    used = [_answers(run) for run in runs.values()]
    stale = np.concatenate([one["staleness"].to_numpy(dtype=float, na_value=0.0) for one in used])
    slower = []
    for (seed, run), one in zip(runs.items(), used, strict=True):
        factors = paces(seed, _clients(run), spread)
        slower.append(float((factors[one["sender"]] > np.median(factors)).mean()))
    ends = np.array([at_end(run).mean for run in runs.values()])
    return {
        "data": cell[0],
        "method": cell[1],
        "answers": f"{np.mean([len(one) for one in used]):.0f}",
        "at work": f"{np.mean([at_work(run) for run in runs.values()]):.1f}",
        "stale, mean": f"{stale.mean():.2f}",
        "stale, most": f"{stale.max():.0f}",
        "slower half, %": f"{100 * np.mean(slower):.0f}",
        "accuracy": f"{percent(float(ends.mean()))} ± {percent(_error(ends))}",
        "s in all": f"{np.mean([run.metrics['virtual_time'].iloc[-1] for run in runs.values()]):.3g}",
    }


def at_work(result: Result) -> float:
    """How many clients were at work, on average over the run."""
    end = float(result.metrics["virtual_time"].iloc[-1])
    steps = result.trace.steps()
    works = steps[steps["client"] < _clients(result)]
    return float((works["ended_at"].clip(upper=end) - works["started_at"].clip(upper=end)).sum() / end)


def _clients(result: Result) -> int:
    """The server has the number after theirs. (`Result.scenario` would read the data again.)"""
    server = result.trace.server
    assert server is not None
    return server


def _answers(result: Result) -> Any:
    """The messages that the server used."""
    sent = result.trace.to_pandas()
    return sent[(sent["receiver"] == _clients(result)) & (sent["status"] == "delivered")]


def _by_seed(cell: Cell, runs: Mapping[str, Result], goal: float) -> dict[str, Any]:
    line: dict[str, Any] = {"data": cell[0], "method": cell[1]}
    for seed, run in runs.items():
        spent = [cost_to(run, column, goal) / size for column, (_, size) in AXES.items()]
        line[seed] = "never" if np.isnan(spent[0]) else " / ".join(f"{value:.3g}" for value in spent)
    return line


def _findings(runs: Runs, goal: float) -> list[Finding]:
    findings: list[Finding] = []
    for partition in PARTITIONS:
        for ours, theirs in PAIRS:
            better, other = (partition, ours), (partition, theirs)
            if better not in runs or other not in runs:
                continue
            for column, words in (("virtual_time", "comes sooner"), ("bytes", "comes with fewer bytes")):
                ratio = _ratio(runs, better, other, column, goal)
                said = f"{partition}: {ours} {words} to {100 * goal:g}% than {theirs}: {_times(ratio)}"
                findings.append(_finding(said, ratio))
            common = [seed for seed in runs[better] if seed in runs[other]]
            ends = [np.array([at_end(runs[cell][seed]).mean for seed in common]) for cell in (better, other)]
            gain = Interval.of(100 * (ends[0] - ends[1]))
            points = f"{gain.mean:+.2f} ± {gain.margin:.2f} points"
            said = f"{partition}: {ours} ends above {theirs}, after as many answers: {points}"
            findings.append(_finding(said, gain))
    return findings


def _finding(said: str, interval: Interval) -> Finding:
    if np.isnan(interval.mean):
        return f"{said} (not reached in every seed)", None
    above = interval.above(0.0)
    return (said if above is not None else f"{said} (too close to say)"), above


def _times(log: Interval) -> str:
    if np.isnan(log.mean):
        return "–"
    if np.isinf(log.margin):
        return f"{np.exp(log.mean):.2f}×"
    low, high = np.exp(log.mean - log.margin), np.exp(log.mean + log.margin)
    return f"{np.exp(log.mean):.2f}× ({low:.2f} to {high:.2f})"


def _mean(values: FloatArray) -> str:
    known = values[~np.isnan(values)]
    if not len(known):
        return "never"
    missing = len(values) - len(known)
    return f"{known.mean():.3g} ± {_error(known):.2g}" + (f" ({missing} never)" if missing else "")


def _error(values: FloatArray) -> float:
    """Standard error of the mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
