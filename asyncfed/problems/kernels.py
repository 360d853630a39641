"""The functions of one client that a problem's derivatives and metrics come from, run for many clients.

A *kernel* is a function of one client's named parameters; it runs through vmap over all k clients or, where
the problem says so, client by client. Second derivatives are reverse over reverse (a vector-Jacobian product
of a gradient), which is what measures fastest under vmap. Results are written once, already scaled, into
their flat rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vjp, vmap

from asyncfed.errors import ScenarioError
from asyncfed.problems.layout import Layout, Params
from asyncfed.problems.one_client import Scale, put
from asyncfed.problems.problem import Batch, Level, Problem

Kernel = Callable[..., tuple[Params, ...]]


class Kernels:
    """Those of one problem, by name."""

    def __init__(self, problem: Problem, inner: Layout, outer: Layout) -> None:
        self._problem, self._inner, self._outer = problem, inner, outer
        self._functions = {name: self._lifted(kernel) for name, kernel in _kernels(problem).items()}

    def __getitem__(self, name: str) -> Kernel:
        """For stacked parameters, where the problem can be vectorized; else for one client's."""
        return self._functions[name]

    def one(
        self, name: str, layout: Layout, x: Tensor, lam: Tensor, batch: Batch, *directions: Params
    ) -> Tensor:
        """What a kernel returns alone, in rows (k, layout.d)."""
        out = x.new_empty(len(x), layout.d)
        if layout.d:
            self.run(name, (x, lam, batch, *directions), ((layout, out, None),))
        return out

    @torch.no_grad()
    def run(
        self, name: str, arguments: tuple[Any, ...], outputs: tuple[tuple[Layout, Tensor, Scale | None], ...]
    ) -> None:
        """Call a kernel on (x, lam, batch, *directions) for every client and write what it returns."""
        x, lam, *rest = arguments
        stacked = (self._inner.views(x), self._outer.views(lam), *rest)
        if self._problem.vectorize:
            results = self._functions[name](*stacked)
            for result, (layout, out, scale) in zip(results, outputs, strict=True):
                _write(layout, result, layout.views(out), scale)
            return
        for i in range(len(x)):
            results = self._functions[name](*row_of(stacked, i))
            for result, (layout, out, scale) in zip(results, outputs, strict=True):
                _write(layout, result, layout.views_one(out[i]), scale_of(scale, i))

    def _lifted(self, kernel: Kernel) -> Kernel:
        if not self._problem.vectorize:
            return kernel
        mapped, name = vmap(kernel), self._problem.name

        def lifted(*arguments: Any) -> tuple[Params, ...]:
            try:
                return mapped(*arguments)
            except RuntimeError as error:
                if "vmap" not in str(error):
                    raise
                raise ScenarioError(
                    f"the functions of problem {name!r} cannot be run for many clients at "
                    "once; give it vectorize=False to run them one by one, or "
                    f"rewrite the line that torch.vmap refuses: {error}"
                ) from error

        return lifted


class ByLeaves:
    """The same of variables that come leaf by leaf, as `Replay` records it."""

    def __init__(self, kernels: Kernels, inner: Layout, outer: Layout) -> None:
        self._kernels, self._inner, self._outer = kernels, inner, outer

    def gradients(self, level: Level, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gradients leaf by leaf, and the losses, from variables leaf by leaf and a batch."""
        inner, outer = len(self._inner.sizes), len(self._outer.sizes)
        x, lam = self._inner.of_leaves(tensors[:inner]), self._outer.of_leaves(tensors[inner : inner + outer])
        kernel, layout = (
            ("inner_gradient", self._inner) if level == "inner" else ("outer_gradient_outer", self._outer)
        )
        gradient, loss, *buffers = self._kernels[kernel](x, lam, tensors[inner + outer :])
        assert isinstance(loss, Tensor)
        return (*layout.leaves(gradient), loss, *(row for row in buffers if isinstance(row, Tensor)))

    def hessian_vector(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """∂_x (∇_x f · u), leaf by leaf, from x, u and lam leaf by leaf and a batch."""
        inner, outer = len(self._inner.sizes), len(self._outer.sizes)
        x, u = (self._inner.of_leaves(tensors[at : at + inner]) for at in (0, inner))
        lam = self._outer.of_leaves(tensors[2 * inner : 2 * inner + outer])
        (found,) = self._kernels["inner_hessian_vectors"](x, lam, tensors[2 * inner + outer :], (u,))
        return tuple(self._inner.leaves(found))


def _kernels(problem: Problem) -> dict[str, Kernel]:
    """Functions of one client's (inner, outer, batch, direction) that return tuples of Params."""
    f, F = problem.inner_loss, problem.outer_loss
    f_by_x, f_by_lam = grad(f, argnums=0), grad(f, argnums=1)
    buffers = problem.buffers

    def inner_gradient(x: Params, lam: Params, batch: Batch) -> tuple[Params, ...]:
        assert buffers is not None
        gradient, (value, moved) = grad_and_value(buffers.loss, argnums=0, has_aux=True)(x, lam, batch)
        return gradient, value, moved

    def outer_gradients(x: Params, lam: Params, batch: Batch) -> tuple[Params, ...]:
        (by_x, by_lam), value = grad_and_value(F, argnums=(0, 1))(x, lam, batch)
        return by_x, by_lam, value

    def hessian_vectors(
        x: Params, lam: Params, batch: Batch, directions: tuple[Params, ...]
    ) -> tuple[Params, ...]:
        pull = vjp(lambda x_: f_by_x(x_, lam, batch), x)[1]
        return tuple(pull(u)[0] for u in directions)

    def second_vectors(
        x: Params, lam: Params, batch: Batch, directions: tuple[Params, ...]
    ) -> tuple[Params, ...]:
        pull = vjp(lambda x_, lam_: f_by_x(x_, lam_, batch), x, lam)[1]
        return tuple(part for u in directions for part in pull(u))

    def metrics(x: Params, lam: Params, batch: Batch) -> tuple[Params, ...]:
        found = problem.measured(x, lam, batch)
        return tuple(found[name] for name in problem.metrics)

    return {
        "inner_gradient": grad_and_value(f, argnums=0) if buffers is None else inner_gradient,
        "inner_outer_gradient": lambda x, lam, batch: (f_by_lam(x, lam, batch),),
        "inner_hessian_vectors": hessian_vectors,
        "inner_second_vectors": second_vectors,
        "inner_cross_vector": lambda x, lam, batch, u: vjp(lambda lam_: f_by_x(x, lam_, batch), lam)[1](u),
        "inner_cross_transposed": lambda x, lam, batch, w: vjp(lambda x_: f_by_lam(x_, lam, batch), x)[1](w),
        "outer_gradients": outer_gradients,
        "outer_gradient_inner": grad_and_value(F, argnums=0),
        "outer_gradient_outer": grad_and_value(F, argnums=1),
        "metrics": metrics,
    }


def _write(layout: Layout, result: Params, target: Params, scale: Scale | None) -> None:
    for tensor, view in zip(layout.leaves(result), layout.leaves(target), strict=True):
        put(tensor, view, scale)


def scale_of(scale: Scale | None, i: int) -> Scale | None:
    """Client i's."""
    return scale[i, 0] if isinstance(scale, Tensor) else scale


def row_of(tree: Any, i: int) -> Any:
    """Client i's part of stacked parameters and batches."""
    if isinstance(tree, Tensor):
        return tree[i]
    if isinstance(tree, dict):
        return {name: tensor[i] for name, tensor in tree.items()}
    return tuple(row_of(part, i) for part in tree)
