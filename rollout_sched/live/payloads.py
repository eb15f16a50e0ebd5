"""Payloads of token ids: what is sent to an instance for each attempt.

The core only counts tokens; the tokens are in the payload's transcript, so a resumed request sends
prompt and transcript.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.model import DeliveredSample
from rollout_sched.live.attempts import AttemptTask
from rollout_sched.live.draft_test import DraftTest, is_greedy
from rollout_sched.live.pieces import Piece
from rollout_sched.live.ports import (
    AnswerUntrue,
    Attempting,
    InstanceClient,
    Order,
    Outcome,
    Output,
    Over,
    Passed,
    PromptToken,
    Responder,
)
from rollout_sched.live.transcript import TokenTranscript

#: A log-probability of 0 may be rounded up; a logit is larger than this.
_ABOVE_ZERO = 1e-3


class DeliveredInGroup:
    """The responder of a request that is delivered, or fails, with its group."""

    def answer(self, sample: DeliveredSample) -> None:
        pass

    def fail(self, reason: str, error: Exception | None) -> None:
        pass


IN_GROUP = DeliveredInGroup()


class TokenPayload:
    """A prompt given as tokens, answered with tokens (token in, token out).

    `sampling`: vLLM's SamplingParams by name, without n and max_tokens; with "logprobs" in it every
    answer must have one log-probability per token. `stream_every`: see `Order`. `test`: decides
    which tokens of a draft stay; with a test, log-probabilities are always requested.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        stream_every: int = 0,
        session: str = "",
        responder: Responder = IN_GROUP,
        test: DraftTest | None = None,
    ) -> None:
        self.prompt_ids = prompt_ids
        if test is not None and sampling.get("logprobs") is None:
            sampling = {**sampling, "logprobs": 0}
        self.sampling = sampling
        self.test = test
        self.stream_every = stream_every
        self.session = session
        self.transcript = TokenTranscript()
        self.responder = responder

    @property
    def response_ids(self) -> list[int]:
        return self.transcript.token_ids

    @property
    def logprobs(self) -> list[float] | None:
        """One for each of `response_ids`; None if none were requested."""
        return None if self.sampling.get("logprobs") is None else self.transcript.logprobs

    def begin(
        self, client: InstanceClient, dispatch: Dispatch, order_id: str, over: Over
    ) -> Attempting:
        return AttemptTask(self.attempt(client, dispatch, order_id), over)

    def begin_verified(
        self,
        client: InstanceClient,
        dispatch: Dispatch,
        order_id: str,
        passed: Passed,
        over: Over,
    ) -> Attempting:
        return AttemptTask(self.attempt_verified(client, dispatch, order_id, passed), over)

    async def attempt_verified(
        self, client: InstanceClient, dispatch: Dispatch, order_id: str, passed: Passed
    ) -> Outcome:
        """Sends two orders: the first gets the draft's log-probabilities under the new weights,
        which takes only the prefill that is needed anyway; the second continues after the kept
        tokens, from the KV cache."""
        sampling = {**self.sampling, "prompt_logprobs": 0}
        order = self._order(dispatch, order_id, max_new_tokens=1, sampling=sampling)
        output = await client.generate(order)
        if output.finish == "abort":
            return _nothing()
        thought = self._thought_of_draft(dispatch, output)
        kept = self.kept(dispatch, thought)
        rest = await passed(kept)
        if rest is None:
            return _nothing()
        self.transcript.verified([token.logprob for token in thought[:kept]])
        if rest.ends:
            return Outcome(0, "stop", (), Piece([], []))
        await asyncio.sleep(0)  # let earlier dispatches begin first
        return await self.attempt(client, rest, order_id)

    def kept(self, dispatch: Dispatch, thought: Sequence[PromptToken]) -> int:
        """How many leading tokens of the draft stay. A cut before tokens that a tool has answered
        leaves nothing, because the tool has already acted on them."""
        assert self.test is not None, "a draft of a payload that tests none"
        transcript = self.transcript
        drawn = zip(transcript.logprobs, transcript.joined.mask, strict=True)
        old = [logprob for logprob, generated in drawn if generated]
        greedy = is_greedy(self.sampling)
        kept = self.test.passed(dispatch, old[: len(thought)], thought, greedy=greedy)
        return kept if kept >= min(transcript.joined.settled, len(thought)) else 0

    def _thought_of_draft(self, dispatch: Dispatch, output: Output) -> list[PromptToken]:
        """One entry for each generated token of the draft. Raises AnswerUntrue."""
        version = dispatch.salt
        if any(made_by < version for made_by, _ in output.spans):
            raise AnswerUntrue(f"it should verify under version {version}, but used an older one")
        context = len(self.prompt_ids) + len(self.response_ids)
        prompt = output.prompt
        if prompt is None or len(prompt) != context - 1:
            told = 0 if prompt is None else len(prompt)
            raise AnswerUntrue(f"a context of {context} tokens came with {told} log-probabilities")
        response = prompt[len(self.prompt_ids) - 1 :]
        made = [
            t
            for t, generated in zip(response, self.transcript.joined.mask, strict=True)
            if generated
        ]
        draft = made[: sum(tokens for _, tokens in dispatch.draft)]
        if not all(-math.inf < token.logprob < _ABOVE_ZERO for token in draft):
            raise AnswerUntrue(
                "its prompt log-probabilities are invalid; start it with --logprobs-mode "
                "raw_logprobs or processed_logprobs"
            )
        return draft

    def _order(
        self,
        dispatch: Dispatch,
        order_id: str,
        max_new_tokens: int,
        sampling: Mapping[str, Any],
        stream_every: int = 0,
    ) -> Order:
        return Order(
            order_id,
            [*self.prompt_ids, *self.response_ids],
            max_new_tokens,
            f"v{dispatch.salt}",
            sampling,
            stream_every,
            self.session,
        )

    async def attempt(self, client: InstanceClient, dispatch: Dispatch, order_id: str) -> Outcome:
        most, every = dispatch.max_new_tokens, self.stream_every
        order = self._order(dispatch, order_id, most, self.sampling, every)
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


def _nothing() -> Outcome:
    """The outcome of an attempt that was stopped before it made a token."""
    return Outcome(0, "abort", (), Piece([], []))
