"""The error of HGP and VR-HGP over the rounds (001, Fig. 2), many seeds, undirected and directed links.

Three clients, logistic regression on one feature (the mean pixel of two MNIST digits), label weights as outer
variables, full batches, 500 steps of SGP (4b), M = 500 rounds of alternating sampling, exact p̄ and δ̄. The
truth is B̄ (I − Ā)⁻¹ c^y + c^λ at the variables that SGP has reached; μ is the coefficient of Theorem 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncfed import Lockstep, Result, Scenario, Study, Summary, SummaryTable
from asyncfed.network import Uniform
from asyncfed.problems import logistic_pair
from asyncfed.protocols import SGP, VRHGP, CompareHypergradients
from topologies import stochastic_directed, stochastic_undirected

PAIRS = ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.9, 0.1), (0.1, 0.9))
AUTHORS = {(1.0, 0.0): 0.0255, (0.0, 1.0): 0.0668, (0.5, 0.5): 0.0264, (0.9, 0.1): 0.0096, (0.1, 0.9): 0.0389}
_CLIENTS = 3
_EARLY = 5  # the round after which the paper sees HGP improve no more


def study(
    seeds: int = 10, rounds: int = 500, steps: int = 500, lr: float = 0.5, dataset: str = "mnist"
) -> Study:
    def part(name: str, seed: int) -> Callable[[], Scenario]:
        return lambda: scenario(name, seed, rounds, steps, lr, dataset)

    parts = {f"{name}/seed-{seed}": part(name, seed) for name in ("StoU", "StoD") for seed in range(seeds)}
    return Study("hgp_error", parts, summarise, save_final=True)


def scenario(name: str, seed: int, rounds: int, steps: int, lr: float, dataset: str) -> Scenario:
    """One draw of data, network and links; all five (α, β) after the same steps of SGP."""
    generate = stochastic_undirected if name == "StoU" else stochastic_directed
    methods = tuple(
        VRHGP(rounds=rounds, alpha=alpha, beta=beta, expectations="exact", record=True)
        for alpha, beta in PAIRS
    )
    return Scenario(
        name=f"{name}/seed-{seed}",
        problem=logistic_pair(_CLIENTS, seed=seed, dataset=dataset),
        topology=generate(_CLIENTS, probability=(0.4, 0.8), seed=seed),
        protocol=CompareHypergradients(SGP(steps=steps, lr=lr, batch=None), methods),
        precision="float64",
        seed=seed,
    )


def errors(result: Result) -> tuple[npt.NDArray[np.float64], float, float]:
    """‖v(m) − truth‖ of each (α, β) after every round (pairs, rounds), ‖truth‖, and η_A, how fast the series
    of this problem shrinks: the spectral radius of Ā.
    """
    from asyncfed.truth import InnerMap, Point, dense_hypergradient, expected_jacobians, expected_matrix

    made = result.scenario
    protocol = made.protocol
    assert isinstance(protocol, CompareHypergradients)
    network = Lockstep().network(made.topology)
    p_bar = expected_matrix(network, *Uniform().prepare(network).expected())
    lr = protocol.inner.lr
    assert isinstance(lr, float)
    step = InnerMap(lr, protocol.inner.order, protocol.inner.weight_decay)
    final = result.final
    point = Point(final["inner"], final["omega"], final["outer"])
    truth = dense_hypergradient(made.problem, p_bar, step, point)
    A = expected_jacobians(made.problem, p_bar, step, point).A
    found = [
        (final[f"history/{place}"] - truth[:, None]).square().sum((0, 2)).sqrt().numpy()
        for place in range(len(protocol.methods))
    ]
    return np.stack(found), float(truth.norm()), float(np.abs(np.linalg.eigvals(A.numpy())).max())


def coefficient(alpha: float, beta: float, eta: float) -> float:
    """μ_{α,β} of Theorem 1, and of Theorem 10 for HGP (C.5)."""
    if (alpha, beta) == (1.0, 0.0):
        return math.sqrt(8 * (eta**2 + (1 - eta) ** 2) / (1 - eta**2))
    shrink = 1 - beta + beta * eta
    inner = (1 + alpha * shrink) / (1 - alpha * shrink) * beta**2 * eta**2 / (1 - shrink**2)
    return math.sqrt(8 * (1 - alpha) / (1 + alpha) * (1 + inner))


def summarise(results: Mapping[str, Result]) -> Summary:
    import pandas as pd

    by_network: dict[str, list[tuple[npt.NDArray[np.float64], float, float]]] = {}
    for name, result in results.items():
        by_network.setdefault(name.split("/")[0], []).append(errors(result))
    lines: list[dict[str, Any]] = []
    findings: list[tuple[str, bool | None]] = []
    curves: dict[str, dict[str, Any]] = {}
    for name, found in by_network.items():
        stacked = np.stack([error for error, _, _ in found])  # (seeds, pairs, rounds)
        sizes, etas = np.array([size for _, size, _ in found]), np.array([eta for _, _, eta in found])
        relative = stacked[:, :, -1] / sizes[:, None]
        for place, (alpha, beta) in enumerate(PAIRS):
            last = relative[:, place]
            lines.append(
                {
                    "links": name,
                    "(α, β)": f"({alpha:g}, {beta:g})",
                    "error": round(float(stacked[:, place, -1].mean()), 4),
                    "relative": f"{last.mean():.3f} ± {last.std(ddof=1) / math.sqrt(len(last)):.3f}"
                    if len(last) > 1
                    else f"{last.mean():.3f}",
                    f"relative, m = {_EARLY}": round(
                        float((stacked[:, place, _EARLY - 1] / sizes).mean()), 3
                    ),
                    "μ": round(float(np.mean([coefficient(alpha, beta, eta) for eta in etas])), 2),
                    "authors, relative": round(AUTHORS[alpha, beta] / 0.125, 3),
                }
            )
        findings += _findings(name, relative, stacked / sizes[:, None, None])
        curves[name] = {
            f"({alpha:g}, {beta:g})": (
                np.arange(1, stacked.shape[2] + 1),
                (stacked[:, place] / sizes[:, None]).mean(0),
            )
            for place, (alpha, beta) in enumerate(PAIRS)
        }
    table = SummaryTable(
        "Error of the hypergradient",
        pd.DataFrame(lines),
        (
            f"means over {len(next(iter(by_network.values())))} seeds ± standard error; relative to ‖truth‖; "
            "μ for the spectral radius of Ā as η_A",
            "authors: final errors of their code (one seed, smaller data, StoD) over their ‖truth‖ of 0.125",
        ),
    )

    def draw(path: Any) -> object:
        from asyncfed.report import add_curves
        from asyncfed.report.style import new_figure, save

        figure = new_figure("Error of (VR-)HGP, relative, mean over seeds", 11.0, 4.2)
        for axes, (name, series) in zip(
            np.atleast_1d(figure.subplots(1, len(curves))), curves.items(), strict=True
        ):
            add_curves(
                axes,
                series,
                xlabel="round m",
                ylabel="‖v − truth‖ / ‖truth‖",
                title=name,
                logx=True,
                logy=True,
            )
        return save(figure, path)

    return Summary([table], findings, {"error": draw})


def _findings(
    name: str, last: npt.NDArray[np.float64], over_rounds: npt.NDArray[np.float64]
) -> list[tuple[str, bool | None]]:
    means = last.mean(0)
    best = PAIRS[int(means.argmin())]
    wins = int((last[:, PAIRS.index((0.9, 0.1))] < last[:, PAIRS.index((1.0, 0.0))]).sum())
    hgp = over_rounds[:, PAIRS.index((1.0, 0.0))].mean(0)
    later = hgp[-1] / hgp[min(_EARLY, len(hgp)) - 1]
    return [
        (f"{name}: (0.9, 0.1) ends lowest (lowest: {best})", best == (0.9, 0.1)),
        (
            f"{name}: VR-HGP (0.9, 0.1) ends below HGP in {wins} of {len(last)} seeds",
            wins >= math.ceil(0.9 * len(last)),
        ),
        (
            f"{name}: HGP improves no more after m = {_EARLY} (its error ends at {later:.2f} of that)",
            bool(later > 0.8),
        ),
    ]
