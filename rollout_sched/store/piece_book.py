"""The index of a store's pieces of tokens: their owners and their places."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from rollout_sched.store.changes import Transaction
from rollout_sched.store.database import PieceRow
from rollout_sched.store.errors import PieceDamaged
from rollout_sched.store.token_files import TokenFiles

#: Reader threads; reading a disk and computing checksums gains nothing from more.
_READERS = 4


class PieceBook:
    """One thread writes and any thread may read: while the lock is held, no place is freed, so a
    place that was looked up stays valid."""

    def __init__(self, files: TokenFiles) -> None:
        self._files = files
        self._pieces: dict[str, dict[int, PieceRow]] = {}
        self._lock = Lock()

    def load(self, pieces: Iterable[PieceRow]) -> list[PieceRow]:
        """Load the rows when the store is opened. Returns the damaged pieces, which are not kept in
        the book."""
        by_file: dict[int, list[PieceRow]] = {}
        for piece in pieces:
            by_file.setdefault(piece.place.file, []).append(piece)
        with ThreadPoolExecutor(_READERS) as readers:
            damaged = [p for some in readers.map(self._damaged, by_file.values()) for p in some]
        gone = {(piece.owner, piece.ordinal) for piece in damaged}
        for here in by_file.values():
            self._add(piece for piece in here if (piece.owner, piece.ordinal) not in gone)
        self._files.take_up(p.place for owned in self._pieces.values() for p in owned.values())
        return damaged

    def owners(self) -> list[str]:
        with self._lock:
            return list(self._pieces)

    def read(self, owner: str) -> dict[int, bytes]:
        """The pieces of an owner by ordinal, ascending. Raises PieceDamaged."""
        with self._lock:
            found = self._pieces.get(owner, {})
            return {ordinal: self.read_piece(found[ordinal]) for ordinal in sorted(found)}

    def heads(self, owner: str, length: int) -> dict[int, bytes]:
        """The first bytes of each piece, unchecked. Raises PieceDamaged."""
        with self._lock:
            found = self._pieces.get(owner, {})
            return {
                ordinal: self._files.read(found[ordinal].place.head(length))
                for ordinal in sorted(found)
            }

    def read_piece(self, piece: PieceRow) -> bytes:
        """The bytes of a piece. Raises PieceDamaged."""
        data = self._files.read(piece.place)
        if checksum(piece.owner, piece.ordinal, data) != piece.crc:
            raise PieceDamaged(f"piece {piece.ordinal} of {piece.owner!r} has a wrong checksum")
        return data

    def append(self, changes: Transaction) -> list[PieceRow]:
        """Write the bytes of new pieces; they count once they are noted. Raises OSError."""
        written = list(changes.written())
        places = self._files.append([data for _, _, data in written])
        return [
            PieceRow(owner, ordinal, place, checksum(owner, ordinal, data))
            for (owner, ordinal, data), place in zip(written, places, strict=True)
        ]

    def going(self, changes: Transaction) -> list[PieceRow]:
        """The pieces that a transaction removes or replaces, those of cleared owners included."""
        keys = set(changes.named())
        for owner in changes.cleared:
            keys |= {(owner, ordinal) for ordinal in self._pieces.get(owner, ())}
        known = (self._pieces.get(owner, {}).get(ordinal) for owner, ordinal in keys)
        return [piece for piece in known if piece is not None]

    def note(self, added: Sequence[PieceRow], gone: Sequence[PieceRow]) -> None:
        """Update the book after the rows were written."""
        with self._lock:
            for piece in gone:
                owned = self._pieces[piece.owner]
                del owned[piece.ordinal]
                if not owned:
                    del self._pieces[piece.owner]
            self._add(added)
            self._files.forget(piece.place for piece in gone)

    def sparse(self) -> list[PieceRow]:
        """The pieces to move, so that their file can be overwritten."""
        file = self._files.sparsest()
        if file is None:
            return []
        every = (piece for owned in self._pieces.values() for piece in owned.values())
        return [piece for piece in every if piece.place.file == file]

    def settled(self) -> None:
        """Removed pieces cannot come back any more."""
        with self._lock:
            self._files.settled()

    def _add(self, pieces: Iterable[PieceRow]) -> None:
        for piece in pieces:
            self._pieces.setdefault(piece.owner, {})[piece.ordinal] = piece

    def _damaged(self, pieces: list[PieceRow]) -> list[PieceRow]:
        """The damaged ones of pieces in one file."""
        damaged = []
        for piece in sorted(pieces, key=lambda piece: piece.place):
            try:
                self.read_piece(piece)
            except PieceDamaged:
                damaged.append(piece)
        return damaged


def checksum(owner: str, ordinal: int, data: bytes) -> int:
    """The checksum of a piece and its owner."""
    return zlib.crc32(data, zlib.crc32(f"{owner}\0{ordinal}".encode()))
