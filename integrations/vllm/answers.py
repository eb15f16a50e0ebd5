"""Joins the chunks of an answer into an Output and rejects answers that are inconsistent."""

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

#: The log-probs for one position of a prompt, by token id: of its token, and perhaps of others.
ById = dict[int, PromptToken]


class Chunk(msgspec.Struct):
    """One chunk of a stream, or a whole answer. `versions` come with the last chunk, if at all,
    `prompt` with the first: one entry for each token of the context except the first. `id`: the id
    of the request that it claims to answer, "" if none. `made`: the number of tokens that it claims
    to have made so far; None if not reported."""

    token_ids: list[int]
    logprobs: list[float] | None = None
    finish: str | None = None
    versions: list[VersionSpan] | None = None
    prompt: list[ById] | None = None
    id: str = ""
    made: int | None = None


class Assembly:
    """Joins the chunks of one answer and passes streamed tokens on.

    Raises InstanceError for an answer that breaks off, AnswerUntrue for one that is inconsistent.
    `labelled` as in `spans_of`.
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
            raise AnswerUntrue(f"it answered {self._id} with the answer to {chunk.id[:80]!r}")
        if self._finish is not None and (tokens or chunk.finish is not None):
            raise AnswerUntrue("it sent more after the end of an answer")
        if len(self._token_ids) + tokens > self._limit:
            raise AnswerUntrue(f"it sent more tokens than the limit of {self._limit}")
        if chunk.made not in (None, len(self._token_ids) + tokens):
            raise AnswerUntrue(
                f"it reports {chunk.made} tokens made, but has sent {len(self._token_ids)} and "
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
        # The last tokens go with the end: alone, they could be resumed from although it has ended.
        if self._on_tokens is not None and tokens and chunk.finish is None:
            self._on_tokens(chunk.token_ids, logprobs if self._wants_logprobs else None)

    def output(self) -> Output:
        """The whole answer."""
        if self._finish is None:
            raise InstanceError("its answer broke off before a finish_reason")
        spans = spans_of(self._versions, len(self._token_ids), labelled=self._labelled)
        return self._as_output(self._finish, spans)

    def cut(self) -> Output:
        """The tokens so far, as the answer to an abort, before the end or too late."""
        return self._as_output(self._finish or "abort", ())

    def _as_output(self, finish: Finish, spans: Spans) -> Output:
        logprobs = self._logprobs if self._wants_logprobs else None
        return Output(self._token_ids, logprobs, finish, spans, self._prompt)


def _of_the_context(token_ids: Sequence[int], told: Sequence[ById]) -> list[PromptToken]:
    """The log-probs of the tokens of a context. Raises AnswerUntrue if they are of other tokens."""
    if len(told) != len(token_ids) - 1:
        raise AnswerUntrue(
            f"it sent {len(told) + 1} log-probs for a prompt of {len(token_ids)} tokens"
        )
    found = [by_id.get(token) for token, by_id in zip(token_ids[1:], told, strict=True)]
    thought = [token for token in found if token is not None]
    if len(thought) != len(found):
        place = found.index(None) + 1
        raise AnswerUntrue(f"it sent no log-prob for token {place} of its prompt")
    return thought
