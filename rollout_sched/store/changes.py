"""Transactions: changes of a store that are applied all or not at all."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_sched.store.tokens import Tokens, encode

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
        self.size += data.most_bytes if isinstance(data, Tokens) else len(data)

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

    def named(self) -> Iterator[tuple[str, int]]:
        """The pieces that are written or removed, except those of cleared owners."""
        for owner, pieces in self.pieces.items():
            for ordinal in pieces:
                yield owner, ordinal
