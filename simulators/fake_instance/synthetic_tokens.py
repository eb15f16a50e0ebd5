"""Synthetic tokens: ids that follow from the context alone, as a language model's would.

A response begins with its *name*, an id of its own, drawn from the context (greedy: from nothing
else); every later token follows from that name and the place in the response. So a request that
was interrupted goes on with the same text on any instance, in any process, and a context tells
what it is made of: the prompt ends where the first name stands, and a response is under way if
nothing but synthetic ids follow the last name.

Ids below SYNTHETIC are left to prompts and observations, whose ids never lie in our ranges unless
their vocabulary has more than 262,144 entries.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SYNTHETIC = 1 << 18
"""synthetic ids lie in SYNTHETIC ... SYNTHETIC + _WORDS - 1, and ..."""
NAMES = 1 << 30
"""... in NAMES ... LIMIT - 1 if they are names"""
LIMIT = 1 << 31
"""one more than the largest id"""
_WORDS = 1 << 17
_LOGPROBS = 1 << 62  # no version

Spans = Sequence[tuple[int, int]]
Words = NDArray[np.uint64]


class Context(NamedTuple):
    """What the tokens of a context are.

    digest         of the whole context
    prompt         digest of what comes before the first response
    prompt_tokens  how many those are
    stream         name of the first response, 0 if there is none
    known_tokens   everything up to the last synthetic token
    name           of the response under way, 0 if a new one is to begin
    made_tokens    of the response under way
    """

    digest: bytes
    prompt: bytes
    prompt_tokens: int
    stream: int = 0
    known_tokens: int = 0
    name: int = 0
    made_tokens: int = 0


def read(token_ids: Sequence[int]) -> Context:
    """Costs one pass over the context. Raises ValueError for what is no token id."""
    try:
        ids = np.array(token_ids, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("token ids must be whole numbers") from None
    if ids.ndim != 1 or not len(ids):
        raise ValueError("a context needs at least one token")
    if ids.min() < 0 or ids.max() >= LIMIT:
        raise ValueError(f"Token id {ids.max()} is out of vocabulary")
    digest = _digest(ids)
    names = np.flatnonzero(ids >= NAMES)
    if not len(names):
        return Context(digest, digest, len(ids))
    first, last = int(names[0]), int(names[-1])
    known = int(np.flatnonzero(ids >= SYNTHETIC)[-1]) + 1
    under_way = bool((ids[last:] >= SYNTHETIC).all())
    return Context(
        digest,
        _digest(ids[:first]),
        first,
        int(ids[first]),
        known,
        int(ids[last]) if under_way else 0,
        len(ids) - last if under_way else 0,
    )


def name(context: Context, draw: str = "") -> int:
    """The name of a new response to this context; another `draw`, another response."""
    digest = blake2b(context.digest + draw.encode(), digest_size=8).digest()
    return NAMES + int.from_bytes(digest, "little") % (LIMIT - NAMES)


def tokens(response: int, start: int, spans: Spans, drift: float = 1.0) -> list[int]:
    """Ids of a response from its token `start` on: (version, tokens) in order. What another
    version makes is another text but for the name, or differs in a share `drift` of the places;
    version 0 makes the plain text."""
    ids: list[int] = []
    for version, count in spans:
        place = start + len(ids)
        words = _mixed(response, place, count, version)
        if drift < 1:
            differs = (words & np.uint64(0xFFFFF)) < np.uint64(int(drift * (1 << 20)))
            words = np.where(differs, words, _mixed(response, place, count, 0))
        ids += (SYNTHETIC + (words >> np.uint64(40)) % np.uint64(_WORDS)).tolist()
    if ids and not start:
        ids[0] = response
    return ids


def logprobs(response: int, start: int, count: int) -> list[float]:
    """One for each of the tokens, between -4 and 0."""
    words = _mixed(response, start, count, _LOGPROBS)
    return [word / -1024 for word in (words >> np.uint64(52)).tolist()]


def responses(token_ids: Sequence[int]) -> Iterable[tuple[int, int, int]]:
    """(name, first place, tokens) of every response in a context."""
    ids = np.array(token_ids, dtype=np.int64)
    names = np.flatnonzero(ids >= NAMES).tolist()
    for first, after in zip(names, [*names[1:], len(ids)], strict=True):
        others = np.flatnonzero(ids[first:after] < SYNTHETIC)
        yield int(ids[first]), first, int(others[0]) if len(others) else after - first


def encode(text: str) -> list[int]:
    """One id per word: "w623" is 623, any other gets an id below SYNTHETIC from its spelling."""
    return [_word_id(word) for word in text.split()]


def decode(token_ids: Iterable[int]) -> str:
    """`encode` gives the ids back."""
    return "".join([f"w{token} " for token in token_ids])


def _word_id(word: str) -> int:
    if word[0] == "w" and word[1:].isdecimal() and (token := int(word[1:])) < LIMIT:
        return token
    return zlib.crc32(word.encode()) % SYNTHETIC


def _digest(ids: NDArray[np.int64]) -> bytes:
    return blake2b(ids.tobytes(), digest_size=16).digest()


def _mixed(response: int, start: int, count: int, version: int) -> Words:
    """Evenly spread 64-bit words: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    origin = (response * 0x9E3779B97F4A7C15 + version * 0xD1342543DE82EF95) % (1 << 64)
    words = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    words = words * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(origin)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
