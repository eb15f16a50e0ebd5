"""Bearer tokens."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.http.server import BearerKeys, authorization, check_key, read_keys


def test_without_keys_every_call_is_admitted():
    keys = BearerKeys()
    assert not keys.known
    assert keys.admit(None)
    assert keys.admit(b"Basic x")


@pytest.mark.parametrize("given", [b"Bearer one", b"Bearer two", b"bearer one", b"BEARER two"])
def test_any_key_admits_with_a_scheme_in_any_case(given):
    assert BearerKeys(["one", "two"]).admit(given)


@pytest.mark.parametrize(
    "given",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer on",
        b"Bearer one ",
        b"Bearer onetwo",
        b"one",
        b"Basic one",
        b"Bearer ONE",
        b"Bearer \xff",
        b"Bearer  one",
    ],
)
def test_other_headers_are_refused(given):
    keys = BearerKeys(["one", "two"])
    assert keys.known
    assert not keys.admit(given)


def test_the_header_of_a_key_admits_it():
    assert BearerKeys(["a+b="]).admit(authorization("a+b="))


@pytest.mark.parametrize("key", ["", "a b", "a\n", "a\x00", "\u00e9"])
def test_a_key_that_cannot_stand_in_a_header(key):
    with pytest.raises(CallerError, match=r"keys:3: an API key must be printable ASCII"):
        check_key("keys:3", key)


@pytest.mark.parametrize("given", [b"Bearer one", b"Bearer three", b"Bearer none"])
def test_every_key_is_compared(given, monkeypatch):
    compared = []

    def compare(token, key, compare=hmac.compare_digest):
        compared.append(key)
        return compare(token, key)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    BearerKeys(["one", "two", "three"]).admit(given)
    assert compared == [b"one", b"two", b"three"]


def test_a_key_on_each_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# comment\n  one  \n\ntwo\n")
    assert read_keys(file) == ["one", "two"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "two words\n", "k\u00e9y\n"])
def test_files_without_a_usable_key(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(CallerError, match="keys:"):
        read_keys(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="cannot be read"):
        read_keys(tmp_path / "none")
