"""LSTM layers, with first and second derivatives written by hand, for many networks at once.

torch's own LSTM can neither be vmapped nor differentiated twice on a CPU; and the same written as matrix
products and pointwise functions, differentiated by autograd, is thousands of small operations and adds up the
gradient of its weights character by character. Here a layer is an `autograd.Function` of stacked networks:

    z_t = [x_t, h_{t−1}]      a_t = W z_t + b      s_t = (i, f, s_g, o)_t = σ(a_t)      g_t = 2 s_g − 1
    c_t = f_t c_{t−1} + i_t g_t                    h_t = o_t τ_t                        τ_t = tanh(c_t)

with W = [W_ih W_hh] and b = b_ih + b_hh, of which the rows of g are doubled: tanh(v) = 2 σ(2v) − 1, and torch
has a σ that takes a seventh of the time of its tanh. Let dv be the derivative of the loss by v, and dy_t the
one by h_t as an output. Then, backwards in t,

    dh_t = dy_t + W_hhᵀ da_{t+1}                   dc_t = f_{t+1} dc_{t+1} + dh_t o_t tanh'(c_t)
    da_t = (dc g, dc c_{t−1}, dc i, dh τ)_t · s_t (1 − s_t)
    dx_t = W_ihᵀ da_t         dW = Σ_t da_t z_tᵀ   db = Σ_t da_t

where da of g is a quarter of what it should be, which is made up for in W, dW and db. Let ∂v (`v_along`) be
the derivative of v along a direction (∂x, ∂W, ∂b). With these as cotangents of (dx, dW, db) the gradient of
(dx, dW, db) by (dy, x, W, b) is (∂h, ∂dx, ∂dW, ∂db), dy held fixed: the lines above, each differentiated
along the direction. That is as far as it goes: there are no third derivatives.

Sums over t are one product each. Tensors are laid out (networks, step, sample, unit), in stretches of steps
below the 32 MiB from which on the allocator maps memory anew each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

_STRETCH_BYTES = 30 * 2**20  # of the largest tensor, the gates
_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input  # (v, σ) to v σ (1 − σ)
_tanh_backward = torch.ops.aten.tanh_backward.grad_input  # (v, tanh) to v (1 − tanh²)


class LSTM(nn.Module):
    """Stacked LSTM layers: sequences (B, length, inputs) to the last layer's outputs (B, length, hidden).

    The equations, parameters and initial values of `torch.nn.LSTM`. Where gradients are disabled, nothing is
    held but the outputs.
    """

    def __init__(self, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.hidden, self.layers = hidden, layers
        for layer in range(layers):
            shapes = {
                "weight_ih": (4 * hidden, hidden if layer else inputs),
                "weight_hh": (4 * hidden, hidden),
                "bias_ih": (4 * hidden,),
                "bias_hh": (4 * hidden,),
            }
            for name, shape in shapes.items():
                self.register_parameter(f"{name}_l{layer}", nn.Parameter(torch.empty(shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.hidden)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, sequences: Tensor) -> Tensor:
        values = sequences.transpose(0, 1)
        for layer in range(self.layers):
            weight = torch.cat(self._of(layer, "weight"), dim=1)
            bias = torch.add(*self._of(layer, "bias"))
            values = _Layer.apply(values, weight, bias, torch.is_grad_enabled())[0]  # type: ignore[no-untyped-call]
        return values.transpose(0, 1)

    def _of(self, layer: int, kind: str) -> tuple[Tensor, Tensor]:
        return getattr(self, f"{kind}_ih_l{layer}"), getattr(self, f"{kind}_hh_l{layer}")


class _Run(NamedTuple):
    """What a stretch of steps leaves behind, (networks, steps, B, units); c begins one step earlier."""

    z: Tensor
    s: Tensor
    tau: Tensor
    c: Tensor


class _Back(NamedTuple):
    """And what going back through it leaves."""

    da: Tensor
    dc: Tensor
    dh: Tensor


class _Stacked(Function):
    """A function of networks, which under vmap is the same function of more networks."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        raise AssertionError("every function says which it is")

    @classmethod
    def of_more(cls, count: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> Any:
        def first(argument: Any, dim: int | None) -> Any:
            if not isinstance(argument, Tensor):
                return argument
            return argument.expand(count, *argument.shape) if dim is None else argument.movedim(dim, 0)

        found = cls.apply(*map(first, arguments, in_dims))  # type: ignore[no-untyped-call]
        return found, (0,) * len(found)


class _Layer(_Stacked):
    """(x, W, b) to h, and to what `_LayerGradient` needs of it, where that is to be kept."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, ...]:
        return _flat(lambda *tensors: _forward(*tensors, keep=keep), x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, _ = inputs
        _, *kept = output
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, *kept)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        dx, dweight, dbias, *_ = _LayerGradient.apply(dy, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return dx, dweight, dbias, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return _Layer.of_more(info.batch_size, in_dims, arguments)


class _LayerGradient(_Stacked):
    """(dy, x, W, b, what `_Layer` kept) to (dx, dW, db), and to what `_LayerProduct` needs besides."""

    @staticmethod
    def forward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        return _flat(_backward, dy, weight, *kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        _, x, weight, bias, *run = inputs
        _, _, _, *back = output
        ctx.mark_non_differentiable(*back)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, *run, *back)
        ctx.kept = len(run)

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> tuple[Tensor | None, ...]:
        (*at,) = ctx.saved_tensors
        directions = (
            torch.zeros_like(own) if given is None else given
            for own, given in zip(at[:3], along[:3], strict=True)
        )
        found = _LayerProduct.apply(*directions, *at[1:2], *at[3:])  # type: ignore[no-untyped-call]
        return (*found, *(None,) * ctx.kept)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return _LayerGradient.of_more(info.batch_size, in_dims, arguments)


class _LayerProduct(_Stacked):
    """(∂x, ∂W, ∂b, W, what `_Layer` and `_LayerGradient` kept) to (∂h, ∂dx, ∂dW, ∂db)."""

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return _flat(_product, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("an LSTM has first and second derivatives here, and no third ones")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return _LayerProduct.of_more(info.batch_size, in_dims, arguments)


def _flat(function: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Call a function of tensors (networks, …) with however many axes of networks there are; the first tensor
    has three axes besides.
    """
    shape = tensors[0].shape[:-3]
    found = function(*(t.reshape(-1, *t.shape[len(shape) :]) for t in tensors))
    return tuple(t.view(*shape, *t.shape[1:]) for t in found)


def _stretches(length: int, bytes_per_step: int) -> Iterator[slice]:
    """All steps, in as few stretches as their largest tensor allows, of nearly equal lengths."""
    count = min(length, math.ceil(length * bytes_per_step / _STRETCH_BYTES))
    cuts = [length * place // count for place in range(count + 1)]
    return (slice(start, stop) for start, stop in pairwise(cuts))


def _quarters(units: Tensor) -> tuple[Tensor, ...]:
    """Of i, f, g and o (…, H), as views of (…, 4 H)."""
    return units.chunk(4, -1)


def _g_times(factor: float, rows: Tensor) -> Tensor:
    """Rows (networks, 4 H, …), those of g times a factor."""
    scaled = rows.clone()
    scaled.chunk(4, 1)[2].mul_(factor)
    return scaled


def _forward(x: Tensor, weight: Tensor, bias: Tensor, *, keep: bool) -> Sequence[Tensor]:
    n, length, samples, inputs = x.shape
    hidden = bias.shape[1] // 4
    weight_t, bias = _g_times(2, weight).mT.contiguous(), _g_times(2, bias).unsqueeze(1)
    minus_one = x.new_full((), -1.0)
    h, a = x.new_empty(n, length, samples, hidden), x.new_empty(n, samples, 4 * hidden)
    h_before = c_before = x.new_zeros(n, samples, hidden)
    g = torch.empty_like(h_before)
    kept: list[Tensor] = []
    for steps in _stretches(length, a.nbytes):
        count = steps.stop - steps.start
        run = _Run(
            z=x.new_empty(n, count, samples, inputs + hidden),
            s=x.new_empty(n, count, samples, 4 * hidden),
            tau=x.new_empty(n, count, samples, hidden),
            c=x.new_empty(n, count + 1, samples, hidden),
        )
        run.z[..., :inputs], run.c[:, 0] = x[:, steps], c_before
        for t, h_now in enumerate(h[:, steps].unbind(1)):
            run.z[:, t, :, inputs:] = h_before
            torch.sigmoid(torch.baddbmm(bias, run.z[:, t], weight_t, out=a), out=run.s[:, t])
            i, f, s_g, o = _quarters(run.s[:, t])
            torch.add(minus_one, s_g, alpha=2, out=g)
            c_before, c, tau = run.c[:, t], run.c[:, t + 1], run.tau[:, t]
            torch.mul(f, c_before, out=c).addcmul_(i, g)
            torch.mul(c, 2, out=tau).sigmoid_()
            torch.add(minus_one, tau, alpha=2, out=tau)
            h_before = torch.mul(o, tau, out=h_now)
        c_before = run.c[:, -1]
        if keep:
            kept += run
    return h, *kept


def _backward(dy: Tensor, weight: Tensor, *kept: Tensor) -> Sequence[Tensor]:
    n, length, samples, hidden = dy.shape
    inputs = weight.shape[2] - hidden
    weight = _g_times(4, weight)
    minus_one = dy.new_full((), -1.0)
    dx = dy.new_empty(n, length, samples, inputs)
    dweight, dbias = torch.zeros_like(weight), weight.new_zeros(n, 4 * hidden)
    dz, ds = dy.new_zeros(n, samples, inputs + hidden), dy.new_empty(n, samples, 4 * hidden)
    dc_next, g = dy.new_zeros(n, samples, hidden), dy.new_empty(n, samples, hidden)
    back: list[Tensor] = []
    start = length
    for run in reversed(_runs(kept)):
        start -= run.z.shape[1]
        da, dc, dh = torch.empty_like(run.s), torch.empty_like(run.tau), torch.empty_like(run.tau)
        for t in reversed(range(run.z.shape[1])):
            i, f, s_g, o = _quarters(run.s[:, t])
            ds_i, ds_f, ds_g, ds_o = _quarters(ds)
            torch.add(minus_one, s_g, alpha=2, out=g)
            dh_now, dc_now, tau = dh[:, t], dc[:, t], run.tau[:, t]
            torch.add(dy[:, start + t], dz[..., inputs:], out=dh_now)
            _tanh_backward(torch.mul(dh_now, o, out=dc_now), tau, grad_input=dc_now).add_(dc_next)
            torch.mul(dc_now, g, out=ds_i)
            torch.mul(dc_now, run.c[:, t], out=ds_f)
            torch.mul(dc_now, i, out=ds_g)
            torch.mul(dh_now, tau, out=ds_o)
            torch.mul(dc_now, f, out=dc_next)
            _sigmoid_backward(ds, run.s[:, t], grad_input=da[:, t])
            torch.bmm(da[:, t], weight, out=dz)
            dx[:, start + t] = dz[..., :inputs]
        dweight.baddbmm_(da.flatten(1, 2).mT, run.z.flatten(1, 2))
        dbias += da.sum((1, 2))
        back = [*_Back(da, dc, dh), *back]
    return dx, _g_times(4, dweight), _g_times(4, dbias), *back


def _product(
    x_along: Tensor, weight_along: Tensor, bias_along: Tensor, weight: Tensor, *kept: Tensor
) -> Sequence[Tensor]:
    n, length, samples, inputs = x_along.shape
    hidden = bias_along.shape[1] // 4
    stretches = len(kept) // (len(_Run._fields) + len(_Back._fields))
    runs, backs = _runs(kept[: 4 * stretches]), _backs(kept[4 * stretches :])
    h_along, runs_along = _run_along(x_along, weight_along, bias_along, weight, runs)
    weight, weight_along = _g_times(4, weight), _g_times(4, weight_along)
    minus_one = x_along.new_full((), -1.0)
    dx_along, dweight_along = torch.empty_like(x_along), torch.zeros_like(weight)
    dbias_along = torch.zeros_like(bias_along)
    dz_along, ds_along = (
        x_along.new_zeros(n, samples, inputs + hidden),
        x_along.new_empty(n, samples, 4 * hidden),
    )
    s_along, slope = torch.empty_like(ds_along), torch.empty_like(ds_along)
    dc_next = x_along.new_zeros(n, samples, hidden)
    g, dc_along, q = (torch.empty_like(dc_next) for _ in range(3))
    start = length
    for run, along, back in zip(reversed(runs), reversed(runs_along), reversed(backs), strict=True):
        start -= run.z.shape[1]
        da_along = torch.empty_like(run.s)
        for t in reversed(range(run.z.shape[1])):
            i, f, s_g, o = _quarters(run.s[:, t])
            _sigmoid_backward(along.s[:, t], run.s[:, t], grad_input=s_along)
            i_along, f_along, s_g_along, o_along = _quarters(s_along)
            ds_i, ds_f, ds_g, ds_o = _quarters(ds_along)
            torch.add(minus_one, s_g, alpha=2, out=g)
            dh, dc, tau, tau_along = back.dh[:, t], back.dc[:, t], run.tau[:, t], along.tau[:, t]
            dh_along = dz_along[..., inputs:]
            torch.mul(dh_along, o, out=q).addcmul_(dh, o_along)
            _tanh_backward(q, tau, grad_input=dc_along).add_(dc_next)
            torch.mul(dh, o, out=q).mul_(tau)
            dc_along.addcmul_(q, tau_along, value=-2)
            torch.mul(dc_along, g, out=ds_i).addcmul_(dc, s_g_along, value=2)
            torch.mul(dc_along, run.c[:, t], out=ds_f).addcmul_(dc, along.c[:, t])
            torch.mul(dc_along, i, out=ds_g).addcmul_(dc, i_along)
            torch.mul(dh_along, tau, out=ds_o).addcmul_(dh, tau_along)
            torch.mul(dc_along, f, out=dc_next).addcmul_(dc, f_along)
            torch.mul(run.s[:, t], -2, out=slope).add_(1).mul_(along.s[:, t])
            _sigmoid_backward(ds_along, run.s[:, t], grad_input=da_along[:, t])
            da_along[:, t].addcmul_(slope, back.da[:, t])
            torch.bmm(da_along[:, t], weight, out=dz_along).baddbmm_(back.da[:, t], weight_along)
            dx_along[:, start + t] = dz_along[..., :inputs]
        for da, z in ((da_along, run.z), (back.da, along.z)):
            dweight_along.baddbmm_(da.flatten(1, 2).mT, z.flatten(1, 2))
        dbias_along += da_along.sum((1, 2))
    return h_along, dx_along, _g_times(4, dweight_along), _g_times(4, dbias_along)


def _run_along(
    x_along: Tensor, weight_along: Tensor, bias_along: Tensor, weight: Tensor, runs: Sequence[_Run]
) -> tuple[Tensor, list[_Run]]:
    """∂h, and of every stretch (∂z, ∂a, ∂τ, ∂c)."""
    n, length, samples, inputs = x_along.shape
    hidden = bias_along.shape[1] // 4
    weight_t, weight_along_t = (_g_times(2, own).mT.contiguous() for own in (weight, weight_along))
    bias_along = _g_times(2, bias_along).unsqueeze(1)
    minus_one = x_along.new_full((), -1.0)
    h_along = x_along.new_empty(n, length, samples, hidden)
    a_along = x_along.new_empty(n, samples, 4 * hidden)
    s_along = torch.empty_like(a_along)
    h_before = c_before = x_along.new_zeros(n, samples, hidden)
    g = torch.empty_like(h_before)
    found: list[_Run] = []
    start = 0
    for run in runs:
        steps = slice(start, start + run.z.shape[1])
        along = _Run(*map(torch.empty_like, run))
        along.z[..., :inputs], along.c[:, 0] = x_along[:, steps], c_before
        for t, h_now in enumerate(h_along[:, steps].unbind(1)):
            along.z[:, t, :, inputs:] = h_before
            torch.baddbmm(bias_along, run.z[:, t], weight_along_t, out=a_along)
            along.s[:, t] = a_along.baddbmm_(along.z[:, t], weight_t)
            _sigmoid_backward(a_along, run.s[:, t], grad_input=s_along)
            i, f, s_g, o = _quarters(run.s[:, t])
            i_along, f_along, s_g_along, o_along = _quarters(s_along)
            torch.add(minus_one, s_g, alpha=2, out=g)
            c_along, tau_along = along.c[:, t + 1], along.tau[:, t]
            torch.mul(f, along.c[:, t], out=c_along).addcmul_(f_along, run.c[:, t])
            c_along.addcmul_(i, s_g_along, value=2).addcmul_(i_along, g)
            _tanh_backward(c_along, run.tau[:, t], grad_input=tau_along)
            h_before = torch.mul(o, tau_along, out=h_now).addcmul_(o_along, run.tau[:, t])
        c_before, start = along.c[:, -1], steps.stop
        found.append(along)
    return h_along, found


def _runs(kept: Sequence[Tensor]) -> list[_Run]:
    return [_Run(*kept[at : at + 4]) for at in range(0, len(kept), 4)]


def _backs(kept: Sequence[Tensor]) -> list[_Back]:
    return [_Back(*kept[at : at + 3]) for at in range(0, len(kept), 3)]
