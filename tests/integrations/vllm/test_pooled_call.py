"""Calls on a pool: bounded, received as they come."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_sched.integrations.http.client import Pool
from rollout_sched.integrations.vllm.orders import post
from rollout_sched.live.ports import InstanceError


def on_server(use):
    """`use(pool)`, where POST /g answers with the status its body names, in two parts."""

    async def handler(request):
        response = web.StreamResponse(status=int(await request.read()))
        await response.prepare(request)
        await response.write(b"bo")
        await response.write(b"dy")
        return response

    async def served():
        app = web.Application()
        app.router.add_post("/g", handler)
        async with TestServer(app, host="127.0.0.1") as server:
            pool = Pool(str(server.make_url("")).rstrip("/"))
            try:
                return await use(pool)
            finally:
                pool.close()

    return asyncio.run(served())


def test_only_a_good_answer_is_received_as_it_comes():
    async def use(pool):
        got = []
        answers = [
            await post(pool, "/g", b"", b"%d" % status, largest=4, receive=got.append)
            for status in (200, 500)
        ]
        return b"".join(got), answers

    got, answers = on_server(use)
    assert got == b"body"
    assert [(answer.status, answer.body) for answer in answers] == [(200, b""), (500, b"body")]


@pytest.mark.parametrize("receive", [None, lambda data: None])
def test_an_answer_longer_than_it_can_be(receive):
    async def use(pool):
        with pytest.raises(InstanceError, match="too large"):
            await post(pool, "/g", b"", b"200", largest=3, receive=receive)

    on_server(use)


def test_nobody_is_there():
    async def use(pool):
        with pytest.raises(InstanceError, match="/g failed"):
            await post(Pool("http://127.0.0.1:1"), "/g", b"", b"", largest=3)

    on_server(use)
