"""How tables travel to a page: a line of JSON, then the columns as they lie in memory.

    4 bytes     length of the JSON, little-endian
    JSON        {"facts": {…}, "columns": [[name, kind, length], …]}, padded with spaces
    columns     one after the other, each from a place that 8 divides

Kinds are those of JavaScript's typed arrays. Whole numbers of 8 bytes become doubles, which hold them exactly
up to 2⁵³. Against JSON, a table of 100,000 edges is made ten times as fast and read without parsing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncfed.runtime.directory import plain_json

Columns = Mapping[str, npt.NDArray[Any]]

_KINDS = {"f8": "Float64Array", "f4": "Float32Array", "i4": "Int32Array", "u1": "Uint8Array"}


def packed(columns: Columns, **facts: Any) -> bytes:
    """The columns of one or several tables, and facts that JSON can hold (what is not finite is null)."""
    arrays = {name: _plain(values) for name, values in columns.items()}
    listed = [[name, _KINDS[values.dtype.str[1:]], len(values)] for name, values in arrays.items()]
    head = json.dumps({"facts": plain_json(facts), "columns": listed}, allow_nan=False).encode()
    head += b" " * (-(len(head) + 4) % 8)
    pieces = [struct.pack("<I", len(head)), head]
    for values in arrays.values():
        pieces += [values.tobytes(), bytes(-values.nbytes % 8)]
    return b"".join(pieces)


def _plain(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if values.dtype == np.bool_:
        values = values.astype(np.uint8)
    elif values.dtype.kind == "i" and values.dtype.itemsize != 4:
        values = values.astype(np.float64)
    return values.astype(values.dtype.newbyteorder("<"), copy=False)
