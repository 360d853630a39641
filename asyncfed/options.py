"""How a scenario is run: where, and how carefully. A run directory keeps it, so that a run can be resumed."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from asyncfed.checks import NonNegativeInt, PositiveInt, Words, checked, shown
from asyncfed.errors import ScenarioError, UnknownNameError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([smh])")


_INTERVALS = (
    "a time such as '60s', '5m' or '1h', a number of steps of each client (with a server: of outer "
    "iterations), or None for no checkpoints"
)


PerActor = PositiveInt | Literal["auto"]
CheckpointEvery = Annotated[str | PositiveInt | None, Words(_INTERVALS)]


@checked
@dataclass(frozen=True)
class Options:
    """What `run` takes beside the scenario and what only this process has; see there."""

    backend: Literal["local", "ray"] = "local"
    clients_per_actor: PerActor = "auto"
    device: str = "auto"
    address: str | None = None
    save_final: bool = False
    checkpoint_every: CheckpointEvery = "60s"
    max_recoveries: NonNegativeInt = 10

    def __post_init__(self) -> None:
        self._check_device()
        if isinstance(self.checkpoint_every, str) and not math.isfinite(self.checkpoint_seconds):
            raise ScenarioError(
                f"checkpoint_every is {shown(self.checkpoint_every)}; it must be {_INTERVALS}"
            )

    @property
    def checkpoint_seconds(self) -> float:
        """Time between checkpoints; infinite where they do not go by time."""
        every = self.checkpoint_every
        found = _SPAN.fullmatch(every.strip()) if isinstance(every, str) else None
        return float(found[1]) * _UNITS[found[2]] if found and float(found[1]) > 0 else math.inf

    @property
    def checkpoint_steps(self) -> float:
        """Steps of each client between checkpoints; infinite where they do not go by steps."""
        every = self.checkpoint_every
        return math.inf if every is None or isinstance(every, str) else float(every)

    def same_place(self, other: Options) -> bool:
        """Whether clients live where they do by the other: on that backend, packed alike."""
        if self.backend != other.backend:
            return False
        return self.backend == "local" or self.clients_per_actor == other.clients_per_actor

    def _check_device(self) -> None:
        if self.device == "auto":
            return
        try:
            kind = torch.device(self.device).type
        except (RuntimeError, TypeError):
            raise ScenarioError(
                f"device is {shown(self.device)}; it must be 'auto', 'cpu', 'cuda' or 'cuda:N'"
            ) from None
        if kind == "cuda" and self.backend == "local" and not torch.cuda.is_available():
            raise ScenarioError(
                "device is 'cuda', but this machine has no usable GPU; use device='cpu' or 'auto'"
            )

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Options:
        """What a run directory says; refuses what none of ours has written."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in data:
            if key not in known:
                raise UnknownNameError("option of a run", str(key), known)
        return cls(**data)
