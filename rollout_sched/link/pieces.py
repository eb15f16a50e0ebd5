"""Keeps the tokens of groups at both ends of a link: the scheduler has all that a front has made.

So a group that began at one front can continue at another, the store can be complete, and samples
can be delivered without asking the front.
"""

from __future__ import annotations

from typing import cast

from rollout_sched.core.model.request_ids import group_of, parse_request_id
from rollout_sched.link.protocol import PieceMade, ReleaseGroup, Streamed, TakeGroup
from rollout_sched.live.requests import Payloads
from rollout_sched.live.requests.token_payload import Piece, TokenTranscript
from rollout_sched.store import PieceDamaged
from rollout_sched.store.transaction import Tokens, decode, encode


class GroupPieces:
    """Finds the new tokens of each request of the groups that one front was given."""

    def __init__(self, payloads: Payloads) -> None:
        self._payloads = payloads
        self._groups: set[str] = set()
        self._streamed: dict[int, int] = {}  # tokens of running attempts that it has

    def take(self, order: TakeGroup) -> None:
        self._groups.add(order.group)
        for piece in order.pieces:
            add_piece(self._payloads, piece)

    def release(self, order: ReleaseGroup) -> None:
        self._groups.discard(order.group)

    def streamed(self, request: str, attempt: int, tokens: int) -> Streamed | None:
        """The new ones of the first `tokens` tokens of a stream; None if the request is a
        client's."""
        payload = self._payloads.get(request)
        if payload is None or group_of(request) not in self._groups:
            return None
        piece = cast(TokenTranscript, payload.transcript).partial(attempt, tokens)
        start = self._streamed.get(attempt, 0)
        self._streamed[attempt] = tokens
        return Streamed(request, attempt, start, _encoded(_slice(piece, start, tokens)))

    def piece_of(self, request: str, attempt: int) -> PieceMade | None:
        """The tokens that an ended attempt, or its tool, has added; None if there are none, or the
        request is a client's."""
        start = self._streamed.pop(attempt, 0)
        payload = self._payloads.get(request)
        if payload is None or group_of(request) not in self._groups:
            return None
        piece = cast(TokenTranscript, payload.transcript).piece(attempt)
        if piece is None:
            return None
        start = min(start, len(piece.token_ids))
        new = _slice(piece, start, len(piece.token_ids))
        return PieceMade(request, attempt, _encoded(new), start)


def add_piece(payloads: Payloads, made: PieceMade) -> None:
    """Add a piece to the transcript of its request. Raises PieceDamaged."""
    transcript = _transcript(payloads, made)
    tokens = decode(made.tokens)
    piece = _begun(transcript, made)
    ids = [*piece.token_ids, *tokens.ids]
    logprobs = None
    if tokens.logprobs is not None and piece.logprobs is not None:
        logprobs = [*piece.logprobs, *tokens.logprobs]
    transcript.append(made.attempt, len(ids), Piece(ids, logprobs))
    if tokens.observed is not None:
        transcript.observe(made.attempt, tokens.observed)


def add_streamed(payloads: Payloads, said: Streamed) -> None:
    """Add streamed tokens to the stream of their attempt. Raises PieceDamaged."""
    tokens = decode(said.tokens)
    _transcript(payloads, said).collect(said.attempt)(tokens.ids, tokens.logprobs)


def _begun(transcript: TokenTranscript, made: PieceMade) -> Piece:
    """The part of a piece that was streamed before."""
    if not made.start:
        return Piece([], [])
    streamed = transcript.streamed(made.attempt)
    if made.start > streamed:
        raise PieceDamaged(f"a piece begins at token {made.start}, but {streamed} were streamed")
    return _slice(transcript.partial(made.attempt, made.start), 0, made.start)


def pieces_of(payloads: Payloads, request: str) -> list[PieceMade]:
    """All tokens of a request, for another front to continue from."""
    payload = payloads.get(request)
    if payload is None:
        return []
    transcript = cast(TokenTranscript, payload.transcript)
    return [PieceMade(request, number, _encoded(piece)) for number, piece in transcript.pieces]


def _transcript(payloads: Payloads, made: PieceMade | Streamed) -> TokenTranscript:
    group, index = parse_request_id(made.request)
    payload = payloads.of_sample(group, index, made.request)
    return cast(TokenTranscript, payload.transcript)


def _slice(piece: Piece, start: int, end: int) -> Piece:
    logprobs = None if piece.logprobs is None else piece.logprobs[start:end]
    return Piece(piece.token_ids[start:end], logprobs, piece.observed)


def _encoded(piece: Piece) -> bytes:
    return encode(Tokens(piece.token_ids, piece.logprobs, piece.observed))
