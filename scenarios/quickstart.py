"""Personalization on links that come and go: SGP, Local and PDBO side by side, digits, 20 clients; seconds.

Every client has its own mixture of the ten digits. SGP trains one common model, Local one each, and PDBO
(PDBO-MTL&DA, with VR-HGP on stochastic directed links) three common models while every client learns its own
label weights and its own weights of the ensemble.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncfed import Result, Study, Summary
from asyncfed.problems import Problem, personalized_classification
from scenarios._personalization import Scale, parts, summarise


def study(
    clients: int = 20,
    steps: int = 100,
    outer_steps: int = 8,
    rounds: int = 40,
    model: str = "mlp:16",
    seed: int = 0,
) -> Study:
    scale = Scale(
        clients=clients,
        steps=steps,
        batch=32,
        lr=0.2,
        lr_mtl=0.6,
        decay_at=(steps * 5 // 6,),
        outer_steps=outer_steps,
        rounds=rounds,
        hypergradient_lr=0.02,
        hypergradient_lr_mtl=0.06,
        weight_decay=0.0,
        seed=seed,
    )

    def problem(personalize: str, outer_l2: float | Mapping[str, float]) -> Problem:
        return personalized_classification(
            "digits", clients=clients, model=model, personalize=personalize, outer_l2=outer_l2
        )

    def summary(results: Mapping[str, Result]) -> Summary:
        return summarise(results, {}, f"Digits, {clients} clients, stochastic directed links")

    methods = ("SGP", "Local", "PDBO-MTL&DA")
    return Study("quickstart", parts(methods, ("StoD",), problem, scale), summary)
