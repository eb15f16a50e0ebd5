"""The table of the file, and what is refused of one."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from rollout_sched.integrations.gateway.control_plane import codec
from rollout_sched.integrations.gateway.control_plane import fanout as relay
from rollout_sched.integrations.gateway.control_plane.auth import id_of
from rollout_sched.integrations.gateway.control_plane.fanout import (
    FleetCall,
    InstanceRefused,
    broadcast,
    read,
    shipped,
    to_each,
)
from rollout_sched.integrations.gateway.control_plane.weight_protocol import ProtocolStep
from rollout_sched.integrations.http import Pool
from rollout_sched.integrations.vllm.protocol import endpoints
from rollout_sched.live.settings import Settings
from tests import virtual_net
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.integrations.gateway.test_hostile import ask_raw, refused, request

#: What trainers call that must reach every server (vLLM 0.32, prime-rl 2026-08, SkyRL 0.4.0, AReaL
#: 1.0.4).
TO_ALL = """
/pause /resume /sleep /wake_up /reset_prefix_cache /collective_rpc /update_weight_version
/start_weight_update /start_draft_weight_update /fetch_weights /update_weights
/finish_weight_update /v1/load_lora_adapter
/v1/unload_lora_adapter /load_lora_adapter /skyrl/v1/load_lora_adapter /areal_pause_generation
/areal_continue_generation /areal_update_weights /areal_update_weights_xccl
/areal_set_update_weight_meta
"""

WITH_RANKS = """
/init_weight_transfer_engine /init_broadcaster /areal_init_weights_update_group
/init_weights_update_group
"""


@pytest.mark.parametrize("path", TO_ALL.split())
def test_calls_that_change_a_server_go_to_all(path: str) -> None:
    rule = shipped().rule_for("POST", path)
    assert rule is not None
    assert rule.to == "all"


@pytest.mark.parametrize("path", WITH_RANKS.split())
def test_ranks_are_rewritten_for_each_instance(path: str) -> None:
    rule = shipped().rule_for("POST", path)
    assert rule is not None
    assert rule.to == "rewrite"


def test_generating_calls_are_not_in_the_table() -> None:
    assert not any(path.encode() in endpoints.ENDPOINTS for _, path in shipped().calls)


def test_pausing_calls_have_a_release_and_ask_absent_instances() -> None:
    rules = shipped().calls.values()
    assert {rule.pause for rule in rules} == {None, "hold", "release"}
    assert all(rule.away for rule in rules if rule.pause)


@pytest.mark.parametrize(
    ("body", "step"),
    [
        (b'{"method": "reload_weights", "kwargs": {"weights_path": "x"}}', ProtocolStep.WHOLE),
        (b'{"method": "skyrl_start_weight_update"}', ProtocolStep.BEGIN),
        (b'{"method": "update_weights_nccl"}', ProtocolStep.LOAD),
        (b'{"method": "skyrl_finish_weight_update"}', ProtocolStep.FINISH),
        (b'{"method": "sleep"}', None),
        (b'{"method": 7}', None),
        (b"[" * 100_000, None),
        (b"\xff", None),
        (b"", None),
    ],
)
def test_a_worker_s_method_says_which_step_it_is(body: bytes, step: ProtocolStep | None) -> None:
    rule = shipped().rule_for("POST", "/collective_rpc")
    assert rule is not None
    assert shipped().step(rule, body) is step


def test_other_calls_are_the_step_that_their_row_says() -> None:
    rule = shipped().rule_for("POST", "/start_weight_update")
    assert rule is not None
    assert shipped().step(rule, b"anything") is ProtocolStep.BEGIN
    assert shipped().rule_for("GET", "/start_weight_update") is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('"POST /x" = { to = "some" }', r"calls\[...\]"),
        ('"POST /x" = { to = "all", colour = "red" }', "colour"),
        ('"POST /x" = { to = "rewrite" }', '"rewrite" needs it'),
        ('"POST /x" = { to = "all", ranks = { first = "a", world = "b" } }', "belongs to"),
        ('"POST /x" = { to = "refuse" }', '"refuse" needs it'),
        ('"POST /x" = { to = "all", because = "so" }', "belongs to"),
        ('"POST /x" = { to = "all", away = true, update = "load" }', "cannot be combined"),
        ('"PUT /x" = { to = "all" }', "'PUT /x'"),
        ('"POST x" = { to = "all" }', "'POST x'"),
        ('"POST /x" = {', "fanout_table.toml"),
    ],
)
def test_an_impossible_row_is_refused_by_name(rows: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(f"[calls]\n{rows}\n[rpc]\n")


A, B = "http://a:1", "http://b:1"

Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Byte(Upstream):
    """An instance whose HTTP is what `speak` says, byte by byte."""

    def __init__(self, speak: Speak) -> None:
        super().__init__(A)
        self.speak = speak
        self.disconnected = asyncio.Event()

    async def open(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.pool = Pool(f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}")

    async def go_down(self) -> None:
        self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await self.speak(reader, writer)
            await writer.drain()
            await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.disconnected.set()
            writer.close()


def says(*parts: bytes, then_close: bool = False) -> Speak:
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
        if then_close:
            writer.close()

    return speak


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("speak", "status"),
    [
        (says(then_close=True), 502),
        (says(b"what?\r\n\r\n", then_close=True), 502),
        (says(b"HTTP/1.1 2000 OK\r\n\r\n"), 502),
        (says(b"HTTP/1.1 200 OK\r\nA: b\x00c\r\n\r\n"), 502),
        (says(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"), 502),
        (says(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"), 200),
        (says(b"HTTP/1.1 200 OK\r\nX: \xe9\r\nContent-Length: 0\r\n\r\n"), 200),
        (says(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), 200),
        (says(b"HTTP/1.1 204 No Content\r\n\r\n"), 204),
        (says(b"HTTP/1.1 304 Not Modified\r\n\r\n"), 304),
        (says(b"HTTP/1.1 599 X\r\nContent-Length: 0\r\n\r\n"), 599),
        (says(), 504),
        (says(b"HTTP/1.1 200"), 504),
    ],
)
async def test_a_broadcast_has_one_answer_for_any_instance_answer(
    speak: Speak, status: int
) -> None:
    async with House(Byte(speak), live={"update_timeout_s": 0.3}) as house:
        told, said = await ask_raw(house, request("POST", "/v1/embeddings"))
        assert told == status, said
        if status in (502, 504):
            assert A in refused(said)


@pytest.mark.parametrize(
    "parts",
    [
        (CHUNKED, b"3\r\none\r\n"),  # and then nothing
        (CHUNKED, b"3\r\none\r\nwhat?\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\none",),
    ],
)
async def test_an_answer_that_stops_does_not_look_complete(parts: tuple[bytes, ...]) -> None:
    instance = Byte(says(*parts))
    async with House(instance, live={"update_timeout_s": 0.2}) as house:
        said = b""
        with contextlib.suppress(OSError):
            _, said = await ask_raw(house, request("POST", "/v1/embeddings"))
        assert not said.endswith(b"0\r\n\r\n")
        await asyncio.wait_for(instance.disconnected.wait(), 5)


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "CLIENT_STALL_S", 0.2)
    sent = 0

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(CHUNKED)
        while True:
            writer.write(b"10000\r\n" + b"x" * 2**16 + b"\r\n")
            await writer.drain()
            sent += 2**16

    instance = Byte(pour)
    async with House(instance) as house:
        host, _, port = house.service.url.removeprefix("http://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(request("GET", "/v1/embeddings"))
        await asyncio.wait_for(instance.disconnected.wait(), 10)
        assert sent < 64 * 2**20  # the kernel's buffers, and ours
        writer.close()


async def test_a_body_that_does_not_arrive_times_out(
    monkeypatch: pytest.MonkeyPatch, house
) -> None:
    monkeypatch.setattr(codec, "BODY_S", 0.1)
    for path in ("/v1/embeddings", "/admin/pause", "/pause", "/rollout/v1/groups"):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{"
        status, said = await ask_raw(house, head.encode())
        assert (status, "0.1 s" in refused(said)) == (408, True)
    assert not house.instances[A].asked


@pytest.mark.parametrize("path", ["/v1/embeddings", "/update_weights", "/rollout/v1/groups"])
@pytest.mark.scene(max_body=1000)
async def test_an_oversized_body_is_refused(path: str, house) -> None:
    status, _ = await ask_raw(house, request("POST", path, body=b"x" * 1001))
    assert status == 413
    assert not house.instances[A].asked


async def test_hop_by_hop_headers_are_not_forwarded(house) -> None:
    headers = (
        "Connection: close, X-Mine , x-other",
        "X-Mine: 1",
        "X-Other: 2",
        "Keep-Alive: 5",
        "Proxy-Connection: keep-alive",
        "Proxy-Authorization: Basic eA==",
        "TE: trailers",
        "Upgrade: h2c",
        "Authorization: Bearer client",
        "X-Kept: yes",
    )
    for path in ("/v1/embeddings", "/pause"):
        assert (await ask_raw(house, request("POST", path, headers, b"{}")))[0] == 200
    for asked in house.instances[A].asked:
        got = asked["headers"]
        assert got["x-kept"] == "yes"
        assert got["authorization"] == "Bearer instance"
        names = ("x-mine", "x-other", "keep-alive", "proxy-connection", "te", "upgrade")
        assert not [name for name in (*names, "proxy-authorization") if name in got]


async def test_a_compressed_body_is_passed_on_as_it_came() -> None:
    seen = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.readexactly(len(packed)))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    packed = gzip.compress(b"{}")
    async with House(Byte(listen)) as house:
        sent = request("POST", "/v1/embeddings", ("Content-Encoding: gzip",), packed)
        assert (await ask_raw(house, sent))[0] == 200
    assert bytes(seen) == packed


async def test_unknown_calls_do_not_reach_one_of_many(house, first, second) -> None:
    status, said = await house.ask("POST", "/load_something")
    assert status == 404
    assert "/v1/rl/engine/load_something" in said["error"]["message"]
    assert not any(instance.asked for instance in house.instances.values())
    assert (await house.ask("GET", "/server_info"))[0] == 200
    assert (await house.ask("POST", "/v1/embeddings"))[0] == 200
    await house.ask("DELETE", "/workers/http%3A%2F%2Fb%3A1")
    assert (await house.ask("POST", "/load_something"))[0] == 200  # it is the only one


async def test_a_removed_instance_leaves_a_broadcast(house, instance) -> None:
    asked = asyncio.Event()

    async def hang(request: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    instance.answering = hang
    asking = asyncio.create_task(house.ask("POST", "/v1/embeddings"))
    await asked.wait()
    instance.pool.close()
    assert (await asking)[0] == 502
    assert (await house.ask("POST", "/v1/embeddings"))[0] == 502


def test_the_bound_is_the_time_for_an_update() -> None:
    """Ten minutes, unless the policy file or a flag says otherwise."""
    assert Settings().update_timeout_s == 600


A, B = "http://a:1", "http://b:1"


class Named:
    """As much of a supervisor as an order needs."""

    def __init__(self, name: str) -> None:
        self.name = name


def asked(*outcomes: Any) -> tuple[int, dict[str, Any]]:
    """What comes of an order that each instance answers with a result or an error."""
    told = dict(zip((A, B), outcomes, strict=False))

    async def order(supervisor: Any) -> dict[str, Any]:
        outcome = told[supervisor.name]
        if isinstance(outcome, Exception):
            raise outcome
        return cast(dict[str, Any], outcome)

    everybody = cast(Any, [Named(name) for name in told])
    return virtual_net.run(to_each(everybody, order))


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ([], 503),
        ([{}], 200),
        ([{}, {}], 200),
        ([{}, ValueError("boom")], 207),
        ([ValueError("boom"), ValueError("boom")], 502),
    ],
)
def test_the_status_says_whether_all_some_or_none_succeeded(
    outcomes: list[Any], status: int
) -> None:
    told, answer = asked(*outcomes)
    assert told == status
    assert answer["total"] == len(outcomes)
    assert answer["succeeded"] == len(answer["results"]) == len(outcomes) - len(answer["failed"])


def test_every_result_has_its_instance_and_how_long_it_took() -> None:
    _, answer = asked({"held": True})
    (result,) = answer["results"].items()
    assert result[0] == id_of(A)
    assert {**result[1], "latency_ms": 0} == {"url": A, "latency_ms": 0, "held": True}


def test_a_failure_says_whether_it_was_refused_or_not_reached() -> None:
    _, answer = asked(InstanceRefused(404, {"detail": "no such path"}), OSError())
    refused, unreached = answer["failed"]
    assert (refused["worker_id"], refused["status"], refused["error"]) == (id_of(A), 404, "refused")
    assert refused["message"] == {"detail": "no such path"}
    assert (unreached["status"], unreached["error"]) == (None, "unreachable")
    assert unreached["message"] == "OSError"


def call(path: str = "/flush_cache", query: str = "", pause: Any = None) -> FleetCall:
    return FleetCall("POST", path, query, [(b"x-a", b"1")], b"body", 5.0, pause)


async def test_a_refused_call_counts_as_not_done(house) -> None:
    house.instances[A].answers["/pause"] = (500, b"\xff no JSON")
    (supervisor,) = house.service.gateway.supervisors()
    status, answer = await broadcast([supervisor], call("/pause", pause="hold"))
    assert (status, answer["failed"][0]["status"]) == (502, 500)
    assert "no JSON" in answer["failed"][0]["message"]
    assert not supervisor.control.held


async def test_each_may_be_sent_a_body_of_its_own(house, first, second) -> None:
    supervisors = house.service.gateway.supervisors()
    await broadcast(supervisors, call(), {A: b"for a", B: b"for b"})
    sent = [instance.asked[0]["body"] for instance in house.instances.values()]
    assert sent == ["for a", "for b"]


async def test_an_undescribed_instance_is_sent_nothing() -> None:
    away = Upstream(A)
    away.dead = True
    async with House(away) as house:
        status, answer = await broadcast(house.service.gateway.supervisors(), call())
        assert status == 502
        assert "never answered as vLLM" in answer["failed"][0]["message"]
        assert not away.asked
