"""The envelope: it agrees with a reference parser of the body, or refuses the body."""

from __future__ import annotations

import random
from typing import Any

from pydantic import TypeAdapter

from rollout_sched.integrations.gateway.data_plane import body as envelopes
from rollout_sched.integrations.gateway.data_plane.fields import BadRequest
from rollout_sched.integrations.vllm.protocol.endpoints import ENDPOINTS
from tests.fuzz.json_words import WORDS, made_body
from tests.fuzz.laws import Unreadable, hold, plain_json

INPUT = {"completions": "prompt", "chat": "messages", "generate": "token_ids"}
BODIES = (
    b'{"prompt":"a","max_tokens":5}',
    b'{"prompt":[1,2,3],"n":2,"stream":true,"seed":4}',
    b'{"prompt":[[1],[2]],"n":1}',
    b'{"prompt":["a","b"],"return_token_ids":true,"echo":false}',
    b'{"messages":[{"role":"user","content":"a"}],"max_completion_tokens":7,"max_tokens":3}',
    b'{"token_ids":[1,2],"sampling_params":{"max_tokens":4,"n":2,"seed":1}}',
    b'{"prompt":"a","cache_salt":"x","temperature":1e999}',
    b'{"prompt":"a","cache_salt":null,"return_token_ids":false}',
    b'{"prompt":"a","prompt":"b","n":1,"n":2}',
    b'{"prompt":"\xff","max_tokens":1}',
    b'{"prompt":"a","other":"\xff"}',
    b'{"prompt":"a","n":1000000000}',
    b'{"prompt":"a","n":1,"x":' + b"[" * 600 + b"]" * 600 + b"}",
    b'{"prompt":"a","x":' + b"[" * 4000 + b"]" * 4000 + b"}",
    b'{"prompt":"a","x":' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}",
    b'{"prompt":[' + b"7," * 2000 + b'7],"max_tokens":2,"nested":{"prompt":[1]}}',
    b'{"text":"\\"prompt\\":[1]' + b"x" * 2100 + b'","prompt":[1,2]}',
    b'{"prompt":"a","group_id":"' + b"g" * 300 + b'","session_id":"\xc3\xa9"}',
    b'{"prompt":"a"} trailing',
    b"\xef\xbb\xbf" + b'{"prompt":"a"}',
    b'[{"prompt":"a"}]',
    b'{"prompt":"a","x":NaN}',
    b'{"prompt":"a","x":"\\ud800"}',
    b'{"prompt":[1 2]}',
    b'{"prompt":[-2]}',
    b'{"prompt":[[1e999],[1]]}',
    b'{"prompt":[{"\xed":1}]}',
    b'{"prompt":"a","session_id":"\x80"}',
    b'{"prompt":[1,2' + b" " * 2100 + b'3],"n":1}',
)


def lax(kind: type, value: Any) -> Any:
    """A value as vLLM's server reads it, by pydantic's lax mode."""
    return None if value is None else TypeAdapter(kind).validate_python(value)


class Envelope:
    name = "envelope"
    words = WORDS
    corpus = BODIES

    def make(self, rng: random.Random) -> bytes:
        return made_body(rng)

    def check(self, data: bytes) -> None:
        for endpoint in ENDPOINTS.values():
            try:
                ours = envelopes.read(data, endpoint)
                envelopes.prompt_tokens(ours.prompt)
                envelopes.group_of(ours.prompt)
            except BadRequest:
                continue
            self._compare(data, endpoint, ours)

    def _compare(self, data: bytes, endpoint: str, ours: Any) -> None:
        try:
            whole = plain_json(data)
        except RecursionError:
            return  # nested too deeply for the reference parser
        except Unreadable as error:
            hold("an accepted body is JSON", False, str(error))
        hold("an accepted body is an object", isinstance(whole, dict), data)
        prompt = whole.get(INPUT[endpoint])
        hold("the prompt equals the body's", plain_json(bytes(ours.prompt)) == prompt, ours.prompt)
        sampling = whole
        limit = whole.get("max_tokens")
        if endpoint == "generate":
            sampling = whole.get("sampling_params") or {}
            limit = sampling.get("max_tokens")
        elif endpoint == "chat" and whole.get("max_completion_tokens") is not None:
            limit = whole["max_completion_tokens"]
        if endpoint == "completions" and "max_tokens" not in whole:
            limit = envelopes.COMPLETIONS_MAX_TOKENS
        samples = 1 if sampling.get("n") is None else sampling["n"]
        if endpoint == "completions" and limit is not None and lax(int, limit) == 0:
            limit = 1
        hold("the limit equals the body's", same(ours.limit, lax(int, limit)), (ours.limit, limit))
        hold("n equals the body's", same(ours.samples, lax(int, samples)), (ours.samples, samples))
        hold(
            "stream equals the body's",
            ours.stream is bool(lax(bool, whole.get("stream"))),
            whole.get("stream"),
        )
        keep = endpoint == "generate" or bool(lax(bool, whole.get("return_token_ids")))
        hold("return_token_ids equals the body's", ours.keep_ids is keep, whole)
        hold(
            "cache_salt equals the body's",
            same(ours.salt or None, whole.get("cache_salt") or None),
            ours.salt,
        )
        hold("group_id equals the body's", ours.group == (whole.get("group_id") or ""), ours.group)
        hold("session_id equals the body's", ours.session == (whole.get("session_id") or ""), whole)

    def spend(self, data: bytes) -> None:
        for endpoint in ENDPOINTS.values():
            try:
                envelopes.read(data, endpoint)
            except BadRequest:
                continue


def same(ours: object, theirs: object) -> bool:
    """Whether both are equal and of the same type: True is not 1."""
    return type(ours) is type(theirs) and ours == theirs
