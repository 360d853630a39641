"""Convolutions as matrix products, of samples that stand side by side in the last dimension.

For inputs h (C, H, W, B) and a kernel K (C', C, m, n), with places (y, x) of the outputs,

    out[c', y, x, b] = Σ_{c, i, j} K[c', c, i, j] · h[c, y + i, x + j, b]

is K, as a matrix, times the *patches*: a matrix whose rows are (c, i, j) and whose columns are (y, x, b).
Because b comes last, a row of it is a few long runs of h, which are copied as such. Where there are rows
enough without the shifts downwards i, these are left out of the matrix: a shift downwards is a later start in
its columns. It is then small enough for the cache, and the products of all i are summed up as they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS_ENOUGH = 32
"""From so many rows on, a matrix product is about as fast as it gets."""

_WIDE = 16
"""From so many columns on (what one instruction takes of them) it may be the other matrix that is turned."""


@dataclass(frozen=True)
class Patches:
    """What kernels of a size see of some inputs."""

    matrix: Tensor  # (C · rows of the kernel that are unrolled · n, starts · places across · B)
    shape: tuple[int, int, int, int]  # of the inputs, with their padding
    size: tuple[int, int]  # of the kernels
    padding: tuple[int, int]

    @classmethod
    def of(cls, h: Tensor, size: tuple[int, int], padding: tuple[int, int] = (0, 0)) -> Patches:
        h = _padded(h, padding) if any(padding) else h.contiguous()
        channels, height, width, batch = h.shape
        unrolled = _unrolled(channels, size)
        starts, across = height - unrolled + 1, width - size[1] + 1
        runs = h.as_strided(
            (channels, unrolled, size[1], starts, across * batch),
            (height * width * batch, width * batch, batch, width * batch, 1),
        )
        matrix = runs.reshape(channels * unrolled * size[1], starts * across * batch)
        return cls(matrix, (channels, height, width, batch), size, padding)

    def convolved(self, kernel: Tensor, bias: Tensor | None = None, *, onto: Tensor | None = None) -> Tensor:
        """The outputs (C', H', W', B), or `onto` with them added."""
        total = None if onto is None else onto.view(len(onto), -1)
        for number, piece in enumerate(self._pieces(kernel)):
            seen = self._part(self.matrix, number)
            if total is not None:
                total.addmm_(piece, seen)
            else:
                total = piece @ seen if bias is None else torch.addmm(bias.unsqueeze(1), piece, seen)
        assert total is not None
        _, height, width, batch = self.shape
        (down, across) = self.size
        return total.view(len(kernel), height - down + 1, width - across + 1, batch)

    def spread(self, *above: tuple[Tensor, Tensor]) -> Tensor:
        """∂L/∂inputs (C, H, W, B) from kernels and the derivatives by what they made, summed up."""
        columns = torch.zeros_like(self.matrix)
        for kernel, d in above:
            flat = d.reshape(len(d), -1)
            for number, piece in enumerate(self._pieces(kernel)):
                self._part(columns, number).addmm_(piece.T, flat)
        channels, height, width, batch = self.shape
        unrolled = _unrolled(channels, self.size)
        starts, across = height - unrolled + 1, width - self.size[1] + 1
        runs = columns.view(channels, unrolled, self.size[1], starts, across * batch)
        found = columns.new_zeros(channels, height, width * batch)
        for i in range(unrolled):
            for j in range(self.size[1]):
                found[:, i : i + starts, j * batch : (j + across) * batch].add_(runs[:, i, j])
        above_it, left_of_it = self.padding
        return found.view(self.shape)[:, above_it : height - above_it, left_of_it : width - left_of_it]

    def _pieces(self, kernel: Tensor) -> Sequence[Tensor]:
        """The kernel as matrices, one for every shift that the matrix does not have."""
        channels, (down, across) = self.shape[0], self.size
        unrolled = _unrolled(channels, self.size)
        apart = kernel.reshape(len(kernel), channels, down // unrolled, unrolled, across)
        return apart.permute(2, 0, 1, 3, 4).flatten(2).unbind()

    def _part(self, columns: Tensor, number: int) -> Tensor:
        """The columns that the piece of this number meets."""
        _, height, width, batch = self.shape
        down, across = self.size
        run = (width - across + 1) * batch
        return columns[:, number * run : (number + height - down + 1) * run]


def correlated(*made: tuple[Patches, Tensor]) -> Tensor:
    """∂L/∂kernel (C', C, m, n) from patches and the derivatives by what it made of them, summed up."""
    first, d = made[0]
    channels, (down, across) = first.shape[0], first.size
    unrolled = _unrolled(channels, first.size)
    turned = len(d) >= _WIDE
    sizes = (len(first.matrix), len(d)) if turned else (len(d), len(first.matrix))
    found = d.new_zeros(down // unrolled, *sizes)
    for seen, d in made:
        flat = d.reshape(len(d), -1)
        for number, product in enumerate(found):
            part = seen._part(seen.matrix, number)
            if turned:
                product.addmm_(part, flat.T)
            else:
                product.addmm_(flat, part.T)
    pieces = found.transpose(1, 2) if turned else found
    apart = pieces.reshape(len(pieces), len(d), channels, unrolled, across)
    return apart.permute(1, 2, 0, 3, 4).reshape(len(d), channels, down, across)


def _unrolled(channels: int, size: tuple[int, int]) -> int:
    """How many rows of a kernel are unrolled: all of them or one."""
    return 1 if channels * size[1] >= _ROWS_ENOUGH else size[0]


def _padded(h: Tensor, padding: tuple[int, int]) -> Tensor:
    channels, height, width, batch = h.shape
    above, left = padding
    wider = h.new_zeros(channels, height + 2 * above, width + 2 * left, batch)
    wider[:, above : above + height, left : left + width] = h
    return wider
