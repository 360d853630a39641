"""Random numbers of a loss, as a function of a key: dropout that is the same twice, and wherever a client is.

A network that drops units asks torch's global generator, which knows nothing of clients, steps or machines.
`drawn_from` answers in its place: every number is a hash of the key of the client and its step, of how
many times something was drawn before it in this call, and of its own place. So a loss is a pure function of
(variables, samples, key); it may be vmapped, differentiated twice, and recorded.

The hash is the 32-bit mixer "lowbias32" (Chris Wellons, 2018), in four rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from asyncfed.errors import ScenarioError

_LOW = 0xFFFFFFFF


def uniforms(key: Tensor, call: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Numbers in (0, 1) for a key (one whole number), in the precision of `like`."""
    bits = _bits(key, call, math.prod(shape))
    return ((bits.double() + 0.5) * 2.0**-32).to(like.dtype).view(shape)


def normals(key: Tensor, call: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Standard normal numbers (Box and Muller)."""
    count = math.prod(shape)
    bits = (_bits(key, call, 2 * count).double() + 0.5) * 2.0**-32
    radius, angle = (-2.0 * bits[:count].log()).sqrt(), 2 * math.pi * bits[count:]
    return (radius * angle.cos()).to(like.dtype).view(shape)


def _bits(key: Tensor, call: int, count: int) -> Tensor:
    place = torch.arange(count, device=key.device)
    first = _mix((key & _LOW) ^ (call * 0x9E3779B9 & _LOW))
    second = _mix((key >> 32) ^ first)
    return _mix(_mix(place ^ first) ^ second)


def _mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


class drawn_from(TorchFunctionMode):  # noqa: N801 (reads as a function: with drawn_from(key): …)
    """Within it, what torch draws comes from the key. What cannot be drawn so is refused by name."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self._key, self._calls = key, 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        drawn = _DRAWN.get(function)
        if drawn is not None:
            found = drawn(self._next, *args, **kwargs)
            if found is not None:
                return found
        elif function in _REFUSED and _REFUSED[function](*args, **kwargs):
            name = getattr(function, "__name__", str(function))
            raise ScenarioError(
                f"the module draws random numbers by {name}, which cannot be repeated on every backend; draw "
                "by torch.nn.Dropout, torch.rand, torch.randn or torch.bernoulli, or leave the drawing out "
                "(dropout=0.0)"
            )
        return function(*args, **kwargs)

    def _next(self, kind: Callable[..., Tensor], shape: tuple[int, ...], like: Tensor) -> Tensor:
        self._calls += 1
        return kind(self._key, self._calls, tuple(shape), like)


Next = Callable[[Callable[..., Tensor], tuple[int, ...], Tensor], Tensor]


def _dropout(per: Callable[[Tensor], tuple[int, ...]]) -> Callable[..., Tensor | None]:
    """Of masks of such a shape: for each number, or for each channel."""

    def dropped(
        draw: Next, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor | None:
        if not training or p == 0.0:
            return None  # as torch does it
        kept = (draw(uniforms, per(input), input) >= p).to(input.dtype) / (1.0 - p if p < 1.0 else 1.0)
        return input.mul_(kept) if inplace else input * kept

    return dropped


def _channels(input: Tensor) -> tuple[int, ...]:
    return (*input.shape[:2], *(1,) * (input.ndim - 2))


def _alpha_dropout(
    draw: Next, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor | None:
    """Keeps mean and variance of what self-normalising networks (SELU) carry."""
    if not training or p == 0.0:
        return None
    low = -1.7580993408473766  # −λα of SELU
    scale = 1.0 / math.sqrt((1.0 - p) * (1.0 + p * low**2))
    kept = (draw(uniforms, tuple(input.shape), input) >= p).to(input.dtype)
    found = (input * kept + low * (1 - kept)) * scale - scale * p * low
    return input.copy_(found) if inplace else found


def _bernoulli(draw: Next, input: Tensor, p: float | None = None, **more: Any) -> Tensor:
    _no_more(more)
    drawn = draw(uniforms, tuple(input.shape), input)
    return (drawn < (input if p is None else p)).to(input.dtype)


def _like(kind: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(draw: Next, input: Tensor, **more: Any) -> Tensor:
        _no_more(more)
        return draw(kind, tuple(input.shape), input)

    return made


def _of_size(kind: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(
        draw: Next, *size: Any, dtype: torch.dtype | None = None, device: Any = None, **more: Any
    ) -> Tensor:
        _no_more(more)
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
        return draw(kind, shape, torch.empty(0, dtype=dtype)).to(device)

    return made


def _filled(kind: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(draw: Next, self: Tensor, first: float = 0.0, second: float = 1.0, **more: Any) -> Tensor:
        _no_more(more)
        drawn = draw(kind, tuple(self.shape), self)
        width = second - first if kind is uniforms else second
        return self.copy_(first + width * drawn)

    return made


def _no_more(more: dict[str, Any]) -> None:
    more = {name: value for name, value in more.items() if value is not None and value is not False}
    more.pop("layout", None)
    if more:
        raise ScenarioError(
            f"the module draws random numbers with {', '.join(more)}, which cannot be given here; "
            "leave it out: every client draws from a stream of its own"
        )


_DRAWN: dict[Any, Callable[..., Tensor | None]] = {
    functional.dropout: _dropout(lambda input: tuple(input.shape)),
    torch.dropout: lambda draw, input, p, train: _DRAWN[functional.dropout](draw, input, p, train),
    functional.dropout1d: _dropout(_channels),
    functional.dropout2d: _dropout(_channels),
    functional.dropout3d: _dropout(_channels),
    functional.alpha_dropout: _alpha_dropout,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.rand: _of_size(uniforms),
    torch.randn: _of_size(normals),
    torch.rand_like: _like(uniforms),
    torch.randn_like: _like(normals),
    Tensor.uniform_: _filled(uniforms),
    Tensor.normal_: _filled(normals),
}


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _in_training(place: int, name: str = "training") -> Callable[..., bool]:
    return lambda *args, **kwargs: bool(kwargs.get(name, args[place] if len(args) > place else False))


def _attention(*args: Any, **kwargs: Any) -> bool:
    """(…, dropout_p at place 11, …, training)"""
    dropped = kwargs.get("dropout_p", args[11] if len(args) > 11 else 0.0)
    return bool(dropped) and bool(kwargs.get("training", True))


_REFUSED: dict[Any, Callable[..., bool]] = {
    functional.rrelu: _in_training(3),
    functional.feature_alpha_dropout: _in_training(2),
    functional.gumbel_softmax: _always,
    functional.fractional_max_pool2d: _always,
    functional.fractional_max_pool3d: _always,
    functional.multi_head_attention_forward: _attention,
    functional.scaled_dot_product_attention: lambda *args, **kwargs: bool(
        kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    ),
    torch.randint: _always,
    torch.randint_like: _always,
    torch.randperm: _always,
    torch.multinomial: _always,
    torch.poisson: _always,
    torch.normal: _always,
    Tensor.bernoulli_: _always,
    Tensor.exponential_: _always,
    Tensor.random_: _always,
    Tensor.multinomial: _always,
}
