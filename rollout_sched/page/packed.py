"""Packs data for a page into one text that is safe anywhere in HTML: gzip, then base64.

Numbers are columns of bytes, which a browser reads without parsing:

    4 bytes       n, little-endian
    n bytes       JSON: {"data": ..., "columns": [{"type", "offset", "length"}]}
    after that    the columns, each starting at a multiple of four

In the data, {"$": number} refers to a column.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

#: Letter and size of a numpy type -> the JavaScript type.
TYPES = {"u1": "Uint8Array", "u4": "Uint32Array", "f4": "Float32Array"}

_ALIGNED = 4


def packed(data: Any) -> str:
    """The text for data of mappings, lists, strings, numbers and numpy columns."""
    columns: list[npt.NDArray[Any]] = []
    tree = _without_columns(data, columns)
    places, offset = [], 0
    for column in columns:
        kind = f"{column.dtype.kind}{column.dtype.itemsize}"
        places.append({"type": TYPES[kind], "offset": offset, "length": len(column)})
        offset += _padded(column.nbytes)
    head = msgspec.json.encode({"data": tree, "columns": places})
    head += b" " * (_padded(len(head)) - len(head))
    parts = [len(head).to_bytes(4, "little"), head]
    for column in columns:
        little = column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
        parts.append(little + bytes(_padded(len(little)) - len(little)))
    return base64.b64encode(gzip.compress(b"".join(parts), 6, mtime=0)).decode()


def _padded(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED


def _without_columns(data: Any, columns: list[npt.NDArray[Any]]) -> Any:
    if isinstance(data, np.ndarray):
        columns.append(data)
        return {"$": len(columns) - 1}
    if isinstance(data, Mapping):
        return {name: _without_columns(value, columns) for name, value in data.items()}
    if isinstance(data, msgspec.Struct):
        return _without_columns(msgspec.structs.asdict(data), columns)
    if isinstance(data, (list, tuple)) and data and not isinstance(data[0], (str, int, float)):
        return [_without_columns(value, columns) for value in data]
    return data
