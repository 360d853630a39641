"""Rounds whose clients make local steps on the inner loss: what these cost."""

from __future__ import annotations

from collections.abc import Mapping

from asyncfed.protocols.at import Level
from asyncfed.protocols.cost import Cost
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.rounds import FloatArray, IntArray, Round


class LocalRound(Round):
    """A round of `steps`: as long as they are many, and a gradient for each."""

    steps: LocalSteps

    def work(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return self.steps.counts(sizes["inner"], clients).astype(float)

    def samples(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> FloatArray:
        return self.steps.samples(sizes["inner"], clients)

    def cost(self, sizes: Mapping[Level, IntArray], clients: IntArray) -> Cost:
        return self.steps.cost(sizes["inner"], clients)
