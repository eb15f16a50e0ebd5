"""What is remembered of header texts: bounded, and never a secret."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.http.parse_cache import MAX_ENTRIES, ParseCache


def test_a_text_is_read_once():
    read: list[bytes] = []

    def upper(text: bytes) -> bytes:
        read.append(text)
        return text.upper()

    known = ParseCache(upper, 10)
    assert [known[b"a: b"], known[b"a: b"]] == [b"A: B", b"A: B"]
    assert read == [b"a: b"]


def test_it_is_bounded():
    known = ParseCache(bytes, 10)
    for number in range(MAX_ENTRIES + 10):
        assert known[b"%d" % number] == b"%d" % number
    assert 0 < len(known) <= MAX_ENTRIES
    assert known[b"a" * 11] == b"a" * 11
    assert b"a" * 11 not in known


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
    known = ParseCache(bytes, 1000)
    assert known[secret] == secret
    assert not known


def test_what_only_names_a_secret_is_kept():
    known = ParseCache(bytes, 1000)
    assert known[b"vary: cookie"] == b"vary: cookie"
    assert known
