"""What is to be changed in a store, all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_sched.store.tokens import Tokens, encode

#: Kind and name of a fact.
FactKey = tuple[str, str]


class Transaction:
    """A transaction. The last word on a fact or a piece counts, so transactions that follow one
    another can be put into one; what comes and goes between is never written.

    facts    what each is to be; None: it goes
    pieces   of each owner, by ordinal; None: it goes. Tokens are encoded when they are written,
             which is not in the thread that puts this together
    cleared  owners of which all goes that was there before
    """

    __slots__ = ("cleared", "facts", "pieces", "size")

    def __init__(self) -> None:
        self.facts: dict[FactKey, bytes | None] = {}
        self.pieces: dict[str, dict[int, bytes | Tokens | None]] = {}
        self.cleared: set[str] = set()
        self.size = 0  # bytes put into it, an upper bound of what it holds

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
        """One piece of an owner goes."""
        self.pieces.setdefault(owner, {})[ordinal] = None

    def clear(self, owner: str) -> None:
        """All pieces of an owner go."""
        self.pieces.pop(owner, None)
        self.cleared.add(owner)

    def add(self, later: Transaction) -> None:
        """What is to be changed after this."""
        self.facts.update(later.facts)
        for owner in later.cleared:
            self.clear(owner)
        for owner, pieces in later.pieces.items():
            self.pieces.setdefault(owner, {}).update(pieces)
        self.size += later.size

    def written(self) -> Iterator[tuple[str, int, bytes]]:
        """The pieces that are to be there: owner, ordinal, bytes."""
        for owner, pieces in self.pieces.items():
            for ordinal, data in pieces.items():
                if data is not None:
                    yield owner, ordinal, encode(data) if isinstance(data, Tokens) else data

    def named(self) -> Iterator[tuple[str, int]]:
        """The pieces that are written or go, beside those of cleared owners."""
        for owner, pieces in self.pieces.items():
            for ordinal in pieces:
                yield owner, ordinal
