"""Predict the next character of what a speaker says, every speaker in its own way.

The losses of `personalized` for a small LSTM network, where the labels are the characters. PDBO's Shakespeare
experiment (Appendix G) is hidden=256, length=200 and 20 clients.
"""

from __future__ import annotations

from asyncfed.checks import NonNegativeFloat, NonNegativeInt, PositiveInt
from asyncfed.data import load_shakespeare
from asyncfed.data.split import Fractions
from asyncfed.models import Positions, char_lstm
from asyncfed.problems.personalized import Components, OuterL2, personalized
from asyncfed.problems.problem import Problem, problem_factory

# Wider networks gain nothing from running clients together, and would need all their memory at once: for 8
# clients a Hessian-vector product takes 1.8 s (one by one 3.1) with 64 units, but 8.0 s (6.4) with 128.
_WIDEST_TOGETHER = 64


@problem_factory
def personalized_characters(
    clients: PositiveInt = 20,
    hidden: PositiveInt = 32,
    layers: PositiveInt = 2,
    length: PositiveInt = 32,
    personalize: str = "mtl+da",
    components: Components = 3,
    seed: int = 0,
    embedding: PositiveInt = 8,
    l2: NonNegativeFloat = 0.0,
    outer_l2: OuterL2 = 0.0,
    stride: PositiveInt = 4,
    min_characters: NonNegativeInt = 2000,
    fractions: Fractions = (0.6, 0.2, 0.2),
    positions: Positions = "all",
) -> Problem:
    """`char_lstm` on `load_shakespeare`; `personalize` and what follows it as in
    `personalized_classification`.
    """
    text = load_shakespeare(
        clients, length, stride, positions, seed=seed, min_characters=min_characters, fractions=fractions
    )
    return personalized(
        f"shakespeare-lstm:{hidden}",
        text.data,
        char_lstm(text.classes, embedding, hidden, layers, positions),
        text.classes,
        personalize=personalize,
        components=components,
        l2=l2,
        outer_l2=outer_l2,
        vectorize=hidden <= _WIDEST_TOGETHER,
    )
