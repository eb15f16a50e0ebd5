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
from typing import Annotated, Any, NamedTuple

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
            options["type"] = reader(hint, flag.unit)
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


def reader(wanted: Any, unit: int = 1) -> Callable[[str], Any]:
    """What argparse calls with a flag's text: a value of this type, times `unit`."""
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
# Argument types of flags that are no field of a struct, for argparse, which shows their errors.

#: A whole number of at least 1.
positive = reader(Annotated[int, msgspec.Meta(ge=1)])

#: A finite number, and one above 0.
number = reader(float)
above_zero = reader(Annotated[float, msgspec.Meta(gt=0)])
