"""Keys and who is let in without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.auth import (
    Access,
    AccessControl,
    is_loopback,
    read_keys,
)


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


ADMIN, TRAINER, CLIENT = Access.ADMIN, Access.TRAINER, Access.CLIENT
KEYS = {CLIENT: ["client", "client-2"], TRAINER: ["trainer"], ADMIN: ["admin", "admin-2"]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Host": "localhost"}


def test_with_keys_the_place_does_not_matter() -> None:
    auth = AccessControl({ADMIN: ["root", "other"]})
    assert auth.refusal(ADMIN, "9.9.9.9", bearer("other")) == ""
    assert "administrator's key" in auth.refusal(ADMIN, "127.0.0.1", {"Host": "localhost"})
    assert "administrator's key" in auth.refusal(ADMIN, "127.0.0.1", bearer("\udce9"))


@pytest.mark.parametrize("holder", KEYS)
@pytest.mark.parametrize("asked", Access)
def test_a_key_opens_its_class_and_those_before_it(holder: Access, asked: Access) -> None:
    auth = AccessControl(KEYS)
    for key in KEYS[holder]:
        assert (auth.refusal(asked, "127.0.0.1", bearer(key)) == "") is (holder >= asked)


@pytest.mark.parametrize("asked", [CLIENT, TRAINER, ADMIN])
def test_no_key_and_a_wrong_one_open_nothing(asked: Access) -> None:
    auth = AccessControl(KEYS)
    for headers in ({"Host": "localhost"}, bearer("clien"), bearer("admin-22"), bearer("")):
        assert auth.refusal(asked, "127.0.0.1", headers)
    assert auth.refusal(Access.OPEN, "9.9.9.9", {}) == ""


def test_clients_need_none_where_they_have_none() -> None:
    auth = AccessControl({ADMIN: ["root"]})
    assert auth.opening(CLIENT) == []
    assert auth.refusal(CLIENT, "9.9.9.9", {}) == ""
    assert set(AccessControl(KEYS).opening(CLIENT)) == {
        key for held in KEYS.values() for key in held
    }


def test_a_trainer_without_keys_of_its_own_needs_an_administrators() -> None:
    auth = AccessControl({ADMIN: ["root"]})
    assert auth.refusal(TRAINER, "127.0.0.1", {"Host": "localhost"})
    assert auth.refusal(TRAINER, "9.9.9.9", bearer("root")) == ""


def test_with_keys_for_trainers_alone_nobody_is_an_administrator() -> None:
    auth = AccessControl({TRAINER: ["trainer"]})
    assert auth.shuts_admins_out
    for headers in ({"Host": "localhost"}, bearer("trainer")):
        assert "--admin-key-file" in auth.refusal(ADMIN, "127.0.0.1", headers)
    with_socket = AccessControl({TRAINER: ["trainer"]}, has_socket=True)
    assert "--admin-socket" in with_socket.refusal(ADMIN, "127.0.0.1", bearer("trainer"))
    assert with_socket.refusal(ADMIN, "", {}, by_socket=True) == ""
    assert with_socket.refusal(TRAINER, "9.9.9.9", bearer("trainer")) == ""


def test_a_key_is_of_one_class() -> None:
    with pytest.raises(CallerError, match="--api-key-file is also in --admin-key-file") as raised:
        AccessControl({CLIENT: ["a", "hush"], ADMIN: ["hush"]})
    assert "hush" not in str(raised.value)


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
    assert (AccessControl().refusal(ADMIN, peer, {"Host": host}) == "") is enters


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
    why = AccessControl().refusal(ADMIN, "127.0.0.1", {"Host": "localhost", name: "x"})
    assert name in why
    assert "--admin-key-file" in why
    with_key = AccessControl({ADMIN: ["root"]})
    assert with_key.refusal(ADMIN, "9.9.9.9", {name: "x", **bearer("root")}) == ""


def test_what_programs_send_does_not() -> None:
    headers = {"Host": "localhost", "User-Agent": "x", "Accept": "*/*", "X-Request-Id": "7"}
    assert AccessControl().refusal(ADMIN, "127.0.0.1", headers) == ""


def test_who_has_a_socket_has_closed_the_port() -> None:
    auth = AccessControl(has_socket=True)
    assert "--admin-socket" in auth.refusal(ADMIN, "127.0.0.1", {"Host": "localhost"})
    assert auth.refusal(ADMIN, "", {}, by_socket=True) == ""
    both = AccessControl({ADMIN: ["root"]}, has_socket=True)
    assert both.refusal(ADMIN, "127.0.0.1", bearer("root")) == ""
    assert "administrator's key" in both.refusal(ADMIN, "127.0.0.1", {})
