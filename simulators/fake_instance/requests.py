"""Parse generation requests, and refuse what vLLM refuses."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from rollout_sched.live.ports import Order, Output
from rollout_sched.simulators.fake_instance import fields
from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.fields import Said

# ------------------------------------------------------------------------------------------
# Error answers in vLLM's format.

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class Refusal(Exception):
    """A request that the server refuses, with its HTTP status. `param` names the field."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


def error_body(refusal: Refusal) -> dict[str, Any]:
    error = {
        "message": str(refusal),
        "type": _TYPES[refusal.status],
        "param": refusal.param,
        "code": refusal.status,
    }
    return {"error": error}


# ------------------------------------------------------------------------------------------
# Decode the bodies and parameters of calls, and encode JSON answers.

T = TypeVar("T")


def decode(raw: bytes, body: type[T]) -> T:
    """Decode the body. Raises Refusal, as vLLM does, if a field is missing or of a wrong type."""
    try:
        return msgspec.json.decode(raw, type=body)
    except msgspec.DecodeError as error:
        raise Refusal(400, str(error)) from None


def flag(request: web.Request, name: str, default: bool) -> bool:
    """A boolean parameter of the query. Raises Refusal."""
    told = request.query.get(name)
    if told is None:
        return default
    if told.lower() not in ("true", "false", "1", "0"):
        raise Refusal(400, f"{name} must be true or false, got {told!r}", name)
    return told.lower() in ("true", "1")


def reply(content: object, status: int = 200) -> web.Response:
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json")


# ------------------------------------------------------------------------------------------
# Tool calls on demand: which call answers a chat, and how its messages define it.
#
# A request with `tools` is answered with a tool call if its last user message has one, as in
# `call add {"a": 1, "b": 2}`. Several calls in a message are made one after the other, each when
# the one before was answered. If `tool_choice` demands a call and no message has one, the tool that
# it names, or the first, is called without arguments; "none" is answered with text.

_SAID = re.compile(r"\bcall (\w+) (\{[^{}]*\})")


class Function(msgspec.Struct):
    """The function of a call; `arguments` is a JSON object as text. An offered tool has none."""

    name: str
    arguments: str = "{}"


class OfFunction(msgspec.Struct):
    """An offered tool, a call of one, or the one that must be called."""

    function: Function


#: Stands for an image or other media in a prompt.
_PLACEHOLDER = "<|media|>"


class Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[OfFunction] | None = None

    @property
    def media(self) -> list[dict[str, Any]]:
        """The parts that are not text."""
        parts = self.content if isinstance(self.content, list) else []
        return [part for part in parts if part.get("type", "text") != "text"]

    @property
    def text(self) -> str:
        """The text of the message, including calls."""
        content = self.content or ""
        if not isinstance(content, str):
            content = " ".join(str(part.get("text", _PLACEHOLDER)) for part in content)
        return " ".join([content, *(call_text(call.function) for call in self.tool_calls or ())])


def call_text(call: Function) -> str:
    """The text that stands for a call in the tokens; no message contains it."""
    return f"<|call|> {call.name} {call.arguments}"


def called(messages: Sequence[Message]) -> list[Function]:
    """The calls that were already made."""
    return [call.function for message in messages for call in message.tool_calls or ()]


def demanded(
    messages: Sequence[Message],
    tools: Sequence[OfFunction],
    choice: str | OfFunction | None,
) -> Function | None:
    """The call that the next message must make; None if it must be text."""
    if not tools or choice == "none":
        return None
    offered = [tool.function.name for tool in tools]
    asked = next((i for i in reversed(range(len(messages))) if messages[i].role == "user"), 0)
    answered = sum(message.role == "tool" for message in messages[asked:])
    said = [call for call in _said(messages[asked].text) if call.name in offered]
    if answered < len(said):
        return said[answered]
    if isinstance(choice, OfFunction):
        return Function(choice.function.name)
    return Function(offered[0]) if choice == "required" else None


def _said(message: str) -> Iterator[Function]:
    for name, arguments in _SAID.findall(message):
        try:
            yield Function(name, json.dumps(json.loads(arguments)))
        except ValueError:
            continue


# ------------------------------------------------------------------------------------------
# The bodies of generation requests.

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
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    bad_words: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None


class CompletionBody(OpenAIBody, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[int | str | Tokens]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False


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
    `echo`: an answer begins with its prompt, and ends with it if it is `silent`; `prompt_logprobs`:
    those of the prompt are wanted.
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
    echo: bool = False
    silent: bool = False
    prompt_logprobs: bool = False
    vocabulary: text.Vocabulary = text.LARGEST

    def prompt_of(self, choice: int) -> Tokens:
        return self.prompts[choice // self.n]

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
        check_least(sampling, limit)
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
        prompt_logprobs=sampling.get("prompt_logprobs") is not None,
        vocabulary=limits.vocabulary,
    )


def request_id(headers: Mapping[str, str], told: str | None) -> str:
    return headers.get("X-Request-Id") or told or secrets.token_hex(16)


def truncated(prompt: Tokens, body: OpenAIBody, limits: RequestLimits) -> Tokens:
    """The last `truncate_prompt_tokens`, -1: as many as fit."""
    kept = body.truncate_prompt_tokens
    return prompt if kept is None else prompt[-(limits.max_model_len if kept < 0 else kept) :]


def media_of(messages: Sequence[Message]) -> str:
    """What the images and other media of a chat are, besides their place in its prompt."""
    return "".join([str(part) for message in messages for part in message.media])


def prompt_text(messages: Sequence[Message]) -> str:
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


#: SamplingParams that are passed on if they ask for something.
_APPLIED = (
    *("stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens", "bad_words"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("structured_outputs", "response_format"),
)


def sampling_of(body: OpenAIBody, max_tokens: int | None, logprobs: bool) -> dict[str, Any]:
    """The SamplingParams that such a request stands for, as far as the server reads them. Raises
    Refusal."""
    if body.stream and body.prompt_logprobs:
        raise Refusal(400, "`prompt_logprobs` are not available when `stream=True`.")
    told = {
        **{name: getattr(body, name) for name in _APPLIED if getattr(body, name)},
        "n": body.n,
        "max_tokens": max_tokens,
        "temperature": body.temperature,
        "seed": body.seed,
        "ignore_eos": body.ignore_eos,
        "extra_args": body.vllm_xargs,
        "logprobs": 0 if logprobs else None,
        "prompt_logprobs": body.prompt_logprobs,
    }
    return {name: value for name, value in told.items() if value is not None}


#: vLLM's VLLM_MAX_N_SEQUENCES.
MAX_N = 16384


def check(limits: RequestLimits, model: str | None, sampling: Mapping[str, Any]) -> int:
    """How many answers per prompt. Raises Refusal as vLLM's SamplingParams do."""
    if model is not None and model != limits.model and model not in limits.adapters:
        raise Refusal(404, f"The model `{model}` does not exist.", "model")
    n = sampling.get("n", 1)
    if not isinstance(n, int) or n < 1:
        raise Refusal(400, f"n must be at least 1, got {n}.", "n")
    if n > MAX_N:
        raise Refusal(400, f"n must be at most {MAX_N}, got {n}.", "n")
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


def check_least(sampling: Mapping[str, Any], limit: int) -> None:
    """Raises Refusal if the fields that end a response are invalid."""
    try:
        least = fields.limits_of(sampling).min_tokens
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    if least > limit:
        message = f"min_tokens must be less than or equal to max_tokens={limit}, got {least}."
        raise Refusal(400, message, "min_tokens")


def siblings(order: Order, n: int) -> list[Order]:
    """An order `n` times. They share their id, as abort wants it, and their seeds count up."""
    seed = order.sampling.get("seed")
    if not isinstance(seed, int):
        return [order] * n
    return [
        msgspec.structs.replace(order, sampling={**order.sampling, "seed": seed + index})
        for index in range(n)
    ]


# ------------------------------------------------------------------------------------------
# What the three generating endpoints have in common; their formats differ.

Json = dict[str, Any]


class ChoiceChunk(NamedTuple):
    """Tokens of one choice that are sent together: all of them, or the next ones of a stream.

    finish    None if more tokens follow
    versions  set with the finish, if known
    first     whether this is the first chunk of the choice
    said      the text of these tokens, without what the server holds back
    names     the text of each token, if log-probs are wanted
    """

    choice: int
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    finish: str | None
    versions: list[Json] | None
    first: bool
    said: Said = Said("")
    names: Sequence[str] = ()


def usage(prompt_tokens: int, made: int, cached: int | None = None) -> Json:
    """`cached`: tokens of the prompt that were in the prefix cache; None if they are not told."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + made,
        "completion_tokens": made,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


def versions(output: Output, label: Any) -> list[Json]:
    """The spans of an answer in vLLM's format; `label` turns a number into its label."""
    spans: list[Json] = []
    start = 0
    for version, count in output.spans:
        spans.append({"version": label(version), "start": start, "end": start + count})
        start += count
    return spans
