"""vLLM's own endpoint: /inference/v1/generate."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from rollout_sched.simulators.fake_instance.protocol import decode
from rollout_sched.simulators.fake_instance.requests import (
    ChoiceChunk,
    GenerateBody,
    Json,
    ParsedRequest,
    RequestLimits,
    parsed,
    request_id,
)


class _Candidate(msgspec.Struct, gc=False):
    token_id: int
    logprob: float
    rank: int = 1


class _Sampled(msgspec.Struct, gc=False):
    token_id: int
    logprob: float
    rank: int
    top_logprobs: tuple[_Candidate]


class GenerateDialect:
    """Token ids in, token ids out. A request is aborted by the id of its answer."""

    path = "/inference/v1/generate"

    def parse(self, raw: bytes, headers: Mapping[str, str], limits: RequestLimits) -> ParsedRequest:
        body = decode(raw, GenerateBody)
        answer_id = f"generate-tokens-{request_id(headers, body.request_id)}"
        prompts = {answer_id: body.token_ids}
        return parsed(body, limits, answer_id, prompts, body.sampling_params, clamp=True)

    def whole(self, asked: ParsedRequest, chunks: Sequence[ChoiceChunk], usage: Json) -> Json:
        return {
            **self._answer(asked, chunks, usage),
            "prompt_logprobs": None,
            "prompt_token_ids": asked.prompts[0] if asked.return_token_ids else None,
            "kv_transfer_params": None,
            "output_mode": "tokens",
        }

    def events(self, asked: ParsedRequest, chunk: ChoiceChunk) -> list[Json]:
        event = self._answer(asked, [chunk], None)
        if chunk.first and asked.return_token_ids:
            event["prompt_token_ids"] = asked.prompts[0]
        return [event]

    def usage_event(self, asked: ParsedRequest, usage: Json) -> Json:
        return self._answer(asked, [], usage)

    def _answer(
        self, asked: ParsedRequest, chunks: Sequence[ChoiceChunk], usage: Json | None
    ) -> Json:
        return {
            "request_id": asked.id,
            "model": asked.model,
            "created": int(time.time()),
            "choices": [self._choice(chunk) for chunk in chunks],
            "usage": usage,
        }

    def _choice(self, chunk: ChoiceChunk) -> Json:
        logprobs = None
        if chunk.logprobs is not None:
            pairs = zip(chunk.token_ids, chunk.logprobs, strict=True)
            content = [_Sampled(t, value, 1, (_Candidate(t, value),)) for t, value in pairs]
            logprobs = {"content": content}
        return {
            "index": chunk.choice,
            "finish_reason": chunk.finish,
            "stop_reason": None,
            "token_ids": chunk.token_ids,
            "weight_versions": chunk.versions,
            "routed_experts": None,
            "sampling_mask": None,
            "logprobs": logprobs,
        }


class SkyRLGenerate(GenerateDialect):
    """SkyRL's own, for mixtures of experts: the same, with an expert of a single layer for each
    token (SkyRL 0.3.0, `vllm_server_actor.py`)."""

    path = "/skyrl/v1/generate"

    def _choice(self, chunk: ChoiceChunk) -> Json:
        return {**super()._choice(chunk), "routed_experts": [[[0]] for _ in chunk.token_ids]}
