"""Replaying a function of tensors: the operations of one call, recorded, and run again by themselves.

For a small network most of the time of `vmap(grad(f))` is spent on finding out which operations to run. They
depend on the shapes of the arguments only (a function that looks at values cannot be vmapped at all), so
after some calls of the same shapes they are recorded once, and from then on just run: the same operations in
the same order, in a third of the time.

That is right for a pure function only. One that also reads a number or a tensor which somebody changes (a
counter, an attribute) would stop to move once it is recorded. So a recording is used only if it gives the
very numbers of the function itself, and this is asked again at certain calls (see `_asked`), which the number
of the call decides and nothing else. Where the numbers differ, a second recording tells why: other operations
or other constants mean that the function changed, which is an error; the same ones mean that the machine does
not round them alike, and then the function is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncfed.errors import ScenarioError

_WORTH_IT = 24  # calls of the same shapes, after which recording (a tenth of a second) pays
_FORMS = 16  # recordings of one function: where shapes change all the time, each would be used little
_MOST = 1000  # operations; a longer list (an unrolled LSTM) takes long to record and gains little
_ASK_EVERY = 256  # replays; for a small network, at seven times the price of one, that is three percent

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(slots=True)
class _Form:
    """Arguments of certain shapes."""

    calls: int = 0
    recorded: Any = None


class Replay:
    """A pure function of tensors that returns tensors; `what` is its name in an error."""

    def __init__(self, function: Function, what: str = "the function") -> None:
        self._function = function
        self._what = what
        self._forms: dict[Any, _Form] = {}
        self._recordings = 0

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        key = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = _Form()
        form.calls += 1
        if form.recorded is not None:
            found: tuple[Tensor, ...] = form.recorded(*tensors)
            if _asked(form.calls - _WORTH_IT):
                self._compare(form, found, self._function(*tensors), tensors)
            return found
        if form.calls != _WORTH_IT or self._recordings >= _FORMS:
            return self._function(*tensors)
        count = _Count()  # type: ignore[no-untyped-call]
        with count:
            result = self._function(*tensors)
        if count.operations <= _MOST:
            form.recorded = self._recording(tensors)
            self._recordings += 1
            self._compare(form, form.recorded(*tensors), result, tensors)
        return result

    def _recording(self, tensors: tuple[Tensor, ...]) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        recorded = make_fx(self._function)(*tensors)
        # A Hessian product differentiates a gradient whose value nobody wants: a quarter of its work.
        recorded.graph.eliminate_dead_code()
        recorded.recompile()
        return recorded

    def _compare(
        self,
        form: _Form,
        found: tuple[Tensor, ...],
        real: tuple[Tensor, ...],
        tensors: tuple[Tensor, ...],
    ) -> None:
        """Refuse a function that changed; give up a recording that does not find what the function does."""
        if _all_equal(found, real):
            return
        moves = tensors[0].device.type == "cpu" and not _all_equal(real, self._function(*tensors))
        if moves or not _same(form.recorded, self._recording(tensors)):
            raise ScenarioError(
                f"{self._what} changed between calls for the same arguments; it must be a pure function of "
                "(inner, outer, batch): what changes while a run goes belongs into the outer variable or the "
                "samples, or into a schedule of the learning rate"
            )
        form.recorded = None


def _asked(replays: int) -> bool:
    """Powers of two, for what moves all the time; then ever again, for what changes once."""
    return replays & (replays - 1) == 0 or replays % _ASK_EVERY == 0


def _same(one: Any, other: Any) -> bool:
    """Whether two recordings have the same operations and constants."""
    names = {node.target for node in one.graph.nodes if node.op == "get_attr"}
    return bool(one.code == other.code) and all(
        _equal(getattr(one, name), getattr(other, name)) for name in names
    )


def _all_equal(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return all(_equal(a, b) for a, b in zip(some, others, strict=True))


def _equal(a: Tensor, b: Tensor) -> bool:
    """To the last bit; a NaN is equal to a NaN."""
    return torch.equal(a, b) or (
        a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations."""

    operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))
