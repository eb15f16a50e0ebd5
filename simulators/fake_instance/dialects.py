"""The formats of the generating endpoints: vLLM's own, OpenAI's completions and chats."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Mapping, Sequence

import msgspec

from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.fields import MEDIA
from rollout_sched.simulators.fake_instance.requests import (
    ChatBody,
    ChoiceChunk,
    CompletionBody,
    Function,
    GenerateBody,
    Json,
    ParsedRequest,
    RequestLimits,
    call_text,
    called,
    decode,
    demanded,
    media_of,
    parsed,
    prompt_text,
    prompts_of,
    request_id,
    sampling_of,
    truncated,
)


class Dialect(ABC):
    """The format of an endpoint: of its requests, of whole answers and of the events of a stream.
    All but chats have one format of a choice, whole or streamed. `texts`: its choices have text;
    `parses`: without the reasoning in it."""

    path: str
    texts = True
    parses = False

    @abstractmethod
    def parse(self, raw: bytes, headers: Mapping[str, str], limits: RequestLimits) -> ParsedRequest:
        """Parse a request. Raises Refusal."""

    @abstractmethod
    def answer(self, asked: ParsedRequest, choices: Sequence[Json], usage: Json | None) -> Json:
        """An answer, or an event of a streamed one."""

    @abstractmethod
    def choice(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json: ...

    def whole(self, asked: ParsedRequest, chunks: Sequence[ChoiceChunk], usage: Json) -> Json:
        """The answer without streaming; `chunks` has one for each choice."""
        return self.answer(asked, [self.choice(asked, chunk) for chunk in chunks], usage)

    def events(self, asked: ParsedRequest, chunk: ChoiceChunk) -> list[Json]:
        """The stream's events for a chunk."""
        return [self.answer(asked, [self.choice(asked, chunk)], None)]


# ------------------------------------------------------------------------------------------
# vLLM's own endpoint: /inference/v1/generate.


class _Candidate(msgspec.Struct, gc=False):
    token_id: int
    logprob: float
    rank: int = 1


class _Sampled(msgspec.Struct, gc=False):
    token_id: int
    logprob: float
    rank: int
    top_logprobs: tuple[_Candidate]


class GenerateDialect(Dialect):
    """Token ids in, token ids out. A request is aborted by the id of its answer."""

    path = "/inference/v1/generate"
    texts = False

    def parse(self, raw: bytes, headers: Mapping[str, str], limits: RequestLimits) -> ParsedRequest:
        body = decode(raw, GenerateBody)
        answer_id = f"generate-tokens-{request_id(headers, body.request_id)}"
        prompts = {answer_id: body.token_ids}
        return parsed(body, limits, answer_id, prompts, body.sampling_params, clamp=True)

    def whole(self, asked: ParsedRequest, chunks: Sequence[ChoiceChunk], usage: Json) -> Json:
        return {
            **super().whole(asked, chunks, usage),
            "prompt_logprobs": prompt_logprobs(asked, 0),
            "prompt_token_ids": asked.prompts[0] if asked.return_token_ids else None,
            "kv_transfer_params": None,
            "output_mode": "tokens",
        }

    def events(self, asked: ParsedRequest, chunk: ChoiceChunk) -> list[Json]:
        (event,) = super().events(asked, chunk)
        if chunk.first and asked.return_token_ids:
            event["prompt_token_ids"] = asked.prompts[0]
        return [event]

    def answer(self, asked: ParsedRequest, choices: Sequence[Json], usage: Json | None) -> Json:
        return {
            "request_id": asked.id,
            "model": asked.model,
            "created": int(time.time()),
            "choices": choices,
            "usage": usage,
        }

    def choice(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json:
        logprobs = None
        if chunk.logprobs is not None:
            pairs = zip(chunk.token_ids, chunk.logprobs, strict=True)
            content = [_Sampled(t, value, 1, (_Candidate(t, value),)) for t, value in pairs]
            logprobs = {"content": content}
        return {
            "index": chunk.choice,
            "finish_reason": chunk.finish,
            "stop_reason": chunk.said.stop,
            "token_ids": chunk.token_ids,
            "weight_versions": chunk.versions,
            "routed_experts": None,
            "sampling_mask": None,
            "logprobs": logprobs,
        }


class SkyRLGenerate(GenerateDialect):
    """SkyRL's own, for mixtures of experts: the same, with an expert of a single layer for each
    token, as bytes of the shape (tokens, layers, experts) in base64 (SkyRL 0.4.0,
    `generate_wire.py`)."""

    path = "/skyrl/v1/generate"

    def choice(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json:
        choice = super().choice(asked, chunk)
        tokens = len(chunk.token_ids)
        packed = {
            "data": b64encode(bytes(tokens)).decode(),
            "shape": (tokens, 1, 1),
            "dtype": "uint8",
        }
        return {**choice, "routed_experts": packed, "rollout_sample_support": None}


def prompt_logprobs(asked: ParsedRequest, choice: int) -> list[Json | None] | None:
    """One for each token but the first; they depend on the token alone."""
    if not asked.prompt_logprobs:
        return None
    rest = asked.prompt_of(choice)[1:]
    values = [text.logprobs(token, 0, 1)[0] for token in rest]
    found: list[Json | None] = [None]
    for token, value in zip(rest, values, strict=True):
        found.append({str(token): {"logprob": value, "rank": 1}})
    return found


# ------------------------------------------------------------------------------------------
# OpenAI's completions and chats.


class OpenAIDialect(Dialect):
    """`kind` is the type of an answer, or of an event of a stream."""

    kind: str

    def answer(self, asked: ParsedRequest, choices: Sequence[Json], usage: Json | None) -> Json:
        return {
            "id": asked.id,
            "object": self.kind,
            "created": int(time.time()),
            "model": asked.model,
            "choices": choices,
            "usage": usage,
        }

    def choice(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json:
        """A choice without its text."""
        choice: Json = {
            "index": chunk.choice,
            "logprobs": self.logprobs(asked, chunk),
            "finish_reason": chunk.finish,
            "stop_reason": chunk.said.stop,
        }
        if asked.return_token_ids:
            choice["token_ids"] = chunk.token_ids
        return choice

    @abstractmethod
    def logprobs(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json | None: ...


def token_name(asked: ParsedRequest, token: int, word: str) -> str:
    """The name of a token in log-probs: its word, or its id if that was requested."""
    return f"token_id:{token}" if asked.ids_for_words else word


class CompletionsDialect(OpenAIDialect):
    """Text or token ids in, text out. Prompt i of an answer `cmpl-x` is aborted as `cmpl-x-i`."""

    path = "/v1/completions"
    kind = "text_completion"

    def parse(self, raw: bytes, headers: Mapping[str, str], limits: RequestLimits) -> ParsedRequest:
        body = decode(raw, CompletionBody)
        answer_id = f"cmpl-{request_id(headers, body.request_id)}"
        prompts = prompts_of(body.prompt, limits.vocabulary)
        silent = bool(body.echo) and body.max_tokens == 0
        asked = parsed(
            body,
            limits,
            answer_id,
            {f"{answer_id}-{i}": truncated(one, body, limits) for i, one in enumerate(prompts)},
            sampling_of(body, 1 if silent else body.max_tokens, body.logprobs is not None),
            ids_for_words=bool(body.return_tokens_as_token_ids),
        )
        asked.echo, asked.silent = bool(body.echo), silent
        return asked

    def choice(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json:
        choice = super().choice(asked, chunk)
        choice["text"] = chunk.said.text
        choice["prompt_logprobs"] = prompt_logprobs(asked, chunk.choice) if chunk.first else None
        if asked.return_token_ids and chunk.first:
            choice["prompt_token_ids"] = asked.prompt_of(chunk.choice)
        return choice

    def logprobs(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json | None:
        if chunk.logprobs is None:
            return None
        words = zip(chunk.token_ids, chunk.names, chunk.logprobs, strict=True)
        items: list[tuple[str, float | None]]
        items = [(token_name(asked, token, word), value) for token, word, value in words]
        if asked.echo and chunk.first:
            items = _echoed(asked, chunk.choice) + ([] if asked.silent else items)
        offsets: list[int] = []
        offset = asked.sent.get(chunk.choice, 0)
        for name, _ in items:
            offsets.append(offset)
            offset += len(name)
        asked.sent[chunk.choice] = offset
        return {
            "text_offset": offsets,
            "token_logprobs": [value for _, value in items],
            "tokens": [name for name, _ in items],
            "top_logprobs": [None if value is None else {name: value} for name, value in items],
        }


def _echoed(asked: ParsedRequest, choice: int) -> list[tuple[str, float | None]]:
    """(name, log-prob) of each token of the prompt."""
    prompt = asked.prompt_of(choice)
    values = [None, *[text.logprobs(token, 0, 1)[0] for token in prompt[1:]]]
    names = [text.decode([token], asked.vocabulary) for token in prompt]
    return list(zip(names, values, strict=True))


class Chat(OpenAIDialect):
    """Messages in, a message out. A request is aborted by the id of its answer."""

    path = "/v1/chat/completions"
    kind = "chat.completion.chunk"
    parses = True

    def parse(self, raw: bytes, headers: Mapping[str, str], limits: RequestLimits) -> ParsedRequest:
        body = decode(raw, ChatBody)
        answer_id = f"chatcmpl-{request_id(headers, body.request_id)}"
        max_tokens = body.max_completion_tokens or body.max_tokens
        sampling = sampling_of(body, max_tokens, bool(body.logprobs))
        call = demanded(body.messages, body.tools or (), body.tool_choice)
        if call is not None:
            calls = [*called(body.messages), call]
            ids = [text.encode(call_text(one), limits.vocabulary) for one in calls]
            sampling["extra_args"] = {**(body.vllm_xargs or {}), "fake_response_ids": ids}
        if media := media_of(body.messages):
            sampling["extra_args"] = {**sampling.get("extra_args", {}), MEDIA: media}
        prompt = text.encode(prompt_text(body.messages), limits.vocabulary)
        asked = parsed(
            body,
            limits,
            answer_id,
            {answer_id: truncated(prompt, body, limits)},
            sampling,
            ids_for_words=bool(body.return_tokens_as_token_ids),
        )
        asked.call = call
        return asked

    def whole(self, asked: ParsedRequest, chunks: Sequence[ChoiceChunk], usage: Json) -> Json:
        choices = [
            {
                **self.choice(asked, chunk),
                "message": {"role": "assistant", **self._message(asked, chunk)},
            }
            for chunk in chunks
        ]
        answer = self._with_prompt(asked, self.answer(asked, choices, usage))
        answer["prompt_logprobs"] = prompt_logprobs(asked, 0)
        return {**answer, "object": "chat.completion"}

    def events(self, asked: ParsedRequest, chunk: ChoiceChunk) -> list[Json]:
        sent: list[Json] = []
        if chunk.first:
            role = {"role": "assistant", "content": ""}
            choice = {"index": chunk.choice, "delta": role, "logprobs": None, "finish_reason": None}
            sent.append(self._with_prompt(asked, self.answer(asked, [choice], None)))
        choice = {**self.choice(asked, chunk), "delta": self._delta(asked, chunk)}
        return [*sent, self.answer(asked, [choice], None)]

    def _with_prompt(self, asked: ParsedRequest, answer: Json) -> Json:
        told = asked.prompts[0] if asked.return_token_ids else None
        return {**answer, "prompt_token_ids": told}

    def _message(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json:
        """A tool call is reported as such only if it is complete."""
        if asked.call is None or chunk.finish != "stop":
            return _spoken(chunk)
        return {"content": None, "tool_calls": [_call(asked, chunk, asked.call)]}

    def _delta(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json:
        """For a tool call: its name first, its arguments when they are complete."""
        if asked.call is None:
            return _spoken(chunk)
        whole = asked.call.arguments if chunk.finish == "stop" else ""
        if chunk.first:
            named = Function(asked.call.name, whole)
            return {"tool_calls": [{"index": 0, **_call(asked, chunk, named)}]}
        if whole:
            return {"tool_calls": [{"index": 0, "function": {"arguments": whole}}]}
        return {}

    def choice(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json:
        choice = super().choice(asked, chunk)
        if asked.call is not None and chunk.finish == "stop":
            choice["finish_reason"] = "tool_calls"
        return choice

    def logprobs(self, asked: ParsedRequest, chunk: ChoiceChunk) -> Json | None:
        if chunk.logprobs is None:
            return None
        content: list[Json] = []
        for token, word, value in zip(chunk.token_ids, chunk.names, chunk.logprobs, strict=True):
            content.append(
                {
                    "token": token_name(asked, token, word),
                    "logprob": value,
                    "bytes": list(word.encode()),
                    "top_logprobs": [],
                }
            )
        return {"content": content}


def _spoken(chunk: ChoiceChunk) -> Json:
    said = chunk.said
    if not said.reasoning:
        return {"content": said.text}
    return {"reasoning": said.reasoning, "content": said.text or None}


def _call(asked: ParsedRequest, chunk: ChoiceChunk, call: Function) -> Json:
    """A tool call in OpenAI's format."""
    return {
        "id": f"call_{asked.id}_{chunk.choice}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
