"""What the three endpoints say: how an answer is read, gone on from, and joined.

An answer that was never interrupted passes through as it came. For one that was, the partial
answers are read into `Part`s, the next attempt is asked to go on from prompt and tokens, and in the
end the parts are joined into one answer, as if nothing had happened.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from rollout_sched.core.events import Spans
from rollout_sched.integrations.gateway.envelope import Endpoint
from rollout_sched.live.ports import InstanceError

#: Where a request goes on whose prompt may have been text: with token ids.
RESUME_PATH = {
    "completions": b"/v1/completions",
    "chat": b"/v1/completions",
    "generate": b"/inference/v1/generate",
}

#: How the engine's own id is made of the X-Request-Id header (vLLM 0.32), for aborting.
ENGINE_ID = {
    b"/v1/completions": "cmpl-%s-0",
    b"/v1/chat/completions": "chatcmpl-%s",
    b"/inference/v1/generate": "generate-tokens-%s",
}

#: Chat fields that completions do not know; the prompt's tokens already hold what they said.
_CHAT_ONLY = (
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
)


class Part(msgspec.Struct):
    """One attempt's share of a response. `logprobs` is in the dialect it was answered in."""

    token_ids: list[int]
    text: str = ""
    logprobs: Any = None
    prompt_ids: list[int] | None = None


_FINISH = re.compile(rb'"finish_reason"\s*:\s*(?:"([^"]*)"|null)')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')


def finish_of(body: bytes) -> str:
    """The finish reason of an answer with one choice. Raises InstanceError if it has none."""
    found = _last(body, b'"finish_reason"', _FINISH)
    if found is None or found[1] is None:
        raise InstanceError("the answer has no finish_reason")
    return found[1].decode()


def tokens_of(body: bytes) -> int:
    """Tokens made, by the usage of an answer. Raises InstanceError if it does not say."""
    found = _last(body, b'"completion_tokens"', _COMPLETION_TOKENS)
    if found is None:
        raise InstanceError("the answer has no usage.completion_tokens")
    return int(found[1])


def _last(body: bytes, key: bytes, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
    """Texts that hold the key have its quotes escaped, so the key as such is never in one."""
    at = body.rfind(key)
    return None if at < 0 else pattern.match(body, at)


def decode(body: bytes) -> dict[str, Any]:
    """An answer in full. Raises InstanceError if it is no JSON object with one choice."""
    try:
        answer = msgspec.json.decode(body)
        choice = answer["choices"][0]
        assert isinstance(choice, dict)
    except (msgspec.DecodeError, LookupError, TypeError, AssertionError) as error:
        raise InstanceError(f"not an answer: {type(error).__name__} {error}") from None
    assert isinstance(answer, dict)
    return answer


def part_of(answer: dict[str, Any]) -> Part | None:
    """What there is to go on from; None if the answer does not give its tokens."""
    choice = answer["choices"][0]
    token_ids = choice.get("token_ids")
    if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
        return None
    message = choice.get("message")
    text = choice.get("text") if message is None else message.get("content")
    prompt_ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    return Part(token_ids, text or "", choice.get("logprobs"), prompt_ids)


def spans_of(answer: dict[str, Any]) -> Spans:
    """The weight versions vLLM >= 0.32 stamps on the tokens of a generate answer."""
    spans = answer["choices"][0].get("weight_versions")
    if not isinstance(spans, list):
        return ()
    try:
        return tuple((int(s["version"]), int(s["end"]) - int(s["start"])) for s in spans)
    except (KeyError, TypeError, ValueError):
        return ()  # a label that is no number is not one of ours


def resume(
    endpoint: Endpoint,
    body: bytes,
    prompt_ids: list[int],
    parts: list[Part],
    limit: int | None,
    salt: str,
) -> dict[str, Any]:
    """The body that goes on from what the parts hold, with at most `limit` new tokens."""
    fields: dict[str, Any] = msgspec.json.decode(body)
    token_ids = prompt_ids + [token for part in parts for token in part.token_ids]
    if endpoint == "generate":
        sampling = fields.get("sampling_params") or {}
        fields["sampling_params"] = {**sampling, "max_tokens": limit, "n": 1}
        return {**fields, "token_ids": token_ids, "cache_salt": salt}
    if endpoint == "chat":
        fields = _as_completion(fields)
    # An echoed prompt would come once more with every part.
    fields.pop("echo", None)
    fields |= {"prompt": token_ids, "max_tokens": limit, "n": 1, "cache_salt": salt}
    return {**fields, "return_token_ids": True}


def _as_completion(fields: dict[str, Any]) -> dict[str, Any]:
    wanted = fields.get("logprobs")
    most = fields.get("top_logprobs") or 0
    kept = {key: value for key, value in fields.items() if key not in _CHAT_ONLY}
    kept["logprobs"] = most if wanted else None
    # A chat template has put the special tokens in already.
    kept["add_special_tokens"] = False
    return kept


def join(
    endpoint: Endpoint, parts: list[Part], last: dict[str, Any], finish: str
) -> dict[str, Any]:
    """One answer in the endpoint's dialect from all parts, of which `last` brought the last.

    `finish` stands in where that one was interrupted with nothing left to do.
    """
    token_ids = [token for part in parts for token in part.token_ids]
    choice = dict(last["choices"][0])
    choice.pop("weight_versions", None)
    if choice.get("finish_reason") == "abort":
        choice["finish_reason"] = finish
    choice["token_ids"] = token_ids
    text = "".join(part.text for part in parts)
    if endpoint == "chat":
        choice.pop("text", None)
        choice["message"] = {"role": "assistant", "content": text}
        choice["logprobs"] = chat_logprobs([part.logprobs for part in parts])
    elif endpoint == "completions":
        choice["text"] = text
        choice["logprobs"] = _completion_logprobs([part.logprobs for part in parts])
    else:
        choice["logprobs"] = _content_logprobs([part.logprobs for part in parts])
    prompt_ids = parts[0].prompt_ids
    usage = dict(last.get("usage") or {})
    prompt = len(prompt_ids) if prompt_ids else usage.get("prompt_tokens", 0)
    usage |= {
        "prompt_tokens": prompt,
        "completion_tokens": len(token_ids),
        "total_tokens": prompt + len(token_ids),
    }
    answer = {**last, "choices": [choice], "usage": usage}
    if "prompt_token_ids" in choice:
        choice["prompt_token_ids"] = prompt_ids
    if endpoint == "chat":
        choice.pop("prompt_token_ids", None)
        answer |= {"object": "chat.completion", "prompt_token_ids": prompt_ids}
        answer["id"] = "chat" + str(answer.get("id", ""))
    return answer


def _content_logprobs(shares: list[Any]) -> Any:
    if all(share is None for share in shares):
        return None
    return {"content": [item for share in shares for item in (share or {}).get("content") or ()]}


def _completion_logprobs(shares: list[Any]) -> Any:
    known = [share for share in shares if share]
    if not known:
        return None
    joined: dict[str, Any] = {}
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        if any(share.get(key) is not None for share in known):
            joined[key] = [item for share in known for item in share.get(key) or ()]
    offsets, at = [], 0
    for token in joined.get("tokens", ()):
        offsets.append(at)
        at += len(token)
    return {**joined, "text_offset": offsets}


def chat_logprobs(shares: list[Any]) -> Any:
    """Parts that were gone on with came as completions; chat has an object per token."""
    if not any(shares):
        return None
    content: list[Any] = []
    for share in shares:
        if not share:
            continue
        if "content" in share:
            content.extend(share["content"] or ())
            continue
        tops = share.get("top_logprobs") or [None] * len(share["tokens"])
        for token, logprob, top in zip(
            share["tokens"], share["token_logprobs"], tops, strict=False
        ):
            item = _chat_logprob(token, logprob)
            item["top_logprobs"] = [_chat_logprob(*pair) for pair in (top or {}).items()]
            content.append(item)
    return {"content": content}


def _chat_logprob(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
