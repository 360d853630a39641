"""The loop of a run: a method's parts, the schedules that say who steps when, and a backend that executes it.

among peers     a part is opened on all blocks, its schedule played to the end, and closed (`peers`)
with a server   a part is a round (or something that the server does alone): the waves of one schedule,
                which lasts for the whole run (`serving`)

A loop can be put down after a tick that says so (`rests`), and another one, made from the same scenario, goes
on from there: all that it needs is in its attributes, and the values are in the backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from asyncfed.protocols.part import Method, Part
from asyncfed.recall import Saved
from asyncfed.runtime.evaluation import Evaluation
from asyncfed.runtime.peers import PeersLoop
from asyncfed.runtime.serving import ServerLoop
from asyncfed.runtime.stage import Stage, Tick


class Loop(Protocol):
    """A run of a method; what is judged last is the final evaluation."""

    def __iter__(self) -> Iterator[Tick | Evaluation]: ...

    def restore(self, saved: Saved) -> Part | None:
        """Go on from where another loop was put down; returns the part that is open, among peers."""


def execute(method: Method, stage: Stage) -> Loop:
    """The loop that runs a method, to be iterated over."""
    return PeersLoop(method, stage) if method.server is None else ServerLoop(method, stage)
