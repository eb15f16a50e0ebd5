"""The payload store: what the requests are about, token by token, and what came of them.

The core counts; here lie the tokens. A payload keeps one piece per attempt, and the pieces joined
are exactly what the core counts, so a resumed request is sent prompt and pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.model import Sample
from rollout_sched.live.attempts import AttemptTask
from rollout_sched.live.ports import (
    AnswerUntrue,
    Attempting,
    InstanceClient,
    OnTokens,
    Order,
    Outcome,
    Output,
    Over,
)


class Piece(msgspec.Struct):
    """Tokens of one attempt, with their log-probabilities if they were asked for."""

    token_ids: list[int]
    logprobs: list[float] | None


class TokenPayload:
    """A prompt given as tokens, answered with tokens (token in, token out).

    `sampling` are vLLM's SamplingParams by name, less n and max_tokens; with "logprobs" in it every
    answer must bring one log-probability per token. `stream_every`: see `Order`.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        stream_every: int = 0,
        session: str = "",
    ) -> None:
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.stream_every = stream_every
        self.session = session
        self._pieces: dict[int, Piece] = {}
        self._streams: dict[int, Piece] = {}

    @property
    def attempts(self) -> int:
        """Attempts whose tokens are kept."""
        return len(self._pieces)

    @property
    def response_ids(self) -> list[int]:
        return [token for piece in self._pieces.values() for token in piece.token_ids]

    @property
    def logprobs(self) -> list[float] | None:
        """One for each of `response_ids`; None if none were asked for."""
        if self.sampling.get("logprobs") is None:
            return None
        return [value for piece in self._pieces.values() for value in piece.logprobs or ()]

    def begin(
        self, client: InstanceClient, dispatch: Dispatch, order_id: str, over: Over
    ) -> Attempting:
        return AttemptTask(self.attempt(client, dispatch, order_id), over)

    async def attempt(self, client: InstanceClient, dispatch: Dispatch, order_id: str) -> Outcome:
        order = Order(
            order_id,
            [*self.prompt_ids, *self.response_ids],
            dispatch.max_new_tokens,
            f"v{dispatch.salt}",
            self.sampling,
            self.stream_every,
            self.session,
        )
        collect = self._collect(dispatch.attempt) if self.stream_every else None
        output = await client.generate(order, collect)
        self._check(output)
        piece = Piece(output.token_ids, output.logprobs)
        return Outcome(len(output.token_ids), output.finish, output.spans, piece)

    def _collect(self, attempt: int) -> OnTokens:
        stream = self._streams[attempt] = Piece([], [])

        def collect(token_ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
            stream.token_ids.extend(token_ids)
            if logprobs is None or stream.logprobs is None:
                stream.logprobs = None
            else:
                stream.logprobs.extend(logprobs)

        return collect

    def _check(self, output: Output) -> None:
        if self.sampling.get("logprobs") is None:
            return
        count = -1 if output.logprobs is None else len(output.logprobs)
        if count != len(output.token_ids):
            raise AnswerUntrue(
                f"{len(output.token_ids)} tokens came with {max(0, count)} log-probabilities"
            )

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

    def answer(self, sample: Sample) -> None:
        """Nobody waits for this one alone: it is delivered with its group."""

    def fail(self, reason: str, error: Exception | None) -> None:
        """Its group fails with it."""
