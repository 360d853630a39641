"""Protocol-buffer messages written by the thousand: all rows of a table at once, each as long as the others.

A varint may be padded to any width, as tracing services do for lengths that they do not know yet. So
the messages of a table differ in bytes, and not in shape, and are one array: rows × bytes.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Parts: TypeAlias = "list[bytes | npt.NDArray[np.uint8]]"
"""What a message is made of, one after the other: bytes that all rows share, or an array rows × bytes."""

_VARINT, _FIXED64, _LENGTH = 0, 1, 2


def varint(value: int) -> bytes:
    """As short as it can be."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def constant(field: int, value: int) -> bytes:
    """The same number in all rows."""
    return _tag(field, _VARINT) + varint(value)


def text(field: int, value: str) -> bytes:
    return data(field, value.encode("utf-8", "replace"))


def data(field: int, value: bytes) -> bytes:
    """A message, or bytes, that all rows share."""
    return _tag(field, _LENGTH) + varint(len(value)) + value


def numbers(field: int, values: npt.NDArray[np.int64], width: int) -> Parts:
    """A number per row, none negative or of more than 7 · width bits."""
    shifts = np.arange(width, dtype=np.uint64) * np.uint64(7)
    digits = (values.astype(np.uint64)[:, None] >> shifts & np.uint64(0x7F)).astype(np.uint8)
    digits[:, :-1] |= 0x80
    return [_tag(field, _VARINT), digits]


def fixed(field: int, values: npt.NDArray[np.int64]) -> Parts:
    """A number per row, in eight bytes."""
    return [_tag(field, _FIXED64), values.astype("<u8")[:, None].view(np.uint8)]


def message(field: int, *parts: Parts) -> Parts:
    """A message per row, inside of another."""
    inside = [part for group in parts for part in group]
    length = sum(len(part) if isinstance(part, bytes) else part.shape[1] for part in inside)
    return [_tag(field, _LENGTH) + varint(length), *inside]


def rows(count: int, parts: Parts) -> bytes:
    """All rows, one after the other."""
    columns = [
        np.broadcast_to(np.frombuffer(part, np.uint8), (count, len(part)))
        if isinstance(part, bytes)
        else part
        for part in parts
    ]
    return np.concatenate(columns, axis=1).tobytes()


def _tag(field: int, wire: int) -> bytes:
    return varint(field << 3 | wire)
