"""A problem from any torch module.

    problem = from_module(Net, data)                  # a class or function that makes it: drawn from the seed
    problem = from_module(net, data)                  # this very module: its weights are the beginning
    problem = from_module(Net, data, outer="head")    # head.weight and head.bias are the outer variable

The module is called through torch's functional_call and never changed. Its training mode is for inner losses,
its evaluation mode for metrics and for the outer loss. What it draws (dropout) comes from the client's own
stream (`draws`). What it notes (BatchNorm) is buffers: each client's own, or averaged with the model, or
frozen. Parameters that need no gradient, and buffers that training does not change, are constants.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from asyncfed.checks import Words, checked, shown
from asyncfed.data import ClientData
from asyncfed.errors import OneByOneWarning, ScenarioError
from asyncfed.models import borrowed_random_state, has_convolutions
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.draws import drawn_from
from asyncfed.problems.layout import Params
from asyncfed.problems.perceptron import written_out
from asyncfed.problems.problem import Batch, Buffers, Loss, OuterSplit, Problem, no_outer

PerSample = Callable[[Any, Tensor], Tensor]
Chosen = str | Sequence[str] | Callable[[str], bool] | None

_LOSSES: dict[str, PerSample] = {
    "cross_entropy": partial(nn.functional.cross_entropy, reduction="none"),
    "mse": partial(nn.functional.mse_loss, reduction="none"),
    "binary_cross_entropy": partial(nn.functional.binary_cross_entropy_with_logits, reduction="none"),
}


@checked
def from_module(
    module: nn.Module | type[nn.Module] | Callable[[], nn.Module],
    data: Annotated[
        ClientData,
        Words("ClientData: asyncfed.data.client_data makes it of arrays, lists, datasets and tables"),
    ],
    loss: str | nn.Module | Callable[[Any, Tensor], Tensor] = "cross_entropy",
    *,
    outer: Chosen = None,
    buffers: Literal["local", "averaged", "frozen"] = "local",
    metrics: Mapping[str, PerSample] | None = None,
    outer_split: OuterSplit = "validation",
    name: str | None = None,
) -> Problem:
    """The problem of training a torch module.

    Parameters
    ----------
    module
        A module, whose weights are where everybody begins; or a class or function without arguments that
        makes one, which is then drawn from the run's seed.
    data
        What the clients have (`asyncfed.data.client_data` makes it of arrays, datasets and tables). The last
        tensor of a sample is the target, those before it are what the module is called with. Samples of a
        single tensor are their own targets.
    loss
        "cross_entropy", "mse", "binary_cross_entropy" (of logits), a loss of torch, or a function
        (output, target) → one number for each sample.
    outer
        Which parameters are the outer variable: those whose name begins with this (or one of these), or for
        which the function is true. All others are the inner one. None: all are inner.
    buffers
        What becomes of what the module notes in training (the running statistics of BatchNorm). "local": they
        stay at their client. "averaged": they travel with the model, and are averaged as it is. "frozen":
        such layers use what they were given, in training too, and it never changes.
    metrics
        More of what is measured, beside the loss (and with cross entropy the accuracy): functions
        (output, target) → one number for each sample.
    outer_split
        The samples of the outer loss, which is the same loss in evaluation mode.
    """
    made = _made(module)
    network = _Network.of(made, data, outer, buffers)
    per_sample = _per_sample(loss)
    given = module if not isinstance(module, nn.Module) else None
    train = _Loss(network, per_sample, training=True)
    judged = _Loss(network, per_sample, training=False)
    measures: dict[str, PerSample] = {"loss": per_sample}
    if per_sample is _LOSSES["cross_entropy"]:
        measures["accuracy"] = _correct
    for key, measure in (metrics or {}).items():
        if not isinstance(key, str) or not callable(measure):
            raise ScenarioError(
                f"metric {key!r} is {shown(measure)}; metrics are functions (output, target) by name, and "
                "return one number for each sample"
            )
        measures[key] = measure
    kept = Buffers(network.row, train.and_buffers, network.kept) if network.kept else None
    problem = Problem(
        name=name or type(made).__name__,
        data=data,
        init_inner=_Begin(network, made, given, "inner"),
        init_outer=_Begin(network, made, given, "outer") if network.outer else no_outer,
        inner_loss=_to_train_by(train, made, data),
        outer_loss=judged,
        metrics={key: _Metric(network, measure) for key, measure in measures.items()},
        joint_metrics=_Metrics(network, measures),
        outer_split=outer_split,
        vectorize=not has_convolutions(made),
        draws=network.draws,
        buffers=kept,
        state_dict=network.state_dict,
    )
    network.try_out(problem)
    return network.one_by_one_if_needed(problem)


def _made(module: object) -> nn.Module:
    """A module of its own: nobody else's is changed."""
    if isinstance(module, nn.Module):
        return copy.deepcopy(module)
    if not callable(module):
        raise ScenarioError(
            f"module is a {type(module).__name__}; it must be a torch.nn.Module, or a class or function "
            "without arguments that makes one"
        )
    try:
        with borrowed_random_state(0):
            made = module()
    except TypeError as error:
        raise ScenarioError(
            f"{getattr(module, '__name__', module)} cannot make a module without arguments ({error}); give a "
            "module, or a function: lambda: Net(10)"
        ) from error
    if not isinstance(made, nn.Module):
        raise ScenarioError(
            f"{getattr(module, '__name__', module)} makes a {type(made).__name__}; it must make a "
            "torch.nn.Module"
        )
    return made


@dataclass(frozen=True, eq=False)
class _Network:
    """A module without values, and the names of what it is called with.

    `moving` are its buffers that training changes, by name, as they are at first; `constants` what nothing
    changes; `scratch` those of the constants that training would change, if they were not frozen.
    """

    train: nn.Module
    eval: nn.Module
    inner: tuple[str, ...]
    outer: tuple[str, ...]
    moving: dict[str, Tensor]
    constants: dict[str, Tensor]
    scratch: tuple[str, ...]
    order: tuple[str, ...]  # of a state_dict
    kept: Literal["local", "averaged"] | None
    draws: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "_placed", {})  # the constants, by device and precision

    @classmethod
    def of(cls, module: nn.Module, data: ClientData, outer: Chosen, buffers: str) -> _Network:
        learned = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not learned:
            raise ScenarioError(
                f"{type(module).__name__} has no parameters that need a gradient: nothing to learn"
            )
        chosen = _chosen(outer, tuple(learned))
        module.train()
        if buffers == "frozen":
            for layer in module.modules():
                if isinstance(layer, nn.modules.batchnorm._NormBase):
                    layer.eval()
        noted, draws = _noted(module, data)
        moving = {} if buffers == "frozen" else noted
        constants = {
            key: value.detach().clone()
            for key, value in (*module.named_parameters(), *module.named_buffers())
            if key not in learned and key not in moving
        }
        order = tuple(module.state_dict())
        skeleton = copy.deepcopy(module).to("meta")
        kept: Any = buffers if moving else None
        return cls(
            skeleton, copy.deepcopy(skeleton).eval(),
            tuple(key for key in learned if key not in chosen), chosen, moving, constants,
            tuple(noted) if buffers == "frozen" else (), order, kept, draws,
        )  # fmt: skip

    @property
    def row(self) -> Tensor:
        """The moving buffers, flat."""
        return torch.cat([value.reshape(-1).double() for value in self.moving.values()])

    def named(self, row: Tensor) -> dict[str, Tensor]:
        """The moving buffers of a flat row, in their own types."""
        pieces = torch.split(row, [value.numel() for value in self.moving.values()])
        return {
            key: _typed(piece, value).view(value.shape)
            for (key, value), piece in zip(self.moving.items(), pieces, strict=True)
        }

    def call(
        self, inner: Any, outer: Any, batch: Batch, *, training: bool
    ) -> tuple[Any, Tensor, Tensor | None]:
        """The output, the target, and the buffers after it (None where there are none that move)."""
        local = self.kept == "local"
        row = batch[-1] if local else None
        key = batch[-2 if local else -1] if self.draws else None
        samples = batch[: len(batch) - local - self.draws]
        inputs = samples[:-1] or samples
        values: dict[str, Tensor] = {**self._constants_like(inner), **outer, **inner}
        if self.kept:
            tail = inner[_TAIL] if row is None else row
            values |= {name: value.detach().clone() for name, value in self.named(tail).items()}
            values.pop(_TAIL, None)
        values |= {name: values[name].clone() for name in self.scratch}
        module = self.train if training else self.eval
        if key is None:
            found = functional_call(module, values, tuple(inputs))
        else:
            with drawn_from(key):
                found = functional_call(module, values, tuple(inputs))
        if not self.kept:
            return found, samples[-1], None
        like = next(iter(inner.values()))
        after = torch.cat([values[name].reshape(-1).to(like.dtype) for name in self.moving])
        return found, samples[-1], after.detach()

    def _constants_like(self, inner: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where, and as precise as, the variables are."""
        like = next(iter(inner.values()))
        known: dict[Any, dict[str, Tensor]] = getattr(self, "_placed")  # noqa: B009 (no field)
        place = (like.device, like.dtype)
        if place not in known:
            known[place] = {
                key: value.to(like.device, like.dtype if value.is_floating_point() else None)
                for key, value in self.constants.items()
            }
        return known[place]

    def state_dict(self, inner: Any, outer: Any, buffers: Tensor | None) -> dict[str, Tensor]:
        """Of one client, what the module loads."""
        values: dict[str, Tensor] = {**self.constants, **outer, **inner}
        if self.kept:
            row = values.pop(_TAIL, None) if self.kept == "averaged" else buffers
            if row is None:
                raise ScenarioError(
                    "the module's buffers are each client's own (buffers='local'); say of which client the "
                    "model is wanted"
                )
            values |= self.named(row)
        return {key: values[key].detach().clone() for key in self.order}

    def try_out(self, problem: Problem) -> None:
        """Call it once as it will be called: mistakes are told at once, and nothing is drawn unnoticed."""
        inner = problem.init_inner(torch.Generator().manual_seed(0))
        outer = problem.init_outer(torch.Generator().manual_seed(0))
        batch = _few(problem.data, problem)
        losses = []
        for seed in (0, 1):
            with borrowed_random_state(seed), torch.no_grad():
                losses.append(problem.inner_loss(inner, outer, batch))
        if not torch.equal(*losses) and all(torch.isfinite(value) for value in losses):
            raise ScenarioError(
                f"{problem.name} draws random numbers that cannot be repeated on every backend; draw by "
                "torch.nn.Dropout, torch.rand, torch.randn or torch.bernoulli in its forward"
            )

    def one_by_one_if_needed(self, problem: Problem) -> Problem:
        """Whether all clients can be computed at once is tried, not guessed."""
        if not problem.vectorize:
            return problem
        derivatives = Derivatives.of(problem)
        inner = derivatives.inner.flatten(problem.init_inner(torch.Generator().manual_seed(0))).detach()
        outer = derivatives.outer.flatten(problem.init_outer(torch.Generator().manual_seed(0))).detach()
        x, lam = inner.expand(2, -1).contiguous(), outer.to(inner).expand(2, -1).contiguous()
        batch = tuple(tensor.expand(2, *tensor.shape).contiguous() for tensor in _few(problem.data, problem))
        try:
            derivatives.inner_gradient(x, lam, batch)
            if self.outer:
                derivatives.inner_second_vectors(x, lam, batch, (x,))
        except (RuntimeError, ScenarioError) as error:
            warnings.warn(
                OneByOneWarning(
                    f"{problem.name} cannot be run for many clients at once, so that they are computed one "
                    f"after the other, which is slower for small networks: {str(error).splitlines()[0]}"
                ),
                stacklevel=4,
            )
            return replace(problem, vectorize=False)
        return problem


_TAIL = "(buffers)"  # their name in the inner variable, where they are averaged with it


def _typed(piece: Tensor, like: Tensor) -> Tensor:
    return piece if like.is_floating_point() else piece.round().to(like.dtype)


def _chosen(outer: Chosen, names: tuple[str, ...]) -> tuple[str, ...]:
    """The parameters that are the outer variable."""
    if outer is None:
        return ()
    if callable(outer):
        chosen = tuple(name for name in names if outer(name))
        if not chosen:
            raise ScenarioError(f"outer chooses none of the parameters {', '.join(names)}")
    else:
        wanted = (outer,) if isinstance(outer, str) else tuple(outer)
        for one in wanted:
            if not isinstance(one, str) or not any(_begins(name, one) for name in names):
                raise ScenarioError(
                    f"outer names {shown(one)}, and no parameter begins with that; there are "
                    f"{', '.join(names)}"
                )
        chosen = tuple(name for name in names if any(_begins(name, one) for one in wanted))
    if len(chosen) == len(names):
        raise ScenarioError(
            "outer takes all parameters, and leaves none to the inner variable; choose some of "
            f"{', '.join(names)}"
        )
    return chosen


def _begins(name: str, prefix: str) -> bool:
    """ "head" stands for head.weight, not for header.weight."""
    return name == prefix or name.startswith(prefix if prefix.endswith(".") else prefix + ".")


def _noted(module: nn.Module, data: ClientData) -> tuple[dict[str, Tensor], bool]:
    """The buffers that a training step changes, as they are before it; and whether anything is drawn."""
    before = {name: value.detach().clone() for name, value in module.named_buffers()}
    trial = copy.deepcopy(module)
    samples = _two(data)
    with borrowed_random_state(0), torch.no_grad():
        state = torch.default_generator.get_state()
        try:
            trial(*(samples[:-1] or samples))
        except Exception as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in samples[:-1] or samples)
            raise ScenarioError(
                f"{type(module).__name__} cannot be called with two samples (tensors of shape {shapes}): "
                f"{error}"
            ) from error
        drew = not torch.equal(state, torch.default_generator.get_state())
    noted = {
        name: before[name]
        for name, value in trial.named_buffers()
        if value.shape != before[name].shape or not torch.equal(value, before[name])
    }
    return noted, drew


def _two(data: ClientData) -> tuple[Tensor, ...]:
    """Two samples of a client, in single precision; the same one twice where it has no other."""
    client = int(data.train.sizes.argmax())
    few = tuple(tensor[:2] for tensor in data.train.of(client))
    few = tuple(torch.cat((tensor, tensor)) if len(tensor) == 1 else tensor for tensor in few)
    return tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in few)


def _few(data: ClientData, problem: Problem) -> Batch:
    return _two(data) + tuple(row[0] for row in problem.beside(torch.zeros(1)))


@dataclass(frozen=True, eq=False)
class _Begin:
    """The initial values of one of the variables."""

    network: _Network
    module: nn.Module
    factory: Callable[[], nn.Module] | None
    which: Literal["inner", "outer"]

    def __call__(self, generator: torch.Generator) -> Params:
        module = self.module
        if self.factory is not None:
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
            with borrowed_random_state(seed):
                module = self.factory()
        own = dict(module.named_parameters())
        names = self.network.inner if self.which == "inner" else self.network.outer
        values = {name: own[name].detach().clone() for name in names}
        if self.which == "inner" and self.network.kept == "averaged":
            values[_TAIL] = self.network.row.to(next(iter(values.values())))
        return values


@dataclass(frozen=True, eq=False)
class _Loss:
    """The mean over the samples of a batch."""

    network: _Network
    per_sample: PerSample
    training: bool

    def __call__(self, inner: Any, outer: Any, batch: Batch) -> Tensor:
        return self.and_buffers(inner, outer, batch)[0]

    def and_buffers(self, inner: Any, outer: Any, batch: Batch) -> tuple[Tensor, Any]:
        """And the buffers after it."""
        output, target, moved = self.network.call(inner, outer, batch, training=self.training)
        return _each(self.per_sample, output, target, "the loss").mean(), moved


def _to_train_by(loss: _Loss, module: nn.Module, data: ClientData) -> Loss:
    """The loss; that of a perceptron, all of whose parameters are learned, knows its derivatives."""
    network, (*inputs, labels) = loss.network, data.train.tensors
    plain = (
        loss.per_sample is _LOSSES["cross_entropy"]
        and not (network.outer or network.constants or network.kept or network.draws)
        and len(inputs) == 1
        and (labels.ndim, labels.dtype) == (1, torch.int64)
        and int(labels.min()) >= 0  # a negative one may be torch's sign for: leave it out
    )
    return written_out(loss, module, inputs[0].shape[1:]) if plain else loss


@dataclass(frozen=True, eq=False)
class _Metric:
    """One, of each sample."""

    network: _Network
    measure: PerSample

    def __call__(self, inner: Any, outer: Any, batch: Batch) -> Tensor:
        output, target, _ = self.network.call(inner, outer, batch, training=False)
        return _each(self.measure, output, target, "a metric")


@dataclass(frozen=True, eq=False)
class _Metrics:
    """All of them, of each sample, from one pass."""

    network: _Network
    measures: Mapping[str, PerSample]

    def __call__(self, inner: Any, outer: Any, batch: Batch) -> dict[str, Tensor]:
        output, target, _ = self.network.call(inner, outer, batch, training=False)
        return {
            name: _each(measure, output, target, f"metric {name!r}")
            for name, measure in self.measures.items()
        }


def _each(measure: PerSample, output: Any, target: Tensor, what: str) -> Tensor:
    """One number for each sample: where there are more (of positions, of outputs), their mean."""
    found = measure(output, target)
    if not isinstance(found, Tensor) or not found.ndim or len(found) != len(target):
        form = (
            f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        )
        raise ScenarioError(
            f"{what} returns {form} for {len(target)} samples; it must return one number for each sample "
            "(reduction='none')"
        )
    return found if found.ndim == 1 else found.flatten(1).mean(1)


def _correct(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).to(output.dtype)


def _per_sample(loss: object) -> PerSample:
    """A loss that returns one number for each sample."""
    if isinstance(loss, str):
        if loss not in _LOSSES:
            raise ScenarioError(
                f"loss is {shown(loss)}; it must be {', '.join(map(repr, _LOSSES))}, a loss of torch, or a "
                "function (output, target) → one number for each sample"
            )
        return _LOSSES[loss]
    if isinstance(loss, nn.Module):
        if any(True for _ in loss.parameters()):
            raise ScenarioError(
                f"the loss {type(loss).__name__} has parameters, which nobody would learn; make it part of "
                "the module"
            )
        own = copy.deepcopy(loss)
        if hasattr(own, "reduction"):
            own.reduction = "none"  # type: ignore[assignment]
        return _LOSSES["cross_entropy"] if _plain_cross_entropy(own) else own
    if not callable(loss):
        raise ScenarioError(
            f"loss is {shown(loss)}; it must be {', '.join(map(repr, _LOSSES))}, a loss of torch, or a "
            "function (output, target) → one number for each sample"
        )
    if loss is nn.functional.cross_entropy:
        return _LOSSES["cross_entropy"]
    try:
        reduces = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # built in: it says nothing of itself
        reduces = False
    return partial(loss, reduction="none") if reduces else loss


def _plain_cross_entropy(loss: nn.Module) -> bool:
    return (
        type(loss) is nn.CrossEntropyLoss
        and loss.weight is None
        and loss.label_smoothing == 0.0
        and loss.ignore_index == -100
    )
