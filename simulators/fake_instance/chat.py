"""OpenAI's chats: /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rollout_sched.simulators.fake_instance import synthetic_tokens as text
from rollout_sched.simulators.fake_instance.dialects import Json, Piece
from rollout_sched.simulators.fake_instance.request_parsing import (
    ChatBody,
    Limits,
    ParsedRequest,
    check,
    decode,
    orders,
    output_limit,
    request_id,
    sampling_of,
    words,
)


class Chat:
    """Messages in, a message out. The id by which it is aborted is that of the answer."""

    path = "/v1/chat/completions"

    def parse(self, raw: bytes, headers: Mapping[str, str], limits: Limits) -> ParsedRequest:
        body = decode(raw, ChatBody)
        prompt = text.encode(words(body.messages))
        sampling = sampling_of(body, bool(body.logprobs))
        n = check(limits, body.model, sampling, 1 if body.n is None else body.n)
        answer_id = f"chatcmpl-{request_id(headers, body.request_id)}"
        stream = bool(body.stream)
        max_tokens = body.max_completion_tokens or body.max_tokens
        return ParsedRequest(
            answer_id,
            limits.model,
            [prompt],
            n,
            orders(
                [answer_id],
                [prompt],
                [output_limit(limits, prompt, max_tokens, clamp=False)],
                n,
                {**sampling, "priority": body.priority},
                body.cache_salt or "",
                limits.stream_interval if stream else 0,
            ),
            stream,
            body.stream_options is not None and body.stream_options.include_usage,
            bool(body.return_token_ids),
            bool(body.logprobs),
            bool(body.return_tokens_as_token_ids),
        )

    def whole(self, asked: ParsedRequest, pieces: Sequence[Piece], usage: Json) -> Json:
        choices = [
            {
                **self._choice(asked, piece),
                "message": {"role": "assistant", "content": text.decode(piece.token_ids)},
            }
            for piece in pieces
        ]
        answer = self._envelope(asked, "chat.completion", choices, usage)
        answer["prompt_token_ids"] = asked.prompts[0] if asked.return_token_ids else None
        return answer

    def chunks(self, asked: ParsedRequest, piece: Piece) -> list[Json]:
        sent: list[Json] = []
        if piece.first:
            role = {"role": "assistant", "content": ""}
            choice = {"index": piece.choice, "delta": role, "logprobs": None, "finish_reason": None}
            opening = self._envelope(asked, "chat.completion.chunk", [choice], None)
            opening["prompt_token_ids"] = asked.prompts[0] if asked.return_token_ids else None
            sent.append(opening)
        delta = {"content": text.decode(piece.token_ids)}
        choice = {**self._choice(asked, piece), "delta": delta}
        return [*sent, self._envelope(asked, "chat.completion.chunk", [choice], None)]

    def usage_chunk(self, asked: ParsedRequest, usage: Json) -> Json:
        return self._envelope(asked, "chat.completion.chunk", [], usage)

    def _envelope(
        self, asked: ParsedRequest, kind: str, choices: Sequence[Json], usage: Json | None
    ) -> Json:
        return {
            "id": asked.id,
            "object": kind,
            "created": int(time.time()),
            "model": asked.model,
            "choices": choices,
            "usage": usage,
        }

    def _choice(self, asked: ParsedRequest, piece: Piece) -> Json:
        choice: Json = {
            "index": piece.choice,
            "logprobs": self._logprobs(asked, piece),
            "finish_reason": piece.finish,
            "stop_reason": None,
        }
        if asked.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _logprobs(self, asked: ParsedRequest, piece: Piece) -> Json | None:
        if piece.logprobs is None:
            return None
        content: list[Json] = []
        for token, value in zip(piece.token_ids, piece.logprobs, strict=True):
            word = f"token_id:{token}" if asked.ids_for_words else f"w{token} "
            content.append(
                {
                    "token": word,
                    "logprob": value,
                    "bytes": list(f"w{token} ".encode()),
                    "top_logprobs": [],
                }
            )
        return {"content": content}
