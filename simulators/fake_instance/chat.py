"""OpenAI's chats: /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout_sched.simulators.fake_instance import openai_answers as openai
from rollout_sched.simulators.fake_instance import requests as tool_calls
from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.protocol import decode
from rollout_sched.simulators.fake_instance.requests import (
    ChatBody,
    ChoiceChunk,
    Function,
    Json,
    ParsedRequest,
    RequestLimits,
    parsed,
    prompt_text,
    request_id,
    sampling_of,
)

_EVENT = "chat.completion.chunk"


class Chat:
    """Messages in, a message out. A request is aborted by the id of its answer."""

    path = "/v1/chat/completions"

    def parse(self, raw: bytes, headers: Mapping[str, str], limits: RequestLimits) -> ParsedRequest:
        body = decode(raw, ChatBody)
        answer_id = f"chatcmpl-{request_id(headers, body.request_id)}"
        max_tokens = body.max_completion_tokens or body.max_tokens
        sampling = sampling_of(body, max_tokens, bool(body.logprobs))
        call = tool_calls.demanded(body.messages, body.tools or (), body.tool_choice)
        if call is not None:
            calls = [*tool_calls.called(body.messages), call]
            ids = [text.encode(tool_calls.call_text(one), limits.vocabulary) for one in calls]
            sampling["extra_args"] = {**(body.vllm_xargs or {}), "fake_response_ids": ids}
        asked = parsed(
            body,
            limits,
            answer_id,
            {answer_id: text.encode(prompt_text(body.messages), limits.vocabulary)},
            sampling,
            ids_for_words=bool(body.return_tokens_as_token_ids),
        )
        asked.call = call
        return asked

    def whole(self, asked: ParsedRequest, chunks: Sequence[ChoiceChunk], usage: Json) -> Json:
        choices = [
            {
                **self._choice(asked, chunk),
                "message": {"role": "assistant", **self._message(asked, chunk)},
            }
            for chunk in chunks
        ]
        answer = openai.answer(asked, "chat.completion", choices, usage)
        return self._with_prompt(asked, answer)

    def events(self, asked: ParsedRequest, chunk: ChoiceChunk) -> list[Json]:
        sent: list[Json] = []
        if chunk.first:
            role = {"role": "assistant", "content": ""}
            choice = {"index": chunk.choice, "delta": role, "logprobs": None, "finish_reason": None}
            sent.append(self._with_prompt(asked, openai.answer(asked, _EVENT, [choice], None)))
        choice = {**self._choice(asked, chunk), "delta": self._delta(asked, chunk)}
        return [*sent, openai.answer(asked, _EVENT, [choice], None)]

    def usage_event(self, asked: ParsedRequest, usage: Json) -> Json:
        return openai.answer(asked, _EVENT, [], usage)

    def _with_prompt(self, asked: ParsedRequest, answer: Json) -> Json:
        told = asked.prompts[0] if asked.return_token_ids else None
        return {**answer, "prompt_token_ids": told}

    def _message(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json:
        """A tool call is reported as such only if it is complete."""
        if asked.call is None or chunk.finish != "stop":
            return {"content": text.decode(chunk.token_ids)}
        return {"content": None, "tool_calls": [_call(asked, chunk, asked.call)]}

    def _delta(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json:
        """For a tool call: its name first, its arguments when they are complete."""
        if asked.call is None:
            return {"content": text.decode(chunk.token_ids)}
        whole = asked.call.arguments if chunk.finish == "stop" else ""
        if chunk.first:
            named = Function(asked.call.name, whole)
            return {"tool_calls": [{"index": 0, **_call(asked, chunk, named)}]}
        if whole:
            return {"tool_calls": [{"index": 0, "function": {"arguments": whole}}]}
        return {}

    def _choice(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json:
        choice = openai.choice(asked, chunk, self._logprobs(asked, chunk))
        if asked.call is not None and chunk.finish == "stop":
            choice["finish_reason"] = "tool_calls"
        return choice

    def _logprobs(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json | None:
        if chunk.logprobs is None:
            return None
        content: list[Json] = []
        for token, value in zip(chunk.token_ids, chunk.logprobs, strict=True):
            word = text.decode([token])
            content.append(
                {
                    "token": openai.name(asked, token, word),
                    "logprob": value,
                    "bytes": list(word.encode()),
                    "top_logprobs": [],
                }
            )
        return {"content": content}


def _call(asked: ParsedRequest, chunk: ChoiceChunk, call: Function) -> Json:
    """A tool call in OpenAI's format."""
    return {
        "id": f"call_{asked.id}_{chunk.choice}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
