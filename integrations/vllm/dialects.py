"""The two endpoints with tokens in and tokens out: their requests, answers and abort ids.

`/inference/v1/generate` is made for this. `/v1/completions` also takes token ids and exists on
every vLLM, but does not report which weights made a token.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rollout_sched.core.model.events import Spans
from rollout_sched.core.model.records import Count
from rollout_sched.integrations.vllm.protocol.answers import (
    Finish,
    Logprob,
    VersionSpan,
    decoded,
    finish_of,
    spans_of,
)
from rollout_sched.integrations.vllm.protocol.endpoints import (
    ASK_VERSIONS,
    COMPLETIONS,
    GENERATE,
    NEUTRAL_SAMPLING,
    UNKNOWN_TO_COMPLETIONS,
    Endpoint,
    engine_id,
)
from rollout_sched.live.ports import (
    AnswerUntrue,
    InstanceError,
    OnTokens,
    Order,
    Output,
    RequestRejected,
)

# ------------------------------------------------------------------------------------------
# Joins the chunks of an answer into an Output and rejects answers that are inconsistent.


class Chunk(msgspec.Struct):
    """One chunk of a stream, or a whole answer. `versions` come with the last chunk, if at all.
    `id`: the id of the request that it claims to answer, "" if none. `made`: the number of tokens
    that it claims to have made so far; None if not reported. `repeats`: its tokens may begin with
    some that came before; by `made`, the last ones are new."""

    token_ids: list[int]
    logprobs: list[float] | None = None
    finish: str | None = None
    versions: list[VersionSpan] | None = None
    id: str = ""
    made: int | None = None
    repeats: bool = False


class AnswerAssembler:
    """Joins the chunks of one answer and passes streamed tokens on.

    Raises InstanceError for an answer that breaks off, AnswerUntrue for one that is inconsistent.
    `labelled` as in `spans_of`.
    """

    def __init__(
        self, order: Order, on_tokens: OnTokens | None = None, *, labelled: bool = False
    ) -> None:
        self._limit = order.max_new_tokens
        self._wants_logprobs = order.sampling.get("logprobs") is not None
        self._on_tokens = on_tokens
        self._labelled = labelled
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: Finish | None = None
        self._versions: list[VersionSpan] | None = None

    def add(self, chunk: Chunk) -> None:
        if chunk.repeats:
            self._drop_repeated(chunk)
        tokens = len(chunk.token_ids)
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
        if chunk.finish is not None:
            self._finish = finish_of(chunk.finish)
            self._versions = chunk.versions
        self._token_ids += chunk.token_ids
        if self._wants_logprobs:
            self._logprobs += logprobs
        # The last tokens go with the end: alone, they could be resumed from although it has ended.
        if self._on_tokens is not None and tokens and chunk.finish is None:
            self._on_tokens(chunk.token_ids, logprobs if self._wants_logprobs else None)

    def _drop_repeated(self, chunk: Chunk) -> None:
        """Leave what is new. Too few tokens fail in `add`, as `made` does not fit them."""
        known = len(chunk.token_ids) - ((chunk.made or 0) - len(self._token_ids))
        if 0 < known <= len(chunk.token_ids):
            repeated = chunk.token_ids[:known]
            if repeated != self._token_ids[len(self._token_ids) - known :]:
                raise AnswerUntrue("its stream repeats other tokens than it has sent")
            del chunk.token_ids[:known]
            if chunk.logprobs is not None:
                del chunk.logprobs[: max(0, len(chunk.logprobs) - len(chunk.token_ids))]

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
        return Output(self._token_ids, logprobs, finish, spans)


#: Each event of a stream reports how many tokens were made so far, so that a repeated event is
#: detected at once: the response is resumed from these tokens if the stream breaks off.
_COUNTED = {"include_usage": True, "continuous_usage_stats": True}


class _Usage(msgspec.Struct):
    completion_tokens: Count | None = None


class _TokenLogprob(msgspec.Struct):
    logprob: Logprob
    token_id: Count | None = None  # since vLLM 0.32


class _Logprobs(msgspec.Struct):
    """`content` is that of /inference/v1/generate, `token_logprobs` that of /v1/completions."""

    content: list[_TokenLogprob] = []
    token_logprobs: list[Logprob] = []


class _Choice(msgspec.Struct):
    token_ids: list[Count] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class _TokenAnswer(msgspec.Struct):
    choices: list[_Choice]
    id: str | None = None
    request_id: str | None = None
    usage: _Usage | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_TokenAnswer)


class Dialect:
    """The request and answer format of one endpoint."""

    target: str
    capability: Endpoint

    def engine_id(self, order_id: str) -> str:
        """The engine's id of the request, which an abort needs."""
        return engine_id(self.capability, order_id)

    def body(self, order: Order, model: str) -> bytes:
        """The request. Raises RequestRejected for sampling that this endpoint would ignore."""
        if order.sampling.get("n", 1) != 1:
            raise RequestRejected(
                "an order is for one response: leave n out, send one order for each"
            )
        sampling = {**order.sampling, "max_tokens": order.max_new_tokens}
        if order.stream_every:
            sampling["stream_interval"] = order.stream_every
        try:
            return _encoder.encode(self._request(order, sampling, model))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestRejected(f"the request cannot be written as JSON: {error}") from error

    def _request(self, order: Order, sampling: dict[str, Any], model: str) -> dict[str, Any]:
        """The body. `sampling` has the limits, and may be changed."""
        request: dict[str, Any] = {
            **self._fields(order, sampling),
            "model": model,
            "request_id": order.id,
            "stream": order.stream_every > 0,
        }
        if order.stream_every:
            request["stream_options"] = _COUNTED
        if order.salt:
            request["cache_salt"] = order.salt
        return request

    def _fields(self, order: Order, sampling: dict[str, Any]) -> dict[str, Any]:
        """The fields that only this endpoint has. `sampling` may be changed."""
        raise NotImplementedError

    def read(self, data: bytes) -> Chunk:
        """A whole answer or one chunk of a stream. Raises AnswerUntrue if it is neither."""
        answer = decoded(_decoder.decode, data)
        told = answer.request_id or answer.id or ""
        made = None if answer.usage is None else answer.usage.completion_tokens
        if not answer.choices:  # the chunk that has only the usage
            return Chunk([], id=told, made=made)
        if len(answer.choices) > 1:
            raise AnswerUntrue(f"it answered with {len(answer.choices)} choices instead of one")
        choice = answer.choices[0]
        if choice.token_ids is None:
            raise AnswerUntrue("its answer has no token ids; use vLLM 0.10.2 or newer")
        logprobs = None
        if choice.logprobs is not None:
            content = choice.logprobs.content
            logprobs = choice.logprobs.token_logprobs or [entry.logprob for entry in content]
            named = [entry.token_id for entry in content if entry.token_id is not None]
            if named and named != choice.token_ids:
                raise AnswerUntrue("its log-probs have other token ids than its answer")
        versions = choice.weight_versions
        return Chunk(choice.token_ids, logprobs, choice.finish_reason, versions, told, made)


class Generate(Dialect):
    """`POST /inference/v1/generate`."""

    target = GENERATE
    capability = "generate"

    def _fields(self, order: Order, sampling: dict[str, Any]) -> dict[str, Any]:
        if not sampling.get("stop"):  # only stop strings need the text
            sampling.setdefault("detokenize", False)
        return {"token_ids": order.token_ids, "sampling_params": sampling}


class Completions(Dialect):
    """`POST /v1/completions` with token ids. `asks`: the server reports weight versions if a
    request asks for them."""

    target = COMPLETIONS
    capability = "completions"

    def __init__(self, asks: bool = False) -> None:
        self._ours = {"return_token_ids": True, **({ASK_VERSIONS: True} if asks else {})}

    def _fields(self, order: Order, sampling: dict[str, Any]) -> dict[str, Any]:
        sampling.pop("detokenize", None)
        if unknown := sorted(UNKNOWN_TO_COMPLETIONS & sampling.keys()):
            raise RequestRejected(
                f"sampling parameter {unknown[0]!r} is not offered by {self.target}; "
                "start vLLM with --enable-scale-out, or leave it out"
            )
        return {**NEUTRAL_SAMPLING, **sampling, "prompt": order.token_ids, **self._ours}
