"""Bodies of clients' requests from a grammar, and their elements."""

from __future__ import annotations

import json
import random
from typing import Any

_NAMES = (
    *("prompt", "messages", "token_ids", "sampling_params", "max_tokens", "max_completion_tokens"),
    *("n", "stream", "return_token_ids", "cache_salt", "group_id", "session_id", "seed", "model"),
)
_ODD = (None, True, False, 0, 1, 2, -1, 1.0, 1.5, 2**63, 10**30, "", "a", "\u00e9", [], {}, [[]])

WORDS = (
    *(b'"%b":' % name.encode() for name in _NAMES),
    *(b'"prompt":[1,2]', b'"n":2', b'"n":null', b'"cache_salt":"s"', b'"stream":true', b"null"),
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u0000", b"\\ud800", b'\\"', b"\n", b" "),
    *(b"NaN", b"Infinity", b"true", b"/**/", b"[" * 200, b'{"a":' * 200, b"\xef\xbb\xbf"),
)


def made_body(rng: random.Random) -> bytes:
    """An object of known and unknown fields, in any order, some of the wrong type."""
    fields: dict[str, Any] = {
        rng.choice(("prompt", "prompt", "messages", "token_ids")): _prompt(rng)
    }
    for name in rng.sample(_NAMES, rng.randrange(5)):
        fields.setdefault(name, _value(name, rng))
    if rng.random() < 0.3:
        fields[rng.choice(("x", "nested", "logit_bias"))] = _nest(rng)
    if rng.random() < 0.2:
        fields["padding"] = '"prompt": [4, 5]' + "x" * 2048
    names = list(fields)
    rng.shuffle(names)
    spaced = None if rng.random() < 0.3 else (",", ":")
    ascii_only = rng.random() < 0.5
    body = json.dumps({n: fields[n] for n in names}, separators=spaced, ensure_ascii=ascii_only)
    return body.encode("utf-8", "surrogatepass")


def _prompt(rng: random.Random) -> Any:
    ids = [rng.randrange(200_000) for _ in range(rng.choice((1, 3, 600)))]
    return rng.choice((ids, ids, "a text", "", [ids, [1]], ["a", "b"], [], [{"content": "a"}], 7))


def _value(name: str, rng: random.Random) -> Any:
    if rng.random() < 0.2:
        return rng.choice(_ODD)
    if name == "sampling_params":
        return {"max_tokens": rng.choice((1, 5, None)), "n": rng.choice((1, 2, None)), "seed": 3}
    if name in ("stream", "return_token_ids"):
        return rng.choice((True, False, None))
    if name in ("cache_salt", "group_id", "session_id", "model"):
        return rng.choice(("s", "\u00e9", "s" * 200, None))
    if name in ("prompt", "messages", "token_ids"):
        return _prompt(rng)
    return rng.choice((1, 2, 3, None))


def _nest(rng: random.Random) -> Any:
    value: Any = rng.choice(_ODD)
    for _ in range(rng.choice((0, 1, 5, 100))):
        value = [value] if rng.random() < 0.5 else {"prompt": value}
    return value
