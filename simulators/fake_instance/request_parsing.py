"""Parse generation requests, and refuse what vLLM refuses."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from rollout_sched.live.ports import Order
from rollout_sched.simulators.fake_instance import synthetic_tokens as text
from rollout_sched.simulators.fake_instance.errors import Refusal
from rollout_sched.simulators.fake_instance.tool_calls import Function, Message, OfFunction

Tokens = list[int]
Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(msgspec.Struct):
    """The fields of every endpoint that generates."""

    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    priority: int = 0
    return_token_ids: bool | None = None


class GenerateBody(GenerationBody, kw_only=True):
    """The body of /inference/v1/generate."""

    token_ids: Annotated[Tokens, msgspec.Meta(min_length=1)]
    sampling_params: dict[str, Any]


class OpenAIBody(GenerationBody, kw_only=True):
    """The further fields of OpenAI's endpoints."""

    n: int | None = 1
    temperature: float | None = None
    seed: int | None = None
    ignore_eos: bool = False
    return_tokens_as_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None


class CompletionBody(OpenAIBody, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[int | str | Tokens]
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class ChatBody(OpenAIBody, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    tools: list[OfFunction] | None = None
    tool_choice: str | OfFunction | None = None


class ParsedRequest(msgspec.Struct):
    """A parsed request: `orders` are `n` for each of `prompts`, in that order.

    `id` is that of the answer; `sent` counts the characters streamed of each choice; `call` is the
    tool call that the answer makes, if any; `counts`: each event of a stream has the usage so far.
    """

    id: str
    model: str
    prompts: Sequence[Tokens]
    n: int
    orders: list[Order]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    logprobs: bool
    ids_for_words: bool = False
    sent: dict[int, int] = {}
    call: Function | None = None
    counts: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


class RequestLimits(msgspec.Struct, frozen=True):
    """What a server adds to a request, and its limits; `adapters` may change."""

    model: str
    max_model_len: int
    stream_interval: int
    adapters: Mapping[str, str] = {}
    vocabulary: text.Vocabulary = text.LARGEST


def parsed(
    body: GenerationBody,
    limits: RequestLimits,
    answer_id: str,
    prompts: Mapping[str, Tokens],
    sampling: Mapping[str, Any],
    *,
    clamp: bool = False,
    ids_for_words: bool = False,
) -> ParsedRequest:
    """A request whose `prompts` are aborted by their keys, with vLLM's SamplingParams.

    `clamp`: a limit beyond the context is reduced, not refused. Raises Refusal.
    """
    n = check(limits, body.model, sampling)
    stream = bool(body.stream)
    options = body.stream_options or StreamOptions()
    every = (sampling.get("stream_interval") or limits.stream_interval) if stream else 0
    salt = body.cache_salt or ""
    told = {name: value for name, value in sampling.items() if name not in ("n", "max_tokens")}
    own = {**told, "priority": body.priority}
    orders: list[Order] = []
    for order_id, prompt in prompts.items():
        limit = output_limit(limits, prompt, sampling.get("max_tokens"), clamp=clamp)
        orders += siblings(Order(order_id, prompt, limit, salt, own, every), n)
    return ParsedRequest(
        answer_id,
        limits.model,
        list(prompts.values()),
        n,
        orders,
        stream,
        options.include_usage,
        bool(body.return_token_ids),
        sampling.get("logprobs") is not None,
        ids_for_words,
        counts=options.include_usage and options.continuous_usage_stats,
    )


def request_id(headers: Mapping[str, str], told: str | None) -> str:
    return headers.get("X-Request-Id") or told or secrets.token_hex(16)


def words(messages: Sequence[Message]) -> str:
    """The prompt of a chat. The prompt of its next turn begins with this one and the answer."""
    parts = [f"<|{message.role}|> {message.text}" for message in messages]
    return " ".join([*parts, "<|assistant|>"])


def prompts_of(
    prompt: str | list[int | str | Tokens], vocabulary: text.Vocabulary = text.LARGEST
) -> list[Tokens]:
    """Token ids of the prompts of a completion: one text or its ids, or a list of such. Raises
    Refusal if one is empty or the list is mixed."""
    if isinstance(prompt, str):
        prompts = [text.encode(prompt, vocabulary)]
    elif all(isinstance(one, int) for one in prompt):
        prompts = [[one for one in prompt if isinstance(one, int)]]
    elif any(isinstance(one, int) for one in prompt):
        raise Refusal(400, "prompt must be a text, token ids, or a list of such.", "prompt")
    else:
        prompts = [
            text.encode(one, vocabulary) if isinstance(one, str) else one
            for one in prompt
            if not isinstance(one, int)
        ]
    if not all(prompts):
        raise Refusal(400, "Either prompt or prompt_embeds must be provided and non-empty.")
    return prompts


def sampling_of(body: OpenAIBody, max_tokens: int | None, logprobs: bool) -> dict[str, Any]:
    """The SamplingParams that such a request stands for, as far as they matter here."""
    told = {
        "n": body.n,
        "max_tokens": max_tokens,
        "temperature": body.temperature,
        "seed": body.seed,
        "ignore_eos": body.ignore_eos,
        "extra_args": body.vllm_xargs,
        "logprobs": 0 if logprobs else None,
    }
    return {name: value for name, value in told.items() if value is not None}


def check(limits: RequestLimits, model: str | None, sampling: Mapping[str, Any]) -> int:
    """How many answers per prompt. Raises Refusal as vLLM's SamplingParams do."""
    if model is not None and model != limits.model and model not in limits.adapters:
        raise Refusal(404, f"The model `{model}` does not exist.", "model")
    n = sampling.get("n", 1)
    if not isinstance(n, int) or n < 1:
        raise Refusal(400, f"n must be at least 1, got {n}.", "n")
    temperature = sampling.get("temperature")
    if temperature is not None:
        if not isinstance(temperature, int | float) or not temperature >= 0:
            message = f"temperature must be non-negative, got {temperature}."
            raise Refusal(400, message, "temperature")
        if n > 1 and not temperature:
            raise Refusal(400, f"n must be 1 when using greedy sampling, got {n}.", "n")
    return n


def output_limit(limits: RequestLimits, prompt: Tokens, max_tokens: object, *, clamp: bool) -> int:
    """How many tokens may be made: as asked for, within the context. Raises Refusal."""
    available = limits.max_model_len - len(prompt)
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise Refusal(400, f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens")
    wanted = 1 if max_tokens is None or clamp else max_tokens
    if wanted > available:
        raise Refusal(
            400,
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you "
            f"requested {wanted} output tokens and your prompt contains {len(prompt)} input "
            f"tokens, for a total of {wanted + len(prompt)} tokens.",
            "input_tokens",
        )
    return available if max_tokens is None else min(max_tokens, available)


def siblings(order: Order, n: int) -> list[Order]:
    """An order `n` times. They share their id, as abort wants it, and their seeds count up."""
    seed = order.sampling.get("seed")
    if not isinstance(seed, int):
        return [order] * n
    return [
        msgspec.structs.replace(order, sampling={**order.sampling, "seed": seed + index})
        for index in range(n)
    ]
