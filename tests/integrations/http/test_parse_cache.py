"""What is cached of header texts: bounded, and never a secret."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.http.parse_cache import MAX_ENTRIES, ParseCache


def test_a_text_is_read_once():
    read: list[bytes] = []

    def upper(text: bytes) -> bytes:
        read.append(text)
        return text.upper()

    cache = ParseCache(upper, 10)
    assert [cache[b"a: b"], cache[b"a: b"]] == [b"A: B", b"A: B"]
    assert read == [b"a: b"]


def test_the_cache_is_bounded():
    cache = ParseCache(bytes, 10)
    for number in range(MAX_ENTRIES + 10):
        assert cache[b"%d" % number] == b"%d" % number
    assert 0 < len(cache) <= MAX_ENTRIES
    assert cache[b"a" * 11] == b"a" * 11
    assert b"a" * 11 not in cache


@pytest.mark.parametrize(
    "secret",
    [
        b"Authorization: Bearer abc",
        b"POST / HTTP/1.1\r\nhost: x\r\ncookie: abc\r\nx: y",
        b"GET / HTTP/1.1\r\nX-API-Key:abc",
        b"set-cookie : abc",
    ],
)
def test_secrets_are_not_kept(secret):
    cache = ParseCache(bytes, 1000)
    assert cache[secret] == secret
    assert not cache


def test_a_field_that_only_names_a_secret_is_kept():
    cache = ParseCache(bytes, 1000)
    assert cache[b"vary: cookie"] == b"vary: cookie"
    assert cache
