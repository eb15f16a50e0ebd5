"""One call for several responses: which prompt and which sampling each of them has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout_sched.integrations.gateway.data_plane import body as envelopes
from rollout_sched.integrations.gateway.data_plane.body import BadRequest, ClientBody, One, split
from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint


def ones(fields: Any, endpoint: Endpoint = "completions", most: int = 100) -> list[One]:
    raw = json.dumps(fields).encode()
    envelope = envelopes.read(raw, endpoint)
    return split(ClientBody(raw, nested=endpoint == "generate"), endpoint, envelope, most)


def told(one: One) -> tuple[str, int, dict[str, bytes], dict[str, bytes]]:
    values = {name: bytes(value) for name, value in one.values.items()}
    return bytes(one.prompt).decode(), one.tokens, values, dict(one.sampling)  # type: ignore[arg-type]


def test_one_response_is_the_call_itself() -> None:
    (one,) = ones({"prompt": [1, 2, 3], "seed": 5})
    assert told(one) == ("[1, 2, 3]", 3, {}, {})


def test_samples_share_their_prompt() -> None:
    first, second = ones({"prompt": [1, 2, 3], "n": 2})
    assert told(first) == told(second) == ("[1, 2, 3]", 3, {}, {"n": b"1"})
    assert first.prompt is second.prompt


@pytest.mark.parametrize("seed", [0, -7])
def test_samples_with_a_seed_have_one_each_as_vllm_gives_them(seed: int) -> None:
    seeds = [one.sampling["seed"] for one in ones({"prompt": "a", "n": 3, "seed": seed})]
    assert seeds == [b"%d" % (seed + n) for n in range(3)]


def test_a_seed_of_null_is_none() -> None:
    assert [dict(one.sampling) for one in ones({"prompt": "a", "n": 2, "seed": None})] == [
        {"n": b"1"}
    ] * 2


def test_the_sampling_of_generate_has_an_object_of_its_own() -> None:
    fields = {"token_ids": [1], "sampling_params": {"n": 2, "seed": 5}, "seed": 9}
    assert [one.sampling["seed"] for one in ones(fields, "generate")] == [b"5", b"6"]


def test_prompts_come_in_order_each_with_its_samples() -> None:
    found = [told(one) for one in ones({"prompt": ["abcd", [1, 2]], "n": 2})]
    first = ('"abcd"', 1, {"prompt": b'"abcd"'}, {"n": b"1"})
    second = ("[1, 2]", 2, {"prompt": b"[1, 2]"}, {"n": b"1"})
    assert found == [first, first, second, second]


def test_a_list_of_one_prompt_is_changed_to_it() -> None:
    (one,) = ones({"prompt": ["a"]})
    assert told(one)[2:] == ({"prompt": b'"a"'}, {"n": b"1"})


@pytest.mark.parametrize("fields", [{"prompt": "a", "n": 11}, {"prompt": ["a"] * 4, "n": 3}])
def test_too_many_are_counted_before_they_are_made(fields: dict[str, Any]) -> None:
    assert len(ones(fields, most=12)) <= 12
    with pytest.raises(BadRequest, match=r"the limit per call is 10"):
        ones(fields, most=10)


def test_a_billion_costs_nothing() -> None:
    with pytest.raises(BadRequest, match="1000000000 responses"):
        ones({"prompt": "a", "n": 10**9, "seed": 1})


@pytest.mark.parametrize("seed", ["x", 1.5, 2**63, [1]])
def test_a_seed_that_is_none_is_refused_where_it_has_to_be_read(seed: Any) -> None:
    assert len(ones({"prompt": "a", "seed": seed})) == 1  # the instance says what it thinks of it
    with pytest.raises(BadRequest, match="`seed` must be a 64-bit integer"):
        ones({"prompt": "a", "n": 2, "seed": seed})
