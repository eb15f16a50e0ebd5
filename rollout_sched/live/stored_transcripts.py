"""Transcripts in a store: what is new of each is written, once, and what is gone is taken back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

from rollout_sched.live.pieces import Piece
from rollout_sched.live.transcript import TokenTranscript
from rollout_sched.store.changes import Transaction
from rollout_sched.store.errors import PieceDamaged
from rollout_sched.store.store import Store
from rollout_sched.store.tokens import HEAD, Tokens, counts, decode

#: Portions that an attempt may come in; a piece's ordinal is its attempt times this, plus the
#: portion, so they are read in order.
_PORTIONS: Final = 2**24

#: The ordinal of what verified tokens count as: no attempt has number 0.
_VERIFIED: Final = 0

T = TypeVar("T")


class _Held:
    """Of one attempt, what the store holds: portions, tokens, and whether a tool has answered."""

    __slots__ = ("answered", "portions", "tokens")

    def __init__(self) -> None:
        self.portions = 0
        self.tokens = 0
        self.answered = False


class StoredTranscripts:
    """By request; its tokens lie in the store under its name.

    What is written is compared with what is held by attempt and length: an attempt's tokens are
    appended to, or cut at the end, and never changed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[str, dict[int, _Held]] = {}
        self._verified: dict[str, list[float]] = {}

    def owners(self) -> set[str]:
        """By the names that they have in the store."""
        return {_owner(request) for request in self._held}

    def write(
        self,
        request: str,
        transcript: TokenTranscript,
        changes: Transaction,
        streamed: Iterable[tuple[int, Piece]] = (),
    ) -> None:
        """What is new since it was last written. `streamed`: of its attempt under way, what the
        scheduler knows of."""
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
        """All of it."""
        self._verified.pop(request, None)
        if self._held.pop(request, None) is not None:
            changes.clear(_owner(request))

    def take_up(self, request: str) -> tuple[int, int]:
        """Look at what the store holds of a request of an earlier epoch: how many tokens were
        generated, and how many observed. Raises PieceDamaged."""
        held = self._held.setdefault(request, {})
        generated = observed = 0
        for ordinal, head in self._store.heads(_owner(request), HEAD).items():
            if ordinal == _VERIFIED:
                self._verified[request] = []  # whatever it is, it is another list than any
                continue
            attempt, portion = divmod(ordinal, _PORTIONS)
            made, returned, answered = counts(head)
            found = held.setdefault(attempt, _Held())
            found.portions = portion + 1
            found.tokens += made
            found.answered |= answered
            generated += made
            observed += returned
        if _owner(request) in self._store.losses.owners:  # what a tool returned is not counted
            raise PieceDamaged(f"tokens of {request!r} are gone")
        return generated, observed

    def read(self, request: str, transcript: TokenTranscript) -> None:
        """Into a new transcript what was taken up. Raises PieceDamaged."""
        pieces: dict[int, Piece] = {}
        verified: list[float] = []
        held = self._held.get(request, {})
        for ordinal, data in self._store.pieces(_owner(request)).items():
            tokens = decode(data)
            attempt = ordinal // _PORTIONS
            if ordinal == _VERIFIED:
                verified = self._verified[request] = list(tokens.logprobs or ())
            elif attempt in held:  # else it has been taken back, and goes soon
                _join(pieces.setdefault(attempt, Piece([], [])), tokens)
        transcript.restore(pieces, verified)


def _write_piece(
    request: str, attempt: int, piece: Piece, held: dict[int, _Held], changes: Transaction
) -> None:
    """What of it the store does not hold."""
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
    """What is kept of an attempt is never changed, so all of it need not be copied."""
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
