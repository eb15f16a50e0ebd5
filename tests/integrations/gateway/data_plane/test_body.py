"""The envelope: read around the token ids or through them, it says the same."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rollout_sched.integrations.gateway.data_plane import body as envelopes
from rollout_sched.integrations.gateway.data_plane.body import (
    ClientBody,
    SubRequest,
    split,
)
from rollout_sched.integrations.gateway.data_plane.fields import BadRequest, fields_of, integer
from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint


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
def test_token_limits_are_read(endpoint: Any, fields: dict[str, Any], limit: int | None) -> None:
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
    def test_prompt_lists_are_split_without_parsing_ids(
        self, prompts: list[Any], ascii: bool
    ) -> None:
        raw = memoryview(json.dumps(prompts, ensure_ascii=ascii).encode())
        found = envelopes.several_prompts(raw, 9)
        assert found is not None
        assert [json.loads(bytes(prompt)) for prompt in found] == prompts

    @pytest.mark.parametrize("one", [b'"one"', b'"[1]"', b"[1,2]", b"null"])
    def test_one_prompt_is_not_a_list_of_prompts(self, one: bytes) -> None:
        assert envelopes.several_prompts(memoryview(one), 9) is None

    @pytest.mark.parametrize(
        "bad", [b"[[[1]]]", b'["a",1]', b"[null]", b'[{"prompt":"a"}]', b"[-7]", b"[[1],{}]"]
    )
    def test_a_list_of_anything_else_is_refused(self, bad: bytes) -> None:
        with pytest.raises(BadRequest, match="list of either"):
            envelopes.several_prompts(memoryview(bad), 9)

    @pytest.mark.parametrize("prompt", [b'""', b"[]", b'"a\\"b"'])
    def test_too_many_prompts_are_refused_early(self, prompt: bytes) -> None:
        """Sixteen million of them were decoded first."""
        raw = memoryview(b"[" + b",".join([prompt] * 2_000_000) + b"]")
        tracemalloc.start()
        try:
            with pytest.raises(BadRequest, match="more than 9 prompts"):
                envelopes.several_prompts(raw, 9)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 100_000


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"prompt":"a","user":' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
        (b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
        (b'{"prompt":"a","group_id":"\xff"}', "not UTF-8 near byte 26"),
        (b'{"prompt":"a\xff"}', "not UTF-8 near byte 12"),
        (b'{"prompt":"a","x":"' + b"y" * 2**20 + b'\xc3"}', "not UTF-8 near byte 10485"),
        (b'{"prompt":"a","n":1.5}', "`n` must be an integer"),
        (b'{"prompt":"a","n":1e999}', r"\$.n"),
        (b'{"prompt":"a","n":-1}', "`n`"),
        (b'{"prompt":"a","max_tokens":1e999}', r"\$.max_tokens"),
        (b'{"prompt":"a","max_tokens":1' + b"0" * 30 + b"}", "`max_tokens` must be at least"),
        (b'{"prompt":"a","max_tokens":1' + b"0" * 5000 + b"}", "max_tokens"),
        (b'{"prompt":"a","group_id":"' + b"g" * 257 + b'"}', "`group_id` is longer than 256"),
        (b'{"prompt":"a","session_id":"' + b"s" * 257 + b'"}', "`session_id` is longer than 256"),
        ('{"prompt":"a","session_id":"%s"}' % ("\u20ac" * 86), "`session_id` is longer than 256"),
        (b'{"prompt":"a","session_id":"a\\nb"}', "`session_id` contains a character"),
    ],
)
def test_unreadable_fields_are_refused_by_name(body: bytes | str, says: str) -> None:
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
    ("endpoint", "field", "value", "hindrance"),
    [
        ("completions", "temperature", 0.5, ""),
        ("completions", "min_tokens", 3, ""),
        ("completions", "seed", 7, ""),
        ("completions", "thinking_token_budget", 9, ""),
        ("completions", "stop", ["</q>"], ""),
        ("generate", "stop", "tokens", "stop"),
        ("completions", "stop", [], ""),
        ("completions", "stop", None, ""),
        ("completions", "echo", True, "echo"),
        ("completions", "presence_penalty", 0.0, ""),
        ("completions", "presence_penalty", 0.1, "presence_penalty"),
        ("completions", "of_a_later_vllm", 1, "of_a_later_vllm"),
        ("chat", "response_format", {"type": "text"}, ""),
        ("chat", "response_format", {"type": "json_object"}, "response_format"),
        ("chat", "tools", [], ""),
        ("chat", "tools", [{"type": "function"}], "tools"),
        ("chat", "messages", [{"role": "user", "content": '"type": "image_url"'}], ""),
        ("chat", "messages", [{"content": [{"type": "text", "text": "a"}]}], ""),
        ("chat", "messages", [{"content": [{"type": "image_url"}]}], "messages"),
        ("generate", "features", {"image": 1}, "features"),
        ("generate", "sampling_params", {"stop": "x"}, "stop"),
        ("generate", "sampling_params", {"logprobs": 0, "min_tokens": 2}, ""),
    ],
)
def test_the_field_with_which_a_response_cannot_be_resumed(
    endpoint: Any, field: str, value: Any, hindrance: str
) -> None:
    fields = {"messages": [1], "prompt": "a", "token_ids": [1], field: value}
    assert envelopes.read(json.dumps(fields).encode(), endpoint).hindrance == hindrance


INTEGERS = TypeAdapter(int)
BOOLEANS = TypeAdapter(bool)


@pytest.mark.parametrize(
    "value",
    [
        b"16",
        b"16.0",
        b'"16"',
        b"1e1",
        b"1.5",
        b'"x"',
        b"[]",
        b'"1.0"',
        b"-3",
        b'""',
        b"true",
        b'" +5 "',
        b'"1_0"',
    ],
)
def test_a_number_is_read_as_vllm_reads_it(value: bytes) -> None:
    body = b'{"prompt":"a","priority":%b}' % value
    try:
        wanted = INTEGERS.validate_python(json.loads(value))
    except ValidationError:
        with pytest.raises(BadRequest, match="priority"):
            envelopes.read(body, "completions")
    else:
        assert envelopes.read(body, "completions").priority == wanted


@pytest.mark.parametrize(
    "value", [b"true", b'"true"', b'"Yes"', b'"off"', b'"0"', b"1", b"0", b'"maybe"', b"7", b"[]"]
)
def test_a_boolean_is_read_as_vllm_reads_it(value: bytes) -> None:
    body = b'{"prompt":"a","stream":%b}' % value
    try:
        wanted = BOOLEANS.validate_python(json.loads(value))
    except ValidationError:
        with pytest.raises(BadRequest, match="stream"):
            envelopes.read(body, "completions")
    else:
        assert envelopes.read(body, "completions").stream is wanted


def test_a_prompt_stays_as_it_was_written() -> None:
    read = envelopes.read(b'{"prompt": [1,  2.50]}', "completions")
    assert bytes(read.prompt) == b"[1,  2.50]"


@pytest.mark.parametrize(
    "field",
    [
        b'"max_tokens":"x"',
        b'"n":1.5',
        b'"cache_salt":7',
        b'"group_id":1',
        b'"priority":"high"',
    ],
)
def test_a_field_of_another_kind_is_named(field: bytes) -> None:
    name = field.split(b'"')[1].decode()
    with pytest.raises(BadRequest, match=name):
        envelopes.read(b'{"prompt":"a",%b}' % field, "completions")


def test_unused_fields_may_have_any_type() -> None:
    envelopes.read(b'{"prompt":"a","temperature":"hot","logit_bias":[[[]]]}', "completions")


@pytest.mark.parametrize("seed", [-(2**63), 0, 2**63 - 1])
def test_a_seed_has_64_bits(seed: int) -> None:
    assert integer(fields_of(b'{"seed":%d}' % seed), "seed") == seed
    for beyond in (-(2**63) - 1, 2**63):
        with pytest.raises(BadRequest, match="seed"):
            integer(fields_of(b'{"seed":%d}' % beyond), "seed")


def test_the_prompt_alone_is_answered_with_echo_and_no_tokens() -> None:
    body = b'{"prompt":"a","max_tokens":0,"echo":%b}'
    assert envelopes.read(body % b"true", "completions").limit == 1
    with pytest.raises(BadRequest, match="at least 1"):
        envelopes.read(body % b"false", "completions")


def test_a_bad_request_is_a_400_unless_it_says_otherwise() -> None:
    assert (BadRequest("no").status, str(BadRequest("no"))) == (400, "no")
    assert BadRequest("too long", 413).status == 413


NAMES = [
    "max_completion_tokens",
    "max_tokens",
    "min_tokens",
    "n",
    "prompt",
    "return_token_ids",
    "seed",
]

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
objects = st.dictionaries(
    st.sampled_from([*NAMES, "cache_salt", "a", "b", "c"]) | st.text(max_size=3), values
)
separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")])


@given(objects, st.none() | objects, st.dictionaries(st.sampled_from(NAMES), values), separators)
@pytest.mark.parametrize("nested", [False, True])
def test_a_changed_body_equals_parsing_and_writing(
    nested: bool, fields: Any, sampling: Any, new: Any, separators: tuple[str, str]
) -> None:
    fields = {**fields, "sampling_params": sampling, "prompt": "a"}
    body = json.dumps(fields, separators=separators, ensure_ascii=False).encode()
    told = {name: json.dumps(value).encode() for name, value in new.items()}
    salt = {"cache_salt": b'"v1"'}
    said = json.loads(ClientBody(b"\n " + body + b" ", nested=nested).changed(salt, told))
    if not nested:
        assert said == {**fields, "cache_salt": "v1", **new}
    else:
        expected = {**(sampling or {}), **new} if new else sampling
        assert said == {**fields, "cache_salt": "v1", "sampling_params": expected}


def test_numbers_pass_as_they_were_written() -> None:
    body = b'{"temperature":1e999,"seed":123456789012345678901234567890,"top_p":0.10}'
    assert ClientBody(body, nested=False).changed({"n": b"1"}, {}) == b'{"n":1,' + body[1:]


@pytest.mark.parametrize(
    "body",
    [
        b'{"cache_salt":null,"a":1,"cache_salt":"theirs"}',
        b'{"cache\\u005fsalt":"theirs"}',
        b'{"a":{"cache_salt":1},"cache_salt":{"cache_salt":2}}',
        b'{"cache_salt":"a","cache_salt":null}',
        b'{"cache_salt":""}',
    ],
)
def test_the_gateways_value_wins(body: bytes) -> None:
    """Readers of JSON believe the last of several values."""
    said = ClientBody(body, nested=False).changed({"cache_salt": b'"ours"'}, {})
    assert json.loads(said)["cache_salt"] == "ours"
    assert msgspec.json.decode(said)["cache_salt"] == "ours"


@pytest.mark.parametrize("body", [b"{", b'{"a":x}', b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"])
def test_an_unreadable_body_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        ClientBody(body, nested=False).changed({"n": b"1"}, {})


def ones(fields: Any, endpoint: Endpoint = "completions", limit: int = 100) -> list[SubRequest]:
    raw = json.dumps(fields).encode()
    envelope = envelopes.read(raw, endpoint)
    return split(ClientBody(raw, nested=endpoint == "generate"), endpoint, envelope, limit)


def told(one: SubRequest) -> tuple[str, int, dict[str, bytes], dict[str, bytes]]:
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


@pytest.mark.parametrize("temperature", [0, 0.0, "0", 1e-6])
def test_greedy_samples_are_refused_as_vllm_refuses_them(temperature: object) -> None:
    body = {"prompt": "a", "temperature": temperature}
    assert len(ones({**body, "n": 1})) == 1
    with pytest.raises(BadRequest, match="greedy"):
        ones({**body, "n": 2})
    for other in (None, 1e-4, -1, "hot", [0]):
        assert len(ones({**body, "temperature": other, "n": 2})) == 2


def test_the_sampling_of_generate_has_an_object_of_its_own() -> None:
    fields = {"token_ids": [1], "sampling_params": {"n": 2, "seed": 5}, "seed": 9}
    assert [one.sampling["seed"] for one in ones(fields, "generate")] == [b"5", b"6"]


def test_prompts_come_in_order_each_with_its_samples() -> None:
    found = [told(one) for one in ones({"prompt": ["abcd", [1, 2]], "n": 2})]
    first = ('"abcd"', 1, {"prompt": b'"abcd"'}, {"n": b"1"})
    second = ("[1, 2]", 2, {"prompt": b"[1, 2]"}, {"n": b"1"})
    assert found == [first, first, second, second]


def test_prompts_as_embeddings_come_first() -> None:
    long = "A" * 8192 * 3
    fields = {"prompt": [1, 2], "prompt_embeds": ["QQ==", long]}
    found = [told(one)[1:3] for one in ones(fields)]
    alone = {"prompt": b"null"}
    assert found == [
        (1, {"prompt_embeds": b'"QQ=="', **alone}),
        (3, {"prompt_embeds": b'"%b"' % long.encode(), **alone}),
        (2, {"prompt": b"[1, 2]", "prompt_embeds": b"null"}),
    ]
    for none in ({}, {"prompt": None}, {"prompt": ""}):
        (one,) = ones({"prompt_embeds": "QQ==", **none})
        assert told(one)[:2] == ('"QQ=="', 1)
    (one,) = ones({"prompt": "a", "prompt_embeds": None})
    assert told(one)[2:] == ({}, {})
    assert envelopes.read(b'{"prompt_embeds":"QQ=="}', "completions").hindrance == "prompt_embeds"


def test_a_list_of_one_prompt_is_changed_to_it() -> None:
    (one,) = ones({"prompt": ["a"]})
    assert told(one)[2:] == ({"prompt": b'"a"'}, {"n": b"1"})


@pytest.mark.parametrize("fields", [{"prompt": "a", "n": 11}, {"prompt": ["a"] * 4, "n": 3}])
def test_too_many_are_counted_before_they_are_made(fields: dict[str, Any]) -> None:
    assert len(ones(fields, limit=12)) <= 12
    with pytest.raises(BadRequest, match=r"the limit per call is 10"):
        ones(fields, limit=10)


@pytest.mark.parametrize("seed", ["x", 1.5, 2**63, 10**4299, []])
def test_a_seed_that_is_none_is_refused_where_it_has_to_be_read(seed: Any) -> None:
    assert len(ones({"prompt": "a", "seed": seed})) == 1  # the instance says what it thinks of it
    with pytest.raises(BadRequest, match="seed"):
        ones({"prompt": "a", "n": 2, "seed": seed})
