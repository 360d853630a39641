"""PDBO-MTL&DA alone, a single run to change as you like: digits, 20 clients, stochastic directed links."""

from __future__ import annotations

from asyncfed import Scenario
from asyncfed.problems import personalized_classification
from asyncfed.protocols import PDBO, SGP, VRHGP, StepDecay
from topologies import stochastic_directed


def scenario(
    clients: int = 20, steps: int = 100, outer_steps: int = 8, personalize: str = "mtl+da", seed: int = 0
) -> Scenario:
    return Scenario(
        name="pdbo_digits",
        problem=personalized_classification(
            "digits", clients=clients, model="mlp:16", personalize=personalize, outer_l2=0.001
        ),
        topology=stochastic_directed(clients, probability=(0.4, 0.8), seed=1),
        protocol=PDBO(
            inner=SGP(steps=steps, lr=StepDecay(0.6, at=(steps * 5 // 6,)), batch=32),
            hypergradient=VRHGP(rounds=40, sampling="joint", lr=0.06),
            outer_steps=outer_steps,
            outer_lr=0.1,
        ),
        seed=seed,
    )
