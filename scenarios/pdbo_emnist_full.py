"""Personalization on EMNIST (001, Table 1) in the paper's own setting, for GPUs.

A CNN of 2,278,334 parameters (three of them for MTL), T = 600 inner steps of batch 128, M = 200 rounds, 20
outer steps. What the paper leaves open: the step size of the linearized step. It is taken as the rate that
the inner steps end with (0.01 of the first), which is the α_i at hand when (VR-)HGP begins. On FC and FixU
clients communicate once per epoch, and FC has the methods with a server, as in `pdbo_emnist`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncfed import Result, Scenario, Study, Summary
from asyncfed.problems import Problem, personalized_classification
from scenarios._personalization import ROWS, SERVED, Epochs, networks_of, parts, scaled
from scenarios._personalization_summary import summarise
from scenarios.pdbo_emnist import PAPER


def study(
    network: str = "StoD",
    clients: int = 100,
    model: str = "cnn",
    steps: int = 600,
    batch: int = 128,
    outer_steps: int = 20,
    rounds: int = 200,
    epochs: int = 200,
    limit: int = 81_425,
    seed: int = 0,
) -> Study:
    """`network` is FC, FixU, StoU, StoD or all."""
    scale = scaled(
        clients,
        steps,
        batch,
        0.05,
        0.25,
        outer_steps,
        0.1,
        rounds,
        seed,
        epochs=Epochs(epochs, batch, 0.01, 0.05, (epochs // 2, epochs * 3 // 4)),
        fastest_mixing=True,
    )

    def problem(personalize: str, outer_l2: float | Mapping[str, float]) -> Problem:
        return personalized_classification(
            "emnist",
            clients=clients,
            model=model,
            personalize=personalize,
            partition="dirichlet:0.4",
            limit=limit,
            outer_l2=outer_l2,
            seed=seed,
        )

    def summary(results: Mapping[str, Result]) -> Summary:
        return summarise(results, PAPER, "Personalization in the setting of the paper")

    cells: dict[str, Callable[[], Scenario]] = {}
    for name in networks_of(network):
        cells |= parts((*ROWS, *(SERVED if name == "FC" else ())), (name,), problem, scale)
    return Study("pdbo_emnist_full", cells, summary, save_final=True, with_diverged=True)
