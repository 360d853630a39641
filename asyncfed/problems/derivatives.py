"""Everything that is ever differentiated, for a block of clients at once; nobody else maps over clients.

Every method takes the inner variables x (k, d), the outer variables lam (k, d_outer) and a batch of tensors
(k, B, …), and returns rows like them. Inside, a *kernel* is a function of one client's named parameters; it
runs through vmap over all k clients or, where the problem says so, client by client. Second derivatives are
reverse over reverse (a vector-Jacobian product of a gradient), which is what measures fastest under vmap.
Results are written once, already scaled, into their flat rows.

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
    whole_outer_gradients     the same over all of a client's samples
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vjp, vmap

from asyncfed.checks import checked
from asyncfed.data import ClientShards
from asyncfed.errors import ScenarioError
from asyncfed.problems.layout import Layout, Params
from asyncfed.problems.one_client import ByAutograd, OneClient, Scale, put
from asyncfed.problems.perceptron import PerceptronLoss, Perceptrons
from asyncfed.problems.problem import Batch, Level, Problem, no_outer
from asyncfed.problems.replay import Replay
from asyncfed.problems.threads import WORTH_SHARING
from asyncfed.problems.written_out import WrittenOut

Kernel = Callable[..., tuple[Params, ...]]

_SCALAR = Layout(None, ((),))
# Evaluation works in pieces: at most this many bytes at a time, counting a sample as 32 times its own size,
# which leaves room for the activations of the networks here (33 times for the EMNIST network).
_BUDGET = 64 * 2**20
_BYTES_PER_INPUT_BYTE = 32
_WHOLE_SAMPLES = 2048  # at a time, in derivatives over all data: their activations stay alive


@checked
class Derivatives:
    """The derivatives of one problem; holds its vmapped kernels and no state."""

    def __init__(self, problem: Problem, layout_inner: Layout, layout_outer: Layout) -> None:
        self.problem = problem
        self.inner = layout_inner
        self.outer = layout_outer
        self._alone: OneClient = WrittenOut.of(problem, layout_inner, layout_outer) or ByAutograd(
            problem, layout_inner, layout_outer
        )
        self._kernels = {name: self._lifted(kernel) for name, kernel in _kernels(problem).items()}
        loss = problem.inner_loss
        self._perceptrons = Perceptrons(loss, layout_inner) if isinstance(loss, PerceptronLoss) else None
        inner_loss, outer_loss = (
            f"the {level} loss of problem {problem.name!r}" for level in ("inner", "outer")
        )
        self._replayed = {
            "inner": Replay(partial(self._leaf_gradients, "inner"), inner_loss),
            "outer": Replay(partial(self._leaf_gradients, "outer"), outer_loss),
            "hessian": Replay(self._leaf_hessian_vector, inner_loss),
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
        second = dataclasses.replace(
            self.problem,
            inner_loss=lambda x, lam, batch: loss(x, batch),
            outer_loss=lambda x, lam, batch: loss(x, batch),
            init_outer=no_outer,
            stages=None,
            network=None,
            mixture=None,
            metrics={},
            joint_metrics=None,
        )
        return Derivatives(second, self.inner, Layout.of({}))

    def mixed(self) -> Derivatives | None:
        """Of the loss of a mixture, a function of x and of batches with weights; None where there is none."""
        mixture = self.problem.mixture
        if mixture is None:
            return None
        weighed = dataclasses.replace(
            self.problem,
            inner_loss=mixture.loss,
            outer_loss=mixture.loss,
            init_outer=no_outer,
            stages=None,
            network=None,
            mixture=None,
            metrics={},
            joint_metrics=None,
        )
        return Derivatives(weighed, self.inner, Layout.of({}))

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
            self._run("inner_gradient", (x, lam, batch), outputs)
        else:
            for i in range(len(x)):
                row = gradient[i], _own(scale, i)
                after = None if moved is None else moved[i]
                loss[i, 0] = self._alone.gradients("inner", x[i], lam[i], _row(batch, i), row, moved=after)
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

    def _leaf_hessian_vector(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """∂_x (∇_x f · u), leaf by leaf, from x, u and lam leaf by leaf and a batch."""
        inner, outer = len(self.inner.sizes), len(self.outer.sizes)
        x, u = (self.inner.of_leaves(tensors[at : at + inner]) for at in (0, inner))
        lam = self.outer.of_leaves(tensors[2 * inner : 2 * inner + outer])
        (found,) = self._kernels["inner_hessian_vectors"](x, lam, tensors[2 * inner + outer :], (u,))
        return tuple(self.inner.leaves(found))

    def _leaf_gradients(self, level: Level, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gradients leaf by leaf, and the losses, from variables leaf by leaf and a batch."""
        inner, outer = len(self.inner.sizes), len(self.outer.sizes)
        x, lam = self.inner.of_leaves(tensors[:inner]), self.outer.of_leaves(tensors[inner : inner + outer])
        kernel, layout = (
            ("inner_gradient", self.inner) if level == "inner" else ("outer_gradient_outer", self.outer)
        )
        gradient, loss, *buffers = self._kernels[kernel](x, lam, tensors[inner + outer :])
        assert isinstance(loss, Tensor)
        return (*layout.leaves(gradient), loss, *(row for row in buffers if isinstance(row, Tensor)))

    def _moved_on(self, made: tuple[Tensor, ...], moved: Tensor | None) -> tuple[Tensor, ...]:
        """Gradients and losses; the buffers behind them, of a problem that has some, go to `moved`."""
        if self.problem.buffers is None:
            return made
        if moved is not None:
            moved.copy_(made[-1])
        return made[:-1]

    def inner_outer_gradient(self, x: Tensor, lam: Tensor, batch: Batch) -> Tensor:
        """Gradient of the inner loss in the outer variable (k, d_outer)."""
        return self._one("inner_outer_gradient", self.outer, x, lam, batch)

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
            self._run(name, (x, lam, batch, views), tuple(outputs))
        else:
            for i in range(len(x)):
                by_x, by_lam = (
                    [(out[i], _own(scale, i)) for layout, out, scale in outputs if layout is wanted]
                    for wanted in (self.inner, self.outer)
                )
                own = [u[i] for u in directions]
                self._alone.second(x[i], lam[i], _row(batch, i), own, by_x, by_lam)
        return tuple(out for _, out, _ in outputs)

    def inner_cross_vector(self, x: Tensor, lam: Tensor, batch: Batch, u: Tensor) -> Tensor:
        """Derivative in lam of ∇_x f · u, for u (k, d): (k, d_outer)."""
        if self.problem.vectorize and len(x) > 1:
            return self._one("inner_cross_vector", self.outer, x, lam, batch, self.inner.views(u))
        out = torch.empty_like(lam)
        for i in range(len(x) if self.outer.d else 0):
            self._alone.second(x[i], lam[i], _row(batch, i), (u[i],), (), [(out[i], None)])
        return out

    def inner_cross_transposed(self, x: Tensor, lam: Tensor, batch: Batch, w: Tensor) -> Tensor:
        """Derivative in x of ∇_λ f · w, for w (k, d_outer): (k, d)."""
        if not self.outer.d:
            return torch.zeros_like(x)
        return self._one("inner_cross_transposed", self.inner, x, lam, batch, self.outer.views(w))

    def outer_gradients(self, x: Tensor, lam: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the outer loss in x (k, d) and in lam (k, d_outer), and its value (k,)."""
        by_x, by_lam, value = torch.empty_like(x), torch.empty_like(lam), x.new_empty(len(x), 1)
        if self.problem.vectorize and len(x) > 1:
            outputs = ((self.inner, by_x, None), (self.outer, by_lam, None), (_SCALAR, value, None))
            self._run("outer_gradients", (x, lam, batch), outputs)
        else:
            for i in range(len(x)):
                rows = (by_x[i], None), (by_lam[i], None)
                value[i, 0] = self._alone.gradients("outer", x[i], lam[i], _row(batch, i), *rows)
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
            self._run(f"outer_gradient_{by}", (x, lam, batch), outputs)
            return gradient, loss[:, 0]
        for i in range(len(x)):
            row = gradient[i], _own(scale, i)
            rows = (row, None) if by == "inner" else (None, row)
            loss[i, 0] = self._alone.gradients("outer", x[i], lam[i], _row(batch, i), *rows)
        return gradient, loss[:, 0]

    def whole_outer_gradients(
        self, x: Tensor, lam: Tensor, shards: ClientShards
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`outer_gradients` over all of each client's samples: a mean over pieces, weighed by their sizes.

        A client's samples are cut into pieces of 128, and the rest into halves of that, so that clients of
        any sizes can be computed together piece by piece.
        """
        by_x, by_lam, value = torch.zeros_like(x), torch.zeros_like(lam), x.new_zeros(len(x))
        for rows, batch, share in self._whole(shards, x):
            found = self.outer_gradients(x[rows], lam[rows], batch)
            by_x.index_add_(0, rows, found[0].mul_(share[:, None]))
            by_lam.index_add_(0, rows, found[1].mul_(share[:, None]))
            value.index_add_(0, rows, found[2] * share)
        return by_x, by_lam, value

    def _whole(self, shards: ClientShards, x: Tensor) -> Iterator[tuple[Tensor, Batch, Tensor]]:
        """(clients, as many samples of each, which share of all its samples that is), all of everybody's."""
        most = max(1, _BUDGET // 4 // max(1, x[:1].nbytes))
        for clients, start, length in _whole_pieces(shards.sizes, most, _WHOLE_SAMPLES):
            rows = torch.from_numpy(clients).to(x.device)
            index = torch.from_numpy(start[:, None] + np.arange(length)).to(x.device)
            share = torch.from_numpy(length / shards.sizes[clients]).to(x)
            yield rows, shards.gather(rows, index), share

    def whole_inner_jacobians(self, x: Tensor, lam: Tensor, shards: ClientShards) -> tuple[Tensor, Tensor]:
        """∇²_x f (k, d, d) and ∂_λ ∇_x f (k, d_outer, d) over all of each client's samples; for small d."""
        hessian = x.new_zeros(len(x), self.inner.d, self.inner.d)
        cross = x.new_zeros(len(x), self.outer.d, self.inner.d)
        units = torch.eye(self.inner.d, dtype=x.dtype, device=x.device)
        for rows, batch, share in self._whole(shards, x):
            directions = tuple(unit.expand(len(rows), -1) for unit in units)
            products, crossed = self.inner_second_vectors(x[rows], lam[rows], batch, directions)
            hessian.index_add_(0, rows, torch.stack(products, 2) * share[:, None, None])
            cross.index_add_(0, rows, torch.stack(crossed, 2) * share[:, None, None])
        return hessian, cross

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

    def evaluate(self, x: Tensor, lam: Tensor, shards: ClientShards) -> dict[str, tuple[Tensor, Tensor]]:
        """For every metric, its sum over all of each client's samples (k,) and how many they are (k,).

        `shards` holds the same k clients as x and lam. Clients of similar size are padded to the largest
        among them (with their own last sample) and the padding is masked out, in pieces of bounded memory.
        """
        counts = torch.from_numpy(shards.sizes).to(x.device)
        sums = {name: x.new_zeros(len(x)) for name in self.problem.metrics}
        most_clients = max(1, _BUDGET // max(1, x[:1].nbytes))
        for clients, start, stop in _pieces(counts, samples_at_once(shards), most_clients):
            sizes = counts[clients].unsqueeze(1)
            index = torch.arange(start, stop, device=x.device)
            batch = shards.gather(clients, torch.minimum(index, sizes - 1))
            values = [x.new_empty(len(clients), stop - start) for _ in sums]
            row = Layout(None, ((stop - start,),))
            outputs = tuple((row, value, None) for value in values)
            self._run("metrics", (x[clients], lam[clients], batch), outputs)
            for total, value in zip(sums.values(), values, strict=True):
                total.index_add_(0, clients, torch.where(index < sizes, value, 0.0).sum(1))
        return {name: (total, counts) for name, total in sums.items()}

    def evaluate_common(self, x: Tensor, lam: Tensor, shards: ClientShards) -> dict[str, Tensor]:
        """`evaluate` for variables x (d,) and lam (d_outer,) that all clients share: one pass over all
        samples, and the sums of each client (k,).
        """
        sums = {name: x.new_zeros(shards.clients) for name in self.problem.metrics}
        owner = torch.from_numpy(np.repeat(np.arange(shards.clients), shards.sizes)).to(x.device)
        inner, outer = self.inner.views_one(x), self.outer.views_one(lam)
        most = samples_at_once(shards)
        with torch.no_grad():
            for start in range(0, shards.total, most):
                batch = tuple(t[start : start + most] for t in shards.tensors)
                batch += tuple(row[0] for row in shards.beside)  # the same for all
                for name, values in self.problem.measured(inner, outer, batch).items():
                    sums[name].index_add_(0, owner[start : start + most], values)
        return sums

    def _one(
        self, name: str, layout: Layout, x: Tensor, lam: Tensor, batch: Batch, *directions: Params
    ) -> Tensor:
        out = x.new_empty(len(x), layout.d)
        if layout.d:
            self._run(name, (x, lam, batch, *directions), ((layout, out, None),))
        return out

    def _lifted(self, kernel: Kernel) -> Kernel:
        if not self.problem.vectorize:
            return kernel
        mapped = vmap(kernel)

        def lifted(*arguments: Any) -> tuple[Params, ...]:
            try:
                return mapped(*arguments)
            except RuntimeError as error:
                if "vmap" not in str(error):
                    raise
                raise ScenarioError(
                    f"the functions of problem {self.problem.name!r} cannot be run for many clients at once; "
                    "give it vectorize=False to run them one by one, or "
                    f"rewrite the line that torch.vmap refuses: {error}"
                ) from error

        return lifted

    @torch.no_grad()
    def _run(
        self, name: str, arguments: tuple[Any, ...], outputs: tuple[tuple[Layout, Tensor, Scale | None], ...]
    ) -> None:
        """Call a kernel on (x, lam, batch, *directions) for every client and write what it returns."""
        x, lam, *rest = arguments
        stacked = (self.inner.views(x), self.outer.views(lam), *rest)
        if self.problem.vectorize:
            results = self._kernels[name](*stacked)
            for result, (layout, out, scale) in zip(results, outputs, strict=True):
                _write(layout, result, layout.views(out), scale)
            return
        for i in range(len(x)):
            results = self._kernels[name](*_row(stacked, i))
            for result, (layout, out, scale) in zip(results, outputs, strict=True):
                own_scale = _own(scale, i)
                _write(layout, result, layout.views_one(out[i]), own_scale)


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


def _whole_pieces(
    sizes: npt.NDArray[np.int64], most: int, samples: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]]:
    """(clients, where each one's piece starts, its length), at most `most` clients and about `samples`
    samples at a time, such that the pieces of a client are all of its samples.
    """
    done = np.zeros_like(sizes)
    length = 128
    while length:
        together = min(most, max(1, samples // length))
        while len(clients := np.flatnonzero(sizes - done >= length)):
            for start in range(0, len(clients), together):
                some = clients[start : start + together]
                yield some, done[some], length
            done[clients] += length
        length //= 2


def _write(layout: Layout, result: Params, target: Params, scale: Scale | None) -> None:
    for tensor, view in zip(layout.leaves(result), layout.leaves(target), strict=True):
        put(tensor, view, scale)


def _own(scale: Scale | None, i: int) -> Scale | None:
    """Client i's."""
    return scale[i, 0] if isinstance(scale, Tensor) else scale


def _row(tree: Any, i: int) -> Any:
    """Client i's part of stacked parameters and batches."""
    if isinstance(tree, Tensor):
        return tree[i]
    if isinstance(tree, dict):
        return {name: tensor[i] for name, tensor in tree.items()}
    return tuple(_row(part, i) for part in tree)


def samples_at_once(shards: ClientShards) -> int:
    """How many samples a network may look at together, without derivatives, in bounded memory."""
    sample_bytes = sum(tensor[:1].nbytes for tensor in shards.tensors)
    return max(1, _BUDGET // max(1, sample_bytes * _BYTES_PER_INPUT_BYTE))


def _pieces(counts: Tensor, samples: int, most_clients: int) -> Iterator[tuple[Tensor, int, int]]:
    """(clients, start, stop): all samples of everybody, similar sizes together, about `samples` at a time."""
    order = torch.argsort(counts, descending=True, stable=True)
    order = order[counts[order] > 0]
    while len(order):
        largest = int(counts[order[0]])
        length = min(largest, samples)
        together = min(most_clients, max(1, samples // length))
        clients, order = order[:together], order[together:]
        for start in range(0, largest, length):
            yield clients, start, min(start + length, largest)
