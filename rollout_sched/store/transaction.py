"""Tokens as bytes: 4 for an id, 4 for a log-probability that is exact as a float32, else 8.

Little-endian: a head (bytes of a log-probability or 0, whether a tool has answered, number of ids,
number of observed ids), the ids, the observed ids, the log-probabilities.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_sched.store.errors import PieceDamaged

_HEAD = struct.Struct("<BBxxII")

_ENCODER = msgspec.msgpack.Encoder()
_FLOAT = b"\xcb"
_TAGGED = np.dtype([("tag", "u1"), ("value", ">f8")])

#: Bytes of the head, which holds the numbers of tokens.
HEAD = _HEAD.size


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """Token ids, their log-probabilities (None: not available), and the ids that a tool returned
    after them (None: no tool has answered)."""

    ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    observed: Sequence[int] | None = None

    @property
    def max_bytes(self) -> int:
        """Upper bound of their encoded size."""
        return HEAD + 4 * (len(self.ids) + len(self.observed or ())) + 8 * len(self.logprobs or ())


def encode(tokens: Tokens) -> bytes:
    """Raises struct.error for an id beyond 31 bits."""
    ids, observed = tokens.ids, tokens.observed or ()
    width, logprobs = 0, b""
    if tokens.logprobs is not None:
        width, logprobs = _encoded_logprobs(tokens.logprobs)
    made, returned = len(ids), len(observed)
    head = _HEAD.pack(width, tokens.observed is not None, made, returned)
    # Three times as fast as reading a list with array or numpy.
    return head + struct.pack(f"<{made + returned}i", *ids, *observed) + logprobs


def _encoded_logprobs(logprobs: Sequence[float]) -> tuple[int, bytes]:
    """As float32 if all values are exact in it."""
    long = _doubles(logprobs)
    with np.errstate(over="ignore"):
        short = long.astype("<f4")
    data = long.tobytes()
    exact = short.astype("<f8").tobytes() == data
    return (4, short.tobytes()) if exact else (8, data)


def _doubles(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """As float64, little-endian. MessagePack encodes a float in nine bytes, a tag and its value;
    numpy reads these nine times as fast as a list of floats."""
    try:
        packed = _ENCODER.encode(values)
    except TypeError:  # numpy floats
        return np.array(values, "<f8")
    count = len(values)
    head = len(packed) - _TAGGED.itemsize * count
    if head < 1 or packed[head :: _TAGGED.itemsize] != _FLOAT * count:  # some are integers
        return np.array(values, "<f8")
    return np.frombuffer(packed, _TAGGED, count, head)["value"].astype("<f8")


def counts(head: bytes) -> tuple[int, int, bool]:
    """From the first HEAD bytes of a piece: its tokens, those that a tool returned, and whether a
    tool has answered. Raises PieceDamaged."""
    try:
        _, answered, made, observed = _HEAD.unpack_from(head)
    except struct.error as error:
        raise PieceDamaged(f"{len(head)} bytes are not a piece of tokens") from error
    return made, observed, bool(answered)


def decode(data: bytes) -> Tokens:
    """Raises PieceDamaged."""
    try:
        width, answered, made, observed = _HEAD.unpack_from(data)
        if width not in (0, 4, 8) or len(data) != _HEAD.size + 4 * (made + observed) + width * made:
            raise PieceDamaged(f"{len(data)} bytes do not match {made} and {observed} tokens")
    except struct.error as error:
        raise PieceDamaged(f"{len(data)} bytes are not a piece of tokens") from error
    ids = np.frombuffer(data, "<i4", made + observed, _HEAD.size).tolist()
    logprobs: list[float] | None = None
    if width:
        logprobs = np.frombuffer(data, f"<f{width}", made, len(data) - width * made).tolist()
    return Tokens(ids[:made], logprobs, ids[made:] if answered else None)


# ------------------------------------------------------------------------------------------
# Transactions: changes of a store that are applied all or not at all.

#: Kind and name of a fact.
FactKey = tuple[str, str]


class Transaction:
    """A transaction. The last change of a fact or piece counts, so successive transactions can be
    merged into one; what is added and removed in between is never written.

    facts    the new value of each; None: it is removed
    pieces   of each owner, by ordinal; None: it is removed. Tokens are encoded when they are
             written, not in the thread that builds the transaction
    cleared  owners whose earlier pieces are all removed
    """

    __slots__ = ("cleared", "facts", "pieces", "size")

    def __init__(self) -> None:
        self.facts: dict[FactKey, bytes | None] = {}
        self.pieces: dict[str, dict[int, bytes | Tokens | None]] = {}
        self.cleared: set[str] = set()
        self.size = 0  # bytes added so far, an upper bound of its content

    def __bool__(self) -> bool:
        return bool(self.facts or self.pieces or self.cleared)

    def put(self, kind: str, name: str, value: bytes) -> None:
        self.facts[kind, name] = value
        self.size += len(value)

    def drop(self, kind: str, name: str) -> None:
        self.facts[kind, name] = None

    def append(self, owner: str, ordinal: int, data: bytes | Tokens) -> None:
        self.pieces.setdefault(owner, {})[ordinal] = data
        self.size += data.max_bytes if isinstance(data, Tokens) else len(data)

    def take_back(self, owner: str, ordinal: int) -> None:
        """Remove one piece of an owner."""
        self.pieces.setdefault(owner, {})[ordinal] = None

    def clear(self, owner: str) -> None:
        """Remove all pieces of an owner."""
        self.pieces.pop(owner, None)
        self.cleared.add(owner)

    def add(self, later: Transaction) -> None:
        """Merge in a later transaction."""
        self.facts.update(later.facts)
        for owner in later.cleared:
            self.clear(owner)
        for owner, pieces in later.pieces.items():
            self.pieces.setdefault(owner, {}).update(pieces)
        self.size += later.size

    def written(self) -> Iterator[tuple[str, int, bytes]]:
        """The pieces to write: owner, ordinal, bytes."""
        for owner, pieces in self.pieces.items():
            for ordinal, data in pieces.items():
                if data is not None:
                    yield owner, ordinal, encode(data) if isinstance(data, Tokens) else data

    def taken_back(self) -> list[tuple[str, int]]:
        """The pieces to remove, except those of cleared owners: owner, ordinal."""
        return [
            (owner, ordinal)
            for owner, pieces in self.pieces.items()
            for ordinal, data in pieces.items()
            if data is None
        ]
