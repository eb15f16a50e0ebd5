"""The transcript of one request: token ids of its attempts, with their log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rollout_sched.live.pieces import JoinedPieces, Piece
from rollout_sched.live.ports import OnTokens

T = TypeVar("T")


def detached(pieces: Mapping[int, T]) -> dict[int, T]:
    """The pieces in order, under negative numbers, which no attempt has."""
    return {place - len(pieces): piece for place, piece in enumerate(pieces.values())}


class TokenTranscript:
    """A transcript (`live.ports.Transcript`) of token ids. One piece is kept for each attempt."""

    def __init__(self) -> None:
        self._verified: list[float] = []  # of the leading generated tokens
        self._pieces: dict[int, Piece] = {}
        self._streams: dict[int, Piece] = {}

    @property
    def attempts(self) -> int:
        """Number of attempts whose tokens are kept."""
        return len(self._pieces)

    @property
    def joined(self) -> JoinedPieces:
        """The kept pieces as one response."""
        return JoinedPieces(self._pieces)

    @property
    def token_ids(self) -> list[int]:
        """Generated and observed tokens."""
        return self.joined.token_ids

    @property
    def logprobs(self) -> list[float]:
        """One for each of `token_ids`, under the weights that made or verified it, if requested;
        0.0 for observed tokens."""
        values = self.joined.drawn_logprobs
        if self._verified:
            made = [place for place, generated in enumerate(self.joined.mask) if generated]
            for place, logprob in zip(made, self._verified, strict=False):
                values[place] = logprob
        return values

    @property
    def pieces(self) -> list[tuple[int, Piece]]:
        """The kept pieces by attempt, in order."""
        return list(self._pieces.items())

    def piece(self, attempt: int) -> Piece | None:
        """The kept piece of an attempt."""
        return self._pieces.get(attempt)

    @property
    def verified_logprobs(self) -> list[float]:
        """Of the leading generated tokens that were verified; each verification makes a new
        list."""
        return self._verified

    def restore(self, pieces: Mapping[int, Piece], verified: list[float]) -> None:
        """Take over the pieces of an earlier transcript of the request."""
        self._pieces.update(pieces)
        self._verified = verified

    def observe(self, attempt: int, token_ids: Sequence[int]) -> None:
        """Append what a tool returned for the turn of this attempt."""
        self._pieces.setdefault(attempt, Piece([], [])).observed = list(token_ids)

    def collect(self, attempt: int) -> OnTokens:
        """Returns a function that appends streamed tokens of an attempt. After the attempt is kept
        or dropped it ignores them: a kept piece is never changed."""
        stream = self._streams.setdefault(attempt, Piece([], []))

        def collect(token_ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
            if self._streams.get(attempt) is not stream:
                return  # the attempt was stopped before its client noticed
            stream.token_ids.extend(token_ids)
            if logprobs is None or stream.logprobs is None:
                stream.logprobs = None
            else:
                stream.logprobs.extend(logprobs)

        return collect

    def streamed(self, attempt: int) -> int:
        stream = self._streams.get(attempt)
        return 0 if stream is None else len(stream.token_ids)

    def partial(self, attempt: int, tokens: int) -> Piece:
        return self._streams[attempt]

    def keep(self, attempt: int, tokens: int, piece: Piece) -> None:
        if len(piece.token_ids) > tokens:
            logprobs = None if piece.logprobs is None else piece.logprobs[:tokens]
            piece = Piece(piece.token_ids[:tokens], logprobs)
        self._streams.pop(attempt, None)
        if tokens:
            self._pieces[attempt] = piece

    def drop(self, attempt: int) -> None:
        if attempt:
            self._pieces.pop(attempt, None)
            self._streams.pop(attempt, None)
        else:
            self._pieces.clear()
            self._verified = []

    def detach(self) -> None:
        self._pieces = detached(self._pieces)
        self._streams.clear()

    def verified(self, logprobs: Sequence[float]) -> None:
        """The leading generated tokens have passed the test: these are their log-probabilities
        under the weights that they now count for."""
        made = sum(len(piece.token_ids) for piece in self._pieces.values())
        self._verified = list(logprobs[:made])

    def cut(self, tokens: int) -> None:
        while tokens and self._pieces:
            attempt, piece = self._pieces.popitem()
            left = len(piece.token_ids) - tokens
            if piece.observed is not None:
                self._pieces.clear()
            elif left > 0:
                logprobs = None if piece.logprobs is None else piece.logprobs[:left]
                self._pieces[attempt] = Piece(piece.token_ids[:left], logprobs)
            tokens = max(0, -left)
        self.verified(self._verified)
