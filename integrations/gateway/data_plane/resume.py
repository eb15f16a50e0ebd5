"""The formats of the three endpoints: how an answer is read, resumed and joined.

An answer that was never interrupted passes through unchanged. For an interrupted one, the partial
answers are read into `Part`s, the next attempt continues from the prompt and the tokens so far, and
at the end the parts are joined into one answer that looks uninterrupted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from rollout_sched.integrations.gateway.data_plane.answers import PARSED, read_object
from rollout_sched.integrations.gateway.data_plane.body import are_token_ids
from rollout_sched.integrations.vllm.protocol.endpoints import (
    CHAT_ONLY,
    COMPLETIONS,
    GENERATE,
    Endpoint,
)
from rollout_sched.live.ports import AnswerUntrue
from rollout_sched.live.requests import continuation
from rollout_sched.live.requests.continuation import StopStrings

#: The path for a resumed request: its prompt may have been text and is now token ids.
RESUME_PATH: dict[Endpoint, bytes] = {
    "completions": COMPLETIONS.encode(),
    "chat": COMPLETIONS.encode(),
    "generate": GENERATE.encode(),
}


class ResponsePart(msgspec.Struct):
    """One attempt's share of a response. `logprobs` has the format of the attempt's endpoint.

    taken   characters of the text before it that belong to the stop string that ends it
    """

    token_ids: list[int]
    text: str = ""
    logprobs: Any = None
    prompt_ids: list[int] | None = None
    taken: int = 0


def text_of_parts(parts: Sequence[ResponsePart]) -> str:
    text = ""
    for part in parts:
        text = text[: len(text) - part.taken] + part.text
    return text


def part_of(endpoint: Endpoint, answer: dict[str, Any]) -> ResponsePart | None:
    """The tokens to resume from; None if the answer does not give its tokens.

    `answer` has passed `answers.read_answer`. Raises AnswerUntrue if it cannot be joined with
    others.
    """
    choice = answer["choices"][0]
    token_ids = choice.get("token_ids")
    if token_ids is None:
        return None
    message = choice.get("message")
    text = (choice.get("text") if message is None else message.get("content")) or ""
    # A prompt is never empty: with an empty list the response would resume from nothing.
    prompt_ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids") or None
    part = ResponsePart(token_ids, text, choice.get("logprobs"), prompt_ids)
    try:
        sum(prompt_ids or ())
        join(endpoint, [part], answer, "length")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise AnswerUntrue(f"the answer cannot be resumed: {type(error).__name__}") from None
    return part


def shows_no_way_on(
    endpoint: Endpoint, answer: dict[str, Any], earlier: list[ResponsePart], prompt: Prompt
) -> bool:
    """Whether a part of a response shows that it cannot go on as text after these parts.

    A server that parses reasoning or tool calls from a chat's text reads them from the beginning.
    And a part may end within a character, whose tokens have no text yet (see `Repetition`).
    `prompt`: as the client gave it.
    """
    if endpoint == "generate":
        return False
    choice = answer["choices"][0]
    message = choice.get("message")
    text = (choice.get("text") if message is None else message.get("content")) or ""
    if not (earlier or text):
        return True  # within its first character, or in a part of the message that is parsed
    if parsed_in(answer):
        return True
    before = text_of_parts(earlier)
    # The search is through all of the text, which may use a few of the same words again.
    found = bool(before) and before in text
    return found and Repetition(prompt, before).is_in(text, len(before) >= _ENOUGH)


def parsed_in(answer: dict[str, Any]) -> str:
    """The field of a chat's answer that the server has parsed from the text; "" if none."""
    message = answer["choices"][0].get("message") or {}
    return next((name for name in PARSED if message.get(name)), "")


#: The tokens of a character but the first.
_PARTS = 3


def end_over_the_cut(
    stops: StopStrings, earlier: list[ResponsePart], part: ResponsePart, choice: dict[str, Any]
) -> int | None:
    """Ends the part of an answer, and its `choice`, at a stop string over the cut before it.

    Returns the tokens that are left of it; 0 if they cannot be counted; None if there is none.
    """
    own = choice.get("stop_reason")
    text = part.text + (own if isinstance(own, str) and not stops.included else "")
    end = (len(text), stops.strings.index(own) if own in stops.strings else len(stops.strings))
    made = sum([len(each.token_ids) for each in earlier])
    if made + len(part.token_ids) <= stops.min_tokens:
        return None
    if own in stops.strings and len(part.token_ids) <= _PARTS and not _tokens_of(part, text):
        return 0  # it may be in what the server has repeated (see `Repetition`)
    for at, place, taken in sorted(stops.over_the_cut(text_of_parts(earlier), text)):
        if (at, place) > end:
            break
        tokens = _tokens_of(part, text[:at])
        if not tokens:
            return 0
        if made + tokens <= stops.min_tokens:
            continue
        del part.token_ids[tokens:]
        part.text = text[:at] if stops.included else ""
        part.taken = 0 if stops.included else taken
        part.logprobs = {name: each and each[:tokens] for name, each in part.logprobs.items()}
        choice.update(finish_reason="stop", stop_reason=stops.strings[place])
        return tokens
    return None


def _tokens_of(part: ResponsePart, text: str) -> int:
    """The tokens that make this text, with which that of the part begins; 0 if unknown."""
    said = ""
    for count, name in enumerate((part.logprobs or {}).get("tokens") or (), 1):
        said += name
        if len(said) >= len(text):
            return count if said.startswith(text) else 0
    return 0


#: A prompt as raw JSON: text, token ids, or messages.
Prompt = bytes | memoryview

#: Characters that a text hardly has in common with another by chance.
_ENOUGH = 24

#: Special tokens of a prompt, which are no part of its decoded text.
_SPECIAL = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]")


class Repetition:
    """Finds prompt and response in the text of a later attempt.

    vLLM repeats both there if the tokens that it resumes from end within a character (vLLM 48853).

    prompt  the longest text of the prompt without special tokens; "" if it is token ids
    before  the end of the response's text so far
    """

    def __init__(self, prompt: Prompt, before: str) -> None:
        pieces = [piece.strip() for text in _texts(prompt) for piece in _SPECIAL.split(text)]
        self.prompt = max(pieces, key=len, default="")[:200]
        self.before = before

    def is_in(self, text: str, unlikely: bool) -> bool:
        """`unlikely`: `text` would not have `before` in it by chance."""
        if len(self.prompt) < _ENOUGH // 3:
            return unlikely and self.before in text
        _, found, rest = text.partition(self.prompt)
        return bool(found) and self.before in rest

    def length(self, text: str, tokens: int) -> int:
        """Characters of the repetition with which the text of so many tokens begins; 0 if none.

        The character that follows it has several tokens, so it is not ASCII. Its event may have
        further text, in which `before` comes again.
        """
        longer = len(text.split()) > 2 * tokens + 8 or len(text) > 128 * tokens
        if not (self.before and self.is_in(text, longer)):
            return 0
        ends = re.finditer(rf"(?<={re.escape(self.before)})[^\x00-\x7f]", text)
        return max(
            [end.start() for end in ends], default=text.rindex(self.before) + len(self.before)
        )


def _texts(prompt: Prompt) -> list[str]:
    """The texts in a prompt."""
    if are_token_ids(prompt):
        return []
    return _texts_in(msgspec.json.decode(prompt))


def _texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    each = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in each for text in _texts_in(one)]


def resume(
    endpoint: Endpoint,
    body: bytes,
    prompt_ids: list[int],
    parts: list[ResponsePart],
    limit: int,
    salt: str,
) -> dict[str, Any]:
    """The body that resumes from the tokens of the parts, with at most `limit` new tokens."""
    fields: dict[str, Any] = msgspec.json.decode(body)
    token_ids = prompt_ids + [token for part in parts for token in part.token_ids]
    made = len(token_ids) - len(prompt_ids)
    if endpoint == "generate":
        sampling = continuation.resumed(fields.get("sampling_params") or {}, made, limit)
        fields["sampling_params"] = {**sampling, "max_tokens": limit, "n": 1}
        return {**fields, "token_ids": token_ids, "cache_salt": salt}
    fields = continuation.resumed(fields, made, limit)
    if endpoint == "chat":
        fields = _as_completion(fields)
    fields |= {"prompt": token_ids, "max_tokens": limit, "n": 1, "cache_salt": salt}
    return {**fields, "return_token_ids": True}


def _as_completion(fields: dict[str, Any]) -> dict[str, Any]:
    wanted = fields.get("logprobs")
    limit = fields.get("top_logprobs") or 0
    kept = {key: value for key, value in fields.items() if key not in CHAT_ONLY}
    kept["logprobs"] = limit if wanted else None
    # The chat template has already added the special tokens.
    kept["add_special_tokens"] = False
    return kept


def join(
    endpoint: Endpoint,
    parts: list[ResponsePart],
    last: dict[str, Any] | None,
    finish: str,
    first: dict[str, Any] | None = None,
    tops: int = 0,
) -> dict[str, Any]:
    """One answer in the endpoint's format from all parts; `last` is the answer with the last part,
    and `first` with the first one, which alone knows the prompt. `tops`: see `chat_logprobs`.

    `last` is None if no instance has answered. `finish` is why the whole response ended, which the
    last answer may not know.
    """
    if last is None:
        last = {**envelope(endpoint, "whole"), "choices": [{"index": 0, "finish_reason": finish}]}
    token_ids = [token for part in parts for token in part.token_ids]
    choice = dict(last["choices"][0])
    choice.pop("weight_versions", None)
    if choice["finish_reason"] in ("abort", "length"):
        choice["finish_reason"] = finish
    choice["token_ids"] = token_ids
    text = text_of_parts(parts)
    if endpoint == "chat":
        choice.pop("text", None)
        choice["message"] = {"role": "assistant", "content": text}
        choice["logprobs"] = chat_logprobs([part.logprobs for part in parts], tops)
    elif endpoint == "completions":
        choice["text"] = text
        choice["logprobs"] = _completion_logprobs([part.logprobs for part in parts])
    else:
        choice["logprobs"] = _content_logprobs([part.logprobs for part in parts])
    prompt_ids = parts[0].prompt_ids if parts else None
    said = last.get("usage") or {}
    prompt = len(prompt_ids) if prompt_ids else said.get("prompt_tokens", 0)
    answer = {**last, "choices": [choice], "usage": {**said, **usage(prompt, len(token_ids))}}
    if "prompt_token_ids" in choice:
        choice["prompt_token_ids"] = prompt_ids
    if first is not None and first is not last:
        _keep(_OF_THE_PROMPT, first, answer)
        _keep(_OF_THE_PROMPT, first["choices"][0], choice)
        _keep(_OF_THE_PROMPT, first.get("usage") or {}, answer["usage"])
    if endpoint == "chat":
        for name in ("prompt_token_ids", "prompt_logprobs"):
            choice.pop(name, None)
        answer |= {"object": "chat.completion", "prompt_token_ids": prompt_ids}
        answer["id"] = "chat" + str(answer.get("id", "")).removeprefix("chat")
    return answer


#: Fields of an answer, of its choice and of its usage that are about the prompt.
_OF_THE_PROMPT = ("prompt_logprobs", "prompt_text", "prompt_tokens_details")


def _keep(names: Sequence[str], first: dict[str, Any], answer: dict[str, Any]) -> None:
    """The fields with these names as in the first answer."""
    for name in names:
        if name in first or name in answer:
            answer[name] = first.get(name)


def with_first_usage(event: bytes, first: bytes) -> bytes:
    """The event with a stream's usage, with what that of its first attempt says of the prompt."""
    told, said = read_object(event), read_object(first)
    if not told["usage"].get("prompt_tokens_details"):
        _keep(_OF_THE_PROMPT, said["usage"], told["usage"])
    return msgspec.json.encode(told)


def usage(prompt: int, made: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
    }


#: The `object` field of an answer, whole or as events.
_OBJECT = {
    ("completions", "whole"): "text_completion",
    ("completions", "event"): "text_completion",
    ("chat", "whole"): "chat.completion",
    ("chat", "event"): "chat.completion.chunk",
}


def envelope(endpoint: Endpoint, kind: str) -> dict[str, Any]:
    """The fields around the choices of an answer that the gateway makes: `kind` "whole", or
    "event"."""
    if endpoint == "generate":
        return {"request_id": "", "model": "", "created": 0}
    return {"id": "", "object": _OBJECT[endpoint, kind], "created": 0, "model": ""}


def last_event(endpoint: Endpoint, said: dict[str, Any], finish: str) -> dict[str, Any]:
    """The event that ends a stream, if no instance has sent one. `said`: see `envelope`."""
    empty: dict[str, Any] = {"text": ""}
    if endpoint != "completions":
        empty = {"delta": {}} if endpoint == "chat" else {"token_ids": []}
    choice = {"index": 0, **empty, "logprobs": None, "finish_reason": finish}
    return {**said, "choices": [choice], "usage": None}


def text_of(choices: list[dict[str, Any]]) -> str:
    """The text of the choices of a stream's events."""
    deltas = [choice.get("delta") or {"content": choice.get("text")} for choice in choices]
    texts = [delta.get("content") for delta in deltas]
    return "".join([text for text in texts if isinstance(text, str)])


def text_after(choices: list[dict[str, Any]]) -> int:
    """Characters of the text up to the last of the choices of a stream's events; 0 without
    log-probs of completions, which alone say it."""
    try:
        logprobs = choices[-1]["logprobs"]
        offset: int = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
    except (LookupError, TypeError):
        return 0
    return offset


def translate_event(
    endpoint: Endpoint,
    said: dict[str, Any],
    resumes: int,
    text_offset: int,
    fields: dict[str, Any],
    tops: int = 0,
) -> None:
    """Rewrite an event of a later attempt into the format of the client's endpoint.

    `said`: see `envelope`; `resumes`: tokens of the response from earlier attempts, which were part
    of this attempt's prompt; `text_offset`: characters of them; `tops`: see `chat_logprobs`. Raises
    LookupError, TypeError, ValueError or AttributeError if it is not an event.
    """
    fields.pop("prompt_token_ids", None)
    from_chat = fields.get("object") == _OBJECT["chat", "event"]
    fields |= said
    for choice in fields.get("choices") or ():
        choice.pop("prompt_token_ids", None)
        if endpoint == "chat" and from_chat:
            (choice.get("delta") or {}).pop("role", None)  # the client already has it
        elif endpoint == "chat":
            choice["delta"] = {"content": choice.pop("text", "")}
            choice["logprobs"] = chat_logprobs([choice.get("logprobs")], tops)
        elif text_offset and (choice.get("logprobs") or {}).get("text_offset"):
            offsets = [text_offset + offset for offset in choice["logprobs"]["text_offset"]]
            choice["logprobs"]["text_offset"] = offsets
    told = fields.get("usage")
    if told:
        made = told.get("completion_tokens", 0) + resumes
        told |= usage(told.get("prompt_tokens", 0) - resumes, made)
        told.pop("prompt_tokens_details", None)  # of a prompt that contains a response


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


def chat_logprobs(shares: list[Any], tops: int) -> Any:
    """Logprobs in chat format, one object per token; resumed parts have completions format, which
    always names the sampled token among the most likely ones. `tops`: how many a chat asks for."""
    if not any(shares):
        return None
    content: list[Any] = []
    for share in shares:
        if not share:
            continue
        if "content" in share:
            content.extend(share["content"] or ())
            continue
        likely = share.get("top_logprobs") or [None] * len(share["tokens"])
        for token, logprob, top in zip(
            share["tokens"], share["token_logprobs"], likely, strict=False
        ):
            item = _chat_logprob(token, logprob)
            pairs = [*(top or {}).items()]
            item["top_logprobs"] = [
                _chat_logprob(*p) for p in (pairs if tops < 0 else pairs[:tops])
            ]
            content.append(item)
    return {"content": content}


def _chat_logprob(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
