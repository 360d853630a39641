"""Derivatives of a network of ReLU layers, written out: back-propagation, and Pearlmutter's R-operator.

A loss that looks at its variable x only through the outputs o of such a network, L(o, λ, batch), has

    gradient            δ = ∂L/∂o at the top, then down through the layers
    Hessian times u     as x moves along u, the outputs move along o' (up through the layers) and δ along
                        δ' = ∇²L o'; both go down together, and how the gradient moves is what is wanted
    ∂_λ (∇_x L · u)     ∂_λ (δ · o'), which never leaves the top

Only the top, a few numbers per sample, is left to autograd. For two convolutions (8 and 16 channels) and a
batch of 64, a gradient takes about 0.8 of autograd's time and a Hessian-vector product 0.6: nothing is
differentiated twice, pooling is three strided maxima, ReLU comes after it, where a quarter is left, and a
value and its movement share convolutions. Layers are linear but for who passes what on, so that they do to a
movement what they do to a value.

Of one client at a time: convolutions of several clients gain nothing from being made together on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

Weights = Mapping[str, Tensor]
Found = Callable[[int, str, Tensor], None]
"""Told what was found: for which direction (0 where there is none), of which parameter."""


class Step(Protocol):
    """A layer; `us` are directions in which its parameters move, `rhs` how its inputs move along each (empty
    for the first layer, whose inputs are data).
    """

    def up(
        self, w: Weights, us: Sequence[Weights], h: Tensor, rhs: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Any]:
        """Outputs, how they move, and what is needed on the way down."""

    def down(
        self, w: Weights, us: Sequence[Weights], kept: Any, d: Tensor, rds: Sequence[Tensor], found: Found
    ) -> tuple[Tensor, list[Tensor]]:
        """From ∂L/∂outputs and how it moves to the same of the inputs; of the first layer it is not asked
        for. What its parameters find is their gradient, or, where they move, how that moves.
        """


@dataclass(frozen=True)
class Linear:
    name: str
    first: bool

    def up(
        self, w: Weights, us: Sequence[Weights], h: Tensor, rhs: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Any]:
        weight, bias = self._of(w)
        moved = [linear(h, *self._of(u)) for u in us]
        for out, rh in zip(moved, rhs, strict=False):
            out.addmm_(rh, weight.T)
        return linear(h, weight, bias), moved, (h, rhs)

    def down(
        self, w: Weights, us: Sequence[Weights], kept: Any, d: Tensor, rds: Sequence[Tensor], found: Found
    ) -> tuple[Tensor, list[Tensor]]:
        h, rhs = kept
        weight, _ = self._of(w)
        for number, rd in enumerate(rds if us else (d,)):
            product = rd.T @ h
            if rhs:
                product.addmm_(d.T, rhs[number])
            found(number, f"{self.name}.weight", product)
            found(number, f"{self.name}.bias", rd.sum(0))
        if self.first:
            return d, []
        below = [torch.addmm(d @ self._of(u)[0], rd, weight) for u, rd in zip(us, rds, strict=True)]
        return d @ weight, below

    def _of(self, w: Weights) -> tuple[Tensor, Tensor]:
        return w[f"{self.name}.weight"], w[f"{self.name}.bias"]


@dataclass(frozen=True)
class Convolution:
    """Of stride 1."""

    name: str
    padding: tuple[int, int]
    first: bool

    def up(
        self, w: Weights, us: Sequence[Weights], h: Tensor, rhs: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Any]:
        kernel, bias = self._of(w)
        if self.first:  # all see the same inputs
            all_kernels, biases = zip((kernel, bias), *map(self._of, us), strict=True)
            both = conv2d(h, torch.cat(all_kernels), torch.cat(biases), padding=self.padding)
            out, *moved = torch.split(both, len(kernel), 1)
            return out, moved, (h, rhs)
        moved = []
        for u, rh in zip(us, rhs, strict=True):
            u_kernel, u_bias = self._of(u)
            inputs, kernels = torch.cat((h, rh), 1), torch.cat((u_kernel, kernel), 1)
            moved.append(conv2d(inputs, kernels, u_bias, padding=self.padding))
        return conv2d(h, kernel, bias, padding=self.padding), moved, (h, rhs)

    def down(
        self, w: Weights, us: Sequence[Weights], kept: Any, d: Tensor, rds: Sequence[Tensor], found: Found
    ) -> tuple[Tensor, list[Tensor]]:
        h, rhs = kept
        kernel, _ = self._of(w)
        if not us:
            below, product = self._back(d, h, kernel, (not self.first, True))
            found(0, f"{self.name}.weight", product)
            found(0, f"{self.name}.bias", d.sum((0, 2, 3)))
            return below, []
        moved = []
        for number, (u, rd) in enumerate(zip(us, rds, strict=True)):
            above, below = (torch.cat((rd, d)), torch.cat((h, rhs[number]))) if rhs else (rd, h)
            found(number, f"{self.name}.weight", self._back(above, below, kernel, (False, True))[1])
            found(number, f"{self.name}.bias", rd.sum((0, 2, 3)))
            if not self.first:
                above, both = torch.cat((rd, d), 1), torch.cat((kernel, self._of(u)[0]))
                moved.append(self._back(above, h, both, (True, False))[0])
        return (d if self.first else self._back(d, h, kernel, (True, False))[0]), moved

    def _of(self, w: Weights) -> tuple[Tensor, Tensor]:
        return w[f"{self.name}.weight"], w[f"{self.name}.bias"]

    def _back(self, d: Tensor, h: Tensor, kernel: Tensor, wanted: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
        """Derivatives by inputs and by kernel, of which those `wanted` mean something."""
        below, product, _ = torch.ops.aten.convolution_backward(
            d, h, kernel, None, [1, 1], list(self.padding), [1, 1], False, [0, 0], 1, [*wanted, False]
        )
        return below, product


@dataclass(frozen=True)
class Flatten:
    def up(
        self, w: Weights, us: Sequence[Weights], h: Tensor, rhs: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Any]:
        return h.flatten(1), [rh.flatten(1) for rh in rhs], h.shape

    def down(
        self, w: Weights, us: Sequence[Weights], kept: Any, d: Tensor, rds: Sequence[Tensor], found: Found
    ) -> tuple[Tensor, list[Tensor]]:
        return d.view(kept), [rd.view(kept) for rd in rds]


@dataclass(frozen=True)
class ReLU:
    def up(
        self, w: Weights, us: Sequence[Weights], h: Tensor, rhs: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Any]:
        out = h.relu()
        return out, [_passed(rh, out) for rh in rhs], out

    def down(
        self, w: Weights, us: Sequence[Weights], kept: Any, d: Tensor, rds: Sequence[Tensor], found: Found
    ) -> tuple[Tensor, list[Tensor]]:
        return _passed(d, kept), [_passed(rd, kept) for rd in rds]


@dataclass(frozen=True)
class PooledReLU:
    """ReLU and then the largest of every 2×2; a last odd row or column is left out."""

    def up(
        self, w: Weights, us: Sequence[Weights], h: Tensor, rhs: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Any]:
        a, b, c, e = _corners(h)
        upper, lower = torch.maximum(a, b), torch.maximum(c, e)
        out = torch.maximum(upper, lower).relu_()
        kept = a >= b, c >= e, upper >= lower, out, h.shape
        return out, [self._chosen(rh, kept) for rh in rhs], kept

    def down(
        self, w: Weights, us: Sequence[Weights], kept: Any, d: Tensor, rds: Sequence[Tensor], found: Found
    ) -> tuple[Tensor, list[Tensor]]:
        return self._placed(d, kept), [self._placed(rd, kept) for rd in rds]

    @staticmethod
    def _chosen(rh: Tensor, kept: Any) -> Tensor:
        left, left_below, above, out, _ = kept
        a, b, c, e = _corners(rh)
        return _passed(torch.where(above, torch.where(left, a, b), torch.where(left_below, c, e)), out)

    @staticmethod
    def _placed(d: Tensor, kept: Any) -> Tensor:
        left, left_below, above, out, shape = kept
        odd = shape[-1] % 2 or shape[-2] % 2
        full = d.new_zeros(shape) if odd else d.new_empty(shape)
        a, b, c, e = _corners(full)
        d = _passed(d, out)
        upper = d * above
        lower = d - upper
        torch.sub(upper, torch.mul(upper, left, out=a), out=b)
        torch.sub(lower, torch.mul(lower, left_below, out=c), out=e)
        return full


def _corners(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every 2×2, as views: above left, above right, below left, below right."""
    height, width = a.shape[-2] // 2 * 2, a.shape[-1] // 2 * 2
    a = a[..., :height, :width]
    return a[..., ::2, ::2], a[..., ::2, 1::2], a[..., 1::2, ::2], a[..., 1::2, 1::2]


def _passed(d: Tensor, out: Tensor) -> Tensor:
    """What a ReLU with these outputs passes on."""
    passed: Tensor = torch.ops.aten.threshold_backward(d, out, 0)
    return passed


class Layers:
    """A network, up and down."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)

    @classmethod
    def of(cls, module: nn.Module) -> Layers | None:
        """None where it has other layers than those above."""
        if not isinstance(module, nn.Sequential) or not len(module):
            return None
        steps: list[Step] = []
        layers = list(module.named_children())
        while layers:
            name, layer = layers.pop(0)
            first = not any(isinstance(step, (Linear, Convolution)) for step in steps)
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                steps.append(Linear(name, first))
            elif isinstance(layer, nn.Conv2d) and _plain_convolution(layer):
                steps.append(Convolution(name, tuple(map(int, layer.padding)), first))  # type: ignore[arg-type]
            elif isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
                steps.append(Flatten())
            elif isinstance(layer, nn.ReLU) and layers and _halves(layers[0][1]):
                layers.pop(0)
                steps.append(PooledReLU())
            elif isinstance(layer, nn.ReLU):
                steps.append(ReLU())
            else:
                return None
        return cls(steps)

    def up(self, w: Weights, us: Sequence[Weights], inputs: Tensor) -> tuple[Tensor, list[Tensor], list[Any]]:
        """Outputs, how they move along each direction, and what `down` needs."""
        h, rhs, kept = inputs, list[Tensor](), []
        for step in self.steps:
            h, rhs, own = step.up(w, us, h, rhs)
            kept.append(own)
        return h, rhs, kept

    def down(
        self,
        w: Weights,
        us: Sequence[Weights],
        kept: Sequence[Any],
        d: Tensor,
        rds: Sequence[Tensor],
        found: Found,
    ) -> None:
        """From ∂L/∂outputs, and how it moves along each direction, to what the parameters find."""
        for step, own in zip(reversed(self.steps), reversed(kept), strict=True):
            d, rds = step.down(w, us, own, d, rds, found)
            if getattr(step, "first", False):
                return


def _plain_convolution(layer: nn.Conv2d) -> bool:
    return (
        layer.stride == (1, 1)
        and layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and layer.bias is not None
    )


def _halves(layer: nn.Module) -> bool:
    """Whether it takes the largest of every 2×2."""
    if not isinstance(layer, nn.MaxPool2d):
        return False
    twice = (2, (2, 2))
    plain = layer.padding in (0, (0, 0)) and layer.dilation in (1, (1, 1))
    return layer.kernel_size in twice and layer.stride in twice and plain and not layer.ceil_mode
