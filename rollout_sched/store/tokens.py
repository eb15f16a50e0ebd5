"""Tokens as bytes: 4 for an id, 4 for a log-probability that is a float32, else 8.

Little-endian: a head (bytes of a log-probability or 0, whether a tool has answered, number of ids,
number of observed ids), the ids, the observed ids, the log-probabilities.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

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
    logprobs = np.zeros(0) if tokens.logprobs is None else np.asarray(tokens.logprobs, np.float64)
    width = 0
    if tokens.logprobs is not None:
        with np.errstate(over="ignore"):
            short = logprobs.astype("<f4")
        width = 4 if np.array_equal(short, logprobs, equal_nan=True) else 8
        logprobs = short if width == 4 else logprobs.astype("<f8")
    observed = () if tokens.observed is None else tokens.observed
    head = _HEAD.pack(width, tokens.observed is not None, len(tokens.ids), len(observed))
    return b"".join((head, _ids(tokens.ids), _ids(observed), logprobs.tobytes()))


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


def _ids(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<i4").tobytes() if len(ids) else b""
