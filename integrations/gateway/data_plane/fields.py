"""The fields of a client's request: its body, read once, with each value as it is written.

Only what scheduling needs is decoded, as leniently as vLLM's server does (pydantic's lax mode):
`16.0` and `"16"` are integers, `"true"` is a boolean. The rest is the server's to refuse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint
from rollout_sched.live.requests import continuation


class BadRequest(Exception):
    """The client's request cannot be used; the text says what to change."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


#: A JSON object's values by name, as written. They lie inside the text that they were read from.
Fields = dict[str, msgspec.Raw]

_OBJECT = msgspec.json.Decoder(Fields)

#: vLLM's range of priorities and seeds.
_LEAST, _MOST = -(2**63), 2**63 - 1

_ANY = msgspec.json.Decoder()
_BOOLEAN = msgspec.json.Decoder(bool | str | None, strict=False)
_TEXT = msgspec.json.Decoder(str | None)
_TEXTS = msgspec.json.Decoder(str | list[str] | None)

#: An integer as text.
_DIGITS = re.compile(r"\s*([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0*)?\s*")

#: Characters of a number as text that are read.
_LONGEST = 64

#: The other words that pydantic reads as booleans.
_WORDS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


def decoded(decoder: Any, text: Any, name: str = "") -> Any:
    """Decode a text from the client. Raises BadRequest with the position of the error."""
    try:
        return decoder.decode(text)
    except RecursionError:
        raise BadRequest("the body is nested too deeply; send JSON of fewer levels") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        at = f" - at `$.{name}`" if name else ""
        raise BadRequest(f"the body cannot be read: {error}{at}") from None


def fields_of(text: bytes | msgspec.Raw) -> Fields:
    """The fields of a JSON object. Raises BadRequest."""
    found: Fields = decoded(_OBJECT, text)
    return found


def integer(found: Fields, name: str) -> int | None:
    """None for a field that is missing or null. Raises BadRequest, as do the next two."""
    raw = found.get(name)
    if raw is None:
        return None
    value = decoded(_ANY, raw, name)
    if isinstance(value, str) and len(value) < _LONGEST:
        digits = _DIGITS.fullmatch(value)
        value = value if digits is None else int(digits[1])
    if value is None:
        return None
    if not isinstance(value, int | float) or value != value // 1:
        raise BadRequest(f"`{name}` must be an integer")
    if not _LEAST <= value <= _MOST:
        raise BadRequest(f"`{name}` must be at least {_LEAST} and at most {_MOST}")
    return int(value)


def number(found: Fields, name: str, missing: float) -> float:
    """NaN for what is no number."""
    raw = found.get(name)
    value = None if raw is None else decoded(_ANY, raw, name)
    if value is None:
        return missing
    try:
        return float(value) if len(str(value)) < _LONGEST else math.nan
    except (TypeError, ValueError):
        return math.nan


def boolean(found: Fields, name: str) -> bool | None:
    raw = found.get(name)
    if raw is None:
        return None
    value: bool | str | None = decoded(_BOOLEAN, raw, name)
    if isinstance(value, str):
        word = _WORDS.get(value.lower())
        if word is None:
            raise BadRequest(f"`{name}` must be true or false")
        return word
    return value


def text(found: Fields, name: str) -> str | None:
    raw = found.get(name)
    if raw is None:
        return None
    value: str | None = decoded(_TEXT, raw, name)
    return value


def texts(found: Fields, name: str) -> list[str]:
    """A text, or several."""
    raw = found.get(name)
    value: str | list[str] | None = None if raw is None else decoded(_TEXTS, raw, name)
    return [value] if isinstance(value, str) else value or []


#: A part of a chat's message that is not text: an image, audio, a file.
_MEDIA = re.compile(rb'"type"\s*:\s*"(?!(?:text|function|refusal|thinking)")')


def hindrance(
    found: Fields, sampling: Mapping[str, msgspec.Raw], endpoint: Endpoint, *, streams: bool
) -> str:
    """The first field with which a response could not be resumed; "" if it can (see
    `continuation`). Of a stream, an instance holds text back, and generate gives none."""
    searched = endpoint != "generate" and not streams
    for fields in (found, sampling):
        for name in fields:
            if name not in continuation.RESUMABLE and continuation.hindrance(
                {name: decoded(msgspec.json, fields[name], name)}, searched=searched
            ):
                return name
    if endpoint == "chat" and _MEDIA.search(memoryview(found["messages"])) is not None:
        return "messages"
    return ""
