"""OpenAI's completions: /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout_sched.simulators.fake_instance import openai_answers as openai
from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.protocol import decode
from rollout_sched.simulators.fake_instance.requests import (
    ChoiceChunk,
    CompletionBody,
    Json,
    ParsedRequest,
    RequestLimits,
    parsed,
    prompts_of,
    request_id,
    sampling_of,
)

_KIND = "text_completion"


class CompletionsDialect:
    """Text or token ids in, text out. Prompt i of an answer `cmpl-x` is aborted as `cmpl-x-i`."""

    path = "/v1/completions"

    def parse(self, raw: bytes, headers: Mapping[str, str], limits: RequestLimits) -> ParsedRequest:
        body = decode(raw, CompletionBody)
        answer_id = f"cmpl-{request_id(headers, body.request_id)}"
        prompts = prompts_of(body.prompt, limits.vocabulary)
        return parsed(
            body,
            limits,
            answer_id,
            {f"{answer_id}-{i}": prompt for i, prompt in enumerate(prompts)},
            sampling_of(body, body.max_tokens, body.logprobs is not None),
            ids_for_words=bool(body.return_tokens_as_token_ids),
        )

    def whole(self, asked: ParsedRequest, chunks: Sequence[ChoiceChunk], usage: Json) -> Json:
        return openai.answer(asked, _KIND, [self._choice(asked, chunk) for chunk in chunks], usage)

    def events(self, asked: ParsedRequest, chunk: ChoiceChunk) -> list[Json]:
        return [openai.answer(asked, _KIND, [self._choice(asked, chunk)], None)]

    def usage_event(self, asked: ParsedRequest, usage: Json) -> Json:
        return openai.answer(asked, _KIND, [], usage)

    def _choice(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json:
        choice = openai.choice(asked, chunk, self._logprobs(asked, chunk))
        choice["text"] = text.decode(chunk.token_ids)
        choice["prompt_logprobs"] = None
        if asked.return_token_ids and chunk.first:
            choice["prompt_token_ids"] = asked.prompts[chunk.choice // asked.n]
        return choice

    def _logprobs(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json | None:
        if chunk.logprobs is None:
            return None
        names: list[str] = []
        offsets: list[int] = []
        offset = asked.sent.get(chunk.choice, 0)
        for token in chunk.token_ids:
            word = text.decode([token])
            names.append(openai.name(asked, token, word))
            offsets.append(offset)
            offset += len(word)
        asked.sent[chunk.choice] = offset
        pairs = zip(names, chunk.logprobs, strict=True)
        return {
            "text_offset": offsets,
            "token_logprobs": chunk.logprobs,
            "tokens": names,
            "top_logprobs": [{word: value} for word, value in pairs],
        }
