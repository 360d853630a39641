"""What somebody needs to go on later from where it is: tensors by name, and facts that JSON can hold.

States are put together by prefixes ("pool/rows/z") and taken apart again, so that each of pool, block,
exchange and backend knows only its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncfed.protocols.part import Tensors


@dataclass(frozen=True, eq=False)
class State:
    """Tensors that nobody else changes, and plain facts."""

    tensors: Tensors = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def under(self, prefix: str) -> State:
        """What was joined under that prefix."""
        whole = prefix + "/"
        own = {
            name.removeprefix(whole): value for name, value in self.tensors.items() if name.startswith(whole)
        }
        return State(own, self.facts.get(prefix, {}))

    def array(self, name: str) -> npt.NDArray[Any]:
        """A tensor that holds numbers of the schedule, as numpy has it."""
        return self.tensors[name].cpu().numpy()


def joined(states: Mapping[str, State], facts: Mapping[str, Any] | None = None) -> State:
    """Several states as one, each under its prefix, and some facts beside them."""
    tensors = {
        f"{prefix}/{name}": value for prefix, state in states.items() for name, value in state.tensors.items()
    }
    nested = {prefix: state.facts for prefix, state in states.items() if state.facts}
    return State(tensors, {**nested, **(facts or {})})


def copied(tensors: Tensors) -> Tensors:
    """The same in memory of its own, in one piece each, on the CPU."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}


def of_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> Tensors:
    """Numbers of the schedule as tensors of their own."""
    return {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
