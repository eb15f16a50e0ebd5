"""A call leaves no cycle behind: while the gateway serves, the collector looks once a minute only,
and whatever waits for it adds up to gigabytes."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rollout_sched.config import load_policy
from rollout_sched.integrations.gateway.data_plane.data_plane import DataPlane
from rollout_sched.integrations.http.server import HttpServer
from rollout_sched.integrations.vllm.http_instance import HttpInstance
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import Description, Gauges
from rollout_sched.live.settings import Settings
from tests import virtual_net

CALLS = 50


class Instance(HttpInstance):
    """Tells nothing but what it has to."""

    async def describe(self) -> Description:
        return Description(64, 10**6, 10**6, version=0)

    async def gauges(self) -> Gauges:
        return Gauges(0, 0, 0.0)

    async def set_version(self, version: int) -> None: ...


def _choice(text: str, ids: list[int], finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": ids}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }


def whole(body: dict[str, Any]) -> bytes:
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    answer = json.dumps({**_choice("x", [1, 2, 3], "length"), "usage": usage}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer


def streamed(body: dict[str, Any]) -> bytes:
    said = [_choice("x", [k], "length" if k == 2 else None) for k in range(3)]
    events = [b"data: %b\n\n" % json.dumps(event).encode() for event in said]
    chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in (*events, b"data: [DONE]\n\n")]
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return b"".join([head, *chunks, b"0\r\n\r\n"])


def refused(body: dict[str, Any]) -> bytes:
    return b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}"


async def _read(reader: asyncio.StreamReader) -> bytes:
    """The body of one message."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"chunked" in head:
        return await reader.readuntil(b"0\r\n\r\n")
    (length,) = (line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return await reader.readexactly(int(length.partition(b":")[2]))


async def garbage(answer: Callable[[dict[str, Any]], bytes], **more: Any) -> Counter[str]:
    """What only the collector finds after so many calls, by type."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(answer(json.loads(await _read(reader))))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    upstream = await asyncio.start_server(serve, "127.0.0.1", 0)
    instance = Instance(f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}")
    driver = Driver(load_policy("dplb").scheduler(1), settings=Settings(poll_s=1000.0))
    await driver.add_instance(instance)
    server = HttpServer(DataPlane(driver, resumable=driver.view.keeps_partial))
    listener = await server.listen("127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": "m", "prompt": [1, 2, 3], "max_tokens": 3, **more}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def calls() -> None:
        for _ in range(CALLS):
            writer.write(head + body)
            await _read(reader)

    await calls()
    gc.collect()
    gc.disable()
    try:
        await calls()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = Counter(type(thing).__qualname__ for thing in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    writer.close()
    await server.close(0.0)
    upstream.close()
    await driver.close()
    return found


@pytest.mark.parametrize(
    ("answer", "more"),
    [(whole, {}), (streamed, {"stream": True}), (refused, {}), (refused, {"stream": True})],
    ids=["whole", "streamed", "refused", "refused stream"],
)
def test_a_call_leaves_nothing_for_the_collector(
    answer: Callable[[dict[str, Any]], bytes], more: dict[str, Any]
) -> None:
    found = virtual_net.run(garbage(answer, **more))
    assert sum(found.values()) < CALLS, found.most_common(12)
