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
    """Raises struct.error for an id beyond 31 bits."""
    ids, observed = tokens.ids, tokens.observed or ()
    width, logprobs = 0, b""
    if tokens.logprobs is not None:
        width, logprobs = _encoded_logprobs(tokens.logprobs)
    made, returned = len(ids), len(observed)
    head = _HEAD.pack(width, tokens.observed is not None, made, returned)
    # Thrice as fast as an array or numpy reads a list.
    return head + struct.pack(f"<{made + returned}i", *ids, *observed) + logprobs


def _encoded_logprobs(logprobs: Sequence[float]) -> tuple[int, bytes]:
    """As float32 where each of them is one."""
    long = struct.pack(f"<{len(logprobs)}d", *logprobs)
    try:
        short = struct.pack(f"<{len(logprobs)}f", *logprobs)
    except OverflowError:
        return 8, long
    exact = np.frombuffer(short, "<f4").astype("<f8").tobytes() == long
    return (4, short) if exact else (8, long)


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
