"""Transcripts in a store: writes the new tokens of each once, and removes dropped ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

from rollout_sched.live.pieces import Piece
from rollout_sched.live.transcript import TokenTranscript
from rollout_sched.store.changes import Transaction
from rollout_sched.store.errors import PieceDamaged
from rollout_sched.store.store import Store
from rollout_sched.store.tokens import HEAD, Tokens, counts, decode

#: Most portions of an attempt; a piece's ordinal is its attempt times this, plus the portion, so
#: that pieces are read in order.
_PORTIONS: Final = 2**24

#: The ordinal of the log-probabilities of verified tokens: no attempt has number 0.
_VERIFIED: Final = 0

T = TypeVar("T")


class _Held:
    """What the store holds of one attempt: portions, tokens, and whether a tool has answered."""

    __slots__ = ("answered", "portions", "tokens")

    def __init__(self) -> None:
        self.portions = 0
        self.tokens = 0
        self.answered = False


class StoredTranscripts:
    """Transcripts by request; the tokens are in the store under the request's name.

    New and stored tokens are compared only by attempt and length: an attempt's tokens are appended
    to, or cut at the end, but never changed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[str, dict[int, _Held]] = {}
        self._verified: dict[str, list[float]] = {}

    def owners(self) -> set[str]:
        """The names of all transcripts in the store."""
        return {_owner(request) for request in self._held}

    def write(
        self,
        request: str,
        transcript: TokenTranscript,
        changes: Transaction,
        streamed: Iterable[tuple[int, Piece]] = (),
    ) -> None:
        """Write the tokens that are new since the last write. `streamed`: tokens of the running
        attempt that the scheduler knows of."""
        wanted = [*transcript.pieces, *streamed]
        held = self._held.get(request)
        if held is None:
            held = self._held[request] = {}
        else:
            for attempt in held.keys() - {attempt for attempt, _ in wanted}:
                _take_back(request, attempt, held.pop(attempt), changes)
        for attempt, piece in wanted:
            _write_piece(request, attempt, piece, held, changes)
        verified = transcript.verified_logprobs
        if (verified or request in self._verified) and verified is not self._verified.get(request):
            self._verified[request] = verified
            changes.append(_owner(request), _VERIFIED, Tokens([0] * len(verified), verified))

    def forget(self, request: str, changes: Transaction) -> None:
        """Remove the whole transcript."""
        self._verified.pop(request, None)
        if self._held.pop(request, None) is not None:
            changes.clear(_owner(request))

    def take_up(self, request: str) -> tuple[int, int]:
        """Read the index of a request of an earlier epoch. Returns the numbers of generated and of
        observed tokens. Raises PieceDamaged."""
        held = self._held.setdefault(request, {})
        generated = observed = 0
        for ordinal, head in self._store.heads(_owner(request), HEAD).items():
            if ordinal == _VERIFIED:
                self._verified[request] = []  # differs in identity from any later list
                continue
            attempt, portion = divmod(ordinal, _PORTIONS)
            made, returned, answered = counts(head)
            found = held.setdefault(attempt, _Held())
            found.portions = portion + 1
            found.tokens += made
            found.answered |= answered
            generated += made
            observed += returned
        if _owner(request) in self._store.losses.owners:  # counts do not cover observed tokens
            raise PieceDamaged(f"tokens of {request!r} are lost")
        return generated, observed

    def read(self, request: str, transcript: TokenTranscript) -> None:
        """Read the stored tokens into a new transcript. Raises PieceDamaged."""
        pieces: dict[int, Piece] = {}
        verified: list[float] = []
        held = self._held.get(request, {})
        for ordinal, data in self._store.pieces(_owner(request)).items():
            tokens = decode(data)
            attempt = ordinal // _PORTIONS
            if ordinal == _VERIFIED:
                verified = self._verified[request] = list(tokens.logprobs or ())
            elif attempt in held:  # else it was dropped, and its removal is not written yet
                _join(pieces.setdefault(attempt, Piece([], [])), tokens)
        transcript.restore(pieces, verified)


def _write_piece(
    request: str, attempt: int, piece: Piece, held: dict[int, _Held], changes: Transaction
) -> None:
    """Write the part of a piece that the store does not have yet."""
    known = held.get(attempt)
    if known is not None and known.tokens > len(piece.token_ids):
        _take_back(request, attempt, known, changes)
        known = None
    if known is None:
        known = held[attempt] = _Held()
    new = _from(piece.token_ids, known.tokens)
    answered = piece.observed is not None and not known.answered
    if not new and not answered:
        return
    logprobs = None if piece.logprobs is None else _from(piece.logprobs, known.tokens)
    tokens = Tokens(new, logprobs, piece.observed if answered else None)
    changes.append(_owner(request), attempt * _PORTIONS + known.portions, tokens)
    known.portions += 1
    known.tokens += len(new)
    known.answered |= answered


def _from(values: list[T], start: int) -> list[T]:
    """The values from `start` on; all of them need no copy, because kept pieces never change."""
    return values[start:] if start else values


def _take_back(request: str, attempt: int, known: _Held, changes: Transaction) -> None:
    for portion in range(known.portions):
        changes.take_back(_owner(request), attempt * _PORTIONS + portion)


def _join(piece: Piece, tokens: Tokens) -> None:
    piece.token_ids += tokens.ids
    if tokens.logprobs is not None and piece.logprobs is not None:
        piece.logprobs += tokens.logprobs
    elif tokens.ids:
        piece.logprobs = None
    if tokens.observed is not None:
        piece.observed = list(tokens.observed)


def _owner(request: str) -> str:
    return f"r:{request}"
