"""The client of the end-to-end bench: what counts as an answer, and when."""

from __future__ import annotations

import asyncio
import math

from aiohttp import web

from benchmarks.live.closed_client import PATH, Finished, send_all
from benchmarks.live.rollout_batch import Ask


async def served(handler, batch, doors=1):
    """What the client tells of a batch sent to so many addresses of one server."""
    app = web.Application()
    app.router.add_post("/{door}" + PATH, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        return await send_all(batch, [f"http://127.0.0.1:{port}/{door}" for door in range(doors)])
    finally:
        await runner.cleanup()


def ask(number, tokens=7):
    return Ask("g", f"g/{number}", b'{"number":%d}' % number, tokens)


def answer(tokens):
    return web.json_response({"choices": [], "usage": {"completion_tokens": tokens}})


def test_all_are_sent_before_any_is_answered_and_go_to_the_addresses_in_turn():
    arrived, all_here = [], asyncio.Event()

    async def handler(request):
        arrived.append((await request.json(), request.match_info["door"]))
        assert request.headers["X-Session-ID"] == f"g/{arrived[-1][0]['number']}"
        if len(arrived) == 6:
            all_here.set()
        await all_here.wait()
        return answer(7)

    finished = asyncio.run(served(handler, [ask(number) for number in range(6)], doors=2))
    assert len(finished.at_s) == 6
    assert list(finished.at_s) == sorted(finished.at_s)
    assert not finished.failures
    assert {(body["number"] % 2, int(door)) for body, door in arrived} == {(0, 0), (1, 1)}


def test_another_status_another_length_and_no_usage_are_failures():
    async def handler(request):
        number = (await request.json())["number"]
        if number == 0:
            return web.Response(status=503, text="full")
        if number == 1:
            return answer(6)
        return web.json_response({}) if number == 2 else answer(7)

    finished = asyncio.run(served(handler, [ask(number) for number in range(4)]))
    assert len(finished.at_s) == 1
    assert [failure.partition(":")[0] for failure in finished.failures] == ["g/0", "g/1", "g/2"]
    assert "503 full" in finished.failures[0]
    assert "6 tokens, not 7" in finished.failures[1]


def test_the_share_is_of_all_that_were_sent():
    finished = Finished([1.0, 2.0, 3.0, 4.0], ["one failed"])
    assert finished.after(0.8) == 4.0
    assert finished.after(0.6) == 3.0
    assert math.isinf(finished.after(1.0))
