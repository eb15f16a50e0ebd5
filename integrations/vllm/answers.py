"""From the chunks of an answer to an Output: joined, and believed only where they can be true."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollout_sched.core.events import Spans
from rollout_sched.integrations.vllm.protocol.answers import (
    Finish,
    VersionSpan,
    finish_of,
    spans_of,
)
from rollout_sched.integrations.vllm.protocol.request_ids import names_another
from rollout_sched.live.ports import (
    AnswerUntrue,
    InstanceError,
    OnTokens,
    Order,
    Output,
    PromptToken,
)

#: What is told of a place in a prompt: of the token that stands there, and perhaps of others.
ById = dict[int, PromptToken]


class Chunk(msgspec.Struct):
    """One chunk of a stream, or a whole answer. `versions` come with the last chunk, if at all,
    `prompt` with the first: one entry for each token of the context but the first. `id`: what
    it says that it answers, "" if nothing. `made`: how many tokens it says to have made by then;
    None if it does not."""

    token_ids: list[int]
    logprobs: list[float] | None = None
    finish: str | None = None
    versions: list[VersionSpan] | None = None
    prompt: list[ById] | None = None
    id: str = ""
    made: int | None = None


class Assembly:
    """Joins the chunks of one answer and hands streamed tokens on.

    An answer that breaks off is an InstanceError, one that cannot be true an AnswerUntrue.
    `labelled` as for `spans_of`.
    """

    def __init__(
        self, order: Order, on_tokens: OnTokens | None = None, *, labelled: bool = False
    ) -> None:
        self._id = order.id
        self._limit = order.max_new_tokens
        self._context = order.token_ids
        self._wants_prompt = order.sampling.get("prompt_logprobs") is not None
        self._wants_logprobs = order.sampling.get("logprobs") is not None
        self._on_tokens = on_tokens
        self._labelled = labelled
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: Finish | None = None
        self._versions: list[VersionSpan] | None = None
        self._prompt: list[PromptToken] | None = None

    def add(self, chunk: Chunk) -> None:
        tokens = len(chunk.token_ids)
        if names_another(chunk.id, self._id):
            raise AnswerUntrue(f"it answered {self._id} with {chunk.id[:80]!r}, another's answer")
        if self._finish is not None and (tokens or chunk.finish is not None):
            raise AnswerUntrue("it sent more after the end of an answer")
        if len(self._token_ids) + tokens > self._limit:
            raise AnswerUntrue(f"it sent more than the {self._limit} tokens it may make")
        if chunk.made not in (None, len(self._token_ids) + tokens):
            raise AnswerUntrue(
                f"it has made {chunk.made} tokens, it says, and sent {len(self._token_ids)} before "
                f"these {tokens}"
            )
        logprobs = chunk.logprobs if chunk.logprobs is not None else []
        if self._wants_logprobs and len(logprobs) != tokens:
            raise AnswerUntrue(f"it sent {len(logprobs)} log-probs with {tokens} tokens")
        if chunk.prompt is not None and self._wants_prompt:
            self._prompt = _of_the_context(self._context, chunk.prompt)
        if chunk.finish is not None:
            self._finish = finish_of(chunk.finish)
            self._versions = chunk.versions
        self._token_ids += chunk.token_ids
        if self._wants_logprobs:
            self._logprobs += logprobs
        # The last tokens go with the end: whoever had them without it would go on from there.
        if self._on_tokens is not None and tokens and chunk.finish is None:
            self._on_tokens(chunk.token_ids, logprobs if self._wants_logprobs else None)

    def output(self) -> Output:
        """The whole answer."""
        if self._finish is None:
            raise InstanceError("its answer broke off before a finish_reason")
        spans = spans_of(self._versions, len(self._token_ids), labelled=self._labelled)
        return self._as_output(self._finish, spans)

    def cut(self) -> Output:
        """What has come so far, as the answer to an abort that came before the end, or too late."""
        return self._as_output(self._finish or "abort", ())

    def _as_output(self, finish: Finish, spans: Spans) -> Output:
        logprobs = self._logprobs if self._wants_logprobs else None
        return Output(self._token_ids, logprobs, finish, spans, self._prompt)


def _of_the_context(token_ids: Sequence[int], told: Sequence[ById]) -> list[PromptToken]:
    """What is told of the tokens of a context. Raises AnswerUntrue if it is of other tokens."""
    if len(told) != len(token_ids) - 1:
        raise AnswerUntrue(
            f"it sent {len(told) + 1} log-probs of a prompt of {len(token_ids)} tokens"
        )
    found = [by_id.get(token) for token, by_id in zip(token_ids[1:], told, strict=True)]
    thought = [token for token in found if token is not None]
    if len(thought) != len(found):
        place = found.index(None) + 1
        raise AnswerUntrue(f"it sent no log-prob of its prompt's token {place}")
    return thought
