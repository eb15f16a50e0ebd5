"""The envelope: read around the token ids or through them, it says the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.integrations.gateway import envelope as envelopes
from rollout_sched.integrations.gateway.envelope import Envelope
from rollout_sched.integrations.gateway.fields import BadRequest, Fields

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
    for name in ("prompt", "limit", "samples", "stream", "keep_ids", "salt", "group", "session"):
        assert getattr(envelope, name) == getattr(whole, name)
    raw = envelope.prompt
    assert json.loads(raw) == tokens
    assert envelopes.prompt_tokens(raw) == len(tokens)


@pytest.mark.parametrize(
    ("endpoint", "fields", "limit"),
    [
        ("completions", {"prompt": "a"}, 16),
        ("completions", {"prompt": "a", "max_tokens": 5}, 5),
        ("chat", {"messages": []}, None),
        ("chat", {"messages": [], "max_tokens": 5}, 5),
        ("chat", {"messages": [], "max_tokens": 5, "max_completion_tokens": 4}, 4),
        ("generate", {"token_ids": [1]}, None),
        ("generate", {"token_ids": [1], "sampling_params": {"max_tokens": 7}}, 7),
    ],
)
def test_limits(endpoint: Any, fields: dict[str, Any], limit: int | None) -> None:
    assert envelopes.read(json.dumps(fields).encode(), endpoint).limit == limit


def test_a_cut_body_is_refused() -> None:
    body = json.dumps({"prompt": list(range(2000)), "max_tokens": 5}).encode()
    for end in (len(body) - 1, len(body) - 20, 5000):
        with pytest.raises(BadRequest):
            envelopes.read(body[:end], "completions")


def test_several_prompts() -> None:
    assert envelopes.several_prompts(b'"one"') is None
    assert envelopes.several_prompts(b"[1,2]") is None
    assert envelopes.several_prompts(b"[[1,2],[3]]") == [[1, 2], [3]]
    assert envelopes.several_prompts(b'["a","b"]') == ["a", "b"]


def test_siblings_share_a_group_and_strangers_do_not() -> None:
    prompts = [json.dumps([k] * n).encode() for k in (1, 2) for n in (3, 4, 3000, 3001)]
    assert len({envelopes.group_of(prompt) for prompt in prompts}) == len(prompts)
    assert envelopes.group_of(prompts[0]) == envelopes.group_of(bytes(prompts[0]))


def test_fields_go_in_front() -> None:
    body = envelopes.with_fields(b' {"a": 1}', {"b": "x", "c": True})
    assert json.loads(body) == {"a": 1, "b": "x", "c": True}
    assert envelopes.with_fields(b"{}", {}) == b"{}"
