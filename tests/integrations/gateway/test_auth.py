"""Keys and who is let in without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.auth import AdminAuth, is_loopback, read_keys


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


def test_with_keys_the_place_does_not_matter() -> None:
    auth = AdminAuth(["root", "other"])
    assert auth.refusal("9.9.9.9", {"Authorization": "Bearer other"}) == ""
    assert "admin key" in auth.refusal("127.0.0.1", {"Host": "localhost"})
    assert "admin key" in auth.refusal("127.0.0.1", {"Authorization": "Bearer \udce9"})


@pytest.mark.parametrize(
    ("peer", "host", "enters"),
    [
        ("127.0.0.1", "127.0.0.1:8000", True),
        ("::1", "[::1]:8000", True),
        ("::1", "[::1]", True),
        ("::ffff:127.0.0.1", "localhost", True),
        ("127.0.0.1", "", True),
        ("127.0.0.1", "name.example:8000", False),
        ("10.0.0.1", "127.0.0.1", False),
        ("::ffff:10.0.0.1", "localhost", False),
        (None, "localhost", False),
    ],
)
def test_without_keys_it_does(peer: str | None, host: str, enters: bool) -> None:
    assert (AdminAuth().refusal(peer, {"Host": host}) == "") is enters


def test_names_other_than_localhost_may_lead_anywhere() -> None:
    assert is_loopback("localhost")
    assert not is_loopback("loop.example")


@pytest.mark.parametrize(
    "name",
    [
        *("Origin", "Referer", "Cookie", "Sec-Fetch-Site", "Sec-Fetch-Mode", "sec-ch-ua"),
        *("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"),
        *("X-Forwarded-Port", "X-Real-IP", "x-real-ip", "CF-Connecting-IP", "True-Client-IP"),
        *("X-Client-IP", "X-Original-URL", "X-Envoy-External-Address", "Fastly-Client-IP"),
    ],
)
def test_what_a_browser_or_a_proxy_carries_in_needs_a_key(name: str) -> None:
    why = AdminAuth().refusal("127.0.0.1", {"Host": "localhost", name: "x"})
    assert name in why
    assert "--admin-key-file" in why
    assert AdminAuth(["root"]).refusal("9.9.9.9", {name: "x", "Authorization": "Bearer root"}) == ""


def test_what_programs_send_does_not() -> None:
    headers = {"Host": "localhost", "User-Agent": "x", "Accept": "*/*", "X-Request-Id": "7"}
    assert AdminAuth().refusal("127.0.0.1", headers) == ""


def test_who_has_a_socket_has_closed_the_port() -> None:
    auth = AdminAuth(has_socket=True)
    assert "--admin-socket" in auth.refusal("127.0.0.1", {"Host": "localhost"})
    assert auth.refusal("", {}, by_socket=True) == ""
    both = AdminAuth(["root"], has_socket=True)
    assert both.refusal("127.0.0.1", {"Authorization": "Bearer root"}) == ""
    assert "admin key" in both.refusal("127.0.0.1", {})
