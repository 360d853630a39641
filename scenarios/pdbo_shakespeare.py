"""Next characters of tiny Shakespeare, one client per speaker (001, App. G and Table 4), at a quarter width.

As in the paper: 20 speakers drawn at random, each a client; its lines in time order, 60% for training, 20%
for validation, the last 20% for testing; two LSTM layers on an embedding of 8; loss and accuracy over all
positions of a sample; SGP (4b) of 600 steps, ×0.1 at 500 and 550, weight decay 1e-3; VR-HGP (0.9, 0.1) of 20
rounds with joint sampling; λ regularized as in its Table 2; reported at the best validation accuracy.

Smaller here, fixed before any run: 64 units instead of 256, 40 characters instead of 200, batches of 32
instead of 128, 8 outer steps with Adam 0.25 instead of 20 with 0.1. The paper gives no rates for this task
beyond "the same … as in Section 6", which are 0.05, and 0.25 for ensembles; a quarter of the width has four
times the rate, so 0.2 and 1.0. The hypergradient is linearized at the rate of the last step, a hundredth of
that. If a row diverges: halve both rates, double `steps`, and say so.

Another text, too: tiny Shakespeare has 308 speakers and 65 characters, the paper's 728 and 80.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncfed import Result, Scenario, Study, Summary
from asyncfed.models import Positions
from asyncfed.problems import Problem, personalized_characters
from scenarios._personalization import networks_of, parts, rows_of, scaled
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
    clients: int = 20,
    hidden: int = 64,
    length: int = 40,
    positions: Positions = "all",
    steps: int = 600,
    batch: int = 32,
    lr: float = 0.2,
    lr_mtl: float = 1.0,
    outer_steps: int = 8,
    outer_lr: float = 0.25,
    rounds: int = 20,
    seed: int = 0,
) -> Study:
    """`network` is FC, FixU, StoU, StoD or all; `positions` is all, or last: what follows a whole sample."""
    scale = scaled(clients, steps, batch, lr, lr_mtl, outer_steps, outer_lr, rounds, seed)

    def problem(personalize: str, outer_l2: float | Mapping[str, float]) -> Problem:
        return personalized_characters(
            clients=clients,
            hidden=hidden,
            length=length,
            positions=positions,
            personalize=personalize,
            outer_l2=outer_l2,
            seed=seed,
        )

    def summary(results: Mapping[str, Result]) -> Summary:
        note = (
            f"{clients} speakers of tiny Shakespeare, LSTM of 2 × {hidden}, {length} characters; the paper's "
            "figures are for 2 × 256, 200 characters and another edition of the text"
        )
        return summarise(results, PAPER, "Next characters", (note,))

    cells: dict[str, Callable[[], Scenario]] = {}
    for name in networks_of(network):
        cells |= parts(rows_of(name), (name,), problem, scale)
    return Study("pdbo_shakespeare", cells, summary, save_final=True, with_diverged=True)
