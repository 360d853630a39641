"""Personalization on EMNIST (001, Table 1), scaled to two cores by a protocol that was fixed before any run.

| | paper | here |
| --- | --- | --- |
| clients, images of each | 100, 814 | 20, 814, and 1,000 more to test on in its label proportions |
| network | conv 32, conv 64, fc 2048 | a quarter as wide: conv 8, conv 16, fc 512 |
| batch | 128 | 64 |
| learning rate, of ensembles | 0.05, 0.25 | 4 times that, for the width; both ×0.1 at 500 and 550 of 600 |
| outer steps | 20 with Adam 0.1 | 8 with Adam 0.25: as far |
| rounds of VR-HGP | 200 | 20 |

As in the authors' code: every outer step starts from the same model and sees the same minibatches and links,
and the hypergradient is of a step at the last rate, 0.01 of the first. So SGP and SGP-MTL are outer step 0 of
PDBO-DA and PDBO-MTL. "SGP-x2.6" is SGP at 2.6 times the rate, which label weights of λ = ±1 amount to.

On FC and FixU a client communicates once per epoch: 200 rounds, batches of 128, momentum 0.9, ×0.1 at rounds
100 and 150, again at 4 times the paper's rate (0.01). FC has the methods with a server, too, with the same
epochs. `pdbo_emnist_full` has the paper's own sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncfed import Result, Scenario, Study, Summary
from asyncfed.problems import Problem, personalized_classification
from scenarios._personalization import Epochs, networks_of, parts, rows_of, scaled
from scenarios._personalization_summary import summarise

PAPER = {
    "FC": {
        "FedAvg+": (83.0, 75.1),
        "FedProx": (69.6, 58.2),
        "pFedMe": (76.2, 65.7),
        "Clustered-FL": (82.3, 73.8),
        "FedEM": (83.9, 75.9),
        "SGP": (82.2, 73.8),
        "Local": (74.7, 63.9),
        "PDBO-DA": (82.9, 74.8),
        "PDBO-MTL": (83.9, 76.5),
        "PDBO-MTL&DA": (83.9, 76.2),
    },
    "FixU": {
        "SGP": (82.3, 74.1),
        "Local": (74.7, 63.9),
        "PDBO-DA": (83.0, 75.5),
        "PDBO-MTL": (83.9, 76.5),
        "PDBO-MTL&DA": (84.0, 77.3),
    },
    "StoU": {
        "SGP": (79.7, 71.6),
        "Local": (73.7, 63.8),
        "PDBO-DA": (80.9, 73.2),
        "PDBO-MTL": (81.6, 73.8),
        "PDBO-MTL&DA": (83.0, 76.3),
    },
    "StoD": {
        "SGP": (79.7, 72.5),
        "SGP-MTL": (80.9, 73.2),
        "Local": (73.7, 63.8),
        "Local-MTL": (67.3, 57.5),
        "PDBO-DA": (80.8, 72.9),
        "PDBO-MTL": (81.6, 75.0),
        "PDBO-MTL&DA": (82.2, 74.5),
    },
}


def study(
    network: str = "StoD",
    dataset: str = "emnist",
    clients: int = 20,
    model: str = "cnn:8,16,512",
    limit: int | None = 16_285,
    extra_test: int = 1000,
    steps: int = 600,
    batch: int = 64,
    lr: float = 0.2,
    lr_mtl: float = 1.0,
    outer_steps: int = 8,
    outer_lr: float = 0.25,
    rounds: int = 20,
    epochs: int = 200,
    epoch_lr: float = 0.04,
    seed: int = 0,
) -> Study:
    """`network` is FC, FixU, StoU, StoD or all; `limit` images are dealt out (2% of EMNIST)."""
    scale = scaled(
        clients,
        steps,
        batch,
        lr,
        lr_mtl,
        outer_steps,
        outer_lr,
        rounds,
        seed,
        epochs=Epochs(epochs, 2 * batch, epoch_lr, 5 * epoch_lr, (epochs // 2, epochs * 3 // 4)),
        fastest_mixing=True,
    )

    def problem(personalize: str, outer_l2: float | Mapping[str, float]) -> Problem:
        return personalized_classification(
            dataset,
            clients=clients,
            model=model,
            personalize=personalize,
            partition="dirichlet:0.4",
            limit=limit,
            extra_test=extra_test,
            outer_l2=outer_l2,
            seed=seed,
        )

    def summary(results: Mapping[str, Result]) -> Summary:
        note = f"{clients} clients, {dataset}, {model}; the paper's figures are for its CNN and full lengths"
        return summarise(results, PAPER, "Personalization", (note,))

    cells: dict[str, Callable[[], Scenario]] = {}
    for name in networks_of(network):
        cells |= parts(rows_of(name, faster=True, served=True), (name,), problem, scale)
    return Study("pdbo_emnist", cells, summary, save_final=True, with_diverged=True)
