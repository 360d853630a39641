"""Next characters of tiny Shakespeare, one client per speaker (001, Table 4), small: an LSTM and PDBO.

The paper's model has two LSTM layers of 256 and reads 200 characters; here 24 units and 20 characters, so
that it ends on two cores. The test lines come after the training lines of the same speaker.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncfed import Result, Study, Summary
from asyncfed.problems import Problem, personalized_characters
from scenarios._personalization import ROWS, Scale, networks_of, parts
from scenarios._personalization_summary import summarise

PAPER = {
    "StoD": {
        "SGP": (28.5, 26.0),
        "SGP-MTL": (27.7, 24.0),
        "Local": (25.3, 17.5),
        "Local-MTL": (25.5, 20.0),
        "PDBO-DA": (38.2, 33.7),
        "PDBO-MTL": (38.0, 34.9),
        "PDBO-MTL&DA": (37.7, 33.0),
    }
}


def study(
    network: str = "StoD",
    clients: int = 10,
    hidden: int = 24,
    length: int = 20,
    steps: int = 200,
    batch: int = 32,
    lr: float = 1.0,
    lr_mtl: float = 3.0,
    outer_steps: int = 4,
    rounds: int = 10,
    hypergradient_lr: float = 0.1,
    seed: int = 0,
) -> Study:
    """`network` is FC, FixU, StoU, StoD or all."""
    scale = Scale(
        clients=clients,
        steps=steps,
        batch=batch,
        lr=lr,
        lr_mtl=lr_mtl,
        decay_at=(steps * 5 // 6, steps * 11 // 12),
        outer_steps=outer_steps,
        rounds=rounds,
        hypergradient_lr=hypergradient_lr,
        hypergradient_lr_mtl=2 * hypergradient_lr,
        weight_decay=1e-4,
        seed=seed,
    )

    def problem(personalize: str, outer_l2: float | Mapping[str, float]) -> Problem:
        return personalized_characters(
            clients=clients, hidden=hidden, length=length, personalize=personalize, outer_l2=outer_l2
        )

    def summary(results: Mapping[str, Result]) -> Summary:
        note = (
            f"{clients} speakers, LSTM of 2 × {hidden}; the paper's figures are for 2 × 256 and 20 characters"
        )
        return summarise(results, PAPER, "Next characters", (note,))

    return Study(
        "pdbo_shakespeare", parts(ROWS, networks_of(network), problem, scale), summary, save_final=True
    )
