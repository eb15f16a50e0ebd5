"""OpenAI's completions: /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rollout_sched.simulators.fake_instance import synthetic_tokens as text
from rollout_sched.simulators.fake_instance.dialects import Json, Piece
from rollout_sched.simulators.fake_instance.request_parsing import (
    CompletionBody,
    Limits,
    ParsedRequest,
    check,
    decode,
    orders,
    output_limit,
    prompts_of,
    request_id,
    sampling_of,
)


class Completions:
    """Text or token ids in, text out. Prompt i of an answer `cmpl-x` is aborted as `cmpl-x-i`."""

    path = "/v1/completions"

    def parse(self, raw: bytes, headers: Mapping[str, str], limits: Limits) -> ParsedRequest:
        body = decode(raw, CompletionBody)
        prompts = prompts_of(body.prompt)
        logprobs = body.logprobs is not None
        sampling = sampling_of(body, logprobs)
        n = check(limits, body.model, sampling, 1 if body.n is None else body.n)
        answer_id = f"cmpl-{request_id(headers, body.request_id)}"
        stream = bool(body.stream)
        output_limits = [
            output_limit(limits, prompt, body.max_tokens, clamp=False) for prompt in prompts
        ]
        return ParsedRequest(
            answer_id,
            limits.model,
            prompts,
            n,
            orders(
                [f"{answer_id}-{i}" for i in range(len(prompts))],
                prompts,
                output_limits,
                n,
                {**sampling, "priority": body.priority},
                body.cache_salt or "",
                limits.stream_interval if stream else 0,
            ),
            stream,
            body.stream_options is not None and body.stream_options.include_usage,
            bool(body.return_token_ids),
            logprobs,
            bool(body.return_tokens_as_token_ids),
        )

    def whole(self, asked: ParsedRequest, pieces: Sequence[Piece], usage: Json) -> Json:
        return self._envelope(asked, [self._choice(asked, piece) for piece in pieces], usage)

    def chunks(self, asked: ParsedRequest, piece: Piece) -> list[Json]:
        return [self._envelope(asked, [self._choice(asked, piece)], None)]

    def usage_chunk(self, asked: ParsedRequest, usage: Json) -> Json:
        return self._envelope(asked, [], usage)

    def _envelope(self, asked: ParsedRequest, choices: list[Json], usage: Json | None) -> Json:
        return {
            "id": asked.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
            "choices": choices,
            "usage": usage,
        }

    def _choice(self, asked: ParsedRequest, piece: Piece) -> Json:
        choice: Json = {
            "index": piece.choice,
            "text": text.decode(piece.token_ids),
            "logprobs": self._logprobs(asked, piece),
            "finish_reason": piece.finish,
            "stop_reason": None,
        }
        if asked.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if piece.first:
                choice["prompt_token_ids"] = asked.prompts[piece.choice // asked.n]
        return choice

    def _logprobs(self, asked: ParsedRequest, piece: Piece) -> Json | None:
        if piece.logprobs is None:
            return None
        told = [f"w{token} " for token in piece.token_ids]
        offset = asked.sent.get(piece.choice, 0)
        offsets: list[int] = []
        for word in told:
            offsets.append(offset)
            offset += len(word)
        asked.sent[piece.choice] = offset
        if asked.ids_for_words:
            told = [f"token_id:{token}" for token in piece.token_ids]
        pairs = zip(told, piece.logprobs, strict=True)
        return {
            "text_offset": offsets,
            "token_logprobs": piece.logprobs,
            "tokens": told,
            "top_logprobs": [{word: value} for word, value in pairs],
        }
