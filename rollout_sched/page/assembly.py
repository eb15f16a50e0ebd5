"""Joins template, style, scripts and data to one HTML file that fetches nothing.

Our scripts are ES modules in separate files. A page that is opened from the disk cannot import
modules from files, so they are joined to one in the order of their imports: their names are unique
over all modules, and the import and export keywords are removed. A Content-Security-Policy in the
page's head allows only these scripts, by their hashes, so that no script in the data can run.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from rollout_sched.page.packed import packed

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
