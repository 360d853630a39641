"""What the functions of a method return, looked at before it is used: a mistake is told in the method's own
names, not in those of whatever would have stumbled over it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor, dtype

from asyncfed.errors import RunError
from asyncfed.protocols.part import Act, Tensors

Lent: TypeAlias = tuple[str, Tensor, int]
"""A tensor that was handed out: its name, and how often it had been written to."""


def require_untouched(part: Act, memory: Tensors, handed: Sequence[Lent], sent: Sequence[Lent]) -> None:
    """That what a step was handed is as it was. (What it absorbed is its own; but what a server `sent` to all
    of its clients is not.)
    """
    whose = f"a step of {type(part).__name__}"
    for key, value, version in handed:
        if value._version != version or memory.get(key) is not value:
            raise RunError(
                f"{whose} changed {key!r} of its memory in place; return what changes "
                "(Step(…, memory={…})) and leave what was handed out as it is"
            )
    for key, value, version in sent:
        if value._version != version:
            raise RunError(
                f"{whose} changed {key!r}, which it was sent, in place; others read it too: clone it"
            )


def require_same_samples(part: Act, samples: Sequence[Tensor], versions: Sequence[int]) -> None:
    """That a step has not written to the clients' data."""
    if [value._version for value in samples] != versions:
        raise RunError(
            f"a step of {type(part).__name__} changed its samples in place; later steps use them too: "
            "clone them"
        )


def require_precision(part: Act, values: Tensors, what: str, precision: Callable[[str], dtype]) -> None:
    """That values are of the run's precision, and those that the part keeps in doubles are doubles."""
    for name, value in values.items():
        if value.dtype != precision(name):
            raise RunError(
                f"{type(part).__name__} {what} {name!r} in {value.dtype}; here it is {precision(name)}: cast "
                "what is computed with a variable in doubles (as in z / omega.to(z)), and name in `exact` "
                "what is to be in doubles itself"
            )


def require_declared(
    part: Act, carries: Mapping[str, int], values: Tensors, what: str, count: int, *, some: bool = False
) -> None:
    """That it is all, or `some`, of what the part exchanges, with a row for each of `count` clients."""
    fits = values.keys() <= carries.keys() if some else values.keys() == carries.keys()
    if not fits:
        said = ", ".join(f"{name} ({length})" for name, length in carries.items()) or "nothing"
        raise RunError(
            f"{type(part).__name__} {what} {_listing(values)}, but declares {said}; what a message holds "
            "and what the part declares (`carries`, or a round's `answers`) must be the same"
        )
    require_rows(part, what, values, count, carries)


def require_remembered(part: Act, memory: Tensors, made: Tensors, count: int) -> None:
    """That what is to be remembered is part of the memory, and as long as it was."""
    if not made.keys() <= memory.keys():
        more = ", ".join(made.keys() - memory.keys())
        raise RunError(
            f"{type(part).__name__} remembers {more}, but declares {', '.join(memory) or 'nothing'}; "
            "what a part remembers it starts with (Start(…, memory={…})), and a round names it in "
            "`remembers`"
        )
    kept = {key: memory[key].shape[1] for key in made if memory[key].ndim == 2}
    require_rows(part, "remembers", made, count, kept)


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


def _listing(values: Tensors) -> str:
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
