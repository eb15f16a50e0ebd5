"""Joins template, style, scripts and data to one HTML file that fetches nothing.

Our scripts are ES modules in separate files. A page that is opened from the disk cannot import
modules from files, so they are joined to one in the order of their imports: their names are unique
over all modules, and the import and export keywords are removed. A Content-Security-Policy in the
page's head allows only these scripts, by their hashes, so that no script in the data can run.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

# ------------------------------------------------------------------------------------------
# Packs data for a page into one text that is safe anywhere in HTML: gzip, then base64.
#
# Numbers are columns of bytes, which a browser reads without parsing:
#
#     4 bytes       n, little-endian
#     n bytes       JSON: {"data": ..., "columns": [{"type", "offset", "length"}]}
#     after that    the columns, each starting at a multiple of four
#
# In the data, {"$": number} refers to a column.

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


_ASSETS = files("rollout_sched.page") / "assets"

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(async )?(function|class|const))", re.MULTILINE)


def page(title: str, start: str, data: Any = None, *, connects: bool = False) -> bytes:
    """The whole file. `start` names the module that draws the page; `data` is its input;
    `connects`: whether the page sends requests to its own server."""
    library, ours = _asset("vendor/uPlot.iife.min.js"), script(start)
    allowed = f"script-src {_hash(library)} {_hash(ours)}; style-src 'unsafe-inline'"
    to_server = "; connect-src 'self'" if connects else ""
    text = Template(_asset("page.html")).substitute(
        title=escape(title),
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; {allowed}{to_server}",
        style=_asset("vendor/uPlot.min.css") + _asset("page.css"),
        library=library,
        script=ours,
        data="" if data is None else packed(data),
    )
    return text.encode()


@cache
def script(start: str) -> str:
    """A module and all of its imports, joined to one module."""
    return "".join(
        _EXPORT.sub("", _IMPORT.sub("", _asset(f"js/{name}.js"))) for name in _order(start)
    )


def _order(start: str) -> list[str]:
    """The modules, each after its imports."""
    found: list[str] = []

    def visit(name: str) -> None:
        if name not in found:
            for imported in _IMPORT.findall(_asset(f"js/{name}.js")):
                visit(imported)
            found.append(name)

    visit(start)
    return list(dict.fromkeys(found))


@cache
def _asset(path: str) -> str:
    return _ASSETS.joinpath(path).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The hash of an inline script in the form of a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
