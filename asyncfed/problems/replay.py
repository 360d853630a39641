"""Replaying a function of tensors: the operations of one call, recorded, and run again by themselves.

For a small network most of the time of `vmap(grad(f))` is spent on finding out which operations to run. They
depend on the shapes of the arguments only (a function that looks at values cannot be vmapped at all), so
after some calls of the same shapes they are recorded once, and from then on just run: the same operations in
the same order, in a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_WORTH_IT = 24  # calls of the same shapes, after which recording (a tenth of a second) pays
_MOST = 1000  # operations; a longer list (an unrolled LSTM) takes long to record and gains little

Function = Callable[..., tuple[Tensor, ...]]


class Replay:
    """A function of tensors that returns tensors, without side effects."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._calls: dict[Any, int] = {}
        self._recorded: dict[Any, Function] = {}

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        key = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        recorded = self._recorded.get(key)
        if recorded is not None:
            return recorded(*tensors)
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        if calls != _WORTH_IT:
            return self._function(*tensors)
        count = _Count()  # type: ignore[no-untyped-call]
        with count:
            result = self._function(*tensors)
        if count.operations <= _MOST:
            from torch.fx.experimental.proxy_tensor import make_fx

            self._recorded[key] = make_fx(self._function)(*tensors)
        return result


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations."""

    operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))
