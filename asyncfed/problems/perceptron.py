"""Derivatives of stacked perceptrons with cross-entropy, written out as batched matrix products.

    z_i = a_{i−1} W_iᵀ + b_i,   a_i = φ(z_i),   a_0 the inputs,   z_L the logits
    f   = mean over the batch of cross-entropy(z_L, label) + (l2/2)‖w‖²

Backwards, with p = softmax(z_L) and B samples in the batch:

    δ_L = (p − onehot) / B,   g_i = δ_{i+1} W_{i+1},   δ_i = φ'(z_i) ∘ g_i
    ∇_{W_i} f = δ_iᵀ a_{i−1},   ∇_{b_i} f = Σ δ_i

and its derivative along a direction (V_i, c_i), written Ṙ (Pearlmutter 1994):

    ż_i = a_{i−1} V_iᵀ + c_i + ȧ_{i−1} W_iᵀ,   ȧ_i = φ'(z_i) ∘ ż_i,   ȧ_0 = 0
    δ̇_L = p ∘ (ż_L − Σ p ∘ ż_L) / B,   ġ_i = δ̇_{i+1} W_{i+1} + δ_{i+1} V_{i+1}
    δ̇_i = φ'(z_i) ∘ ġ_i + φ''(z_i) ∘ g_i ∘ ż_i
    ∇²f · (V, c) = (δ̇_iᵀ a_{i−1} + δ_iᵀ ȧ_{i−1},   Σ δ̇_i)

Autograd under vmap finds the same numbers and makes more passes over memory: gradients as large as the
variables are made first and added to where they belong afterwards, and a Hessian product has a gradient made
that nobody wants. Here a product is added, already scaled, to its place as it is made, and what a pass needs
of the variables is read before any of it is written: so a step, or d − α∇²f d, may be made in place.

A loss says itself that it is one of these, by being a `PerceptronLoss`; `Derivatives` then asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, softplus

Batch = tuple[Tensor, ...]
Loss = Callable[[Any, Any, Batch], Tensor]
Scale = float | Tensor
Named = Mapping[str, Tensor]

_WORTH_FUSING = 8192  # numbers in a client's matrix from which a product of its own, added as it is made, pays


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
    """A loss that is the f above, for which it may be called like any other; and its derivatives.

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

    @torch.no_grad()
    def gradient(
        self, w: Named, batch: Batch, scale: Scale | None, out: Named, *, add: bool = False
    ) -> Tensor:
        """Write (or add) ∇f of k clients, times `scale` (a number or (k, 1)), to `out`; returns f (k,).
        `out` may be `w`.
        """
        passed = self._forward(w, batch)
        deltas, _ = self._backward(w, passed)
        loss = passed.loss
        if self.l2:
            loss = loss + (self.l2 / 2) * sum(value.square().flatten(1).sum(1) for value in w.values())
        add = self._penalty(w, scale, out, add)
        for name, delta, a in zip(self.layers, deltas, passed.inputs, strict=True):
            scaled, alpha = _scaled(delta, scale)
            _put(out[f"{name}.weight"], ((scaled, a),), alpha, add)
            _put_sum(out[f"{name}.bias"], scaled, alpha, add)
        return loss

    @torch.no_grad()
    def hessian_vector(
        self, w: Named, batch: Batch, u: Named, scale: Scale | None, out: Named, *, add: bool = False
    ) -> None:
        """Write (or add) ∇²f · u, times `scale`, to `out`, which may be `u`."""
        passed = self._forward(w, batch)
        deltas, before = self._backward(w, passed)
        z_dots, a_dots = self._forward_dot(w, u, passed)
        delta_dots = self._backward_dot(w, u, passed, deltas, before, z_dots)
        add = self._penalty(u, scale, out, add)
        for number, name in enumerate(self.layers):
            dot, alpha = _scaled(delta_dots[number], scale)
            pairs = ((dot, passed.inputs[number]),)
            if number:  # the inputs have no derivative
                pairs += ((_scaled(deltas[number], scale)[0], a_dots[number]),)
            _put(out[f"{name}.weight"], pairs, alpha, add)
            _put_sum(out[f"{name}.bias"], dot, alpha, add)

    def _forward(self, w: Named, batch: Batch) -> _Passed:
        images, labels = batch
        a, inputs, zs = images.flatten(2), [], []
        phi = _ACTIVATIONS[self.kind].value
        for name in self.layers:
            inputs.append(a)
            zs.append(_affine(a, w[f"{name}.weight"], w[f"{name}.bias"]))
            if name != self.layers[-1]:
                a = phi(zs[-1])
        log_p = log_softmax(zs[-1], -1)
        loss = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1).mean(-1).neg_()
        return _Passed(inputs, zs, log_p.exp_(), labels, loss)

    def _backward(self, w: Named, passed: _Passed) -> tuple[list[Tensor], list[Tensor]]:
        """δ_1 … δ_L, and g_1 … g_{L−1}."""
        labels = passed.labels.unsqueeze(-1)
        delta = passed.p.scatter_add(-1, labels, passed.p.new_full((1, 1, 1), -1.0).expand_as(labels))
        deltas, before = [delta.div_(passed.p.shape[1])], list[Tensor]()
        for number in reversed(range(1, len(self.layers))):
            g = torch.bmm(deltas[0], w[f"{self.layers[number]}.weight"])
            before.insert(0, g)
            deltas.insert(0, g * self._slope(passed, number - 1))
        return deltas, before

    def _forward_dot(self, w: Named, u: Named, passed: _Passed) -> tuple[list[Tensor], list[Tensor]]:
        """ż_1 … ż_L, and ȧ_0 … ȧ_{L−1}, of which the first is never looked at."""
        z_dots, a_dots = [], [passed.inputs[0]]
        for number, name in enumerate(self.layers):
            z_dot = _affine(passed.inputs[number], u[f"{name}.weight"], u[f"{name}.bias"])
            if number:
                a_dots.append(self._slope(passed, number - 1) * z_dots[-1])
                z_dot.baddbmm_(a_dots[-1], w[f"{name}.weight"].mT)
            z_dots.append(z_dot)
        return z_dots, a_dots

    def _backward_dot(
        self,
        w: Named,
        u: Named,
        passed: _Passed,
        deltas: list[Tensor],
        before: list[Tensor],
        z_dots: list[Tensor],
    ) -> list[Tensor]:
        """δ̇_1 … δ̇_L"""
        z_dot, p = z_dots[-1], passed.p
        found = [(z_dot - (p * z_dot).sum(-1, keepdim=True)).mul_(p).div_(p.shape[1])]
        bend = _ACTIVATIONS[self.kind].bend
        for number in reversed(range(1, len(self.layers))):
            weight = f"{self.layers[number]}.weight"
            dot = torch.bmm(found[0], w[weight]).baddbmm_(deltas[number], u[weight])
            dot.mul_(self._slope(passed, number - 1))
            if bend is not None:
                z, a = passed.zs[number - 1], passed.inputs[number]
                dot.addcmul_(bend(z, a), before[number - 1] * z_dots[number - 1])
            found.insert(0, dot)
        return found

    def _slope(self, passed: _Passed, number: int) -> Tensor:
        return _ACTIVATIONS[self.kind].slope(passed.zs[number], passed.inputs[number + 1])

    def _penalty(self, w: Named, scale: Scale | None, out: Named, add: bool) -> bool:
        """Write (or add) the part that comes of the penalty; returns whether something stands there now."""
        if not self.l2:
            return add
        for name, value in w.items():
            part = value * self.l2 if scale is None else value * (self.l2 * _over(scale, value))
            out[name].add_(part) if add else out[name].copy_(part)
        return True


@dataclass(frozen=True, slots=True)
class _Passed:
    """What a forward pass leaves: a_0 … a_{L−1}, z_1 … z_L, softmax(z_L), the labels and the losses."""

    inputs: list[Tensor]
    zs: list[Tensor]
    p: Tensor
    labels: Tensor
    loss: Tensor


def written_out(loss: Loss, module: nn.Module, l2: float = 0.0) -> Loss:
    """`loss`, which is the mean cross-entropy of what `module` makes of the first tensor of a batch, against
    the second, plus (l2/2)‖w‖²: as a `PerceptronLoss` where `module` is a perceptron, else as it is.
    """
    if not isinstance(module, nn.Sequential):
        return loss
    layers = list(module.named_children())
    if layers and type(layers[0][1]) is nn.Flatten and (layers[0][1].start_dim, layers[0][1].end_dim) == (1, -1):
        layers = layers[1:]
    else:
        return loss
    affine, between = layers[::2], layers[1::2]
    kinds = {type(layer) for _, layer in between} or {nn.Identity}
    plain = (
        len(layers) % 2 == 1
        and all(type(layer) is nn.Linear and layer.bias is not None for _, layer in affine)
        and len(kinds) == 1
        and kinds <= set(_ACTIVATIONS)
        and all(repr(layer) == repr(type(layer)()) for _, layer in between)
    )
    return PerceptronLoss(loss, tuple(name for name, _ in affine), kinds.pop(), l2) if plain else loss


def _affine(a: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias.unsqueeze(1), a, weight.mT)


def _over(scale: Scale, like: Tensor) -> Scale:
    """A number, or one for each client, to multiply tensors like that with."""
    return scale.view(-1, *(1,) * (like.ndim - 1)) if isinstance(scale, Tensor) and scale.ndim > 1 else scale


def _scaled(delta: Tensor, scale: Scale | None) -> tuple[Tensor, float]:
    """A number is left to the product that comes; one for each client is cheapest here."""
    if isinstance(scale, Tensor):
        return delta * _over(scale, delta), 1.0
    return delta, 1.0 if scale is None else scale


def _put(view: Tensor, pairs: tuple[tuple[Tensor, Tensor], ...], alpha: float, add: bool) -> None:
    """Write (or add) alpha Σ leftᵀ right over the pairs."""
    if view[0].numel() >= _WORTH_FUSING:
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
