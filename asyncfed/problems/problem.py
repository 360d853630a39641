"""A problem is a few plain functions for one client and one batch, and the clients' data.

Nothing here knows of stacked clients, flat vectors or derivatives: `Derivatives` adds all that. A user builds
a `Problem` from functions; our own problems come from factories, ordinary functions marked with
`@problem_factory`, which write down how they were called (`Recipe`), so that a run directory can say what was
run and another process can build the same problem.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call

from asyncfed.checks import NonNegativeFloat, PositiveInt, checked, shown
from asyncfed.data import ClientData, ClientShards
from asyncfed.errors import ScenarioError, UnknownNameError
from asyncfed.models import stacked_outputs
from asyncfed.problems.layout import Params
from asyncfed.registry import ONE_OF_YOUR_OWN, NotPlainError, from_data, register, registered, to_data

P = ParamSpec("P")
T = TypeVar("T")
Batch = tuple[Tensor, ...]
Loss = Callable[[Any, Any, Batch], Tensor]
Init = Callable[[torch.Generator], Params]
OuterSplit = Literal["train", "validation"]
Level = Literal["inner", "outer"]

OWN_COLUMNS = frozenset(
    {
        "phase", "step", "outer_step", "virtual_time", "train_loss", "accuracy_p10", "consensus",
        "messages", "delivered", "lost", "bytes", "gradients", "hessian_products",
        "client", "steps", "samples",
    }
)  # fmt: skip
"""What a run writes beside a problem's metrics (and `validation_…`), so no metric can be called so."""


@checked
@dataclass(frozen=True)
class Recipe:
    """How a problem was made: the factory's name and all its arguments, defaults included, as plain data."""

    factory: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        said = f"{self.factory}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"
        return said if len(said) <= 400 else f"{said[:400]}…"

    def as_dict(self) -> dict[str, Any]:
        """What `problem_from_recipe` takes."""
        return {"factory": self.factory, "arguments": self.arguments}


@checked
@dataclass(frozen=True)
class Stages:
    """An inner loss in two stages, of which the first knows nothing of the inner variable:

        inner_loss(inner, outer, batch) = loss(inner, encode(outer, batch))

    Where many steps are made at one outer variable, a client's samples are then encoded once. `encode` works
    sample by sample: what it returns has the leading sample axis of the batch. `vectorize` says of the second
    stage alone what `Problem.vectorize` does of all; by default it is as that says.
    """

    encode: Callable[[Any, Batch], Batch]
    loss: Callable[[Any, Batch], Tensor]
    vectorize: bool | None = None


@checked
@dataclass(frozen=True)
class Mixture:
    """An inner variable that is several models side by side, for methods that fit a mixture of them (FedEM).

    `losses(inner, batch)` are the losses (K, B) of every sample under each of the `count` K models, and
    `penalty(inner)` are terms of the inner loss that depend on no sample. Predictions are mixed with weights
    softmax(outer): the outer variable is K numbers.
    """

    count: PositiveInt
    losses: Callable[[Any, Batch], Tensor]
    penalty: Callable[[Any], Tensor] | None = None

    def loss(self, inner: Any, outer: Any, batch: Batch) -> Tensor:
        """mean_s Σ_k q_k(s) ℓ_k(s), and the penalty; q (B, K) is the last of the batch."""
        *samples, q = batch
        weighed = (q.mT * self.losses(inner, tuple(samples))).sum(0).mean()
        return weighed if self.penalty is None else weighed + self.penalty(inner)


@checked
@dataclass(frozen=True)
class Network:
    """Losses that look at the inner variable only through the outputs of a network:

        inner_loss(inner, outer, batch) = inner(outputs, outer, batch) + (l2/2)‖inner‖²
        outer_loss(inner, outer, batch) = outer(outputs, outer, batch), or the inner loss where that is None

    where the inner variable is the parameters of `module` by name, and its inputs are the first of the batch.
    With `copies` K there are K such networks for the same inputs: parameters have a leading axis K, and so do
    the outputs. Where clients compute one by one, derivatives can then be written out layer by layer.
    """

    module: nn.Module
    inner: Callable[[Tensor, Any, Batch], Tensor]
    outer: Callable[[Tensor, Any, Batch], Tensor] | None = None
    copies: PositiveInt | None = None
    l2: NonNegativeFloat = 0.0

    def outputs(self, inner: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """(B, …), or (K, B, …)."""
        if self.copies is not None:
            return stacked_outputs(self.module, inner, inputs)
        found: Tensor = functional_call(self.module, dict(inner), (inputs,))
        return found

    def inner_loss(self, inner: Mapping[str, Tensor], outer: Any, batch: Batch) -> Tensor:
        loss = self.inner(self.outputs(inner, batch[0]), outer, batch)
        return loss + half_square(inner, self.l2) if self.l2 else loss

    def outer_loss(self, inner: Mapping[str, Tensor], outer: Any, batch: Batch) -> Tensor:
        if self.outer is None:
            return self.inner_loss(inner, outer, batch)
        return self.outer(self.outputs(inner, batch[0]), outer, batch)


def half_square(x: Mapping[str, Tensor], rate: float) -> Tensor:
    """The penalty (rate/2)‖x‖² over all the tensors of x."""
    return (rate / 2) * torch.stack([tensor.square().sum() for tensor in x.values()]).sum()


Kept = Literal["local", "averaged"]


@dataclass(frozen=True)
class Buffers:
    """What a network changes as it is trained, beside its parameters: the running statistics of BatchNorm.

    Whoever trains by the inner loss moves them on; evaluation and second derivatives never do.

    Parameters
    ----------
    row
        One client's at the beginning, flat.
    loss
        (inner, outer, batch) → the inner loss, and the buffers after it, flat.
    kept
        "local": they stay at their client, whose batches end with them. "averaged": they are the last numbers
        of the inner variable, travel with it, and are averaged as it is.
    """

    row: Tensor
    loss: Callable[[Any, Any, Batch], tuple[Tensor, Tensor]]
    kept: Kept = "local"


def _as_inner(inner: Any, outer: Any, batch: Batch) -> Tensor:
    raise AssertionError("stands for a loss until __post_init__ replaces it")


def _staged(stages: Stages, inner: Any, outer: Any, batch: Batch) -> Tensor:
    return stages.loss(inner, stages.encode(outer, batch))


def no_outer(generator: torch.Generator) -> Params:
    """The outer variable of a single-level problem: none."""
    return {}


@checked
@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Problem:
    """Losses of one client, how variables begin, and everybody's data.

    `inner` and `outer` are whatever `init_inner` and `init_outer` return: a dict of tensors or a single
    tensor. A batch is a tuple of tensors with a leading sample axis. A metric maps (inner, outer, batch) to
    one value per sample; its name is a column of the results, so it is none of `OWN_COLUMNS`. A problem with
    one level leaves out `outer_loss` (then it is `inner_loss`) and `init_outer` (then there is no outer
    variable). `vectorize=False` runs clients one by one instead of through vmap, for functions that vmap
    cannot do or does slowly.

    Losses and metrics are pure functions of (inner, outer, batch): the same arguments, the same values,
    however often and for whichever clients they are called. What they read besides must not change while a
    run goes, for the operations of a loss may be recorded and run again without calling it. Where they are, a
    loss that changed is refused, at the latest after some hundred steps; clients that compute one by one
    (`vectorize=False`, or alone in their actor) call it every time, and nobody notices.

    A loss is a mean over the samples of its batch, plus terms that do not depend on the batch (such as weight
    decay): data too big for one piece is cut into several, whose losses are averaged by their sizes.
    `outer_split` says which of a client's samples its outer loss is over. `stages` may say how the inner loss
    falls into two, to save work, and `network` that losses see the inner variable only through a network's
    outputs; with either, `inner_loss` may be left out, and with a network `outer_loss`, too. `joint_metrics`
    may compute all metrics at once, a dict with the names of `metrics`, where they share most of their work.
    `mixture` may say how the inner variable is a mixture of models, for methods that fit one.

    With `draws` a batch has one tensor more: a key, one whole number for the client and its step, from which
    a loss makes all its random numbers (`asyncfed.problems.draws`). It is the same wherever the client is, so
    a loss is still a pure function of what it is given. With `buffers` that are local a batch ends with the
    client's row of them. `state_dict` makes of a client's (inner, outer, buffers) what a torch module loads.
    """

    name: str
    data: ClientData
    init_inner: Init
    inner_loss: Loss = _as_inner
    outer_loss: Loss = _as_inner
    init_outer: Init = no_outer
    outer_split: OuterSplit = "train"
    metrics: Mapping[str, Loss] = field(default_factory=dict)
    joint_metrics: Callable[[Any, Any, Batch], dict[str, Tensor]] | None = None
    stages: Stages | None = None
    network: Network | None = None
    mixture: Mixture | None = None
    vectorize: bool = True
    draws: bool = False
    buffers: Buffers | None = None
    state_dict: Callable[[Any, Any, Tensor | None], dict[str, Tensor]] | None = None
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        if self.stages is not None and (self.draws or self.buffers is not None):
            raise ScenarioError(
                f"problem {self.name!r} has stages, which are computed once and used in many steps, and "
                "draws random numbers or has buffers, which change; leave out `stages`"
            )
        if self.network is not None:
            given = self.inner_loss not in (_as_inner, self.network.inner_loss)
            given |= self.outer_loss not in (_as_inner, self.network.outer_loss)
            if given or self.stages is not None:
                raise ScenarioError(
                    f"problem {self.name!r} has a network, which says what its losses are; leave out "
                    "`inner_loss`, `outer_loss` and `stages`, or the network"
                )
            object.__setattr__(self, "inner_loss", self.network.inner_loss)
            object.__setattr__(self, "outer_loss", self.network.outer_loss)
        if self.inner_loss is _as_inner:
            if self.stages is None:
                raise ScenarioError(
                    f"problem {self.name!r} has no inner_loss; give it one, `stages` or a `network`"
                )
            object.__setattr__(self, "inner_loss", functools.partial(_staged, self.stages))
        if self.outer_loss is _as_inner:
            object.__setattr__(self, "outer_loss", self.inner_loss)
        for metric in self.metrics:
            if metric in OWN_COLUMNS or metric.startswith("validation_"):
                raise ScenarioError(
                    f"a metric of problem {self.name!r} is called {metric!r}, as a column of every run is; "
                    "give it another name (not validation_…, nor one of "
                    + ", ".join(sorted(OWN_COLUMNS))
                    + ")"
                )

    def __repr__(self) -> str:
        made = "" if self.recipe is None else f"\n  made by   {self.recipe}"
        metrics = ", ".join(self.metrics) or "none"
        return f"<Problem {self.name}\n  data      {self.data!r}\n  metrics   {metrics}{made}>"

    @property
    def clients(self) -> int:
        return self.data.clients

    @property
    def outer_data(self) -> ClientShards:
        """The samples that the outer loss is over."""
        return self.data.validation if self.outer_split == "validation" else self.data.train

    @property
    def sample_sizes(self) -> dict[Level, npt.NDArray[np.int64]]:
        """How many samples each client has of either loss."""
        return {"inner": self.data.train.sizes, "outer": self.outer_data.sizes}

    @property
    def local_buffers(self) -> Tensor | None:
        """One client's at the beginning, where they stay at their client."""
        return None if self.buffers is None or self.buffers.kept != "local" else self.buffers.row

    @property
    def averaged_buffers(self) -> int:
        """How many of the last numbers of the inner variable are buffers."""
        return self.buffers.row.numel() if self.buffers is not None and self.buffers.kept == "averaged" else 0

    def beside(self, like: Tensor, buffers: Tensor | None = None) -> tuple[Tensor, ...]:
        """What stands beside the samples of some clients where nothing is trained: one row of `like` each."""
        rows: tuple[Tensor, ...] = ()
        if self.draws:
            rows += (torch.zeros(len(like), dtype=torch.int64, device=like.device),)
        if (first := self.local_buffers) is not None:
            rows += (first.to(like).expand(len(like), -1) if buffers is None else buffers,)
        return rows

    def measured(self, inner: Any, outer: Any, batch: Batch) -> dict[str, Tensor]:
        """Every metric of every sample."""
        if self.joint_metrics is not None:
            return self.joint_metrics(inner, outer, batch)
        return {name: metric(inner, outer, batch) for name, metric in self.metrics.items()}


def problem_factory(function: Callable[P, Problem]) -> Callable[P, Problem]:
    """Register a function that makes problems under its own name, and have it attach a recipe to each."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def factory(*args: P.args, **kwargs: P.kwargs) -> Problem:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        problem = function(*args, **kwargs)
        try:
            arguments = {name: to_data(value, strict=True) for name, value in bound.arguments.items()}
        except NotPlainError:
            return problem
        return dataclasses.replace(problem, recipe=Recipe(function.__name__, arguments))

    return register("problem")(factory)


def recipe_type(cls: type[T]) -> type[T]:
    """Let a frozen dataclass stand among a factory's arguments and still be written down in a recipe."""
    return register("option")(cls)


@checked
def problem_from_recipe(data: Mapping[str, Any]) -> Problem:
    """Build the problem that a recipe (as `Recipe.as_dict` writes it) describes."""
    if set(data) != {"factory", "arguments"}:
        raise ScenarioError(
            f"a recipe has the keys 'factory' and 'arguments'; this one has {shown(list(data))}"
        )
    recipe, factories = Recipe(data["factory"], data["arguments"]), registered("problem")
    name = recipe.factory
    if name not in factories:
        raise UnknownNameError("problem", name, factories, ONE_OF_YOUR_OWN)
    known = inspect.signature(factories[name]).parameters
    for argument in recipe.arguments:
        if argument not in known:
            raise UnknownNameError(f"argument of problem {name!r}", argument, known)
    arguments = {key: from_data(value, "a recipe") for key, value in recipe.arguments.items()}
    problem: Problem = factories[name](**arguments)
    return problem
