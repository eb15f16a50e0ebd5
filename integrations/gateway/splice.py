"""A client's body with a few values changed where they stand; the rest stays the bytes it came in.

Nothing else is decoded, so numbers pass as they were written, and what is changed costs no memory
but its own. Values of a field that stands twice are changed in the last place, which is the one
that JSON's readers believe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from rollout_sched.integrations.gateway.fields import NOTHING, BadRequest, Changeable

#: JSON values by the name of their field.
Values = Mapping[str, bytes | memoryview]

#: No field at all.
NONE: Values = {}

_DECODER = msgspec.json.Decoder(Changeable)
_OPENING = re.compile(rb"\s*\{(\s*\})?")


def decoded(decoder: Any, text: Any) -> Any:
    """What a decoder makes of a text of the client's. Raises BadRequest naming the place."""
    try:
        return decoder.decode(text)
    except RecursionError:
        raise BadRequest("the body is nested too deeply; send JSON of fewer levels") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body cannot be read: {error}") from None


def changeable(body: bytes | msgspec.Raw) -> Changeable:
    """The values that may be changed, as they stand in a JSON object."""
    found: Changeable = decoded(_DECODER, body)
    return found


def changed(body: bytes, values: Values, sampling: Values, *, nested: bool) -> bytes:
    """The body with these values, and with these sampling parameters.

    `nested`: sampling parameters have an object of their own. Raises BadRequest.
    """
    found = changeable(body)
    if not nested:
        values = {**values, **sampling}
    elif sampling:
        own = found.sampling_params
        if own is NOTHING or bytes(own) == b"null":
            own = msgspec.Raw(b"{}")
        values = {**values, "sampling_params": _spliced(own, changeable(own), sampling)}
    return _spliced(body, found, values)


def _spliced(text: bytes | msgspec.Raw, found: Changeable, values: Values) -> bytes:
    """A JSON object with new values where the old ones stand; new fields go in front."""
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
    assert opening is not None  # or it could not have been read
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
    """Where a text lies in memory: what was decoded as Raw lies within what it was decoded from."""
    address: int = np.frombuffer(text, np.uint8).__array_interface__["data"][0]
    return address
