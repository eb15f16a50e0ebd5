"""What well-behaved clients ask, and what they must get: their own answer, whole, once."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.soak.wire import Answer, Line, post

MODEL = "fake"
TOKENS = 8
LONG = 400  # tokens of a stream that its client cancels

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
_WORD = re.compile(r"w\d+ ")


class WrongAnswer(Exception):
    """A well-behaved client did not get what it asked for; the text says how."""


class Asking(NamedTuple):
    """A request as bytes, and the check of its answer."""

    data: bytes
    check: Callable[[Answer], None]
    cancelled: bool = False


#: Shares of the kinds of calls, in percent.
SHARES = {
    "completion": 35,
    "chat": 15,
    "generate": 15,
    "stream": 15,
    "chat stream": 5,
    "two": 7,
    "two streams": 3,
    "cancelled": 5,
}


def asking(number: int, key: str, rng: random.Random) -> Asking:
    """The call with this number."""
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
    name = f"soak-{number}"
    fields = (f"authorization: Bearer {key}", f"x-request-id: {name}")
    stream = kind in ("stream", "chat stream", "two streams", "cancelled")
    samples = 2 if kind.startswith("two") else 1
    path, body = _body(kind, number)
    body["model"] = MODEL
    if stream:
        body["stream"] = True
    if samples > 1:
        body["n"] = samples  # vLLM makes no two greedy responses
    elif path != GENERATE:
        body["temperature"] = 0.0

    def check(answer: Answer) -> None:
        if answer.status != 200:
            raise WrongAnswer(f"{kind}: {answer.status} {answer.body[:200]!r}")
        try:
            told = _events(answer.body) if stream else [json.loads(answer.body)]
            counts = _counted(told, path, name)
        except (ValueError, LookupError, TypeError) as error:
            why = f"{kind}: {type(error).__name__} {error}: {answer.body[-300:]!r}"
            raise WrongAnswer(why) from None
        if counts != dict.fromkeys(range(samples), TOKENS):
            raise WrongAnswer(f"{kind}: {counts} tokens: {answer.body[-300:]!r}")

    return Asking(post(path, body, *fields), check, cancelled=kind == "cancelled")


def _body(kind: str, number: int) -> tuple[str, dict[str, Any]]:
    more = {"max_tokens": LONG if kind == "cancelled" else TOKENS, "ignore_eos": True}
    if kind == "generate":
        return GENERATE, {"token_ids": [number % 5000, 7, 8], "sampling_params": more}
    if kind.startswith("chat"):
        return CHAT, {"messages": [{"role": "user", "content": f"count {number}"}], **more}
    prompt: object = f"count {number}" if number % 2 else [number % 5000, 2, 3]
    return COMPLETIONS, {"prompt": prompt, **more}


def _events(body: bytes) -> list[dict[str, Any]]:
    *events, last, rest = body.split(b"\n\n")
    if last != b"data: [DONE]" or rest:
        raise ValueError("the stream does not end with [DONE]")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def _counted(told: list[dict[str, Any]], path: str, name: str) -> dict[int, int]:
    """Tokens by the index of their response; each must have exactly one finish reason."""
    counts: dict[int, int] = {}
    ends: list[int] = []
    for answer in told:
        named = str(answer.get("id") or answer.get("request_id"))
        if not re.search(rf"{name}(?!\d)", named):
            raise ValueError(f"the answer is {named}'s, not {name}'s")
        for choice in answer["choices"]:
            index = choice["index"]
            made = (
                len(choice["token_ids"]) if path == GENERATE else len(_WORD.findall(_text(choice)))
            )
            counts[index] = counts.get(index, 0) + made
            if choice["finish_reason"] is not None:
                ends.append(index)
    if sorted(ends) != sorted(counts):
        raise ValueError(f"the responses {sorted(ends)} end")
    return counts


def _text(choice: dict[str, Any]) -> str:
    said = choice.get("message") or choice.get("delta")
    return str(choice.get("text") or (said or {}).get("content") or "")


async def call(line: Line, asking: Asking) -> None:
    """Raises WrongAnswer or wire.WireError."""
    await line.send(asking.data)
    if asking.cancelled:
        answer = await line.answer(enough=lambda chunk: b"data: " in chunk)
        line.drop()
        if answer.status != 200:
            raise WrongAnswer(f"cancelled: {answer.status} {answer.body[:200]!r}")
    else:
        asking.check(await line.answer())
