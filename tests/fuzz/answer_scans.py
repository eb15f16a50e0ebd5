"""The scanner in C of whole answers: what it accepts, msgspec accepts, with the same result."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from rollout_sched.integrations.gateway.data_plane import answers
from rollout_sched.live.ports import InstanceError
from tests.fuzz.answers import ANSWERS
from tests.fuzz.answers import WORDS as ANSWER_WORDS
from tests.fuzz.json_words import WORDS as JSON_WORDS
from tests.fuzz.laws import hold, packets
from tests.native import answer_scan

WORDS = (
    *JSON_WORDS,
    *ANSWER_WORDS,
    *(b",-0.5", b",0.0", b",0", b",-1e-05", b",-1.5e-7", b",null", b"-", b".", b"e-", b"E", b"00"),
    *(b'"logprob":-0.5', b'"logprob":0.01', b'"top_logprobs":[', b'"token_logprobs":[', b"]]"),
    *(b"-" + b"9" * 31, b"-0." + b"0" * 70, b"," + b"1," * 70, b"1" * 130, b" "),
    *(b'"id":"a"', b'"request_id":"b"', b'"usage":{"completion_tokens":1}', b'"\\u0041":1'),
)


class AnswerScans:
    name = "answer-scans"
    words = WORDS
    corpus = ANSWERS

    def make(self, rng: random.Random) -> bytes:
        count = rng.choice((0, 1, 2, 3, 15, 16, 60, 64, 130))
        body = msgspec.json.encode(self._answer(rng, count))
        return body.replace(b",", b", ") if rng.random() < 0.05 else body

    def _answer(self, rng: random.Random, count: int) -> Any:
        told = rng.choice((count, count, count, count + 1))
        usage = {"prompt_tokens": 3, "completion_tokens": told, "total_tokens": 3 + told}
        ids = [rng.choice((0, 7, rng.randrange(10**6))) for _ in range(count)]
        odd = rng.random() < 0.1
        logprobs = [_logprob(rng, odd=odd) for _ in range(count)]
        items = [{"token": "a", "logprob": each, "bytes": [97]} for each in logprobs]
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": rng.choice(("stop", "length", "abort", "error", "tool_calls", "")),
            "token_ids": rng.choice((ids, ids, None)),
        }
        kind = rng.randrange(4)
        if kind < 2:
            tops = rng.choice((None, [None, *({"a": each, "b": None} for each in logprobs)]))
            choice["text"] = rng.choice(("ok", 'a "b" \\ \n', "\u00e9", None, 7))
            choice["logprobs"] = {"token_logprobs": logprobs, "top_logprobs": tops, "tokens": ["a"]}
        else:
            items = [{**item, "top_logprobs": rng.choice((None, items[:2]))} for item in items]
            choice["message"] = {"role": "assistant", "content": "x", "tool_calls": None}
            choice["logprobs"] = {"content": items}
        if rng.random() < 0.3:
            choice["weight_versions"] = [{"version": "3", "start": 0, "end": told}]
        if rng.random() < 0.1:
            choice.pop(rng.choice(list(choice)))
        answer = {"id": "cmpl-1", "choices": [choice], "usage": usage, "prompt_logprobs": [[1.5]]}
        return dict(rng.sample(list(answer.items()), len(answer)))

    def check(self, data: bytes) -> None:
        scanned = answer_scan().scan(data)
        for endpoint in ("completions", "chat", "generate"):
            for labelled in (False, True):
                scan = answers.from_scan(scanned, endpoint, labelled=labelled) if scanned else None
                if scan is not None:
                    judged = _judged(data, endpoint, labelled)
                    hold("the scanner agrees with msgspec", scan == judged, (scan, judged))

    def spend(self, data: bytes) -> None:
        for part in packets(data, 256):
            answer_scan().scan(part)


def _judged(data: bytes, endpoint: Any, labelled: bool) -> object:
    try:
        return answers.read_by_msgspec(data, endpoint, labelled=labelled)
    except InstanceError as error:
        return error


def _logprob(rng: random.Random, *, odd: bool) -> float | None:
    plain = (0.0, -0.0, -1, -rng.random() * 9, -rng.random() / 10**7, -9999.0)
    return rng.choice((*plain, None, 1e-4) if odd else plain)
