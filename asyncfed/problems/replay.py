"""Replaying a vmapped kernel: the operations of one call, recorded, and run again without vmap and autograd.

For a small network most of the time of `vmap(grad(f))` is spent on finding out which operations to run. They
depend on the shapes of the arguments only (a function that looks at values cannot be vmapped at all), so
after a few calls of the same shapes they are recorded once and from then on just run: the same operations in
the same order, in a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

_WORTH_IT = 24  # calls of the same shapes, after which recording (a tenth of a second) pays


class Replay:
    """A function of tensors in dicts and tuples, without side effects."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._calls: dict[Any, int] = {}
        self._recorded: dict[Any, Callable[..., list[torch.Tensor]]] = {}
        self._results: dict[Any, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        leaves, form = tree_flatten(arguments)
        key = (
            tuple((leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves),
            tuple(map(_shape_of, arguments)),
        )
        recorded = self._recorded.get(key)
        if recorded is not None:
            return tree_unflatten(recorded(*leaves), self._results[key])
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        if calls > _WORTH_IT:
            self._record(key, leaves, form)
        return self._function(*arguments)

    def _record(self, key: Any, leaves: list[torch.Tensor], form: Any) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
            results, self._results[key] = tree_flatten(self._function(*tree_unflatten(list(tensors), form)))
            return results

        self._recorded[key] = make_fx(flat)(*leaves)


def _shape_of(tree: Any) -> Any:
    """How tensors are nested, and under which names."""
    if isinstance(tree, dict):
        return tuple(tree)
    if isinstance(tree, tuple):
        return tuple(map(_shape_of, tree))
    return None
