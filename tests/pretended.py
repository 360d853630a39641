"""A GPU that is not there: tensors that say they are on `cuda`, compute on the CPU, and do not mix.

A test that runs `with pretended_gpu():` sees a machine with one GPU. A tensor made there (`device="cuda"`,
`.to("cuda")`, or computed from such tensors) is a `Pretended`: it has real numbers, so a whole run goes to
its end and can be compared with the same run on the CPU, and every operation on it is looked at. What CUDA
refuses is refused: a tensor on the GPU that meets one on the CPU (a single number of no dimensions excepted,
where an operation works element by element), a generator of the CPU that draws for the GPU, `numpy()`.

Why not torch's FakeTensorMode: its tensors have no values, so a run ends at the first `item()`; and in a
torch built without CUDA it cannot even slice a tensor of `cuda`, for there is no guard for that device. Here
Python is told `cuda`, and C++ `meta`, a device for which every torch has a guard.

What it cannot see is in docs/gpu.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)
_META = torch.device("meta", 0)  # what others mean by `meta` has no index

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_ASK_DEVICE = torch.ops.prim.device.default
_DEVICE, _IS_CUDA = Tensor.device.__get__, Tensor.is_cuda.__get__
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
_COPIES = {_aten.copy_.default, _aten.copy.default, _aten._to_copy.default}
_INDEXING = {  # of a tensor on the GPU, by places that may be on the CPU: self, indices, values
    _aten.index.Tensor, _aten._unsafe_index.Tensor, _aten.index_put.default, _aten.index_put_.default,
    _aten._index_put_impl_.default, _aten._unsafe_index_put.default,
}  # fmt: skip
_WITH_A_NUMBER = {  # take one from the CPU, as those do that work element by element
    _aten.fill_.Tensor, _aten.fill.Tensor, _aten.index_fill_.int_Tensor, _aten.index_fill.int_Tensor,
    _aten.masked_fill_.Tensor, _aten.masked_fill.Tensor,
}  # fmt: skip


class Pretended(Tensor):
    """Numbers on the pretended GPU; `held` are the same numbers, in the same memory, as the CPU sees them."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretended:
        made = Tensor._make_subclass(cls, held, False, dispatch_device=True, device_for_backend_keys=_META)
        made.held = held
        return made

    @property
    def device(self) -> torch.device:
        return _CUDA

    @property
    def is_cuda(self) -> bool:
        return True

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.held.numpy(force=True)
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.held.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"{self.held!r} on a pretended GPU"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})


class _Made(TorchDispatchMode):
    """Operations on no tensor of the GPU: among them those that make one there, or bring one there.

    It stands where torch's fake mode would: below what records operations, which is to see these tensors.
    """

    shape_env = None  # of the fake mode: shapes are known

    def __init__(self) -> None:
        super().__init__()
        self._mode_key = _FAKE

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})


class _Named(TorchFunctionMode):
    """What is said of devices in Python: `cuda`, where C++ hears and says `meta`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == _DEVICE:
            device = function(*args)
            return _CUDA if device == _META else device
        if function == _IS_CUDA:
            return args[0].device == _CUDA
        if function is torch.device or _is_faking():
            return function(*args, **(kwargs or {}))
        if function is Tensor.cuda:
            return args[0].to(_META)
        kwargs = {key: _for_cpp(value) for key, value in (kwargs or {}).items()}
        if function in _FROM_NUMBERS and kwargs.get("device") == _META:
            return function(*args, **kwargs | {"device": _CPU}).to(_META)
        return function(*map(_for_cpp, args), **kwargs)


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """A machine with one GPU, as far as torch and those who ask it can tell; with ASYNCFED_REAL_GPU set, the
    GPU that there is.
    """
    if os.environ.get("ASYNCFED_REAL_GPU"):
        yield
        return
    with patch.object(torch.cuda, "is_available", lambda: True), _Made(), _Named():
        yield


def _computed(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operation on the numbers held; its results on the GPU, unless they are brought to the CPU."""
    if function is _ASK_DEVICE:
        return _META
    given = [*_tensors(args), *_tensors(kwargs.values())]
    pretended = {id(value.held): value for value in given if isinstance(value, Pretended)}
    asked = kwargs.get("device")
    there = bool(pretended) if asked is None else asked == _META
    if not pretended and not there:
        return function(*args, **kwargs)
    _require_one_device(function, args, given)
    if there:
        _require_generator(kwargs.get("generator"))
        kwargs = kwargs if asked is None else kwargs | {"device": _CPU}
    found = function(*map(_held, args), **{key: _held(value) for key, value in kwargs.items()})
    if torch.Tag.inplace_view in function.tags:  # of another shape now, and has to know it
        with no_dispatch():
            function(*args, **kwargs)
    if not there or (function is _aten.copy_.default and id(found) not in pretended):
        return found
    return _on_gpu(found, pretended)


def _require_one_device(function: Any, args: Sequence[Any], given: Sequence[Tensor]) -> None:
    """What CUDA asks of the arguments of an operation."""
    astray = [value for value in given if not isinstance(value, Pretended)]
    if not astray or len(astray) == len(given) or function in _COPIES:
        return
    if function in _INDEXING and isinstance(args[0], Pretended):
        values = args[2:3]
        astray = [value for value in values if not isinstance(value, Pretended) and value.ndim]
    elif torch.Tag.pointwise in function.tags or function in _WITH_A_NUMBER:
        written = args[0] if function._schema.is_mutable else None
        astray = [value for value in astray if value.ndim or value is written]
    if astray:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({function} of tensors {', '.join(_said(value) for value in given)})"
        )


def _is_faking() -> bool:
    """Whether torch notes shapes and devices only, as it does of all that is recorded."""
    return isinstance(torch._C._get_dispatch_mode(_FAKE), FakeTensorMode)


def _require_generator(generator: torch.Generator | None) -> None:
    if generator is not None and generator.device.type == "cpu":
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")


def _said(value: Tensor) -> str:
    return f"{tuple(value.shape)} on {'cuda' if isinstance(value, Pretended) else 'cpu'}"


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _held(value: Any) -> Any:
    if isinstance(value, Pretended):
        return value.held
    return type(value)(map(_held, value)) if type(value) in (list, tuple) else value


def _on_gpu(found: Any, pretended: dict[int, Pretended]) -> Any:
    """On the GPU; what was written to in place, or in `out`, is itself."""
    if isinstance(found, Tensor):
        return pretended[id(found)] if id(found) in pretended else Pretended(found)
    return [_on_gpu(value, pretended) for value in found] if isinstance(found, (list, tuple)) else found


def _for_cpp(value: Any) -> Any:
    """A device as C++ is told it."""
    if isinstance(value, str):
        return _META if value.startswith("cuda") else value
    return _META if isinstance(value, torch.device) and value.type == "cuda" else value
