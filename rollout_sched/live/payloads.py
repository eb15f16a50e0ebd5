"""Payloads of token ids: what is asked of an instance, attempt by attempt.

The core counts; the tokens lie in the payload's transcript, so a resumed request is sent prompt and
transcript.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.model import Sample
from rollout_sched.live.attempts import AttemptTask
from rollout_sched.live.ports import (
    AnswerUntrue,
    Attempting,
    InstanceClient,
    Order,
    Outcome,
    Output,
    Over,
    Responder,
)
from rollout_sched.live.transcript import Piece, TokenTranscript


class DeliveredInGroup:
    """Nobody waits for this request alone: it is delivered, or fails, with its group."""

    def answer(self, sample: Sample) -> None:
        pass

    def fail(self, reason: str, error: Exception | None) -> None:
        pass


IN_GROUP = DeliveredInGroup()


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
        responder: Responder = IN_GROUP,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.stream_every = stream_every
        self.session = session
        self.transcript = TokenTranscript()
        self.responder = responder

    @property
    def response_ids(self) -> list[int]:
        return self.transcript.token_ids

    @property
    def logprobs(self) -> list[float] | None:
        """One for each of `response_ids`; None if none were asked for."""
        return None if self.sampling.get("logprobs") is None else self.transcript.logprobs

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
        collect = self.transcript.collect(dispatch.attempt) if self.stream_every else None
        output = await client.generate(order, collect)
        self._check(output)
        piece = Piece(output.token_ids, output.logprobs)
        return Outcome(len(output.token_ids), output.finish, output.spans, piece)

    def _check(self, output: Output) -> None:
        if self.sampling.get("logprobs") is None:
            return
        count = -1 if output.logprobs is None else len(output.logprobs)
        if count != len(output.token_ids):
            raise AnswerUntrue(
                f"{len(output.token_ids)} tokens came with {max(0, count)} log-probabilities"
            )
