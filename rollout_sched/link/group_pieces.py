"""The tokens of groups at both ends of a link: what a front has made, its scheduler holds too.

So a group that was begun at one front can go on at another, a store has all that it needs, and what
is delivered is at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from rollout_sched.link.messages import LetGo, PieceMade, TakeGroup
from rollout_sched.live.payload_book import PayloadBook
from rollout_sched.live.transcript import Piece, TokenTranscript
from rollout_sched.store.tokens import Tokens, decode, encode


class GroupPieces:
    """Of the groups that one front was given: what is new of each request."""

    def __init__(self, payloads: PayloadBook) -> None:
        self._payloads = payloads
        self._groups: set[str] = set()
        self._verified: dict[str, Sequence[float]] = {}  # that the scheduler has, by request

    def take(self, order: TakeGroup) -> None:
        self._groups.add(order.group)
        for piece in order.pieces:
            keep(self._payloads, piece)
            self._verified[piece.request] = _transcript(self._payloads, piece).verified_logprobs

    def let_go(self, order: LetGo) -> None:
        self._groups.discard(order.group)
        for request in order.requests:
            self._verified.pop(request, None)

    def of(self, request: str, attempt: int) -> PieceMade | None:
        """What an attempt that has ended, or its tool, has added; None if that is nothing, or the
        request is a client's."""
        payload = self._payloads.get(request)
        if payload is None or group_of(request) not in self._groups:
            return None
        transcript = cast(TokenTranscript, payload.transcript)
        verified = transcript.verified_logprobs
        passed: Sequence[float] = ()
        if verified is not self._verified.get(request):
            self._verified[request] = passed = verified
        piece = transcript.piece(attempt)
        if piece is None and not passed:
            return None
        return PieceMade(request, attempt, _encoded(piece), tuple(passed))


def keep(payloads: PayloadBook, made: PieceMade) -> None:
    """Into the transcript of its request. Raises PieceDamaged."""
    transcript = _transcript(payloads, made)
    if made.tokens:
        tokens = decode(made.tokens)
        logprobs = None if tokens.logprobs is None else list(tokens.logprobs)
        ids = list(tokens.ids)
        transcript.keep(made.attempt, len(ids), Piece(ids, logprobs))
        if tokens.observed is not None:
            transcript.observe(made.attempt, tokens.observed)
    if made.verified:
        transcript.verified(made.verified)


def pieces_of(payloads: PayloadBook, request: str) -> list[PieceMade]:
    """All that a request has, for another front to go on from."""
    payload = payloads.get(request)
    if payload is None:
        return []
    transcript = cast(TokenTranscript, payload.transcript)
    pieces = [PieceMade(request, number, _encoded(piece)) for number, piece in transcript.pieces]
    if transcript.verified_logprobs:
        pieces.append(PieceMade(request, 0, b"", tuple(transcript.verified_logprobs)))
    return pieces


def group_of(request: str) -> str:
    """The group that it is of, if it is of one (`core.outcomes` names them)."""
    return request.rpartition("/")[0]


def _transcript(payloads: PayloadBook, made: PieceMade) -> TokenTranscript:
    group, _, index = made.request.rpartition("/")
    payload = payloads.of_sample(group, int(index), made.request)
    return cast(TokenTranscript, payload.transcript)


def _encoded(piece: Piece | None) -> bytes:
    if piece is None:
        return b""
    return encode(Tokens(piece.token_ids, piece.logprobs, piece.observed))
