"""vLLM's own endpoint: /inference/v1/generate."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from rollout_sched.simulators.fake_instance.dialects import Json, Piece
from rollout_sched.simulators.fake_instance.request_parsing import (
    GenerateBody,
    Limits,
    ParsedRequest,
    check,
    decode,
    orders,
    output_limit,
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


class Generate:
    """Token ids in, token ids out. The id by which it is aborted is that of the answer."""

    path = "/inference/v1/generate"

    def parse(self, raw: bytes, headers: Mapping[str, str], limits: Limits) -> ParsedRequest:
        body = decode(raw, GenerateBody)
        sampling = body.sampling_params
        n = check(limits, body.model, sampling, sampling.get("n", 1))
        answer_id = f"generate-tokens-{request_id(headers, body.request_id)}"
        stream = bool(body.stream)
        every = sampling.get("stream_interval") or limits.stream_interval
        output_limits = [
            output_limit(limits, body.token_ids, sampling.get("max_tokens"), clamp=True)
        ]
        return ParsedRequest(
            answer_id,
            limits.model,
            [body.token_ids],
            n,
            orders(
                [answer_id],
                [body.token_ids],
                output_limits,
                n,
                {**sampling, "priority": body.priority},
                body.cache_salt or "",
                every if stream else 0,
            ),
            stream,
            body.stream_options is not None and body.stream_options.include_usage,
            bool(body.return_token_ids),
            sampling.get("logprobs") is not None,
        )

    def whole(self, asked: ParsedRequest, pieces: Sequence[Piece], usage: Json) -> Json:
        return {
            "request_id": asked.id,
            "model": asked.model,
            "created": int(time.time()),
            "usage": usage,
            "prompt_logprobs": None,
            "prompt_token_ids": asked.prompts[0] if asked.return_token_ids else None,
            "kv_transfer_params": None,
            "output_mode": "tokens",
            "choices": [self._choice(piece) for piece in pieces],
        }

    def chunks(self, asked: ParsedRequest, piece: Piece) -> list[Json]:
        chunk = {
            "request_id": asked.id,
            "model": asked.model,
            "created": int(time.time()),
            "choices": [self._choice(piece)],
            "usage": None,
        }
        if piece.first and asked.return_token_ids:
            chunk["prompt_token_ids"] = asked.prompts[0]
        return [chunk]

    def usage_chunk(self, asked: ParsedRequest, usage: Json) -> Json:
        created = int(time.time())
        return {
            "request_id": asked.id,
            "model": asked.model,
            "created": created,
            "choices": [],
            "usage": usage,
        }

    def _choice(self, piece: Piece) -> Json:
        logprobs = None
        if piece.logprobs is not None:
            pairs = zip(piece.token_ids, piece.logprobs, strict=True)
            content = [_Sampled(t, value, 1, (_Candidate(t, value),)) for t, value in pairs]
            logprobs = {"content": content}
        return {
            "index": piece.choice,
            "finish_reason": piece.finish,
            "stop_reason": None,
            "token_ids": piece.token_ids,
            "weight_versions": piece.versions,
            "routed_experts": None,
            "sampling_mask": None,
            "logprobs": logprobs,
        }
