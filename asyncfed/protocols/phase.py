"""What a protocol is to the runtime: a sequence of phases, each a few pure functions of one client.

Nearly every method here exchanges weighted sums. In each step of a phase a client

    absorbs    y = residue + Σ weight · payload     what arrived, and the share of its own that it kept
    computes   step(y, minibatch) → payload φ(y), residue ψ(y)
    emits      φ, which the network weighs and delivers; ψ stays at home as it is

which is the paper's y_i ← Σ_j p_ji φ_j(y_j) + ψ_i(y_i) (001, Eq. 2). The functions see clients stacked along
a leading axis (so that one call serves a block of them), but never which clients, nor how many there are
elsewhere: z has shape (k, d), ω (k, 1), and the lines read as in the paper.

Tensors that are not exchanged (the outer variable, a running estimate) live in `memory`. A phase receives
what the phases before it left behind (`carried`) and adds to it for the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from asyncfed.data import ClientData
from asyncfed.network.expectations import Expectations
from asyncfed.network.links import Network
from asyncfed.network.timing import Timing
from asyncfed.network.weights import Shares, Weights
from asyncfed.problems.derivatives import Derivatives

Tensors = dict[str, torch.Tensor]
Steps = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Site:
    """What is at hand where a phase begins: some clients, their data, and how many there are in the run."""

    derivatives: Derivatives
    data: ClientData
    clients: Steps
    n: int
    start: torch.Tensor  # the inner variables that the run began with


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

    @property
    def closing(self) -> bool:
        """Whether what the last round brought is computed on once more, with nothing sent."""

    @property
    def judged(self) -> bool:
        """Whether its estimates are worth evaluating."""

    @property
    def estimates(self) -> bool:
        """Whether it weighs messages by what the clients saw of the network in the inner steps before."""

    @property
    def needs_outer(self) -> bool:
        """Whether it makes sense only for a problem with an outer variable."""

    @property
    def ends_outer_step(self) -> bool: ...

    def check(self, network: Network, weights: Weights, timing: Timing) -> None:
        """Refuse a network that breaks an assumption."""

    def shares(
        self, weights: Weights, network: Network, timing: Timing, learned: Expectations | None
    ) -> Shares:
        """What each message weighs."""

    def samples_of(self, steps: Steps) -> Steps:
        """Whose minibatch a step uses: its own, unless it goes back over older steps."""

    def begin(self, site: Site, carried: Tensors) -> Opening: ...

    def step(
        self,
        derivatives: Derivatives,
        absorbed: Tensors,
        memory: Tensors,
        batch: tuple[torch.Tensor, ...],
        steps: Steps,
        room: Tensors,
    ) -> Emission:
        """One step of clients whose own step counts within the phase are `steps`. `room` offers tensors that
        the residue may be written to.
        """

    def watch(self, reports: list[dict[str, npt.NDArray[np.float64]]], clients: int) -> None:
        """Stop a phase that goes wrong: called now and then with what its steps have reported so far."""

    def estimate(self, absorbed: Tensors, memory: Tensors) -> Estimate: ...

    def finish(self, absorbed: Tensors, memory: Tensors) -> Tensors:
        """What the next phase, or the result, gets beside what was carried before."""


class PhaseDefaults:
    """What most phases answer."""

    sends = True
    closing = False
    judged = True
    estimates = False
    needs_outer = False
    ends_outer_step = False

    def check(self, network: Network, weights: Weights, timing: Timing) -> None:
        return None

    def shares(
        self, weights: Weights, network: Network, timing: Timing, learned: Expectations | None
    ) -> Shares:
        return weights.prepare(network)

    def samples_of(self, steps: Steps) -> Steps:
        return steps

    def watch(self, reports: list[dict[str, npt.NDArray[np.float64]]], clients: int) -> None:
        return None


def whole(value: object) -> bool:
    """Whether a number of steps or rounds is one."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


@runtime_checkable
class ProtocolLike(Protocol):
    """A method among peers: its phases, in order. (One with a server is a `ServerProtocol`.)"""

    def phases(self) -> tuple[Phase, ...]: ...
