"""A call that is passed on ends once, whatever the client or the instance does."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollout_sched.integrations.gateway.control_plane import codec
from rollout_sched.integrations.gateway.control_plane import fanout as relay
from rollout_sched.integrations.http import Pool
from rollout_sched.live.settings import Settings
from tests.integrations.gateway.house import House, Upstream, run
from tests.integrations.gateway.test_hostile import ask_raw, refused, request
from tests.live.scripted import until

A, B = "http://a:1", "http://b:1"

Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Byte(Upstream):
    """An instance whose HTTP is what `speak` says, byte by byte."""

    def __init__(self, speak: Speak) -> None:
        super().__init__(A)
        self.speak = speak
        self.gone = asyncio.Event()

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
            self.gone.set()
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
def test_whatever_an_instance_answers_there_is_one_answer(speak: Speak, status: int) -> None:
    async def scene() -> None:
        async with House(Byte(speak), live={"update_timeout_s": 0.3}) as house:
            told, said = await ask_raw(house, request("POST", "/v1/embeddings"))
            assert told == status, said
            if status in (502, 504):
                assert A in refused(said)

    run(scene())


@pytest.mark.parametrize(
    "parts",
    [
        (CHUNKED, b"3\r\none\r\n"),  # and then nothing
        (CHUNKED, b"3\r\none\r\nwhat?\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\none",),
    ],
)
def test_an_answer_that_stops_does_not_look_complete(parts: tuple[bytes, ...]) -> None:
    async def scene() -> None:
        instance = Byte(says(*parts))
        async with House(instance, live={"update_timeout_s": 0.2}) as house:
            said = b""
            with contextlib.suppress(OSError):
                _, said = await ask_raw(house, request("POST", "/v1/embeddings"))
            assert not said.endswith(b"0\r\n\r\n")
            await asyncio.wait_for(instance.gone.wait(), 5)

    run(scene())


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "CLIENT_STALL_S", 0.2)
    sent = 0

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(CHUNKED)
        while True:
            writer.write(b"10000\r\n" + b"x" * 2**16 + b"\r\n")
            await writer.drain()
            sent += 2**16

    async def scene() -> None:
        instance = Byte(pour)
        async with House(instance) as house:
            host, _, port = house.service.url.removeprefix("http://").rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port), limit=1024)
            writer.write(request("GET", "/v1/embeddings"))
            await asyncio.wait_for(instance.gone.wait(), 10)
            assert sent < 64 * 2**20  # the kernel's buffers, and ours
            writer.close()

    run(scene())


def test_a_body_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "BODY_S", 0.1)

    async def scene() -> None:
        async with House(Upstream(A)) as house:
            for path in ("/v1/embeddings", "/admin/pause", "/pause", "/rollout/v1/groups"):
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{"
                status, said = await ask_raw(house, head.encode())
                assert (status, "0.1 s" in refused(said)) == (408, True)
            assert not house.instances[A].asked

    run(scene())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/update_weights", "/rollout/v1/groups"])
def test_a_body_that_is_too_long(path: str) -> None:
    async def scene() -> None:
        async with House(Upstream(A), max_body=1000) as house:
            status, _ = await ask_raw(house, request("POST", path, body=b"x" * 1001))
            assert status == 413
            assert not house.instances[A].asked

    run(scene())


def test_what_lies_between_two_neighbours_is_not_passed_on() -> None:
    async def scene() -> None:
        async with House(Upstream(A)) as house:
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

    run(scene())


def test_a_compressed_body_is_passed_on_as_it_came() -> None:
    async def scene() -> None:
        seen = bytearray()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.extend(await reader.readexactly(len(packed)))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        packed = gzip.compress(b"{}")
        async with House(Byte(listen)) as house:
            sent = request("POST", "/v1/embeddings", ("Content-Encoding: gzip",), packed)
            assert (await ask_raw(house, sent))[0] == 200
        assert bytes(seen) == packed

    run(scene())


def test_what_is_unknown_does_not_change_one_of_many() -> None:
    async def scene() -> None:
        async with House(Upstream(A), Upstream(B)) as house:
            status, said = await house.ask("POST", "/load_something")
            assert status == 404
            assert "/v1/rl/engine/load_something" in said["error"]["message"]
            assert not any(instance.asked for instance in house.instances.values())
            assert (await house.ask("GET", "/server_info"))[0] == 200
            assert (await house.ask("POST", "/v1/embeddings"))[0] == 200
            await house.ask("DELETE", "/workers/http%3A%2F%2Fb%3A1")
            assert (await house.ask("POST", "/load_something"))[0] == 200  # it is the only one

    run(scene())


def test_an_instance_that_is_removed_meanwhile() -> None:
    async def scene() -> None:
        instance: Any = Upstream(A)
        instance.stream = asyncio.Queue()
        async with House(instance) as house:
            asking = asyncio.create_task(house.ask("POST", "/v1/embeddings"))
            await until(lambda: instance.asked)
            instance.pool.close()
            assert (await asking)[0] == 502
            assert (await house.ask("POST", "/v1/embeddings"))[0] == 502

    run(scene())


def test_the_bound_is_the_time_for_an_update() -> None:
    """Ten minutes, unless the policy file or a flag says otherwise."""
    assert Settings().update_timeout_s == 600
