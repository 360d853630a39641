"""Everything that is ever differentiated, for a block of clients at once; nobody else maps over clients.

Every method takes the inner variables x (k, d), the outer variables lam (k, d_outer) and a batch of tensors
(k, B, …), and returns rows like them: by `Kernels` for many clients at once, by `OneClient` for a single one,
by `Perceptrons` where the inner loss is of that kind. See `whole` for all of a client's samples.

    method                    per client
    inner_gradient            ∇_x f,  f
    inner_outer_gradient      ∇_λ f
    inner_hessian_vector      ∂_x (∇_x f · u)        (d,)
    inner_cross_vector        ∂_λ (∇_x f · u)        (d_outer,)
    inner_cross_transposed    ∂_x (∇_λ f · w)        (d,)
    inner_second_vectors      both of u, of one or several u, at the price of one gradient in common
    outer_gradients           ∇_x F,  ∇_λ F,  F
    outer_gradient            one of the two, and F
    descend                   a step along ∇_x f, or along ∇_λ F, in place
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from asyncfed.checks import checked
from asyncfed.problems.kernels import ByLeaves, Kernels, row_of, scale_of
from asyncfed.problems.layout import Layout
from asyncfed.problems.one_client import ByAutograd, OneClient, Scale, put
from asyncfed.problems.perceptron import PerceptronLoss, Perceptrons
from asyncfed.problems.problem import Batch, Level, Loss, Problem, no_outer
from asyncfed.problems.replay import Replay
from asyncfed.problems.threads import WORTH_SHARING
from asyncfed.problems.written_out import WrittenOut

_SCALAR = Layout(None, ((),))


@checked
class Derivatives:
    """The derivatives of one problem; holds its kernels and no state."""

    def __init__(self, problem: Problem, layout_inner: Layout, layout_outer: Layout) -> None:
        self.problem = problem
        self.inner = layout_inner
        self.outer = layout_outer
        self._alone: OneClient = WrittenOut.of(problem, layout_inner, layout_outer) or ByAutograd(
            problem, layout_inner, layout_outer
        )
        self.kernels = Kernels(problem, layout_inner, layout_outer)
        loss = problem.inner_loss
        self._perceptrons = Perceptrons(loss, layout_inner) if isinstance(loss, PerceptronLoss) else None
        leaves = ByLeaves(self.kernels, layout_inner, layout_outer)
        inner_loss, outer_loss = (
            f"the {level} loss of problem {problem.name!r}" for level in ("inner", "outer")
        )
        self._replayed = {
            "inner": Replay(partial(leaves.gradients, "inner"), inner_loss),
            "outer": Replay(partial(leaves.gradients, "outer"), outer_loss),
            "hessian": Replay(leaves.hessian_vector, inner_loss),
        }

    @classmethod
    def of(cls, problem: Problem) -> Derivatives:
        """With the layouts of the problem's own initial values."""
        inner = problem.init_inner(torch.Generator().manual_seed(0))
        outer = problem.init_outer(torch.Generator().manual_seed(0))
        return cls(problem, Layout.of(inner), Layout.of(outer))

    def staged(self) -> Derivatives | None:
        """Of the second stage of the inner loss, a function of x and of encoded batches alone; None where the
        problem has no stages.
        """
        if self.problem.stages is None:
            return None
        loss = self.problem.stages.loss
        return self._of_one_loss(lambda x, lam, batch: loss(x, batch))

    def mixed(self) -> Derivatives | None:
        """Of the loss of a mixture, a function of x and of batches with weights; None where there is none."""
        return None if self.problem.mixture is None else self._of_one_loss(self.problem.mixture.loss)

    def _of_one_loss(self, loss: Loss) -> Derivatives:
        """Of a function of the same x, without an outer variable."""
        problem = dataclasses.replace(
            self.problem,
            inner_loss=loss,
            outer_loss=loss,
            init_outer=no_outer,
            stages=None,
            network=None,
            mixture=None,
            metrics={},
            joint_metrics=None,
        )
        return Derivatives(problem, self.inner, Layout.of({}))

    def inner_gradient(
        self,
        x: Tensor,
        lam: Tensor,
        batch: Batch,
        scale: Scale | None = None,
        out: Tensor | None = None,
        moved: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Gradient in x (k, d), times `scale` (number or (k, 1)), in `out` where given; and the loss (k,). In
        `moved` (k, b), where given, the buffers after it.
        """
        gradient = torch.empty_like(x) if out is None else out
        if self._perceptrons is not None:
            return gradient, self._perceptrons.gradient(x, batch, scale, gradient)
        loss = x.new_empty(len(x), 1)
        if self.problem.vectorize and len(x) > 1:
            if not self._worth_sharing(x, batch):
                return gradient, self._replayed_gradient(x, lam, batch, scale, gradient, moved)
            outputs = ((self.inner, gradient, scale), (_SCALAR, loss, None), *self._moving(x, moved))
            self.kernels.run("inner_gradient", (x, lam, batch), outputs)
        else:
            for i in range(len(x)):
                row = gradient[i], scale_of(scale, i)
                after = None if moved is None else moved[i]
                loss[i, 0] = self._alone.gradients("inner", x[i], lam[i], row_of(batch, i), row, moved=after)
        return gradient, loss[:, 0]

    def _worth_sharing(self, x: Tensor, batch: Batch) -> bool:
        """Whether it is the mathematics that takes long; else it is Python: recorded operations are best."""
        return len(x) * batch[0].shape[1] * self.inner.d >= WORTH_SHARING

    def _moving(self, x: Tensor, moved: Tensor | None) -> tuple[tuple[Layout, Tensor, None], ...]:
        """Where buffers go after a gradient, of a problem that has them."""
        if self.problem.buffers is None:
            return ()
        row = Layout(None, (tuple(self.problem.buffers.row.shape),))
        return ((row, x.new_empty(len(x), row.d) if moved is None else moved, None),)

    @torch.no_grad()
    def _replayed_gradient(
        self, x: Tensor, lam: Tensor, batch: Batch, scale: Scale | None, out: Tensor, moved: Tensor | None
    ) -> Tensor:
        """The gradient in `out`, by recorded operations; returns the losses."""
        leaves = (*self.inner.leaves(self.inner.views(x)), *self.outer.leaves(self.outer.views(lam)))
        *found, loss = self._moved_on(self._replayed["inner"](*leaves, *batch), moved)
        for value, view in zip(found, self.inner.leaves(self.inner.views(out)), strict=True):
            put(value, view, scale)
        return loss

    @torch.no_grad()
    def descend(
        self,
        level: Level,
        x: Tensor,
        lam: Tensor,
        batch: Batch,
        rate: Scale,
        into: Tensor | None = None,
        moved: Tensor | None = None,
    ) -> Tensor:
        """A gradient step in place: of the inner loss in x ("inner"), or of the outer loss in lam ("outer").
        Returns the losses before it (k,). For many steps of equal shapes: see `Replay`. With `into` the step
        is made there, and the variable stays. In `moved`, where given, the buffers after it ("inner").
        """
        layout, variable = (self.inner, x) if level == "inner" else (self.outer, lam)
        variable = variable if into is None else into
        if self._perceptrons is not None and level == "inner":
            return self._perceptrons.gradient(x, batch, -rate, variable, add=True)
        if not self.problem.vectorize or len(x) == 1:
            if level == "inner":
                step, loss = self.inner_gradient(x, lam, batch, -rate, moved=moved)
            else:
                step, loss = self.outer_gradient(x, lam, batch, "outer", -rate)
            variable.add_(step)
            return loss
        leaves = (*self.inner.leaves(self.inner.views(x)), *self.outer.leaves(self.outer.views(lam)))
        made = self._replayed[level](*leaves, *batch)
        *found, loss = self._moved_on(made, moved) if level == "inner" else made
        for gradient, view in zip(found, layout.leaves(layout.views(variable)), strict=True):
            if isinstance(rate, Tensor):
                view.addcmul_(gradient, rate.view(-1, *(1,) * (view.ndim - 1)), value=-1.0)
            else:
                view.add_(gradient, alpha=-rate)
        return loss

    def _moved_on(self, made: tuple[Tensor, ...], moved: Tensor | None) -> tuple[Tensor, ...]:
        """Gradients and losses; the buffers behind them, of a problem that has some, go to `moved`."""
        if self.problem.buffers is None:
            return made
        if moved is not None:
            moved.copy_(made[-1])
        return made[:-1]

    def inner_outer_gradient(self, x: Tensor, lam: Tensor, batch: Batch) -> Tensor:
        """Gradient of the inner loss in the outer variable (k, d_outer)."""
        return self.kernels.one("inner_outer_gradient", self.outer, x, lam, batch)

    def inner_hessian_vector(
        self,
        x: Tensor,
        lam: Tensor,
        batch: Batch,
        u: Tensor,
        scale: Scale | None = None,
        out: Tensor | None = None,
        *,
        add: bool = False,
    ) -> Tensor:
        """Hessian of the inner loss in x, times u (k, d), times `scale`, in `out` where given (which may be
        u), or added to what stands there.
        """
        if self._perceptrons is not None:
            result = torch.empty_like(x) if out is None else out
            self._perceptrons.hessian_vector(x, batch, u, scale, result, add=add)
            return result
        if add:
            assert out is not None, "there must be something to add to"
            return out.add_(self.inner_hessian_vector(x, lam, batch, u, scale))
        if not self.problem.vectorize or len(x) == 1:
            (result,) = self._second(x, lam, batch, (u,), (scale,), (out,), crossed=False)
            return result
        result = torch.empty_like(x) if out is None else out
        leaves = (part for variable in (x, u) for part in self.inner.leaves(self.inner.views(variable)))
        with torch.no_grad():
            found = self._replayed["hessian"](*leaves, *self.outer.leaves(self.outer.views(lam)), *batch)
        for tensor, view in zip(found, self.inner.leaves(self.inner.views(result)), strict=True):
            put(tensor, view, scale)
        return result

    def inner_hessian_vectors(
        self,
        x: Tensor,
        lam: Tensor,
        batch: Batch,
        directions: tuple[Tensor, ...],
        scale: Scale | None = None,
        out: tuple[Tensor | None, ...] | None = None,
    ) -> tuple[Tensor, ...]:
        """The same for several directions, at the price of one gradient in common."""
        count = len(directions)
        outs = (None,) * count if out is None else out
        return self._second(x, lam, batch, directions, (scale,) * count, outs, crossed=False)

    def inner_second_vectors(
        self,
        x: Tensor,
        lam: Tensor,
        batch: Batch,
        directions: tuple[Tensor, ...],
        scale: Scale | None = None,
        out: tuple[Tensor | None, ...] | None = None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """For each direction u (k, d): the Hessian times u, times `scale`, and ∂_λ (∇_x f · u), unscaled."""
        count = len(directions)
        crossed = bool(self.outer.d)
        outs = (None,) * count if out is None else out
        found = self._second(x, lam, batch, directions, (scale,) * count, outs, crossed=crossed)
        if not crossed:
            return found, tuple(torch.empty_like(lam) for _ in directions)
        return found[::2], found[1::2]

    def _second(
        self,
        x: Tensor,
        lam: Tensor,
        batch: Batch,
        directions: tuple[Tensor, ...],
        scales: tuple[Scale | None, ...],
        outs: tuple[Tensor | None, ...],
        *,
        crossed: bool,
    ) -> tuple[Tensor, ...]:
        outputs: list[tuple[Layout, Tensor, Scale | None]] = []
        for scale, out in zip(scales, outs, strict=True):
            outputs.append((self.inner, torch.empty_like(x) if out is None else out, scale))
            if crossed:
                outputs.append((self.outer, torch.empty_like(lam), None))
        if self.problem.vectorize and len(x) > 1:
            name = "inner_second_vectors" if crossed else "inner_hessian_vectors"
            views = tuple(self.inner.views(u) for u in directions)
            self.kernels.run(name, (x, lam, batch, views), tuple(outputs))
        else:
            for i in range(len(x)):
                by_x, by_lam = (
                    [(out[i], scale_of(scale, i)) for layout, out, scale in outputs if layout is wanted]
                    for wanted in (self.inner, self.outer)
                )
                own = [u[i] for u in directions]
                self._alone.second(x[i], lam[i], row_of(batch, i), own, by_x, by_lam)
        return tuple(out for _, out, _ in outputs)

    def inner_cross_vector(self, x: Tensor, lam: Tensor, batch: Batch, u: Tensor) -> Tensor:
        """Derivative in lam of ∇_x f · u, for u (k, d): (k, d_outer)."""
        if self.problem.vectorize and len(x) > 1:
            return self.kernels.one("inner_cross_vector", self.outer, x, lam, batch, self.inner.views(u))
        out = torch.empty_like(lam)
        for i in range(len(x) if self.outer.d else 0):
            self._alone.second(x[i], lam[i], row_of(batch, i), (u[i],), (), [(out[i], None)])
        return out

    def inner_cross_transposed(self, x: Tensor, lam: Tensor, batch: Batch, w: Tensor) -> Tensor:
        """Derivative in x of ∇_λ f · w, for w (k, d_outer): (k, d)."""
        if not self.outer.d:
            return torch.zeros_like(x)
        return self.kernels.one("inner_cross_transposed", self.inner, x, lam, batch, self.outer.views(w))

    def outer_gradients(self, x: Tensor, lam: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the outer loss in x (k, d) and in lam (k, d_outer), and its value (k,)."""
        by_x, by_lam, value = torch.empty_like(x), torch.empty_like(lam), x.new_empty(len(x), 1)
        if self.problem.vectorize and len(x) > 1:
            outputs = ((self.inner, by_x, None), (self.outer, by_lam, None), (_SCALAR, value, None))
            self.kernels.run("outer_gradients", (x, lam, batch), outputs)
        else:
            for i in range(len(x)):
                rows = (by_x[i], None), (by_lam[i], None)
                value[i, 0] = self._alone.gradients("outer", x[i], lam[i], row_of(batch, i), *rows)
        return by_x, by_lam, value[:, 0]

    def outer_gradient(
        self,
        x: Tensor,
        lam: Tensor,
        batch: Batch,
        by: Level,
        scale: Scale | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Gradient of the outer loss in one of the variables, times `scale`, in `out` where given; and the
        loss (k,).
        """
        layout, variable = (self.inner, x) if by == "inner" else (self.outer, lam)
        gradient = variable.new_empty(len(x), layout.d) if out is None else out
        loss = x.new_empty(len(x), 1)
        if self.problem.vectorize and len(x) > 1:
            outputs = ((layout, gradient, scale), (_SCALAR, loss, None))
            self.kernels.run(f"outer_gradient_{by}", (x, lam, batch), outputs)
            return gradient, loss[:, 0]
        for i in range(len(x)):
            row = gradient[i], scale_of(scale, i)
            rows = (row, None) if by == "inner" else (None, row)
            loss[i, 0] = self._alone.gradients("outer", x[i], lam[i], row_of(batch, i), *rows)
        return gradient, loss[:, 0]

    def unused_outer(self, batch: Batch) -> list[str]:
        """The parts of the outer variable that neither loss of some samples depends on, by name."""
        dtype = next((t.dtype for t in batch if t.is_floating_point()), torch.get_default_dtype())
        batch += tuple(row[0] for row in self.problem.beside(torch.zeros(1, dtype=dtype)))
        generator = torch.Generator().manual_seed(0)
        inner, _ = self.inner.leaves_one(self.inner.flatten(self.problem.init_inner(generator)).to(dtype))
        outer, leaves = self.outer.leaves_one(
            self.outer.flatten(self.problem.init_outer(generator)).to(dtype)
        )
        used = [False] * len(leaves)
        for loss in (self.problem.inner_loss, self.problem.outer_loss):
            with torch.enable_grad():
                value = loss(inner, outer, batch)
            if value.requires_grad:
                found = torch.autograd.grad(value, leaves, allow_unused=True)
                used = [old or new is not None for old, new in zip(used, found, strict=True)]
        names = self.outer.names or ("the outer variable",)
        return [name for name, seen in zip(names, used, strict=True) if not seen]
