"""Whole answers of instances: a client gets one valid answer, or an error.

An input is a letter, which selects how the answers come (`KINDS`), and the body of an answer.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import msgspec

from tests import virtual_loop
from tests.fuzz.fixtures import (
    ENDPOINTS,
    MAX_ATTEMPTS,
    PROMPT,
    Asked,
    Client,
    Says,
    answer,
    ask,
    check_error,
    good_answer,
    read_whole,
)
from tests.fuzz.json_words import WORDS as JSON_WORDS
from tests.fuzz.laws import Unreadable, cuts, hold, packets, plain_json


class Kind(NamedTuple):
    """The endpoint; whether the policy keeps partial answers; whether every call gets the input as
    its answer, or only the first; how that answer comes."""

    path: str
    partial: bool
    always: bool
    status: int
    breaks: bool


KINDS = [
    *itertools.product(ENDPOINTS, (False, True), (False, True), (200,), (False,)),
    *itertools.product(ENDPOINTS[:1], (True,), (False, True), (200,), (True,)),
    *itertools.product(ENDPOINTS[:1], (True,), (False, True), (400, 404, 500, 204), (False,)),
]
FIRST = ord("A")
LIMIT = 8  # tokens that the client asks for

ANSWERS = (
    answer(ENDPOINTS[0], [1, 2]),
    answer(ENDPOINTS[0], [1], "length"),
    answer(ENDPOINTS[0], [1, 2], "abort"),
    answer(ENDPOINTS[0], [], "abort"),
    answer(ENDPOINTS[1], [1, 2], "abort"),
    answer(ENDPOINTS[2], [1, 2], "abort"),
    answer(ENDPOINTS[0], [1, 2])[:-1],
    answer(ENDPOINTS[0], [1, 2])[:-20] + b"}",
    answer(ENDPOINTS[0], [1, 2], "abort").replace(b"[1,2]", b'["1",2]'),
    answer(ENDPOINTS[0], [1, 2], "abort").replace(b'"text":"w1 w2 "', b'"text":7'),
    answer(ENDPOINTS[0], [1, 2]).replace(b'"completion_tokens":2', b'"completion_tokens":99999'),
    answer(ENDPOINTS[0], [1, 2]).replace(b'"completion_tokens":2', b'"completion_tokens":0'),
    answer(ENDPOINTS[0], [1, 2]).replace(b"null", b"NaN"),
    answer(ENDPOINTS[0], [1, 2]).replace(b"w1", b"\xff"),
    answer(ENDPOINTS[0], [1, 2]).replace(b'"stop"', b'"st\xffop"'),
    b'"finish_reason":"stop" "completion_tokens":2 }',
    b'"finish_reason":"stop" "completion_tokens":2',
    b'{"choices":[],"finish_reason":"stop","completion_tokens":2}',
    b'{"choices":[{"finish_reason":"abort","token_ids":[1],"logprobs":7}]}',
    b'{"choices":[{"finish_reason":"stop"}],"usage":{"completion_tokens":' + b"9" * 5000 + b"}}",
    b'{"error":{"message":"no","code":400}}',
    b"<html>Bad gateway</html>",
    b"",
    b"[" * 3000,
    answer(ENDPOINTS[0], [1]) * 2,
)
WORDS = (
    *JSON_WORDS,
    *(b'"finish_reason":"abort"', b'"finish_reason":null', b'"finish_reason":"length"'),
    *(b'"token_ids":[3]', b'"token_ids":null', b'"choices":[', b'"usage":{}', b'"logprobs":{}'),
    *(b'"message":{"content":"x"}', b'"completion_tokens":3', b'"weight_versions":[{"version":"'),
    *(b'"rollout_sched":{}', b'"prompt_token_ids":[1]', b'"prompt_token_ids":"x"'),
)


def kind_of(data: bytes) -> Kind | None:
    number = data[0] - FIRST if data else -1
    return Kind(*KINDS[number]) if 0 <= number < len(KINDS) else None


def request(path: str, **more: Any) -> bytes:
    name = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}.get(path, "token_ids")
    prompt: Any = [{"role": "user", "content": "a"}] if name == "messages" else PROMPT
    return msgspec.json.encode({name: prompt, "max_tokens": LIMIT, "model": "m", **more})


class Answers:
    name = "answers"
    words = WORDS
    corpus = tuple(
        b"%c%b" % (FIRST + kind, body)
        for number, body in enumerate(ANSWERS)
        for kind in sorted({0, 1, 2, 3, number % len(KINDS)})
    )

    def make(self, rng: random.Random) -> bytes:
        kind = rng.randrange(len(KINDS))
        ids = [rng.randrange(100) for _ in range(rng.choice((0, 1, 2, 8, 9, 200)))]
        finish = rng.choice(("stop", "length", "abort", "abort", "error", "", "tool_calls"))
        body = answer(KINDS[kind][0], ids, finish)
        if rng.random() < 0.4:
            told = msgspec.json.decode(body)
            place = rng.choice((told, told["choices"][0], told["usage"]))
            field = rng.choice(list(place))
            place[field] = rng.choice((None, 7, -1, "x", [], {}, [None], {"content": 7}, [1.5]))
            body = msgspec.json.encode(told)
        return b"%c%b" % (FIRST + kind, body)

    def check(self, data: bytes) -> None:
        kind = kind_of(data)
        if kind is None:
            return
        body = data[1:]
        told = [self._told(kind, says_first(kind, cut), body) for cut in list(cuts(body))[::2]]
        hold("packet boundaries do not matter", told[1:] == told[:-1], told)

    def _told(self, kind: Kind, says: Says, body: bytes) -> tuple[int, bytes]:
        client, asked = virtual_loop.run(
            ask(kind.path, request(kind.path), says, partial=kind.partial)
        )
        hold("a call has a bounded number of attempts", len(asked) <= MAX_ATTEMPTS, len(asked))
        if client.status == 200:
            self._check_answer(client, kind, body, len(asked))
        else:
            check_error(client, passed_on=_refuses(kind))
            hold("one broken answer is retried", kind.always or _refuses(kind), client.data)
        return client.status, bytes(client.data)

    def _check_answer(self, client: Client, kind: Kind, body: bytes, attempts: int) -> None:
        told = read_whole(bytes(client.data))
        choices = told.get("choices")
        hold("an answer has one choice", isinstance(choices, list) and len(choices) == 1, told)
        choice = choices[0] if choices else None
        finish = choice.get("finish_reason") if isinstance(choice, dict) else None
        hold("an answer has a finish reason", isinstance(finish, str) and finish != "abort", told)
        hold("an answer has segments", "segments" in (told.get("rollout_sched") or {}), told)
        if attempts == 1 and not kind.partial:
            try:
                said = plain_json(body)
            except (Unreadable, RecursionError) as error:
                hold("a passed-on answer is JSON", False, str(error))
            if b'"abort"' in body:
                return  # joined, of one part
            del told["rollout_sched"]
            said.pop("rollout_sched", None)
            hold("an answer is passed on unchanged", told == said, (told, said))

    def spend(self, data: bytes) -> None:
        kind = kind_of(data)
        if kind is not None:
            says = says_first(kind, packets(data[1:], 256))
            virtual_loop.run(ask(kind.path, request(kind.path), says, partial=kind.partial))


def _refuses(kind: Kind) -> bool:
    """Whether the status of the answer blames the request."""
    return 400 <= kind.status < 500


def says_first(kind: Kind, parts: list[bytes]) -> Says:
    def says(asked: Asked) -> tuple[int, list[bytes], bool]:
        if kind.always or asked.number == 0:
            return kind.status, parts, kind.breaks
        return good_answer(asked)

    return says
