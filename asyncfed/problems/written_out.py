"""One client's derivatives of losses that see the inner variable through a network of layers: `layerwise`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from asyncfed.problems.layerwise import Layers, Weights
from asyncfed.problems.layout import Layout
from asyncfed.problems.one_client import Row, Scale, put, put_leaves
from asyncfed.problems.problem import Batch, Level, Network, Problem


class WrittenOut:
    """Of a problem whose network has only layers that can be written out."""

    def __init__(self, network: Network, layers: Layers, inner: Layout, outer: Layout) -> None:
        self._network, self._layers, self._inner, self._outer = network, layers, inner, outer

    @classmethod
    def of(cls, problem: Problem, inner: Layout, outer: Layout) -> WrittenOut | None:
        """None where derivatives are autograd's."""
        network = problem.network
        layers = None if network is None else Layers.of(network.module)
        return None if network is None or layers is None else cls(network, layers, inner, outer)

    @torch.no_grad()
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
        assert moved is None, "a network written out has no buffers"
        models = self._models(x)
        tops, kept = [], []
        for w in models:
            top, _, own = self._layers.up(w, (), batch[0])
            tops.append(top)
            kept.append(own)
        outputs = self._joined(tops).requires_grad_()
        outer, leaves = self._outer.leaves_one(lam)
        loss = self._loss(level, outputs, outer, batch)
        wanted = [outputs, *(leaves if by_lam is not None else ())]
        d, *found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        if by_lam is not None:
            put_leaves(found, self._outer, *by_lam)
        value = loss.detach()
        if by_x is None:
            return value + self._penalty(level, x)
        target, scale = by_x
        for w, own, top, views in zip(models, kept, self._apart(d), self._models(target), strict=True):
            self._layers.down(w, (), own, top, (), partial(_put_by_name, ((views, scale),)))
        return value + self._penalty(level, x, x, by_x)

    @torch.no_grad()
    def second(
        self,
        x: Tensor,
        lam: Tensor,
        batch: Batch,
        directions: Sequence[Tensor],
        by_x: Sequence[Row],
        by_lam: Sequence[Row],
    ) -> None:
        models = self._models(x)
        moving = [self._models(u) for u in directions]
        tops, moved, kept = [], [], []
        for number, w in enumerate(models):
            top, along, own = self._layers.up(w, [us[number] for us in moving], batch[0])
            tops.append(top)
            moved.append(along)
            kept.append(own)
        outputs = self._joined(tops).requires_grad_()
        outer, leaves = self._outer.leaves_one(lam)
        with torch.enable_grad():
            loss = self._loss("inner", outputs, outer, batch)
            (d,) = torch.autograd.grad(loss, outputs, create_graph=True)
        wanted = [*([outputs] if by_x else ()), *(leaves if by_lam else ())]
        ds: list[Tensor] = []
        for number in range(len(directions)):
            with torch.enable_grad():
                product = (d * self._joined([own[number] for own in moved])).sum()
            found = list(
                torch.autograd.grad(
                    product, wanted, retain_graph=True, allow_unused=True, materialize_grads=True
                )
            )
            if by_x:
                ds.append(found.pop(0))
            if by_lam:
                put_leaves(found, self._outer, *by_lam[number])
        if not by_x:
            return
        apart, moved_apart = self._apart(d.detach()), [self._apart(rd) for rd in ds]
        targets = [(self._models(row), scale) for row, scale in by_x]
        for number, w in enumerate(models):
            self._layers.down(
                w,
                [us[number] for us in moving],
                kept[number],
                apart[number],
                [rd[number] for rd in moved_apart],
                partial(_put_by_name, [(views[number], scale) for views, scale in targets]),
            )
        for u, row in zip(directions, by_x, strict=True):
            self._penalty("inner", x, u, row)

    def _loss(self, level: Level, outputs: Tensor, outer: object, batch: Batch) -> Tensor:
        """But for the penalty."""
        network = self._network
        loss = network.inner if level == "inner" or network.outer is None else network.outer
        with torch.enable_grad():
            return loss(outputs, outer, batch)

    def _penalty(self, level: Level, x: Tensor, u: Tensor | None = None, row: Row | None = None) -> Tensor:
        """(l2/2)‖x‖², and l2 · u added to what was found; of an outer loss of its own there is none."""
        rate = self._network.l2 if level == "inner" or self._network.outer is None else 0.0
        if not rate:
            return x.new_zeros(())
        if u is not None and row is not None:
            target, scale = row
            target.add_(u * (rate if scale is None else rate * scale))
        return rate / 2 * x.square().sum()

    def _models(self, x: Tensor) -> list[Weights]:
        """The parameters of each network, as views of a row."""
        params = self._inner.views_one(x)
        assert isinstance(params, dict), "a network's parameters have names"
        if self._network.copies is None:
            return [params]
        return [{name: p[copy] for name, p in params.items()} for copy in range(self._network.copies)]

    def _joined(self, outputs: Sequence[Tensor]) -> Tensor:
        return outputs[0].detach() if self._network.copies is None else torch.stack(list(outputs))

    def _apart(self, outputs: Tensor) -> Sequence[Tensor]:
        return (outputs,) if self._network.copies is None else outputs.unbind()


def _put_by_name(
    targets: Sequence[tuple[Weights, Scale | None]], number: int, name: str, value: Tensor
) -> None:
    views, scale = targets[number]
    put(value, views[name], scale)
