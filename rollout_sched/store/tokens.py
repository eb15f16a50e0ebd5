"""Tokens as bytes: 4 for an id, 4 for a log-probability that is a float32, else 8.

Little-endian: a head (bytes of a log-probability or 0, whether a tool has answered, number of ids,
number of observed ids), the ids, the observed ids, the log-probabilities.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rollout_sched.store.errors import PieceDamaged

_HEAD = struct.Struct("<BBxxII")

#: Bytes that say how many tokens there are.
HEAD = _HEAD.size


class Tokens(msgspec.Struct, frozen=True):
    """Token ids, their log-probabilities (None: there are none), and the ids that a tool returned
    to them (None: no tool has)."""

    ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    observed: Sequence[int] | None = None


def encode(tokens: Tokens) -> bytes:
    """Raises OverflowError for an id beyond 31 bits."""
    observed = () if tokens.observed is None else tokens.observed
    width, logprobs = 0, b""
    if tokens.logprobs is not None:
        width, logprobs = _encoded_logprobs(tokens.logprobs)
    head = _HEAD.pack(width, tokens.observed is not None, len(tokens.ids), len(observed))
    ids = _bytes(array("i", tokens.ids))
    return b"".join((head, ids, _bytes(array("i", observed)), logprobs))


def _encoded_logprobs(logprobs: Sequence[float]) -> tuple[int, bytes]:
    """As float32 where each of them is one. An array reads a list twice as fast as numpy does."""
    drawn = np.frombuffer(array("d", logprobs))
    with np.errstate(over="ignore"):
        short = drawn.astype("<f4")
    exact = bool((short == drawn).all())
    return (4, short.tobytes()) if exact else (8, drawn.astype("<f8").tobytes())


def _bytes(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def counts(head: bytes) -> tuple[int, int, bool]:
    """Of the first HEAD bytes of a piece: its tokens, those that a tool returned, and whether one
    has. Raises PieceDamaged."""
    try:
        _, answered, made, observed = _HEAD.unpack_from(head)
    except struct.error as error:
        raise PieceDamaged(f"{len(head)} bytes are no tokens") from error
    return made, observed, bool(answered)


def decode(data: bytes) -> Tokens:
    """Raises PieceDamaged."""
    try:
        width, answered, made, observed = _HEAD.unpack_from(data)
        if width not in (0, 4, 8) or len(data) != _HEAD.size + 4 * (made + observed) + width * made:
            raise PieceDamaged(f"{len(data)} bytes cannot be {made} and {observed} tokens")
    except struct.error as error:
        raise PieceDamaged(f"{len(data)} bytes are no tokens") from error
    ids = np.frombuffer(data, "<i4", made + observed, _HEAD.size).tolist()
    logprobs: list[float] | None = None
    if width:
        logprobs = np.frombuffer(data, f"<f{width}", made, len(data) - width * made).tolist()
    return Tokens(ids[:made], logprobs, ids[made:] if answered else None)
