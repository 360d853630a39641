"""What a protocol is to the runtime: a sequence of phases, each a few pure functions of one client.

Nearly every method here exchanges weighted sums. In each step of a phase a client

    absorbs    y = residue + Σ weight · payload     (what arrived, and the share of its own payload that it
    kept) computes   step(y, minibatch) → payload φ(y), residue ψ(y) emits      φ, which the network weighs
    and delivers; ψ stays at home as it is

which is the paper's y_i ← Σ_j p_ji φ_j(y_j) + ψ_i(y_i) (001, Eq. 2). The functions see clients stacked along
a leading axis (so that one call serves a block of them), but never which clients, nor how many there are
elsewhere: z has shape (k, d), ω (k, 1), and the lines read as in the paper.

Tensors that are not exchanged (the outer variable, a running estimate) live in `memory`. A phase receives
what the phase before it left behind (`carried`) and leaves the same behind for the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from asyncfed.network.links import Network
from asyncfed.network.weights import Shares
from asyncfed.problems.derivatives import Derivatives

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Opening:
    """How a phase starts: y(0), and what a client remembers beside it."""

    absorbed: Tensors
    memory: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Emission:
    """What a step returns. A key missing from `residue` means zero; `report` holds one number per client."""

    payload: Tensors
    residue: Tensors = field(default_factory=dict)
    report: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    """The variables a client would be judged by."""

    inner: torch.Tensor
    outer: torch.Tensor


class Phase(Protocol):
    """One stretch of a protocol in which all clients do the same kind of step."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """What its messages are called in the trace."""

    @property
    def steps(self) -> int: ...

    @property
    def batch(self) -> int | None:
        """Minibatch size; None for all of a client's training data."""

    @property
    def sends(self) -> bool: ...

    def check(self, network: Network, shares: Shares) -> None:
        """Refuse a network that breaks an assumption."""

    def begin(self, derivatives: Derivatives, carried: Tensors) -> Opening: ...

    def step(
        self,
        derivatives: Derivatives,
        absorbed: Tensors,
        memory: Tensors,
        batch: tuple[torch.Tensor, ...],
        steps: npt.NDArray[np.int64],
        room: Tensors,
    ) -> Emission:
        """One step of clients whose own step counts are `steps`. `room` offers tensors that the residue may
        be written to.
        """

    def estimate(self, absorbed: Tensors, memory: Tensors) -> Estimate: ...

    def finish(self, absorbed: Tensors, memory: Tensors) -> Tensors:
        """What the next phase, or the result, gets."""


class ProtocolLike(Protocol):
    """A method: its phases, in order."""

    def phases(self) -> tuple[Phase, ...]: ...
