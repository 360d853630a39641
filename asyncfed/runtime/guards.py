"""What the functions of a method return, looked at before it is used: a mistake is told in the method's own
names, not in those of whatever would have stumbled over it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from asyncfed.errors import RunError
from asyncfed.protocols.part import Act, Tensors


def require_kind(part: Act, function: str, found: object, kind: type) -> None:
    """That a function of a part returned what it should."""
    if not isinstance(found, kind):
        wanted = "a dict of tensors" if kind is dict else f"{kind.__name__}(…)"
        raise RunError(
            f"{function} of {type(part).__name__} returned {_form(found)}; it must return {wanted}"
        )


def require_rows(part: Act, what: str, values: Tensors, count: int, lengths: Mapping[str, int]) -> None:
    """That every value is a tensor with a row for each of `count` clients, as long as `lengths` say."""
    for name, value in values.items():
        fits = isinstance(value, Tensor) and value.ndim > 0 and len(value) == count
        if not fits or (name in lengths and value.shape[1:] != (lengths[name],)):
            raise RunError(
                f"{type(part).__name__} {what} {name!r} as {_form(value)}; it must be a tensor of shape "
                f"({count}, {lengths.get(name, '…')}), one row for each client"
            )


def require_numbers(part: Act, report: Tensors, count: int) -> None:
    """That a report has one number for each of `count` clients."""
    for name, value in report.items():
        if not isinstance(value, Tensor) or value.shape != (count,):
            raise RunError(
                f"{type(part).__name__} reports {name!r} as {_form(value)}; it must be a tensor of shape "
                f"({count},), one number for each client"
            )


def listing(values: Tensors) -> str:
    """Names and lengths, for a message."""
    lengths = {
        name: value.shape[-1] for name, value in values.items() if isinstance(value, Tensor) and value.ndim
    }
    return ", ".join(f"{name} ({lengths[name]})" if name in lengths else name for name in values) or "nothing"


def _form(value: object) -> str:
    """What something is, in a word or two."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "nothing" if value is None else f"a {type(value).__name__}"
