"""Replaces a few values in a client's body in place; all other bytes stay unchanged.

Nothing else is decoded, so numbers keep their spelling, and a change needs memory only for the new
values. If a field occurs twice, its last occurrence is changed, which is the one that JSON parsers
use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from rollout_sched.integrations.gateway.data_plane.fields import NOTHING, BadRequest, Changeable

#: JSON values by the name of their field.
Values = Mapping[str, bytes | memoryview]

#: No changes.
NONE: Values = {}

_NO_FIELDS = msgspec.Raw(b"{}")
_DECODER = msgspec.json.Decoder(Changeable)
_OPENING = re.compile(rb"\s*\{(\s*\})?")


def decoded(decoder: Any, text: Any) -> Any:
    """Decode a text from the client. Raises BadRequest with the position of the error."""
    try:
        return decoder.decode(text)
    except RecursionError:
        raise BadRequest("the body is nested too deeply; send JSON of fewer levels") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body cannot be read: {error}") from None


def changeable(text: bytes | msgspec.Raw) -> Changeable:
    """The raw values of a JSON object that may be changed. Raises BadRequest."""
    found: Changeable = decoded(_DECODER, text)
    return found


class ClientBody:
    """A client's body, read once for all the bodies that are made from it.

    `nested`: its sampling parameters are in an object of their own.
    """

    __slots__ = ("_found", "nested", "raw")

    def __init__(self, raw: bytes, *, nested: bool) -> None:
        self.raw = raw
        self.nested = nested
        self._found: Changeable | None = None

    def found(self) -> Changeable:
        """The values of it that may be changed. Raises BadRequest."""
        found = self._found
        if found is None:
            found = self._found = changeable(self.raw)
        return found

    def sampling(self) -> Changeable:
        """The sampling parameters that may be changed. Raises BadRequest."""
        return changeable(self._own_sampling()) if self.nested else self.found()

    def changed(self, values: Values, sampling: Values) -> bytes:
        """The body with these values, and with these sampling parameters. Raises BadRequest."""
        found = self.found()
        if not self.nested:
            values = {**values, **sampling}
        elif sampling:
            own = self._own_sampling()
            values = {**values, "sampling_params": _spliced(own, changeable(own), sampling)}
        return _spliced(self.raw, found, values)

    def _own_sampling(self) -> msgspec.Raw:
        own = self.found().sampling_params
        return _NO_FIELDS if own is NOTHING or bytes(own) == b"null" else own


def _spliced(text: bytes | msgspec.Raw, found: Changeable, values: Values) -> bytes:
    """A JSON object with new values in place of the old ones; new fields go in front."""
    start = _address(text)
    whole = memoryview(text)
    places, new = [], []
    for name, value in values.items():
        old = getattr(found, name)
        if old is NOTHING:
            new.append(b"".join((b'"', name.encode(), b'":', value)))
        else:
            at = _address(old) - start
            places.append((at, at + len(memoryview(old)), value))
    opening = _OPENING.match(whole)
    assert opening is not None  # otherwise decoding it would have failed
    at = opening.end() if opening[1] is None else opening.start(1)
    parts: list[Any] = [whole[:at], b",".join(new)]
    if new and opening[1] is None:
        parts.append(b",")
    for begin, end, value in sorted(places):
        parts += (whole[at:begin], value)
        at = end
    parts.append(whole[at:])
    return b"".join(parts)


def _address(text: bytes | msgspec.Raw) -> int:
    """A text's address in memory: a decoded Raw lies inside the buffer it was decoded from."""
    address: int = np.frombuffer(text, np.uint8).__array_interface__["data"][0]
    return address
