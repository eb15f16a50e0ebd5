"""Calls of clients through the gateway to working instances: each call gets what it asked for.

An input is a digit, which selects the endpoint and the policy, and a body.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import msgspec

from rollout_sched.integrations.gateway.data_plane.fields import boolean, integer
from tests import virtual_loop
from tests.fuzz import json_words
from tests.fuzz.envelope import BODIES, INPUT
from tests.fuzz.fixtures import (
    ENDPOINTS,
    Asked,
    Client,
    ask,
    check_error,
    good_answer,
    read_events,
    read_whole,
)
from tests.fuzz.laws import Unreadable, hold, plain_json

HEADERS = {b"x-policy": b"7", b"connection": b"x", b"x-request-id": b"mine"}
#: Statuses that blame the client's call, and the status for a call at a bad time.
REFUSALS = (400, 413, 422, 503)
#: Fields that the gateway sets itself.
ADDED = ("cache_salt", "return_token_ids")


class Calls:
    name = "calls"
    words = json_words.WORDS
    corpus = (
        *(b"0" + body for body in BODIES),
        b"1" + BODIES[4],
        b"2" + BODIES[5],
        b'3{"prompt":"a","stream":true,"n":2}',
        b'4{"messages":[{"role":"user","content":"a"}],"stream":true}',
        b'1{"messages":[{"role":"user"}],"stream":true,"return_token_ids":null}',
        b'1{"messages":[{"role":"user"}],"stream":true,"return_token_ids":false}',
        b'5{"token_ids":[1,2],"stream":true,"sampling_params":{"n":3,"seed":7}}',
        b'2{"token_ids":[1],"sampling_params":{"n":1,"temperature":1e999}}',
        b'0{"prompt":["a","b"],"n":2,"seed":9223372036854775807}',
        b'0{"prompt":["a"],"seed":"x","n":2}',
        b'0{"prompt":[["a"],{"b":1},null],"n":1}',
        b'0{"prompt":"a","n":2,"x":9007199254740993123456789}',
        b'0{"prompt":["a"' + b',"a"' * 1000 + b'],"n":1000}',
    )

    def make(self, rng: random.Random) -> bytes:
        return b"%d" % rng.randrange(6) + json_words.made_body(rng)

    def check(self, data: bytes) -> None:
        kind = data[:1]
        if not b"0" <= kind <= b"5" or len(kind) != 1:
            return
        partial, endpoint = divmod(int(kind), 3)
        path, body = ENDPOINTS[endpoint], data[1:]
        client, asked = virtual_loop.run(
            ask(path, body, good_answer, partial=bool(partial), headers=HEADERS)
        )
        if client.status != 200:
            check_error(client)
            blamed = client.status in REFUSALS
            hold(f"a refusal, not a {client.status}", blamed, bytes(client.data))
            hold("a refused call reaches no instance", not asked, (client.data, asked))
            return
        try:
            whole = plain_json(body)
        except RecursionError:
            return  # nested too deeply for the reference parser
        except Unreadable as error:
            hold("an accepted body is JSON", False, str(error))
        expected = _expected(path, whole)
        hold("each response is requested once", len(asked) == len(expected), len(asked))
        with contextlib.suppress(RecursionError):
            for one, fields in zip(asked, expected, strict=True):
                self._check_asked(one, path, fields)
        self._check_answer(client, len(expected))

    def _check_asked(self, asked: Asked, path: str, fields: dict[str, Any]) -> None:
        try:
            sent = plain_json(asked.body)
        except Unreadable as error:
            hold("a request to an instance is JSON", False, (str(error), asked.body))
        salt = sent.get("cache_salt")
        own = fields.get("cache_salt")
        salted = isinstance(salt, str) and salt.endswith("v0") and salt.startswith(own or "")
        hold("a request to an instance has the version's salt", salted, asked.body)
        same = _same(_asked_for(sent), _asked_for(fields))
        hold("an instance gets the client's request", same, (sent, fields))
        if fields.get("stream") and "generate" not in path:
            asks = _as_vllm(boolean, sent.get("return_token_ids"))
            hold("a stream is requested with token ids", asks is True, sent)
        lines = asked.header_lines.split(b"\r\n")
        hold("header lines are complete", lines[-1] == b"" and all(b": " in x for x in lines[:-1]))
        hold("end-to-end headers pass", b"x-policy: 7" in lines, lines)
        hold("hop-by-hop headers do not pass", b"connection: x" not in lines, lines)

    def _check_answer(self, client: Client, count: int) -> None:
        if client.streamed:
            events = read_events(bytes(client.data))
            hold("a complete stream ends with [DONE]", events[-1] is None, events[-1])
            choices = [c for event in events[:-1] for c in (event or {}).get("choices", ())]
            ends = [c["index"] for c in choices if c.get("finish_reason")]
            hold("each response of a stream ends", sorted(ends) == list(range(count)), ends)
            return
        choices = read_whole(bytes(client.data)).get("choices")
        indices = [choice.get("index") for choice in choices or ()]
        hold("each response is present", indices == list(range(count)), indices)

    def spend(self, data: bytes) -> None:
        virtual_loop.run(ask(ENDPOINTS[0], data[1:], good_answer))


def _expected(path: str, whole: Any) -> list[dict[str, Any]]:
    """The requests that instances should get, in order."""
    hold("an accepted body is an object", isinstance(whole, dict), whole)
    endpoint = ("completions", "chat", "generate")[ENDPOINTS.index(path)]
    prompts = [whole[INPUT[endpoint]]]
    if endpoint == "completions" and isinstance(prompts[0], list) and prompts[0]:
        first = prompts[0][0]
        prompts = [prompts[0]] if isinstance(first, int | float) else prompts[0]
        alone = not isinstance(first, int | float)
    else:
        alone = False
    sampling = (whole.get("sampling_params") or {}) if endpoint == "generate" else whole
    samples = _as_vllm(integer, sampling.get("n")) or 1
    if samples == 1 and not alone:
        return [whole]
    return [_one(whole, endpoint, *each) for each in product(prompts, range(samples))]


def _one(whole: dict[str, Any], endpoint: str, prompt: Any, number: int) -> dict[str, Any]:
    one = {**whole, INPUT[endpoint]: prompt}
    sampling = one
    if endpoint == "generate":
        sampling = one["sampling_params"] = dict(whole.get("sampling_params") or {})
    sampling.pop("n", None)
    seed = _as_vllm(integer, sampling.get("seed"))
    if seed not in (None, -1):  # -1: none
        sampling["seed"] = seed + number
    return one


def _as_vllm(kind: Callable[[dict[str, msgspec.Raw], str], Any], value: Any) -> Any:
    """The value of a field as vLLM reads it, which takes 2.0 and true for integers."""
    return kind({"value": msgspec.Raw(msgspec.json.encode(value))}, "value")


def _asked_for(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without those that the gateway adds; n = 1 may be given or left out."""
    rest = {name: value for name, value in fields.items() if name not in ADDED}
    if rest.get("n", 1) == 1:
        rest.pop("n", None)
    sampling = rest.get("sampling_params")
    if isinstance(sampling, dict) and sampling.get("n", 1) == 1:
        rest["sampling_params"] = {key: sampling[key] for key in sampling if key != "n"}
    return rest


def _same(ours: Any, theirs: Any) -> bool:
    """Whether both are equal; True is not 1; numbers compare as a JSON parser reads them."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return (isinstance(ours, bool) is isinstance(theirs, bool)) and ours == theirs
