"""The envelope: read around the token ids or through them, it says the same."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.integrations.gateway.data_plane import body as envelopes
from rollout_sched.integrations.gateway.data_plane.body import BadRequest, Envelope, Fields

ASKED = (
    *("prompt", "limit", "limit_field", "samples", "stream", "keep_ids", "salt", "says_ours"),
    *("group", "session", "priority", "tools"),
)

ids = st.lists(st.integers(0, 200_000), min_size=1, max_size=900)
scalars = st.none() | st.integers(1, 9) | st.text(max_size=20)


@given(
    ids,
    st.sampled_from(["prompt", "token_ids"]),
    st.dictionaries(st.sampled_from(["user", "note", "model"]), scalars),
    st.booleans(),
    st.booleans(),
)
def test_around_the_ids_is_as_through_them(
    tokens: list[int], name: str, other: dict[str, Any], first: bool, spaced: bool
) -> None:
    fields: dict[str, Any] = {**other, name: tokens} if not first else {name: tokens, **other}
    fields["max_tokens"] = 5
    # The decoys: a nested field of that name, and a text that looks like one.
    fields["nested"] = {"prompt": [1, 2, 3]}
    fields["padding"] = '"prompt": [4, 5]' + "x" * 2048
    if first:
        fields = dict(reversed(fields.items()))
    body = json.dumps(fields, separators=None if spaced else (",", ":")).encode()
    endpoint: Any = "completions" if name == "prompt" else "generate"
    envelope = envelopes.read(body, endpoint)
    whole = Envelope(msgspec.json.decode(body, type=Fields), endpoint)
    for name in ASKED:
        assert getattr(envelope, name) == getattr(whole, name)
    raw = envelope.prompt
    assert json.loads(bytes(raw)) == tokens
    assert envelopes.prompt_tokens(raw) == len(tokens)


@pytest.mark.parametrize(
    ("endpoint", "fields", "limit"),
    [
        ("completions", {"prompt": "a"}, 16),
        ("completions", {"prompt": "a", "max_tokens": 5}, 5),
        ("completions", {"prompt": "a", "max_tokens": None}, None),
        ("completions", {"prompt": "a", "max_completion_tokens": 5}, 16),
        ("chat", {"messages": []}, None),
        ("chat", {"messages": [], "max_tokens": 5}, 5),
        ("chat", {"messages": [], "max_tokens": None}, None),
        ("chat", {"messages": [], "max_tokens": 5, "max_completion_tokens": None}, 5),
        ("chat", {"messages": [], "max_tokens": 5, "max_completion_tokens": 4}, 4),
        ("generate", {"token_ids": [1]}, None),
        ("generate", {"token_ids": [1], "sampling_params": {"max_tokens": 7}}, 7),
        ("generate", {"token_ids": [1], "sampling_params": {"max_tokens": None}}, None),
    ],
)
def test_limits(endpoint: Any, fields: dict[str, Any], limit: int | None) -> None:
    """Absent and null are as vLLM 0.32 takes them: only completions have a default."""
    assert envelopes.read(json.dumps(fields).encode(), endpoint).limit == limit


def test_a_cut_body_is_refused() -> None:
    body = json.dumps({"prompt": list(range(2000)), "max_tokens": 5}).encode()
    for end in (len(body) - 1, len(body) - 20, 5000):
        with pytest.raises(BadRequest):
            envelopes.read(body[:end], "completions")


texts = st.lists(st.text(max_size=20), min_size=1, max_size=9)
lists_of_ids = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=9)


class TestSeveralPrompts:
    @given(texts | lists_of_ids, st.booleans())
    def test_they_are_told_apart_without_being_read(self, prompts: list[Any], ascii: bool) -> None:
        raw = memoryview(json.dumps(prompts, ensure_ascii=ascii).encode())
        found = envelopes.several_prompts(raw, 9)
        assert found is not None
        assert [json.loads(bytes(prompt)) for prompt in found] == prompts

    @pytest.mark.parametrize("one", [b'"one"', b'"[1]"', b"[1,2]", b"null"])
    def test_one_is_none(self, one: bytes) -> None:
        assert envelopes.several_prompts(memoryview(one), 9) is None

    @pytest.mark.parametrize(
        "bad", [b"[[[1]]]", b'["a",1]', b"[null]", b'[{"prompt":"a"}]', b"[-7]", b"[[1],{}]"]
    )
    def test_a_list_of_anything_else_is_refused(self, bad: bytes) -> None:
        with pytest.raises(BadRequest, match="list of either"):
            envelopes.several_prompts(memoryview(bad), 9)

    @pytest.mark.parametrize("prompt", [b'""', b"[]", b'"a\\"b"'])
    def test_more_than_may_be_are_refused_as_soon_as_they_are_seen(self, prompt: bytes) -> None:
        """Sixteen million of them were decoded first."""
        raw = memoryview(b"[" + b",".join([prompt] * 2_000_000) + b"]")
        start = time.perf_counter()
        tracemalloc.start()
        try:
            with pytest.raises(BadRequest, match="more than 9 prompts"):
                envelopes.several_prompts(raw, 9)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 100_000
        assert time.perf_counter() - start < 0.1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"prompt":"a","user":' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
        (b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
        (b'{"prompt":"a","group_id":"\xff"}', "not UTF-8 near byte 26"),
        (b'{"prompt":"a\xff"}', "not UTF-8 near byte 12"),
        (b'{"prompt":"a","x":"' + b"y" * 2**20 + b'\xc3"}', "not UTF-8 near byte 10485"),
        (b'{"prompt":"a","n":true}', r"\$.n"),
        (b'{"prompt":"a","n":1.0}', r"\$.n"),
        (b'{"prompt":"a","n":1e999}', r"\$.n"),
        (b'{"prompt":"a","n":-1}', "`n`"),
        (b'{"prompt":"a","max_tokens":1e999}', r"\$.max_tokens"),
        (b'{"prompt":"a","max_tokens":1' + b"0" * 30 + b"}", "`max_tokens` must be at most"),
        (b'{"prompt":"a","max_tokens":1' + b"0" * 5000 + b"}", "max_tokens"),
        (b'{"prompt":"a","group_id":"' + b"g" * 257 + b'"}', "`group_id` is longer than 256"),
        (b'{"prompt":"a","session_id":"' + b"s" * 257 + b'"}', "`session_id` is longer than 256"),
        ('{"prompt":"a","session_id":"%s"}' % ("\u20ac" * 86), "`session_id` is longer than 256"),
        (b'{"prompt":"a","session_id":"a\\nb"}', "`session_id` contains a character"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(body: bytes | str, says: str) -> None:
    raw = body if isinstance(body, bytes) else body.encode()
    with pytest.raises(BadRequest, match=says):
        envelopes.read(raw, "completions")


def test_names_of_every_script_are_taken() -> None:
    body = json.dumps({"prompt": "a", "session_id": "сессия 1"}, ensure_ascii=False).encode()
    assert envelopes.read(body, "completions").session == "сессия 1"


def test_siblings_share_a_group_and_strangers_do_not() -> None:
    prompts = [memoryview(json.dumps([k] * n).encode()) for k in (1, 2) for n in (3, 4, 3000, 3001)]
    assert len({envelopes.group_of(prompt) for prompt in prompts}) == len(prompts)
    assert envelopes.group_of(prompts[0]) == envelopes.group_of(memoryview(bytes(prompts[0])))


def test_fields_go_in_front() -> None:
    body = envelopes.with_fields(b' {"a": 1}', {"b": "x", "c": True})
    assert json.loads(body) == {"a": 1, "b": "x", "c": True}
    assert envelopes.with_fields(b"{}", {}) == b"{}"


@pytest.mark.parametrize(("said", "priority"), [({}, 0), ({"priority": -3}, -3)])
def test_a_priority_is_that_of_the_body(said: dict[str, int], priority: int) -> None:
    body = json.dumps({"prompt": "a", **said}).encode()
    assert envelopes.read(body, "completions").priority == priority


@pytest.mark.parametrize(
    ("endpoint", "said", "tools"),
    [
        ("chat", {}, False),
        ("chat", {"tools": None}, False),
        ("chat", {"tools": []}, False),
        ("chat", {"tools": [{"type": "function"}]}, True),
        ("completions", {"tools": "any"}, False),
    ],
)
def test_only_a_chat_offers_tools(endpoint: Any, said: dict[str, Any], tools: bool) -> None:
    body = json.dumps({"messages": [1], "prompt": "a", **said}, separators=(",", ":")).encode()
    assert envelopes.read(body, endpoint).tools is tools
