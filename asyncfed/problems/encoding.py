"""What the first layers of a network make of images, as one step of autograd: `layerwise` up, and down again.

For a loss in two stages, whose outer variable is the parameters of the first. All its derivatives that
methods ask for, second ones too, go down through these layers once, with nothing differentiated after. Where
something is (∂_x (∇_λ f · w), torch.func), it goes the way of plain autograd instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp

from asyncfed.models import has_convolutions, outputs
from asyncfed.problems.layerwise import Layers

Encoder = Callable[[Mapping[str, Tensor], Tensor], Tensor]


def encoder(body: nn.Module) -> Encoder:
    """(parameters by name, images) → features. Written out where clients compute one by one, which is where
    there are convolutions, and all layers are known; otherwise as `outputs` makes them.
    """
    layers = Layers.of(body) if has_convolutions(body) else None
    if layers is None:
        return lambda w, images: outputs(body, w, images)

    def encode(w: Mapping[str, Tensor], images: Tensor) -> Tensor:
        features: Tensor = _Encode.apply(body, layers, tuple(w), [], images, *w.values())  # type: ignore[no-untyped-call]
        return features

    return encode


class _Encode(torch.autograd.Function):
    """`kept`, an empty list, is what the way up leaves for the way down."""

    @staticmethod
    def forward(
        body: nn.Module, layers: Layers, names: tuple[str, ...], kept: list[Any], images: Tensor, *ws: Tensor
    ) -> Tensor:
        features, _, own = layers.up(dict(zip(names, ws, strict=True)), (), images)
        kept.extend(own)
        return features

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.body, ctx.layers, ctx.names, ctx.kept, images, *ws = inputs
        ctx.save_for_backward(images, *ws)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Any, ...]:
        images, *ws = ctx.saved_tensors
        (d,) = above
        if torch.is_grad_enabled():  # to be differentiated again
            return *(None,) * 5, *_by_autograd(ctx.body, ctx.names, images, ws)(d)
        found: dict[str, Tensor] = {}
        w = dict(zip(ctx.names, ws, strict=True))
        ctx.layers.down(w, (), ctx.kept, d, (), lambda _, name, value: found.update({name: value}))
        return *(None,) * 5, *(found[name] for name in ctx.names)


def _by_autograd(
    body: nn.Module, names: tuple[str, ...], images: Tensor, ws: list[Tensor]
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """From ∂L/∂features to ∂L/∂parameters."""

    def up(*ws: Tensor) -> Tensor:
        return outputs(body, dict(zip(names, ws, strict=True)), images)

    pull: Callable[[Tensor], tuple[Tensor, ...]] = vjp(up, *ws)[1]
    return pull
