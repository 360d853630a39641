"""One client's derivatives, by plain autograd; what `WrittenOut` does by hand where a network allows it.

For a single client that is faster than torch.func, which besides loads the compiler and sympy at its first
gradient (85 MB and two seconds, in every actor). Nothing is replayed here, so nobody notices a loss that is
no pure function: it is called as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from asyncfed.problems.layout import Layout
from asyncfed.problems.problem import Batch, Level, Problem

Scale = float | Tensor
Row = tuple[Tensor, Scale | None]
"""Where something goes, and what it is multiplied by before."""


class OneClient(Protocol):
    """Derivatives of a client with inner variable x (d,) and outer variable lam (d_outer,)."""

    def gradients(
        self,
        level: Level,
        x: Tensor,
        lam: Tensor,
        batch: Batch,
        by_x: Row | None,
        by_lam: Row | None = None,
        moved: Tensor | None = None,
    ) -> Tensor:
        """Of the inner or the outer loss, by either variable where there is room for it; returns the loss. In
        `moved`, where given, the buffers after it.
        """

    def second(
        self,
        x: Tensor,
        lam: Tensor,
        batch: Batch,
        directions: Sequence[Tensor],
        by_x: Sequence[Row],
        by_lam: Sequence[Row],
    ) -> None:
        """∂_x (∇_x f · u) and ∂_λ (∇_x f · u) for every direction u; either may be asked for or not."""


class ByAutograd:
    """Of any problem."""

    def __init__(self, problem: Problem, inner: Layout, outer: Layout) -> None:
        self._problem, self._inner, self._outer = problem, inner, outer

    def gradients(
        self,
        level: Level,
        x: Tensor,
        lam: Tensor,
        batch: Batch,
        by_x: Row | None,
        by_lam: Row | None = None,
        moved: Tensor | None = None,
    ) -> Tensor:
        inner, inner_leaves = self._inner.leaves_one(x)
        outer, outer_leaves = self._outer.leaves_one(lam)
        problem = self._problem
        with torch.enable_grad():
            if moved is not None and problem.buffers is not None:
                loss, after = problem.buffers.loss(inner, outer, batch)
                moved.copy_(after.detach())
            else:
                loss = (problem.inner_loss if level == "inner" else problem.outer_loss)(inner, outer, batch)
        leaves = [*(inner_leaves if by_x else ()), *(outer_leaves if by_lam else ())]
        found = _derivatives(loss, leaves)
        if by_x is not None:
            put_leaves(found[: len(inner_leaves)], self._inner, *by_x)
            found = found[len(inner_leaves) :]
        if by_lam is not None:
            put_leaves(found, self._outer, *by_lam)
        return loss.detach()

    def second(
        self,
        x: Tensor,
        lam: Tensor,
        batch: Batch,
        directions: Sequence[Tensor],
        by_x: Sequence[Row],
        by_lam: Sequence[Row],
    ) -> None:
        inner, inner_leaves = self._inner.leaves_one(x)
        outer, outer_leaves = self._outer.leaves_one(lam)
        wanted = [*(inner_leaves if by_x else ()), *(outer_leaves if by_lam else ())]
        with torch.enable_grad():
            loss = self._problem.inner_loss(inner, outer, batch)
            gradient = torch.autograd.grad(
                loss, inner_leaves, create_graph=True, allow_unused=True, materialize_grads=True
            )
            for number, u in enumerate(directions):
                towards = self._inner.leaves(self._inner.views_one(u))
                # Not as grad_outputs, which would load the compiler and sympy too.
                product = torch.stack([(g * t).sum() for g, t in zip(gradient, towards, strict=True)]).sum()
                found = _derivatives(product, wanted, retain_graph=True)
                if by_x:
                    put_leaves(found[: len(inner_leaves)], self._inner, *by_x[number])
                    found = found[len(inner_leaves) :]
                if by_lam:
                    put_leaves(found, self._outer, *by_lam[number])


def _derivatives(value: Tensor, leaves: Sequence[Tensor], *, retain_graph: bool = False) -> Sequence[Tensor]:
    if not leaves:
        return ()
    if not value.requires_grad:  # it is the same everywhere
        return [torch.zeros_like(leaf) for leaf in leaves]
    return torch.autograd.grad(
        value, leaves, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
    )


def put_leaves(found: Sequence[Tensor], layout: Layout, row: Tensor, scale: Scale | None) -> None:
    """Write the parts of a variable, scaled, to their places in a row."""
    for value, view in zip(found, layout.leaves(layout.views_one(row)), strict=True):
        put(value, view, scale)


def put(value: Tensor, view: Tensor, scale: Scale | None) -> None:
    """Write a part, times a number or, of several clients, times one for each (k, 1)."""
    if scale is None:
        view.copy_(value)
    elif isinstance(scale, Tensor) and scale.ndim > 1:
        torch.mul(value, scale.view(-1, *(1,) * (view.ndim - 1)), out=view)
    else:
        torch.mul(value, scale, out=view)
