"""The connections that generate: kept for less long than the server keeps them."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_sched.integrations.vllm.control import KEEP_ALIVE_S
from rollout_sched.integrations.vllm.generation_calls import GenerationCalls

SERVERS_KEEP_ALIVE_S = 5.0  # uvicorn's default, which vLLM keeps


async def on_server(handler, use):
    app = web.Application()
    app.router.add_post("/g", handler)
    async with TestServer(app, host="127.0.0.1") as server:
        calls = GenerationCalls(str(server.make_url("")).rstrip("/"), {"A": "1"}, None, None)
        try:
            return await use(calls)
        finally:
            await calls.close()


def test_idle_connections_are_dropped_before_the_server_does():
    assert 0 < KEEP_ALIVE_S < SERVERS_KEEP_ALIVE_S


def test_connections_are_kept_between_calls():
    ports = set()

    async def handler(request):
        ports.add(request.transport.get_extra_info("peername")[1])
        return web.Response(text=request.headers["A"] + request.headers["B"])

    async def use(calls):
        return [(await calls.post("/g", {"B": "2"}, b"", 100)).body for _ in range(3)]

    assert asyncio.run(on_server(handler, use)) == [b"12"] * 3
    assert len(ports) == 1


def test_only_a_good_answer_is_received():
    async def handler(request):
        status = int(await request.read())
        return web.Response(body=b"body", status=status)

    async def use(calls):
        got = []
        answers = [
            await calls.post("/g", {}, b"%d" % status, 100, got.append) for status in (200, 500)
        ]
        return got, [answer.body for answer in answers]

    assert asyncio.run(on_server(handler, use)) == ([b"body"], [b"", b"body"])
