"""Meta FL on CIFAR-10 (002, Fig. 1): FedAvg, Per-FedAvg and ν = 3, by rounds and by gradient evaluations.

50 clients, a fifth of them in each round, τ = 4, α = 0.01, β = 0.001, minibatches of 40, a perceptron
3072-80-60-10. Everybody has a class distribution of its own, from Dirichlet(0.01), 800 samples to train on,
and 200 to be judged on after three steps of fine-tuning. FedAvg is ν = 0 and Per-FedAvg ν = 1; ν = 3 is
exact, first-order (FO) and Hessian-free (HF): the last two are not in the paper's figure.

The paper shows the order of three curves and no numbers, and does not say the rounds, the activation, the
scale of the pixels, or whether clients share samples. Here: 300 rounds, ReLU, normalised pixels, and an
overlapping split, in which everybody draws from the whole dataset. Other readings are parameters:
`pixels="unit"` (in [0, 1]), `split="disjoint"` (which cannot honour the distributions: the classes of those
served last have run out), `model="mlp:80,60:tanh"`. HF's differences of gradients cross kinks of ReLU, the
more so the smaller δ is: 0.1 is near to the exact product, as far as that goes.

*Gradient evaluations* are of one minibatch each, of all clients together. A Hessian product costs about as
much as two gradients, and counts as two; how things stand where it counts as one is said too. *The majority
class* is what a client gets right that always says the most frequent class of its own training samples.

Where CIFAR-10 is absent: `dataset="emnist"` (or "mnist"), or "digits", with 35 samples a client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from asyncfed import Result, Scenario, Study, Summary, SummaryTable
from asyncfed.data import DirichletOverClasses, OverlappingDirichlet, Partition
from asyncfed.problems import Problem, classification
from asyncfed.protocols import MetaFL, Server
from scenarios._server_methods import Finding, course, parts_of, remembered, with_spread
from topologies import star

FEDAVG, PER_FEDAVG, EXACT, FO, HF = "FedAvg", "Per-FedAvg", "exact", "FO", "HF"
ROWS = (FEDAVG, PER_FEDAVG, EXACT, FO, HF)
MAJORITY = "majority class"
SAMPLES = {"digits": 35}  # of a client, where a dataset is too small for 1,000
INDEPENDENT = {  # accuracy after 100, 200 and 300 rounds of two seeds of an independent implementation
    FEDAVG: ((47, 56), (51, 55), (53, 60)),
    PER_FEDAVG: ((56, 61), (71, 77), (89, 93)),
    EXACT: ((79, 79), (92, 94), (94, 95)),
    FO: ((65, 66), (84, 85), (92, 93)),
}
_PRICES = (2, 1)  # gradient evaluations that a Hessian product counts as
_BUDGETS = 200  # at which two curves are compared

FloatArray = npt.NDArray[np.float64]
Runs = Mapping[str, Mapping[int, Result]]  # row → seed → run


def study(
    seeds: int = 3,
    rounds: int = 300,
    clients: int = 50,
    samples: int | None = None,
    dataset: str = "cifar10",
    model: str = "mlp:80,60",
    pixels: Literal["normalised", "unit"] = "normalised",
    split: Literal["overlapping", "disjoint"] = "overlapping",
    concentration: float = 0.01,
    participation: float = 0.2,
    nu: int = 3,
    tau: int = 4,
    alpha: float = 0.01,
    beta: float = 0.001,
    batch: int = 40,
    delta: float = 0.1,
) -> Study:
    """`samples` of a client are by default 1,000, or as many as the dataset has for 50 clients."""
    each = samples or SAMPLES.get(dataset, 1000)
    kinds: dict[str, type[DirichletOverClasses | OverlappingDirichlet]] = {
        "overlapping": OverlappingDirichlet,
        "disjoint": DirichletOverClasses,
    }

    @remembered
    def problem(seed: int) -> Problem:
        dealer: Partition = kinds[split](concentration, each)
        return classification(dataset, clients, model, dealer, seed, (0.8, 0.0, 0.2), pixels=pixels)

    def scenario(row: str, seed: str) -> Scenario:
        number = int(seed.removeprefix("seed-"))
        protocol = MetaFL(
            outer_steps=rounds,
            nu={FEDAVG: 0, PER_FEDAVG: 1}.get(row, nu),
            tau=tau,
            alpha=alpha,
            beta=beta,
            batch=batch,
            variant="fo" if row == FO else "hf" if row == HF else "exact",
            delta=delta if row == HF else None,
            tuning=nu,
            server=Server(participation),
        )
        return Scenario(
            problem=problem(number),
            topology=star(clients),
            protocol=protocol,
            evaluate_every=max(1, rounds // 30),
            seed=number,
        )

    names = [f"{row}/seed-{seed}" for seed in range(seeds) for row in ROWS]
    as_theirs = (dataset, model, pixels, split, nu, rounds) == (
        "cifar10", "mlp:80,60", "normalised", "overlapping", 3, 300,
    )  # fmt: skip

    def summary(results: Mapping[str, Result]) -> Summary:
        runs = _by_row(results)
        known = sorted({seed for own in runs.values() for seed in own})
        ceilings = {seed: majority_accuracy(problem(seed)) for seed in known}
        return summarise(runs, ceilings, nu, rounds, INDEPENDENT if as_theirs else {})

    return Study("meta_cifar10", parts_of(scenario, names), summary)


def majority_accuracy(problem: Problem) -> float:
    """Of clients that always say the most frequent class of their training samples, on all test samples."""
    right = 0
    for client in range(problem.clients):
        (_, seen), (_, asked) = (shards.of(client) for shards in (problem.data.train, problem.data.test))
        right += int((asked == seen.bincount().argmax()).sum())
    return right / problem.data.test.total


def summarise(
    runs: Runs,
    ceilings: Mapping[int, float],
    nu: int = 3,
    rounds: int = 300,
    theirs: Mapping[str, Sequence[tuple[int, int]]] = INDEPENDENT,
) -> Summary:
    import pandas as pd

    if not runs:
        return Summary()
    marks = [rounds * k // 3 for k in (1, 2, 3)]
    by_rounds = SummaryTable(
        "Accuracy after rounds",
        pd.DataFrame(_lines_by_rounds(runs, ceilings, nu, marks, theirs)),
        (
            "test accuracy in % after fine-tuning, mean over seeds (smallest–largest); untuned: at the end, "
            "of the server's model itself",
            *(
                ["theirs: an independent implementation, two seeds; the paper gives no numbers"]
                if theirs
                else []
            ),
        ),
    )
    by_price = [
        SummaryTable(
            f"Accuracy after gradient evaluations, a Hessian product counting as {_number(price)}",
            pd.DataFrame(_lines_by_price(runs, nu, marks, price)),
            (
                "in the columns: evaluations of all clients together, in thousands: all that the cheapest "
                f"run makes, and those of {label(PER_FEDAVG, nu)} after {_listed(marks)} rounds; – where a "
                "run made fewer; evaluations/round: of all who are asked",
            ),
        )
        for price in _PRICES
    ]

    def draw(path: Path) -> object:
        return _draw(path, runs, ceilings, nu)

    findings = [
        *_order(runs, nu, marks),
        *_leads(runs, nu),
        *_below_the_ceiling(runs, ceilings, nu, rounds),
        *_as_theirs(runs, nu, marks, theirs),
    ]
    return Summary([by_rounds, *by_price], findings, {"accuracy": draw})


def label(row: str, nu: int) -> str:
    return {FEDAVG: "FedAvg (ν = 0)", PER_FEDAVG: "Per-FedAvg (ν = 1)"}.get(row, f"ν = {nu}, {row}")


def at_round(result: Result, number: int) -> float:
    """Accuracy in percent; between evaluations on the line between them, NaN after the last."""
    return _at(course(result, "step"), 100 * course(result), number)


def evaluations(result: Result, price: int) -> FloatArray:
    """What all clients together had computed at each evaluation of the run."""
    return course(result, "gradients") + price * course(result, "hessian_products")


def lead(a: Result, b: Result, price: int) -> float:
    """By how many points a is ahead of b at equal gradient evaluations: the mean over all that both made."""
    of_a, of_b = (evaluations(run, price) for run in (a, b))
    budgets = np.linspace(0, min(of_a[-1], of_b[-1]), _BUDGETS)
    ahead = np.interp(budgets, of_a, course(a)) - np.interp(budgets, of_b, course(b))
    return float(100 * ahead.mean())


def _by_row(results: Mapping[str, Result]) -> dict[str, dict[int, Result]]:
    runs: dict[str, dict[int, Result]] = {}
    for name, result in results.items():
        row, seed = name.split("/")
        runs.setdefault(row, {})[int(seed.removeprefix("seed-"))] = result
    return runs


def _at(x: FloatArray, y: FloatArray, place: float) -> float:
    return float(np.interp(place, x, y, right=np.nan))


def _number(price: int) -> str:
    return {1: "one", 2: "two"}[price]


def _listed(numbers: Sequence[float]) -> str:
    *first, last = (f"{number:g}" for number in numbers)
    return f"{', '.join(first)} and {last}"


def _spread(values: Sequence[float]) -> str:
    return "–" if np.isnan(values).any() else with_spread(values, ".1f")


def _lines_by_rounds(
    runs: Runs,
    ceilings: Mapping[int, float],
    nu: int,
    marks: Sequence[int],
    theirs: Mapping[str, Sequence[tuple[int, int]]],
) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for row, own in runs.items():
        line: dict[str, Any] = {"method": label(row, nu)}
        line |= {f"after {mark}": _spread([at_round(run, mark) for run in own.values()]) for mark in marks}
        if theirs:
            line["theirs"] = " / ".join(map(_range, theirs.get(row, ()))) or "–"
        line["untuned"] = _spread([100 * course(run, "accuracy_tuned_0")[-1] for run in own.values()])
        line["seeds"] = len(own)
        lines.append(line)
    level = _spread([100 * value for value in ceilings.values()])
    ceiling = {"method": f"one's own {MAJORITY}", **{f"after {mark}": level for mark in marks}}
    return [
        *lines,
        {**ceiling, **({"theirs": "–"} if theirs else {}), "untuned": "–", "seeds": len(ceilings)},
    ]


def _range(ends: tuple[int, int]) -> str:
    low, high = ends
    return str(low) if low == high else f"{low}–{high}"


def _lines_by_price(runs: Runs, nu: int, marks: Sequence[int], price: int) -> list[dict[str, Any]]:
    """All seeds cost the same."""
    costs = {row: evaluations(next(iter(own.values())), price) for row, own in runs.items()}
    budgets = {min(float(cost[-1]) for cost in costs.values())}
    if PER_FEDAVG in runs:
        steps = course(next(iter(runs[PER_FEDAVG].values())), "step")
        budgets |= {_at(steps, costs[PER_FEDAVG], mark) for mark in marks}
    return [
        {
            "method": label(row, nu),
            **{
                f"{budget / 1000:.3g}": _spread(
                    [_at(costs[row], 100 * course(run), budget) for run in own.values()]
                )
                for budget in sorted(budgets)
            },
            "evaluations/round": f"{costs[row][-1] / course(next(iter(own.values())), 'step')[-1]:g}",
        }
        for row, own in runs.items()
    ]


def _agreed(words: str, differences: Sequence[float]) -> Finding:
    """Whether all are above zero; None where not all have the same sign."""
    signs = set(np.sign(differences))
    if len(signs) > 1 or 0.0 in signs:
        return f"{words}; not alike in all seeds", None
    return words, signs == {1.0}


def _together(runs: Runs, rows: Sequence[str]) -> list[list[Result]]:
    """Runs of some rows with the same seed."""
    seeds = [seed for seed in runs.get(rows[0], {}) if all(seed in runs.get(row, {}) for row in rows)]
    return [[runs[row][seed] for row in rows] for seed in seeds]


def _order(runs: Runs, nu: int, marks: Sequence[int]) -> list[Finding]:
    """What the paper shows, and where FO and HF stand in it."""
    findings: list[Finding] = []
    for rows in ((EXACT, PER_FEDAVG, FEDAVG), (EXACT, FO, PER_FEDAVG), (EXACT, HF, PER_FEDAVG)):
        for mark in marks:
            levels = [[at_round(run, mark) for run in own] for own in _together(runs, rows)]
            if levels:
                means = np.mean(levels, axis=0)
                named = [f"{label(row, nu)} ({mean:.1f})" for row, mean in zip(rows, means, strict=True)]
                steps = [float(-np.diff(own).max()) for own in levels]
                findings.append(_agreed(f"after {mark} rounds {' > '.join(named)}", steps))
    return findings


def _leads(runs: Runs, nu: int) -> list[Finding]:
    """The same at equal gradient evaluations."""
    findings: list[Finding] = []
    for row in (EXACT, FO, HF):
        for price in _PRICES:
            if pairs := _together(runs, (row, PER_FEDAVG)):
                leads = [lead(ours, theirs, price) for ours, theirs in pairs]
                words = (
                    f"at equal gradient evaluations (a Hessian product is {_number(price)}) {label(row, nu)} "
                    f"is ahead of {label(PER_FEDAVG, nu)}: on average by {np.mean(leads):+.1f} points "
                    f"({min(leads):+.1f} to {max(leads):+.1f})"
                )
                findings.append(_agreed(words, leads))
    return findings


def _below_the_ceiling(runs: Runs, ceilings: Mapping[int, float], nu: int, rounds: int) -> list[Finding]:
    """Whether any row is better than what nobody needs a network for."""
    best = max(runs, key=lambda row: float(np.mean([at_round(run, rounds) for run in runs[row].values()])))
    ends = {seed: at_round(run, rounds) for seed, run in runs[best].items()}
    level = np.mean([100 * ceilings[seed] for seed in ends])
    words = (
        f"after {rounds} rounds the best, {label(best, nu)} ({np.mean(list(ends.values())):.1f}), is above "
        f"one's own {MAJORITY} ({level:.1f})"
    )
    return [_agreed(words, [end - 100 * ceilings[seed] for seed, end in ends.items()])]


def _as_theirs(
    runs: Runs, nu: int, marks: Sequence[int], theirs: Mapping[str, Sequence[tuple[int, int]]]
) -> list[Finding]:
    """Whether our ranges overlap with theirs, which are in whole points."""
    findings: list[Finding] = []
    for row in [row for row in theirs if row in runs]:
        ours = [[at_round(run, mark) for run in runs[row].values()] for mark in marks]
        meets = [
            min(own) <= high + 0.5 and max(own) >= low - 0.5
            for own, (low, high) in zip(ours, theirs[row], strict=True)
        ]
        said = " / ".join(f"{min(own):.1f}–{max(own):.1f}" for own in ours)
        words = (
            f"{label(row, nu)} after {_listed(marks)} rounds: our seeds ({said}) overlap with those of the "
            f"independent implementation ({' / '.join(map(_range, theirs[row]))})"
        )
        findings.append((words, all(meets)))
    return findings


def _draw(path: Path, runs: Runs, ceilings: Mapping[int, float], nu: int) -> Path:
    """Means over seeds with their range: by rounds, and by gradient evaluations."""
    from asyncfed.report import add_curves
    from asyncfed.report.style import new_figure, save

    figure = new_figure("Accuracy after fine-tuning", 11.0, 3.6)
    panels = figure.subplots(1, 2, sharey=True)
    level = 100 * float(np.mean(list(ceilings.values())))
    for axes, by_rounds in zip(panels, (True, False), strict=True):
        series: dict[str, Any] = {}
        for row, own in runs.items():
            accuracy = 100 * np.stack([course(run) for run in own.values()])
            run = next(iter(own.values()))
            x = course(run, "step") if by_rounds else evaluations(run, _PRICES[0]) / 1000
            series[label(row, nu)] = (x, accuracy.mean(0), accuracy.min(0), accuracy.max(0))
        longest = max(x[-1] for x, *_ in series.values())
        series[f"one's own {MAJORITY}"] = ([0.0, longest], [level, level])
        add_curves(
            axes,
            series,
            xlabel="communication rounds"
            if by_rounds
            else "gradient evaluations of all clients (thousands; Hessian product: 2)",
            ylabel="test accuracy, %" if by_rounds else "",
            legend=not by_rounds,
        )
    return save(figure, path)
