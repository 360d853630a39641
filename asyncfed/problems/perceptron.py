"""Derivatives of stacked perceptrons with cross-entropy, written out as batched matrix products.

    z_i = a_{i−1} W_iᵀ + b_i,   a_i = φ(z_i),   a_0 the inputs,   z_L the logits
    f   = mean over the batch of cross-entropy(z_L, label) + (l2/2)‖w‖²

Backwards, with p = softmax(z_L) and B samples in the batch:

    δ_L = (p − onehot) / B,   g_i = δ_{i+1} W_{i+1},   δ_i = φ'(z_i) ∘ g_i
    ∇_{W_i} f = δ_iᵀ a_{i−1},   ∇_{b_i} f = Σ δ_i

and the derivatives of all these along a direction (V_i, c_i), with a dot (Pearlmutter 1994):

    ż_i = a_{i−1} V_iᵀ + c_i + ȧ_{i−1} W_iᵀ,   ȧ_i = φ'(z_i) ∘ ż_i,   ȧ_0 = 0
    δ̇_L = p ∘ (ż_L − Σ p ∘ ż_L) / B,   ġ_i = δ̇_{i+1} W_{i+1} + δ_{i+1} V_{i+1}
    δ̇_i = φ'(z_i) ∘ ġ_i + φ''(z_i) ∘ g_i ∘ ż_i
    ∇²f · (V, c) = (δ̇_iᵀ a_{i−1} + δ_iᵀ ȧ_{i−1},   Σ δ̇_i)

Autograd under vmap finds the same numbers with more operations and more passes over memory: gradients, as
large as the variables, are made first and added to where they belong afterwards. Here a product is added,
already scaled, to its place as it is made. What a pass needs of the variables is read before any of it is
written, so that a step, or d − α∇²f d, may be made in place.

A loss says itself that it is one of these, by being a `PerceptronLoss`; `Derivatives` then asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, softplus

from asyncfed.problems.layout import Layout, aligned

Batch = tuple[Tensor, ...]
Loss = Callable[[Any, Any, Batch], Tensor]
Scale = float | Tensor

_WORTH_FUSING = (
    8192  # numbers in a client's matrix from which a product of its own, added as it is made, pays
)


class _Activation(NamedTuple):
    """φ; and φ'(z), φ''(z) where z = z_i and a = φ(z) are known. None: zero everywhere."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    bend: Callable[[Tensor, Tensor], Tensor] | None


def _logistic(z: Tensor) -> Tensor:
    return torch.where(z > 20, 1.0, torch.sigmoid(z))  # beyond, torch's softplus is a straight line


def _density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z * z) * 0.3989422804014327  # 1/√(2π)


_ACTIVATIONS: dict[type[nn.Module], _Activation] = {
    nn.ReLU: _Activation(torch.relu, lambda z, a: (a > 0).to(a.dtype), None),
    nn.Tanh: _Activation(torch.tanh, lambda z, a: 1 - a * a, lambda z, a: -2 * a * (1 - a * a)),
    nn.Softplus: _Activation(
        softplus, lambda z, a: _logistic(z), lambda z, a: _logistic(z) * (1 - _logistic(z))
    ),
    nn.GELU: _Activation(
        nn.functional.gelu,
        lambda z, a: torch.special.ndtr(z) + z * _density(z),
        lambda z, a: (2 - z * z) * _density(z),
    ),
    nn.Identity: _Activation(lambda z: z, lambda z, a: torch.ones_like(z), None),
}


@dataclass(frozen=True, eq=False)
class PerceptronLoss:
    """A loss that is the f above, and is called like any other.

    Parameters
    ----------
    loss
        The same, as a plain function of one client.
    layers
        Names of the layers, inputs first: parameters are called `<layer>.weight` and `<layer>.bias`.
    kind
        The class of the activations between them.
    l2
        Of the penalty.
    """

    loss: Loss
    layers: tuple[str, ...]
    kind: type[nn.Module]
    l2: float = 0.0

    def __call__(self, inner: Any, outer: Any, batch: Batch) -> Tensor:
        return self.loss(inner, outer, batch)


@dataclass(frozen=True, eq=False)
class Perceptrons:
    """The derivatives of such a loss for k clients, whose variables are rows (k, d)."""

    loss: PerceptronLoss
    layout: Layout

    @torch.no_grad()
    def gradient(
        self, x: Tensor, batch: Batch, scale: Scale | None, out: Tensor, *, add: bool = False
    ) -> Tensor:
        """Write (or add) ∇f, times `scale` (a number or (k, 1)), to `out`, which may be x; returns f (k,)."""
        w, target = self._layers(x), self._layers(out)
        passed = self._forward(w, batch)
        deltas, _ = self._backward(w, passed)
        loss = passed.loss
        if self.loss.l2:
            loss = loss + (self.loss.l2 / 2) * x.square().sum(1)
        add = self._penalty(x, scale, out, add)
        for place, delta, a in zip(target, deltas, passed.a, strict=True):
            scaled, alpha = _scaled(delta, scale)
            _put(place.weight, [(scaled, a)], alpha, add)
            _put_sum(place.bias, scaled, alpha, add)
        return loss

    @torch.no_grad()
    def hessian_vector(
        self, x: Tensor, batch: Batch, u: Tensor, scale: Scale | None, out: Tensor, *, add: bool = False
    ) -> None:
        """Write (or add) ∇²f · u, times `scale`, to `out`, which may be u."""
        w, v, target = self._layers(x), self._layers(u), self._layers(out)
        passed = self._forward(w, batch)
        deltas, g = self._backward(w, passed)
        z_dots, a_dots = self._forward_dot(w, v, passed)
        delta_dots = self._backward_dot(w, v, passed, deltas, g, z_dots)
        add = self._penalty(u, scale, out, add)
        for i, place in enumerate(target):
            dot, alpha = _scaled(delta_dots[i], scale)
            pairs = [(dot, passed.a[i])]
            if i:  # ȧ_0 = 0
                pairs.append((_scaled(deltas[i], scale)[0], a_dots[i - 1]))
            _put(place.weight, pairs, alpha, add)
            _put_sum(place.bias, dot, alpha, add)

    def _layers(self, rows: Tensor) -> list[_Affine]:
        named = self.layout.views(rows)
        assert isinstance(named, dict), "parameters of layers have names"
        return [_Affine(named[f"{name}.weight"], named[f"{name}.bias"]) for name in self.loss.layers]

    def _forward(self, w: list[_Affine], batch: Batch) -> _Passed:
        images, labels = batch
        phi = _ACTIVATIONS[self.loss.kind]
        a, z = [images.flatten(2)], list[Tensor]()
        for i, layer in enumerate(w):
            z.append(layer(a[i]))
            if i + 1 < len(w):
                a.append(phi.value(z[i]))
        slopes = [phi.slope(z_i, a_i) for z_i, a_i in zip(z, a[1:], strict=False)]
        log_p = log_softmax(z[-1], -1)
        loss = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1).mean(-1).neg_()
        return _Passed(a, z, slopes, log_p.exp_(), labels, loss)

    def _backward(self, w: list[_Affine], passed: _Passed) -> tuple[list[Tensor], list[Tensor]]:
        """δ_1 … δ_L, and g_1 … g_{L−1}"""
        labels, p = passed.labels.unsqueeze(-1), passed.p
        delta = p.scatter_add(-1, labels, p.new_full((1, 1, 1), -1.0).expand_as(labels))
        deltas, g = [delta.div_(p.shape[1])], list[Tensor]()
        for layer, slope in zip(reversed(w[1:]), reversed(passed.slopes), strict=True):
            g.insert(0, torch.bmm(deltas[0], layer.weight))
            deltas.insert(0, g[0] * slope)
        return deltas, g

    def _forward_dot(
        self, w: list[_Affine], v: list[_Affine], passed: _Passed
    ) -> tuple[list[Tensor], list[Tensor]]:
        """ż_1 … ż_L, and ȧ_1 … ȧ_{L−1}"""
        z_dots = [v[0](passed.a[0])]
        a_dots = list[Tensor]()
        for i in range(1, len(w)):
            a_dots.append(passed.slopes[i - 1] * z_dots[-1])
            z_dots.append(v[i](passed.a[i]).baddbmm_(a_dots[-1], w[i].weight.mT))
        return z_dots, a_dots

    def _backward_dot(
        self,
        w: list[_Affine],
        v: list[_Affine],
        passed: _Passed,
        deltas: list[Tensor],
        g: list[Tensor],
        z_dots: list[Tensor],
    ) -> list[Tensor]:
        """δ̇_1 … δ̇_L"""
        p, z_dot = passed.p, z_dots[-1]
        found = [(z_dot - (p * z_dot).sum(-1, keepdim=True)).mul_(p).div_(p.shape[1])]
        bend = _ACTIVATIONS[self.loss.kind].bend
        for i in reversed(range(1, len(w))):
            g_dot = torch.bmm(found[0], w[i].weight).baddbmm_(deltas[i], v[i].weight)
            delta_dot = g_dot.mul_(passed.slopes[i - 1])
            if bend is not None:
                delta_dot.addcmul_(bend(passed.z[i - 1], passed.a[i]), g[i - 1] * z_dots[i - 1])
            found.insert(0, delta_dot)
        return found

    def _penalty(self, x: Tensor, scale: Scale | None, out: Tensor, add: bool) -> bool:
        """Write (or add) what the penalty contributes; returns whether something stands there now."""
        if not self.loss.l2:
            return add
        part = x * (self.loss.l2 if scale is None else self.loss.l2 * scale)
        out.add_(part) if add else out.copy_(part)
        return True


class _Affine(NamedTuple):
    """W_i (k, m, n) and b_i (k, m)."""

    weight: Tensor
    bias: Tensor

    def __call__(self, a: Tensor) -> Tensor:
        if self.weight[0].numel() >= _WORTH_FUSING:  # a W_iᵀ reads a large matrix across its rows
            return torch.baddbmm(self.bias.unsqueeze(2), self.weight, a.mT).mT
        return torch.baddbmm(self.bias.unsqueeze(1), a, self.weight.mT)


@dataclass(frozen=True, slots=True)
class _Passed:
    """What a forward pass leaves: a_0 … a_{L−1}, z_1 … z_L, φ'(z_1) … φ'(z_{L−1}), p, labels and losses."""

    a: list[Tensor]
    z: list[Tensor]
    slopes: list[Tensor]
    p: Tensor
    labels: Tensor
    loss: Tensor


def written_out(loss: Loss, module: nn.Module, shape: Sequence[int], l2: float = 0.0) -> Loss:
    """`loss`, which is the mean cross-entropy of what `module` makes of the first tensor of a batch, against
    the second, plus (l2/2)‖w‖²: as a `PerceptronLoss` where `module` is a perceptron, else as it is.

    `shape` is that of one input.
    """
    layers = list(module.named_children()) if isinstance(module, nn.Sequential) else []
    if layers and repr(layers[0][1]) == repr(nn.Flatten()):
        layers = layers[1:]
    elif len(shape) != 1:
        return loss
    affine, between = layers[::2], layers[1::2]
    kinds = {type(layer) for _, layer in between} or {nn.Identity}
    kind = kinds.pop()
    if (
        len(layers) % 2 == 0
        or kinds
        or kind not in _ACTIVATIONS
        or any(repr(layer) != repr(kind()) for _, layer in between)
        or any(type(layer) is not nn.Linear or layer.bias is None for _, layer in affine)
    ):
        return loss
    return PerceptronLoss(loss, tuple(name for name, _ in affine), kind, l2)


def _scaled(delta: Tensor, scale: Scale | None) -> tuple[Tensor, float]:
    """A number is left to the product that comes; one for each client is cheapest here."""
    if isinstance(scale, Tensor):
        return delta * scale.unsqueeze(-1), 1.0
    return delta, 1.0 if scale is None else scale


def _put(view: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], alpha: float, add: bool) -> None:
    """Write (or add) alpha Σ leftᵀ right over the pairs."""
    if view[0].numel() >= _WORTH_FUSING and (aligned(view) or not add):
        for left, right in pairs:
            view.baddbmm_(left.mT, right, beta=float(add), alpha=alpha)
            add = True
        return
    (left, right), *others = pairs
    product = torch.bmm(left.mT, right)
    for left, right in others:
        product.baddbmm_(left.mT, right)
    if add:
        view.add_(product, alpha=alpha)
    else:
        torch.mul(product, alpha, out=view)


def _put_sum(view: Tensor, delta: Tensor, alpha: float, add: bool) -> None:
    if add:
        view.add_(delta.sum(1), alpha=alpha)
    else:
        torch.mul(delta.sum(1), alpha, out=view)
