"""The two endpoints with tokens in and tokens out: their requests, answers and abort ids.

`/inference/v1/generate` is made for this. `/v1/completions` also takes token ids and exists on
every vLLM, but does not report which weights made a token.
"""

from __future__ import annotations

from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from rollout_sched.integrations.vllm.answers import ById, Chunk
from rollout_sched.integrations.vllm.protocol.answers import VersionSpan, decoded
from rollout_sched.integrations.vllm.protocol.endpoints import COMPLETIONS, GENERATE
from rollout_sched.integrations.vllm.protocol.request_ids import engine_id
from rollout_sched.integrations.vllm.protocol.requests import (
    NEUTRAL_SAMPLING,
    UNKNOWN_TO_COMPLETIONS,
)
from rollout_sched.live.ports import AnswerUntrue, Order, PromptToken, RequestRejected

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Logprob = Annotated[float, msgspec.Meta(ge=-3.5e38, le=3.5e38)]  # finite; vLLM sends -9999 for -inf

_T = TypeVar("_T")

#: Each event of a stream reports how many tokens were made so far, so that a repeated event is
#: detected at once: the response is resumed from these tokens if the stream breaks off.
_COUNTED = {"include_usage": True, "continuous_usage_stats": True}

_encoder = msgspec.json.Encoder()


class Dialect(Protocol):
    """The request and answer format of one endpoint."""

    @property
    def target(self) -> str: ...

    @property
    def capability(self) -> str: ...

    def engine_id(self, order_id: str) -> str:
        """The engine's id of the request, which an abort needs."""

    def body(self, order: Order, model: str) -> bytes:
        """The request. Raises RequestRejected for sampling that this endpoint would ignore."""

    def read(self, data: bytes) -> Chunk:
        """A whole answer or one chunk of a stream. Raises AnswerUntrue if it is neither."""


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _TokenLogprob(msgspec.Struct):
    logprob: Logprob
    token_id: int | None = None  # since vLLM 0.32


class _PromptLogprob(msgspec.Struct):
    logprob: Logprob
    rank: Annotated[int, msgspec.Meta(ge=1)]


#: For each token of a prompt (None for the first): log-probs of it and of others, by token id.
_PromptLogprobs = list[dict[int, _PromptLogprob] | None] | None


class _GenerateLogprobs(msgspec.Struct):
    content: list[_TokenLogprob]


class _GenerateChoice(msgspec.Struct):
    token_ids: list[TokenId]
    finish_reason: str | None = None
    logprobs: _GenerateLogprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class _GenerateAnswer(msgspec.Struct):
    choices: list[_GenerateChoice]
    prompt_logprobs: _PromptLogprobs = None
    request_id: str | None = None
    usage: _Usage | None = None


class Generate:
    """`POST /inference/v1/generate`."""

    target = GENERATE
    capability = "generate"

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_GenerateAnswer).decode

    def engine_id(self, order_id: str) -> str:
        return engine_id("generate", order_id)

    def body(self, order: Order, model: str) -> bytes:
        sampling = _sampling(order)
        if not sampling.get("stop"):  # only stop strings need the text
            sampling.setdefault("detokenize", False)
        if order.stream_every:
            sampling["stream_interval"] = order.stream_every
        request: dict[str, Any] = {
            "model": model,
            "request_id": order.id,
            "token_ids": order.token_ids,
            "sampling_params": sampling,
            "stream": order.stream_every > 0,
        }
        if order.stream_every:
            request["stream_options"] = _COUNTED
        if order.salt:
            request["cache_salt"] = order.salt
        return _encoded(request)

    def read(self, data: bytes) -> Chunk:
        answer = decoded(self._decode, data)
        choice, told = _only(answer.choices), answer.request_id or ""
        made = None if answer.usage is None else answer.usage.completion_tokens
        if choice is None:
            return Chunk([], id=told, made=made)
        logprobs = None
        if choice.logprobs is not None:
            content = choice.logprobs.content
            logprobs = [entry.logprob for entry in content]
            named = [entry.token_id for entry in content if entry.token_id is not None]
            if named and named != choice.token_ids:
                raise AnswerUntrue("its log-probs have other token ids than its answer")
        versions, prompt = choice.weight_versions, _prompt_tokens(answer.prompt_logprobs)
        return Chunk(choice.token_ids, logprobs, choice.finish_reason, versions, prompt, told, made)


class _CompletionLogprobs(msgspec.Struct):
    token_logprobs: list[Logprob]


class _CompletionChoice(msgspec.Struct):
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: _CompletionLogprobs | None = None
    weight_versions: list[VersionSpan] | None = None
    prompt_logprobs: _PromptLogprobs = None


class _CompletionAnswer(msgspec.Struct):
    choices: list[_CompletionChoice]
    id: str | None = None
    usage: _Usage | None = None


class Completions:
    """`POST /v1/completions` with token ids."""

    target = COMPLETIONS
    capability = "completions"

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_CompletionAnswer).decode

    def engine_id(self, order_id: str) -> str:
        return engine_id("completions", order_id)

    def body(self, order: Order, model: str) -> bytes:
        sampling = _sampling(order)
        sampling.pop("detokenize", None)
        if unknown := sorted(UNKNOWN_TO_COMPLETIONS & sampling.keys()):
            raise RequestRejected(
                f"sampling parameter {unknown[0]!r} is not offered by {self.target}; "
                "start vLLM with --enable-scale-out, or leave it out"
            )
        request: dict[str, Any] = {
            **NEUTRAL_SAMPLING,
            **sampling,
            "model": model,
            "request_id": order.id,
            "prompt": order.token_ids,
            "return_token_ids": True,
            "stream": order.stream_every > 0,
        }
        if order.stream_every:
            request["stream_interval"] = order.stream_every
            request["stream_options"] = _COUNTED
        if order.salt:
            request["cache_salt"] = order.salt
        return _encoded(request)

    def read(self, data: bytes) -> Chunk:
        answer = decoded(self._decode, data)
        choice, told = _only(answer.choices), answer.id or ""
        made = None if answer.usage is None else answer.usage.completion_tokens
        if choice is None:
            return Chunk([], id=told, made=made)
        if choice.token_ids is None:
            raise AnswerUntrue("its answer has no token ids; use vLLM 0.10.2 or newer")
        logprobs = None if choice.logprobs is None else choice.logprobs.token_logprobs
        versions, prompt = choice.weight_versions, _prompt_tokens(choice.prompt_logprobs)
        return Chunk(choice.token_ids, logprobs, choice.finish_reason, versions, prompt, told, made)


def _prompt_tokens(told: _PromptLogprobs) -> list[ById] | None:
    """The log-probs for each token of a prompt except the first, which has none."""
    if told is None:
        return None
    return [
        {token: PromptToken(t.logprob, t.rank) for token, t in (by_id or {}).items()}
        for by_id in told[1:]
    ]


def _encoded(request: dict[str, Any]) -> bytes:
    try:
        return _encoder.encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestRejected(f"the request cannot be written as JSON: {error}") from error


def _sampling(order: Order) -> dict[str, Any]:
    if order.sampling.get("n", 1) != 1:
        raise RequestRejected("an order is for one response: leave n out, send one order for each")
    return {**order.sampling, "max_tokens": order.max_new_tokens}


def _only(choices: list[_T]) -> _T | None:
    """The one choice of an answer; None in the chunk that has only the usage."""
    if len(choices) > 1:
        raise AnswerUntrue(f"it answered with {len(choices)} choices instead of one")
    return choices[0] if choices else None
