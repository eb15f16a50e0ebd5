"""Keys and who is let in without them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.auth import (
    Access,
    AccessControl,
    AllowList,
    InstanceKeys,
    NotAllowed,
    checked_url,
    is_loopback,
    read_instance_keys,
)
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.integrations.vllm.scripted import ScriptedVllm

ADMIN, TRAINER, CLIENT = Access.ADMIN, Access.TRAINER, Access.CLIENT
KEYS = {CLIENT: ["client", "client-2"], TRAINER: ["trainer"], ADMIN: ["admin", "admin-2"]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Host": "localhost"}


def test_with_keys_the_callers_address_does_not_matter() -> None:
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
def test_without_keys_only_local_callers_are_let_in(
    peer: str | None, host: str, enters: bool
) -> None:
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
def test_requests_from_browsers_and_proxies_need_a_key(name: str) -> None:
    why = AccessControl().refusal(ADMIN, "127.0.0.1", {"Host": "localhost", name: "x"})
    assert name in why
    assert "--admin-key-file" in why
    with_key = AccessControl({ADMIN: ["root"]})
    assert with_key.refusal(ADMIN, "9.9.9.9", {name: "x", **bearer("root")}) == ""


def test_where_none_is_set_a_key_is_made_for_a_browser_on_this_machine() -> None:
    auth = AccessControl()
    browser = {"Host": "localhost", "Sec-Fetch-Site": "same-origin"}
    mine = {**browser, **bearer(auth.page_key)}
    assert auth.refusal(ADMIN, "127.0.0.1", mine) == ""
    assert auth.refusal(ADMIN, "127.0.0.1", {**browser, **bearer("other")})
    assert auth.refusal(ADMIN, "9.9.9.9", mine)
    assert AccessControl().page_key != auth.page_key
    assert AccessControl({ADMIN: ["root"]}).page_key == ""
    assert AccessControl(has_socket=True).page_key == ""


def test_a_wrong_key_is_told_from_a_missing_one() -> None:
    auth = AccessControl({ADMIN: ["root"]})
    missing = auth.refusal(ADMIN, "127.0.0.1", {"Host": "localhost"})
    assert missing.startswith("this needs an administrator's key")
    wrong = auth.refusal(ADMIN, "127.0.0.1", bearer("other"))
    assert wrong == f"the key that was sent is not known: {missing}"


def test_requests_from_local_programs_need_no_key() -> None:
    headers = {"Host": "localhost", "User-Agent": "x", "Accept": "*/*", "X-Request-Id": "7"}
    assert AccessControl().refusal(ADMIN, "127.0.0.1", headers) == ""


def test_an_admin_socket_closes_the_port() -> None:
    auth = AccessControl(has_socket=True)
    assert "--admin-socket" in auth.refusal(ADMIN, "127.0.0.1", {"Host": "localhost"})
    assert auth.refusal(ADMIN, "", {}, by_socket=True) == ""
    both = AccessControl({ADMIN: ["root"]}, has_socket=True)
    assert both.refusal(ADMIN, "127.0.0.1", bearer("root")) == ""
    assert "administrator's key" in both.refusal(ADMIN, "127.0.0.1", {})


A, B = "http://a:1", "http://b:1"
SECRET = "the instances' secret"


class TestKeys:
    def test_instances_have_a_common_key_or_their_own(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text(f"# vLLM's\ncommon\n{B}/  own\nhttp://c:1 third\n")
        keys = read_instance_keys(file, [A, B])
        assert (keys.key_of(A), keys.key_of(f"{A}/"), keys.key_of(B)) == ("common", "common", "own")
        assert (keys.key_of("http://c:1"), keys.key_of("http://d:1")) == ("third", None)

    def test_without_a_file(self) -> None:
        assert read_instance_keys(None, [A]).key_of(A) is None

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "has no key"),
            ("one\ntwo\n", "keys:2: second key"),
            (f"{A} k\u00e9y\n", "keys:1: "),
            ("\n\nk\u00e9y\n", "keys:3: "),
        ],
    )
    def test_files_that_make_no_sense(self, tmp_path: Path, text: str, says: str) -> None:
        file = tmp_path / "keys"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(CallerError, match=says):
            read_instance_keys(file, [])

    def test_instance_keys_go_to_no_other_server(self) -> None:
        assert InstanceKeys("common", {}, frozenset([A])).key_of(B) is None


class TestAllowList:
    @pytest.mark.parametrize(
        ("pattern", "url", "allowed"),
        [
            ("http://10.0.0.*:8000", "http://10.0.0.7:8000", True),
            ("http://10.0.0.*:8000", "http://10.0.0.7:8000/", True),
            ("http://10.0.0.*:8000/", "http://10.0.0.7:8000", True),
            ("http://10.0.0.*:8000", "http://10.0.0.7:8001", False),
            ("http://10.0.0.*:8000", "http://10.0.0.7", False),
            ("http://10.0.0.*:8000", "https://10.0.0.7:8000", False),
            ("http://10.0.0.*", "http://10.0.0.1.evil.example", False),
            ("http://10.0.0.*", "http://10.0.0.1:22", False),
            ("http://10.0.0.*", "http://10.0.0.1/path", False),
            ("http://10.0.0.*", "http://10.0.0.x@evil", False),
            ("http://gpu-*.pods:*", "http://gpu-12.pods:8001", True),
            ("http://gpu-*.pods:*", "http://gpu-12.evil.pods:8001", False),
            ("http://[fd00::*]:8000", "http://[fd00::1]:8000", True),
            ("http://[fd00::*]:8000", "http://[fd00::1:2]:8000", False),
            ("http://a.b:1", "http://axb:1", False),
        ],
    )
    def test_patterns(self, pattern: str, url: str, allowed: bool) -> None:
        allow = AllowList([pattern])
        if allowed:
            allow.check(url)
        else:
            with pytest.raises(NotAllowed, match="--allow-instance"):
                allow.check(url)

    @pytest.mark.parametrize("pattern", ["*", "10.0.0.*:8000", "ftp://a", ""])
    def test_patterns_that_match_no_url(self, pattern: str) -> None:
        with pytest.raises(CallerError, match="begin it with http://"):
            AllowList([pattern])

    def test_without_patterns_all_may_come(self) -> None:
        AllowList([], [A]).check(B)

    @pytest.mark.scene(allow_instances=["http://10.0.0.*:8000"])
    async def test_the_allow_list_holds_on_every_route(self, house) -> None:
        """Those named at start may always come back."""
        for path, body in (
            ("/admin/instances", {"url": B}),
            ("/admin/instances", {"url": B, "patient": True}),
            ("/workers", {"url": B}),
            (f"/add_worker?url={B}", None),
        ):
            status, said = await house.ask("POST", path, body)
            assert status == 403
            assert "--allow-instance" in said["error"]["message"]
        assert list(house.driver.supervisors) == [A]
        body = {"url": "http://10.0.0.7:8000"}
        assert (await house.ask("POST", "/workers", body))[0] == 502  # nobody is there
        assert (await house.ask("DELETE", f"/admin/instances/{A}"))[0] == 204
        await house.instances[A].open()
        assert (await house.ask("POST", "/admin/instances", {"url": A}))[0] == 201


@pytest.mark.parametrize("url", ["http://a:1\n", "http://a\r\nX: 1", "http://a b", "http://\u00e9"])
def test_urls_that_would_not_fit_into_a_line(url: str) -> None:
    with pytest.raises(CallerError, match="printable ASCII"):
        checked_url(url)


LINE_END = "http://a:1\r\nX-Evil: 1"
LINE_END_QUOTED = "http%3A%2F%2Fa%3A1%0D%0AX-Evil%3A%201"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/admin/instances", {"url": LINE_END}),
        ("POST", "/admin/instances", {"url": LINE_END, "patient": True}),
        ("POST", "/workers", {"url": LINE_END}),
        ("POST", "/admin/pause", {"instances": [LINE_END]}),
        ("POST", f"/add_worker?url={LINE_END_QUOTED}", None),
        ("POST", f"/remove_worker?url={LINE_END_QUOTED}", None),
        ("GET", f"/workers/{LINE_END_QUOTED}", None),
        ("DELETE", f"/workers/{LINE_END_QUOTED}", None),
        ("DELETE", f"/admin/instances/{LINE_END_QUOTED}", None),
        ("POST", f"/admin/instances/{LINE_END_QUOTED}/drain", None),
        ("GET", f"/v1/rl/workers/{LINE_END_QUOTED}", None),
        ("POST", f"/v1/rl/workers/{LINE_END_QUOTED}/engine/pause", None),
    ],
)
async def test_a_url_with_a_line_end_is_refused_wherever_it_is_given(
    method: str, path: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with House(Upstream(A)) as house:
        data = None if body is None else body
        async with house.session.request(
            method, aiohttp.client.URL(house.service.url + path, encoded=True), json=data
        ) as response:
            assert response.status == 400
            assert "X-Evil" not in response.headers
            assert "printable ASCII" in (await response.json())["error"]["message"]
        assert list(house.driver.supervisors) == [A]
    assert "\nX-Evil" not in caplog.text


class Stranger:
    """Something at a URL that is no vLLM, and what it was sent."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body
        self.headers: list[dict[str, str]] = []

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: Any) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        return web.Response(status=self.status, body=self.body)


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("status", [200, 401, 404, 500])
async def test_a_stranger_gets_no_key_and_is_not_quoted(
    tmp_path: Path, status: int, patient: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("common-key\n")
    stranger = Stranger(status, SECRET.encode())
    options = Options(policy="dplb", instances=[], port=0, instance_api_key_file=keys)
    service = Service(options, lambda line: None)
    await service.open()
    async with stranger as url, aiohttp.ClientSession(service.url) as client:
        body = {"url": url, "patient": patient}
        async with client.post("/admin/instances", json=body) as response:
            assert response.status == (202 if patient else 502)
            said = await response.text()
        if status != 200:
            assert str(status) in said
        if status == 401:
            assert "--api-key" in said  # the remedy
        async with client.get("/admin/instances") as response:
            said += await response.text()
        # Nor is anything passed on to what has never answered as vLLM.
        for path in (f"/v1/rl/workers/{url.replace('/', '%2F')}/engine/x", "/v1/rl/engine/x"):
            where = aiohttp.client.URL(service.url + path, encoded=True)
            async with client.get(where) as response:
                assert response.status != 200
                said += await response.text()
        assert SECRET not in said
    await service.close()
    assert stranger.headers
    assert not any("common-key" in str(headers) for headers in stranger.headers)


async def test_a_non_http_answer_is_not_quoted() -> None:
    async def banner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SECRET.encode() + b"\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(banner, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    service = Service(Options(policy="dplb", instances=[], port=0), lambda line: None)
    await service.open()
    async with (
        aiohttp.ClientSession(service.url) as client,
        client.post("/admin/instances", json={"url": url}) as response,
    ):
        assert response.status == 502
        assert "secret" not in await response.text()
    await service.close()
    server.close()


async def test_an_instance_is_sent_its_own_key_or_the_common_one(tmp_path: Path) -> None:
    """Named at start: the common one. Added: its own, or the one that the file names for it."""
    keys = tmp_path / "keys"
    named, listed, told, nobody = (ScriptedVllm() for _ in range(4))
    named.api_key, listed.api_key, told.api_key = "common", "listed", "told"
    nobody.api_key = "common"
    async with named.serving(), listed.serving(), told.serving(), nobody.serving():
        keys.write_text(f"common\n{listed.url} listed\n")
        options = Options(policy="dplb", instances=[named.url], port=0, instance_api_key_file=keys)
        service = Service(options, lambda line: None)
        await service.open()
        assert service.gateway.healthy
        async with aiohttp.ClientSession(service.url) as client:
            for body, status in (
                ({"url": listed.url}, 201),
                ({"url": told.url}, 502),
                ({"url": told.url, "api_key": "told"}, 201),
                ({"url": nobody.url}, 502),
            ):
                async with client.post("/admin/instances", json=body) as response:
                    assert response.status == status, await response.text()
            path = f"/admin/instances/{named.url}"
            async with client.delete(path) as response:
                assert response.status == 204
            async with client.post("/admin/instances", json={"url": named.url}) as response:
                assert response.status == 201
        await service.close()
