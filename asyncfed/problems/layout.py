"""Parameters as one flat row, and back again without copying.

A block keeps its clients' variables as a matrix (k, d), one row per client, because the network mixes rows
and does not care what they mean. Losses want named tensors. A `Layout` remembers names and shapes in order
and turns the one into the other: towards names always as views, so that writing into the view writes the row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from asyncfed.checks import NonNegativeInt, checked

Params = dict[str, Tensor] | Tensor


_LINE = 64  # bytes of a cache line, and of the widest registers


def aligned_rows(count: int, like: Tensor) -> Tensor:
    """Room for rows as long as those of `like`, each of which begins at a cache line: products read and write
    such rows up to a third faster.
    """
    numbers = max(1, _LINE // like.element_size())
    width = like.shape[-1]
    return like.new_empty(count, -(-width // numbers) * numbers)[:, :width]


def aligned(rows: Tensor) -> bool:
    """Whether each begins at a cache line, as far as sizes tell."""
    return all(
        numbers * rows.element_size() % _LINE == 0 for numbers in (rows.stride(0), rows.storage_offset())
    )


@checked
@dataclass(frozen=True)
class Layout:
    """Names and shapes of parameters in order; `names` is None for a single bare tensor."""

    names: tuple[str, ...] | None
    shapes: tuple[tuple[NonNegativeInt, ...], ...]

    @classmethod
    def of(cls, params: Params) -> Layout:
        """The layout of one client's parameters."""
        if isinstance(params, Tensor):
            return cls(None, (tuple(params.shape),))
        return cls(tuple(params), tuple(tuple(tensor.shape) for tensor in params.values()))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def d(self) -> int:
        """Numbers in all."""
        return sum(self.sizes)

    def flatten(self, params: Params) -> Tensor:
        """One client's parameters as a row (d,)."""
        pieces = [tensor.reshape(-1) for tensor in self.leaves(params)]
        return torch.cat(pieces) if pieces else torch.empty(0)

    def flatten_stacked(self, params: Params, out: Tensor | None = None) -> Tensor:
        """Parameters of k clients (each with a leading axis k) as rows (k, d).

        Without parameters there is nothing to tell k from: then `out` (k, 0) must be given.
        """
        leaves = self.leaves(params)
        if out is None:
            if not leaves:
                raise ValueError(
                    "an empty layout does not tell how many clients there are; pass out of shape (k, 0)"
                )
            out = leaves[0].new_empty(len(leaves[0]), self.d)
        for view, tensor in zip(self.leaves(self.views(out)), leaves, strict=True):
            view.copy_(tensor)
        return out

    def views(self, flat: Tensor) -> Params:
        """Rows (k, d) as parameters with a leading axis k, without a copy."""
        return self._views(flat, (len(flat),))

    def views_one(self, flat: Tensor) -> Params:
        """One row (d,) as parameters, without a copy."""
        return self._views(flat, ())

    def leaves_one(self, flat: Tensor) -> tuple[Params, list[Tensor]]:
        """One row (d,) as parameters that autograd follows, and the tensors among them."""
        leaves = [leaf.detach().requires_grad_() for leaf in self.leaves(self.views_one(flat))]
        return self.of_leaves(leaves), leaves

    def of_leaves(self, leaves: Sequence[Tensor]) -> Params:
        """The parameters whose tensors, in the order of this layout, are these."""
        return leaves[0] if self.names is None else dict(zip(self.names, leaves, strict=True))

    def leaves(self, params: Params) -> list[Tensor]:
        """The tensors of `params` in the order of this layout."""
        if isinstance(params, Tensor):
            return [params]
        return [params[name] for name in self.names or ()]

    def _views(self, flat: Tensor, leading: tuple[int, ...]) -> Params:
        pieces = torch.split(flat, list(self.sizes), dim=-1) if self.sizes else ()
        views = [piece.view((*leading, *shape)) for piece, shape in zip(pieces, self.shapes, strict=True)]
        return self.of_leaves(views)
