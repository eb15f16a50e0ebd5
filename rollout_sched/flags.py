"""Command-line flags for the fields of a struct, so that only the struct defines them.

A flag has the field's name, type and default. Its help is the field's line in the struct's
docstring: `name  what it means`, with two or more spaces between, and the indented lines after it.
What differs from that stands at the field: `Annotated[list[str], Flag("--instance", "URL")]`.
"""

from __future__ import annotations

import argparse
import math
import re
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

_LINE = re.compile(r"(\w+)\s{2,}(\S.*)")


class Flag(NamedTuple):
    """name     if it is not the field's, such as the singular of a list
    metavar  the value in the help
    unit     by which the flag's number is multiplied
    """

    name: str = ""
    metavar: str = ""
    unit: int = 1


def add_flags(
    to: argparse._ActionsContainer, kind: type[msgspec.Struct], names: Iterable[str] | None = None
) -> None:
    """Add a flag for each of the fields `names`, or for all; a flag that is not given sets no
    attribute. One for a list may be repeated."""
    hints = typing.get_type_hints(kind, include_extras=True)
    about = meanings(kind)
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name in fields if names is None else names:
        field, (flag, hint) = fields[name], _flag(hints[name])
        text = about[name]
        if field.default not in (None, "", msgspec.NODEFAULT):
            text += f" (default: {_shown(field.default, flag.unit)})"
        options: dict[str, Any] = {
            "dest": _dest(kind, name),
            "default": argparse.SUPPRESS,
            "help": text.replace("%", "%%"),
        }
        if field.required:
            options["required"] = True
        if hint is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            if typing.get_origin(hint) is list:
                options["action"], (hint,) = "append", typing.get_args(hint)
            options["type"] = _reader(hint, flag.unit)
            options["metavar"] = flag.metavar or _metavar(name, hint)
        to.add_argument(flag.name or "--" + name.replace("_", "-"), **options)


def given_flags(options: argparse.Namespace, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of `kind` that were given as flags."""
    names = (field.name for field in msgspec.structs.fields(kind))
    return {n: getattr(options, _dest(kind, n)) for n in names if hasattr(options, _dest(kind, n))}


def meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The text of each field in the docstring, or in that of a struct that it inherits from."""
    known = {field.name for field in msgspec.structs.fields(kind)}
    said: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        name = ""
        for line in (vars(each).get("__doc__") or "").splitlines()[1:]:
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


def _flag(hint: Any) -> tuple[Flag, Any]:
    """What is said at the field, and the type of a value that is given."""
    said = getattr(hint, "__metadata__", ())
    flag = next((each for each in said if isinstance(each, Flag)), Flag())
    plain = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
    if typing.get_origin(plain) in (types.UnionType, typing.Union):
        given = tuple(each for each in typing.get_args(plain) if each is not types.NoneType)
        return flag, typing.Union[given]  # noqa: UP007 (of one or more)
    return flag, plain if plain in (bool, Path) or typing.get_origin(plain) is list else hint


def _metavar(name: str, hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(typing.get_args(hint))
    if hint is Path:
        return "PATH"
    return "SECONDS" if name.endswith("_s") else "NAME" if hint is str else "N"


def _shown(default: Any, unit: int) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, int):
        return str(default // unit)
    return f"{default:g}" if isinstance(default, float) else str(default)


def _reader(wanted: Any, unit: int) -> Callable[[str], Any]:
    if wanted is Path:
        return Path

    def read(text: str) -> Any:
        try:
            value = msgspec.convert(text, wanted, strict=False)
        except msgspec.ValidationError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r}: expected a finite number")
        return value if unit == 1 else value * unit

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
