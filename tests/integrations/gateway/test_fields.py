"""Which fields of a body are read, and what may stand in them."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET

from rollout_sched.integrations.gateway.data_plane.body import (
    NOTHING,
    BadRequest,
    Changeable,
    Fields,
    Seed,
)


def read(body: bytes) -> Fields:
    return msgspec.json.decode(body, type=Fields)


def test_what_is_not_there_is_told_from_what_is_null() -> None:
    assert read(b"{}").max_tokens is UNSET
    assert read(b'{"max_tokens":null}').max_tokens is None
    assert read(b'{"max_tokens":7}').max_tokens == 7
    assert read(b"{}").cache_salt is read(b"{}").return_token_ids is UNSET


def test_a_prompt_stays_as_it_was_written() -> None:
    assert bytes(read(b'{"prompt": [1,  2.50]}').prompt) == b"[1,  2.50]"
    assert read(b"{}").prompt == NOTHING


@pytest.mark.parametrize(
    "body",
    [
        b'{"max_tokens":"7"}',
        b'{"n":1.5}',
        b'{"stream":1}',
        b'{"cache_salt":7}',
        b'{"sampling_params":[]}',
        b'{"sampling_params":{"max_tokens":"x"}}',
        b'{"group_id":1}',
        b'{"priority":"high"}',
    ],
)
def test_a_field_of_another_kind_is_named(body: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\."):
        read(body)


def test_what_nobody_here_needs_may_be_anything() -> None:
    assert read(b'{"temperature":"hot","logit_bias":[[[]]]}') == read(b"{}")


def test_what_may_be_changed_is_found_in_any_body() -> None:
    found = msgspec.json.decode(b'{"seed": 5, "n":null, "other":1}', type=Changeable)
    assert (bytes(found.seed), bytes(found.n), found.prompt) == (b"5", b"null", NOTHING)


@pytest.mark.parametrize("seed", [-(2**63), 0, 2**63 - 1])
def test_a_seed_has_64_bits(seed: int) -> None:
    assert msgspec.convert(seed, Seed) == seed
    for beyond in (-(2**63) - 1, 2**63):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(b"%d" % beyond, type=Seed)


def test_a_bad_request_is_a_400_unless_it_says_otherwise() -> None:
    assert (BadRequest("no").status, str(BadRequest("no"))) == (400, "no")
    assert BadRequest("too long", 413).status == 413
