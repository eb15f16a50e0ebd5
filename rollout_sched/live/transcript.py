"""What the attempts of one request have made: token ids, with their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollout_sched.live.ports import OnTokens


class Piece(msgspec.Struct):
    """Tokens of one attempt, with their log-probabilities if they were asked for."""

    token_ids: list[int]
    logprobs: list[float] | None


class TokenTranscript:
    """A transcript (`live.ports.Transcript`) of token ids."""

    def __init__(self) -> None:
        self._pieces: dict[int, Piece] = {}
        self._streams: dict[int, Piece] = {}

    @property
    def attempts(self) -> int:
        """Attempts whose tokens are kept."""
        return len(self._pieces)

    @property
    def token_ids(self) -> list[int]:
        return [token for piece in self._pieces.values() for token in piece.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """One for each of `token_ids`, if they were asked for."""
        return [value for piece in self._pieces.values() for value in piece.logprobs or ()]

    def collect(self, attempt: int) -> OnTokens:
        """Takes what the stream of an attempt brings."""
        stream = self._streams[attempt] = Piece([], [])

        def collect(token_ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
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
