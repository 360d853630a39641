"""What a run is made on, and what its loop tells as it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncfed.network.waves import Recorder
from asyncfed.protocols.part import Scene
from asyncfed.rng import Streams
from asyncfed.runtime.backend import Backend
from asyncfed.runtime.evaluation import Evaluation


@dataclass(frozen=True, eq=False)
class Tick:
    """A wave was executed (or, on Ray, put on its way), or a round."""

    phase: str
    steps_done: int  # client steps in all, of all parts
    steps_planned: int
    time: float
    rests: bool  # whether the run could be put down here


@dataclass(frozen=True, eq=False)
class Stage:
    """What a run is made on."""

    scene: Scene
    streams: Streams
    backend: Backend
    recorder: Recorder
    itemsize: int
    evaluate_every: float | None
    enough: Callable[[Evaluation], bool]
