"""A body with values changed where they stand says what it would if it were read and written."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.integrations.gateway.data_plane.body import BadRequest, Changeable, ClientBody

NAMES = sorted(set(Changeable.__struct_fields__) - {"cache_salt", "sampling_params"})

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
def test_as_if_read_and_written(
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
    ],
)
def test_ours_is_the_value_that_counts(body: bytes) -> None:
    """Readers of JSON believe the last of several values."""
    said = ClientBody(body, nested=False).changed({"cache_salt": b'"ours"'}, {})
    assert json.loads(said)["cache_salt"] == "ours"
    assert msgspec.json.decode(said)["cache_salt"] == "ours"


@pytest.mark.parametrize("body", [b"{", b'{"a":x}', b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"])
def test_what_cannot_be_read_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        ClientBody(body, nested=False).changed({"n": b"1"}, {})
