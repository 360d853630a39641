"""What executes the waves. Backends differ in where clients live; the numbers and the trace are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from asyncfed.network.waves import Snapshot, Wave
from asyncfed.protocols.phase import Phase, Tensors
from asyncfed.runtime.block import Measurement

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Placement:
    """Where the clients live, for people: "local", or so many actors on such devices."""

    backend: str
    actors: int
    clients_per_actor: int
    device: str
    note: str = ""


class Backend(Protocol):
    """Executes one run; `close` is called whatever happens."""

    @property
    def placement(self) -> Placement: ...

    def begin(self, phase: Phase, first_step: int) -> int:
        """Open a phase on every block; returns the bytes of one of its messages."""

    def run(self, wave: Wave) -> None:
        """Execute a wave, or put it on its way."""

    def reports(self) -> dict[str, FloatArray]:
        """What the steps since the last call reported, in the order of the waves."""

    def measure(self, snapshot: Snapshot, *, validation: bool) -> list[Measurement]: ...

    def finish(self, snapshot: Snapshot) -> None: ...

    def final(self) -> Tensors:
        """What the last phase left behind, all clients stacked."""

    def close(self) -> None: ...
