"""Derivatives of a network of ReLU layers, written out: back-propagation, and Pearlmutter's R-operator.

A loss that looks at its variable x only through the outputs o of such a network, L(o, λ, batch), has

    gradient            δ = ∂L/∂o at the top, then down through the layers
    Hessian times u     as x moves along u, the outputs move along o' (up through the layers) and δ along
                        δ' = ∇²L o'; both go down together, and how the gradient moves is what is wanted
    ∂_λ (∇_x L · u)     ∂_λ (δ · o'), which never leaves the top

Only the top, a few numbers per sample, is left to autograd. Nothing is differentiated twice, ReLU comes after
pooling, where a quarter is left, and a value and its movement share products. Layers are linear but for who
passes what on, so that they do to a movement what they do to a value.

Between layers the samples stand side by side in the *last* dimension: (features, B), or (channels, height,
width, B). Convolutions are then matrix products (`patches`), and all that goes over images goes over long
runs of memory.

Of one client at a time: convolutions of several clients gain nothing from being made together on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from asyncfed.problems.patches import Patches, correlated

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
        moved = [torch.addmm(u_bias, u_weight, h) for u_weight, u_bias in map(self._of, us)]
        for out, rh in zip(moved, rhs, strict=False):
            out.addmm_(weight, rh)
        return torch.addmm(bias, weight, h), moved, (h, rhs)

    def down(
        self, w: Weights, us: Sequence[Weights], kept: Any, d: Tensor, rds: Sequence[Tensor], found: Found
    ) -> tuple[Tensor, list[Tensor]]:
        h, rhs = kept
        weight, _ = self._of(w)
        for number, rd in enumerate(rds if us else (d,)):
            product = rd @ h.T
            if rhs:
                product.addmm_(d, rhs[number].T)
            found(number, f"{self.name}.weight", product)
            found(number, f"{self.name}.bias", rd.sum(1))
        if self.first:
            return d, []
        below = [torch.addmm(self._of(u)[0].T @ d, weight.T, rd) for u, rd in zip(us, rds, strict=True)]
        return weight.T @ d, below

    def _of(self, w: Weights) -> tuple[Tensor, Tensor]:
        """The bias as a column."""
        return w[f"{self.name}.weight"], w[f"{self.name}.bias"].unsqueeze(1)


@dataclass(frozen=True)
class Convolution:
    """Of stride 1."""

    name: str
    size: tuple[int, int]
    padding: tuple[int, int]
    first: bool

    def inputs(self, h: Tensor) -> Patches:
        return Patches.of(h, self.size, self.padding)

    def up(
        self, w: Weights, us: Sequence[Weights], h: Any, rhs: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Any]:
        seen = h if self.first else self.inputs(h)
        kernels, biases = zip(*map(self._of, (w, *us)), strict=True)
        both = seen.convolved(torch.cat(kernels), torch.cat(biases))  # all see the same inputs
        out, *moved = torch.split(both, len(kernels[0]))
        seen_moving = [self.inputs(rh) for rh in rhs]
        for onto, moving in zip(moved, seen_moving, strict=False):
            moving.convolved(kernels[0], onto=onto)
        return out, moved, (seen, seen_moving)

    def down(
        self, w: Weights, us: Sequence[Weights], kept: Any, d: Tensor, rds: Sequence[Tensor], found: Found
    ) -> tuple[Tensor, list[Tensor]]:
        seen, seen_moving = kept
        kernel, _ = self._of(w)
        for number, rd in enumerate(rds if us else (d,)):
            moving = [(seen_moving[number], d)] if seen_moving else []
            found(number, f"{self.name}.weight", correlated((seen, rd), *moving))
            found(number, f"{self.name}.bias", rd.sum((1, 2, 3)))
        if self.first:
            return d, []
        below = [seen.spread((kernel, rd), (self._of(u)[0], d)) for u, rd in zip(us, rds, strict=True)]
        return seen.spread((kernel, d)), below

    def _of(self, w: Weights) -> tuple[Tensor, Tensor]:
        return w[f"{self.name}.weight"], w[f"{self.name}.bias"]


@dataclass(frozen=True)
class Flatten:
    def up(
        self, w: Weights, us: Sequence[Weights], h: Tensor, rhs: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Any]:
        return h.flatten(0, -2), [rh.flatten(0, -2) for rh in rhs], h.shape

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
        return out, [_where_positive(out, rh) for rh in rhs], out

    def down(
        self, w: Weights, us: Sequence[Weights], kept: Any, d: Tensor, rds: Sequence[Tensor], found: Found
    ) -> tuple[Tensor, list[Tensor]]:
        return _where_positive(kept, d), [_where_positive(kept, rd) for rd in rds]


@dataclass(frozen=True)
class PooledReLU:
    """ReLU, then the largest of every 2×2, the first of equal ones; a last odd row or column is left out."""

    def up(
        self, w: Weights, us: Sequence[Weights], h: Tensor, rhs: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Any]:
        a, b, c, e = _corners(h)
        upper, lower = torch.maximum(a, b), torch.maximum(c, e)
        out = torch.maximum(upper, lower).relu_()
        kept = b - a, e - c, lower - upper, out, h.shape
        return out, [self._chosen(rh, kept) for rh in rhs], kept

    def down(
        self, w: Weights, us: Sequence[Weights], kept: Any, d: Tensor, rds: Sequence[Tensor], found: Found
    ) -> tuple[Tensor, list[Tensor]]:
        return self._placed(d, kept), [self._placed(rd, kept) for rd in rds]

    @staticmethod
    def _chosen(rh: Tensor, kept: Any) -> Tensor:
        right, right_below, below, out, _ = kept
        a, b, c, e = _corners(rh)
        upper, lower = torch.where(right > 0, b, a), torch.where(right_below > 0, e, c)
        return _where_positive(out, torch.where(below > 0, lower, upper))

    @staticmethod
    def _placed(d: Tensor, kept: Any) -> Tensor:
        right, right_below, below, out, shape = kept
        odd = shape[1] % 2 or shape[2] % 2
        full = d.new_zeros(shape) if odd else d.new_empty(shape)
        a, b, c, e = _corners(full)
        d = _where_positive(out, d)
        lower = _where_positive(below, d)
        upper = d.sub_(lower)
        torch.sub(upper, _where_positive(right, upper, b), out=a)
        torch.sub(lower, _where_positive(right_below, lower, e), out=c)
        return full


def _corners(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every 2×2, as views: above left, above right, below left, below right."""
    height, width = a.shape[1] // 2 * 2, a.shape[2] // 2 * 2
    a = a[:, :height, :width]
    return a[:, ::2, ::2], a[:, ::2, 1::2], a[:, 1::2, ::2], a[:, 1::2, 1::2]


def _where_positive(decides: Tensor, d: Tensor, out: Tensor | None = None) -> Tensor:
    """d where `decides` is above zero, and else zero: one pass, where masks would take two."""
    if out is None:
        passed: Tensor = torch.ops.aten.threshold_backward(d, decides, 0)
        return passed
    return torch.ops.aten.threshold_backward.grad_input(d, decides, 0, grad_input=out)  # type: ignore[no-any-return]


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
                size, padding = (tuple(map(int, pair)) for pair in (layer.kernel_size, layer.padding))
                steps.append(Convolution(name, size, padding, first))  # type: ignore[arg-type]
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

    def inputs(self, images: Tensor) -> Any:
        """A batch (B, …) as the first layer takes it: once, for all the networks that see it."""
        h = images.movedim(0, -1).contiguous()
        return self.steps[0].inputs(h) if isinstance(self.steps[0], Convolution) else h

    def up(self, w: Weights, us: Sequence[Weights], inputs: Any) -> tuple[Tensor, list[Tensor], list[Any]]:
        """Outputs (B, …), how they move along each direction, and what `down` needs."""
        h, rhs, kept = inputs, list[Tensor](), []
        for step in self.steps:
            h, rhs, own = step.up(w, us, h, rhs)
            kept.append(own)
        return _samples_first(h), [_samples_first(rh) for rh in rhs], kept

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
        d, *rds = (above.movedim(0, -1).contiguous() for above in (d, *rds))
        for step, own in zip(reversed(self.steps), reversed(kept), strict=True):
            d, rds = step.down(w, us, own, d, rds, found)
            if getattr(step, "first", False):
                return


def _samples_first(h: Tensor) -> Tensor:
    return h.movedim(-1, 0).contiguous()


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
