"""Personalization on CIFAR-10 (001, Table 4), with a LeNet: another network than the paper's MobileNet-v2.

The paper's 20 clients, stochastic directed links, Dirichlet(0.4) over all 60,000 images, 30% of a client's
for training, 10% for validation and 60% for testing, and M = 20 rounds of VR-HGP. Inner steps, rates and
outer steps are those of `pdbo_emnist` (600 steps of batch 64 at 0.2, or 1.0 for ensembles; 8 outer steps
with Adam 0.25), fixed before any run. The authors' network came pretrained on ImageNet, so that its
accuracies are out of reach; the order of the rows is what is compared.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncfed import Result, Study, Summary
from asyncfed.problems import Problem, personalized_classification
from scenarios._personalization import parts, rows_of, scaled
from scenarios._personalization_summary import summarise

PAPER = {
    "StoD": {
        "SGP": (75.6, 69.7),
        "Local": (62.5, 41.1),
        "PDBO-DA": (75.6, 70.3),
        "PDBO-MTL": (73.6, 65.2),
        "PDBO-MTL&DA": (77.2, 73.0),
    }
}


def study(
    dataset: str = "cifar10",
    clients: int = 20,
    model: str = "lenet",
    limit: int | None = None,
    steps: int = 600,
    batch: int = 64,
    lr: float = 0.2,
    lr_mtl: float = 1.0,
    outer_steps: int = 8,
    outer_lr: float = 0.25,
    rounds: int = 20,
    seed: int = 0,
) -> Study:
    scale = scaled(clients, steps, batch, lr, lr_mtl, outer_steps, outer_lr, rounds, seed)

    def problem(personalize: str, outer_l2: float | Mapping[str, float]) -> Problem:
        return personalized_classification(
            dataset,
            clients=clients,
            model=model,
            personalize=personalize,
            partition="dirichlet:0.4",
            fractions=(0.3, 0.1, 0.6),
            limit=limit,
            part="all" if dataset.startswith("cifar") else None,
            outer_l2=outer_l2,
            seed=seed,
        )

    def summary(results: Mapping[str, Result]) -> Summary:
        note = f"{clients} clients, {dataset}, {model}; the paper's figures are for a pretrained MobileNet-v2"
        return summarise(results, PAPER, "Personalization", (note,))

    cells = parts(rows_of("StoD", faster=True), ("StoD",), problem, scale)
    return Study("pdbo_cifar10", cells, summary, save_final=True, with_diverged=True)
