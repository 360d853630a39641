"""What executes the waves. Backends differ in where nodes live; the numbers and the trace are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from asyncfed.network.waves import Snapshot, Wave
from asyncfed.protocols.part import Act, Part, Tensors
from asyncfed.runtime.block import Reports
from asyncfed.runtime.judging import Measurement
from asyncfed.runtime.state import State


@dataclass(frozen=True)
class Placement:
    """Where the clients live, for people: "local", or so many actors on such devices."""

    backend: str
    actors: int
    clients_per_actor: int
    device: str
    note: str = ""
    threads: int = 1  # of torch, in each process


class Backend(Protocol):
    """Executes one run; `close` is called whatever happens."""

    @property
    def placement(self) -> Placement: ...

    def begin(self, part: Part, first_step: int) -> None:
        """Open a part among peers on every block."""

    def run(self, wave: Wave, round: Act | None = None) -> None:
        """Execute a wave, or put it on its way: of a round, or of the part that is open."""

    def reports(self) -> Reports:
        """What the steps since the last call reported, in the order of the waves; a server's: the newest."""

    def measure(
        self, snapshot: Snapshot, *, judging: Act | None = None, validation: bool = False
    ) -> list[Measurement]:
        """What the clients are worth: by the open part, or by what a method with a server says."""

    def finish(self, snapshot: Snapshot) -> None:
        """Close the part that is open."""

    def final(self) -> Tensors:
        """What the nodes that decide have in the end: all clients stacked, or the server (and, with
        "clients/" before their names, what the clients remember).
        """

    def state(self) -> Callable[[], State]:
        """All that the rest of the run depends on, as it is now. What is returned hands it over: it may be
        called later and in another thread, while the run goes on.
        """

    def restore(self, state: State, part: Part | None) -> None:
        """Be as `state` was taken, by whatever backend and packing, in the middle of that part (None with a
        server).
        """

    def recover(self) -> str:
        """After somebody was lost: put others in the place of those who are gone, and be as at the beginning
        of the run. Returns whose places they were.
        """

    def close(self, *, well: bool = False) -> None:
        """`well` says that the run came to its end."""
