"""A run that is over keeps nothing of its data alive, also without the collector of circles, which comes late
where there are many objects: else the parts of a study pile up.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from asyncfed import DivergenceError, Scenario, VirtualTime, run
from asyncfed.problems import bilevel_quadratic, classification, quadratic
from asyncfed.protocols import HGP, PDBO, SGP, FedAvg, LocalSteps
from topologies import fully_connected, star

_DIGITS = classification("digits", clients=3, model="mlp:8", seed=0)
_TWO_LEVELS = bilevel_quadratic(clients=3, seed=1)
RUNS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "peers": (_DIGITS, fully_connected(3), SGP(4, 0.1, batch=8), {}),
    "server": (_DIGITS, star(3), FedAvg(2, LocalSteps(0.1)), {"timing": VirtualTime("exponential(1)")}),
    "bilevel": (_TWO_LEVELS, fully_connected(3), PDBO(SGP(3, 0.1), HGP(2), 1), {}),
    "diverging": (quadratic(clients=3), fully_connected(3), SGP(400, 1e3, batch=8), {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_data_is_freed_when_the_run_is_over(name: str, tmp_path: Path) -> None:
    for attempt in range(2):  # the first may load a module, whose parts circle
        gc.collect()
        gc.disable()
        try:
            freed = _ran(name, tmp_path / str(attempt))() is None
        finally:
            gc.enable()
    assert freed


def _ran(name: str, out: Path) -> weakref.ref[Any]:
    problem, topology, method, options = RUNS[name]
    own = dataclasses.replace(problem)
    try:
        run(Scenario(own, topology, method, **options), out=out)
    except DivergenceError:
        assert name == "diverging"
    else:
        assert name != "diverging"
    return weakref.ref(own)
