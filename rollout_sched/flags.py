"""Command-line flags for the fields of a struct, so that only the struct defines them.

A flag has the field's name, type and default. Its help is the field's line in the struct's
docstring: `name  what it means`, with two or more spaces between, and the indented lines after it.
"""

from __future__ import annotations

import argparse
import math
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

_LINE = re.compile(r"(\w+)\s{2,}(\S.*)")


def add_flags(to: argparse._ActionsContainer, kind: type[msgspec.Struct]) -> None:
    """Add a flag for each field; a flag that is not given sets no attribute."""
    hints = typing.get_type_hints(kind, include_extras=True)
    about = meanings(kind)
    for field in msgspec.structs.fields(kind):
        flag = "--" + field.name.replace("_", "-")
        text = about[field.name]
        if field.default is not None:
            text += f" (default: {_shown(field.default)})"
        name: dict[str, Any] = {
            "dest": _dest(kind, field.name),
            "default": argparse.SUPPRESS,
            "help": text.replace("%", "%%"),
        }
        if isinstance(field.default, bool):
            to.add_argument(flag, action=argparse.BooleanOptionalAction, **name)
        elif hints[field.name] == Path | None:
            to.add_argument(flag, type=Path, metavar="PATH", **name)
        else:
            hint = hints[field.name]
            metavar = "SECONDS" if field.name.endswith("_s") else "N"
            if typing.get_origin(hint) is typing.Literal:
                metavar = "|".join(typing.get_args(hint))
            to.add_argument(flag, type=_reader(hint), metavar=metavar, **name)


def given_flags(options: argparse.Namespace, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of `kind` that were given as flags."""
    names = (field.name for field in msgspec.structs.fields(kind))
    return {n: getattr(options, _dest(kind, n)) for n in names if hasattr(options, _dest(kind, n))}


def meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The text of each field in the docstring."""
    known = {field.name for field in msgspec.structs.fields(kind)}
    said: dict[str, str] = {}
    name = ""
    for line in (kind.__doc__ or "").splitlines()[1:]:
        begun = _LINE.fullmatch(line.strip())
        if begun and begun[1] in known:
            name = begun[1]
            said[name] = begun[2]
        elif name and line.strip():
            said[name] += " " + line.strip()
        else:
            name = ""
    return said


def _dest(kind: type[msgspec.Struct], name: str) -> str:
    return f"{kind.__name__}.{name}"


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _reader(wanted: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = msgspec.convert(text, wanted, strict=False)
        except msgspec.ValidationError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r}: expected a finite number")
        return value

    return read


# ------------------------------------------------------------------------------------------
# Argument types of our commands, for argparse, which shows their errors.


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else positive(text)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return value


def seconds(text: str) -> float:
    """A number above 0."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0 seconds")
    return value
