"""Who is let in, and what goes wrong on demand."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from rollout_sched.live.ports import Output
from rollout_sched.simulators.fake_instance.server import _News, _next_id
from tests.simulators.fake_instance.served import FOREVER, PROMPT, Client, begin, served

GENERATE = "/inference/v1/generate"
BODY = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 20, "temperature": 0}}


async def switch(client: Client, fault: str, **settings: Any) -> None:
    status, answer = await client.post("/fake/fault", {"fault": fault, **settings})
    assert status == 200
    assert [one["fault"] for one in answer["faults"]] == [fault]


async def test_a_key_guards_what_it_guards_in_vllm() -> None:
    async with served(api_key="secret") as client:
        for path in (GENERATE, "/v1/completions"):
            assert await client.post(path, BODY) == (401, {"error": "Unauthorized"})
            assert (await client.post(path, BODY, Authorization="Bearer other"))[0] == 401
        assert (await client.get("/v1/models"))[0] == 401
        assert (await client.post(GENERATE, BODY, Authorization="Bearer secret"))[0] == 200
        assert (await client.get("/metrics"))[0] == 200


async def test_unknown_paths() -> None:
    async with served() as client:
        assert (await client.get("/nowhere"))[0] == 404


async def test_excess_requests_are_refused() -> None:
    async with served(speed=10.0, max_queued=2) as client:
        tasks = [asyncio.create_task(client.generate([n], sampling=FOREVER)) for n in (1, 2)]
        await client.until_running(2)
        status, answer = await client.post(GENERATE, BODY)
        assert status == 503
        assert "busy" in answer["error"]["message"]
        for task in tasks:
            task.cancel()


@pytest.mark.parametrize("fault", ["reset", "cut"])
@pytest.mark.parametrize("stream", [False, True])
async def test_broken_connections(fault: str, stream: bool) -> None:
    async with served(speed=100.0) as client:
        await switch(client, fault, times=1)
        with pytest.raises(aiohttp.ClientError):
            await client.post(GENERATE, {**BODY, "stream": stream})
        await client.until_running(0)
        assert len((await client.generate([1, 2, 3], sampling={"max_tokens": 9}))["token_ids"])


async def test_a_cut_stream_has_begun() -> None:
    async with served(speed=100.0) as client:
        await switch(client, "cut")
        async with client.session.post(GENERATE, json={**BODY, "stream": True}) as response:
            assert response.status == 200
            assert (await response.content.readline()).startswith(b"data: {")
            with pytest.raises(aiohttp.ClientError):
                await response.content.read()


async def test_a_silent_server_is_ended_by_its_connection() -> None:
    async with served() as client:
        await switch(client, "silent")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.post(GENERATE, BODY)
        assert (await client.get("/load"))[1] == {"server_load": 0}
        await switch(client, "silent", on="control")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.post("/pause")
        assert (await client.get("/health"))[0] == 200


async def test_garbage_and_errors() -> None:
    async with served() as client:
        for fault, status in (("garbage", 200), ("error_500", 500), ("error_503", 503)):
            await switch(client, fault, times=1)
            told, answer = await client.post(GENERATE, BODY)
            assert told == status
            assert isinstance(answer, bytes) == (fault == "garbage")
        assert (await client.post(GENERATE, BODY))[0] == 200


async def test_answers_of_another_version() -> None:
    async with served() as client:
        await client.post("/update_weight_version", {"new_version": "7"})
        await switch(client, "wrong_version", times=1)
        lie = await client.generate([1], sampling={"max_tokens": 2})
        assert lie["weight_versions"] == [{"version": "8", "start": 0, "end": 2}]
        truth = await client.generate([1], sampling={"max_tokens": 2})
        assert truth["weight_versions"] == [{"version": "7", "start": 0, "end": 2}]


async def test_the_answer_comes_twice() -> None:
    async with served() as client:
        await switch(client, "twice")
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        body = b'{"token_ids":[1],"sampling_params":{"max_tokens":1}}'
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        got = b""
        while got.count(b"HTTP/1.1 200") < 2 or got.count(b'"choices"') < 2:
            part = await reader.read(1 << 16)
            assert part
            got += part
        writer.close()
        chunks = await client.stream(GENERATE, BODY)
        assert chunks[0::2] == chunks[1::2]


async def test_a_failed_update_tears_the_model() -> None:
    async with served() as client:
        await switch(client, "update_500", times=1)
        rpc = {"method": "reload_weights", "kwargs": {}}
        assert (await client.post("/collective_rpc", rpc))[0] == 500
        assert (await client.post(GENERATE, BODY))[0] == 500
        assert (await client.get("/health"))[0] == 503


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_restart_comes_back_empty(at_once: bool) -> None:
    async with served(speed=100.0) as client:
        started = await client.metric("process_start_time_seconds")
        await client.post("/update_weight_version", {"new_version": "7"})
        await client.generate([1, 2, 3, 4, 5], sampling={"max_tokens": 2})
        running = asyncio.create_task(client.generate([1], sampling=FOREVER))
        await client.until_running(1)
        path, body = GENERATE, BODY
        if at_once:
            path, body = "/fake/restart", {"seconds": 0.05}
        else:
            await switch(client, "restart", times=1, seconds=0.05)
        with pytest.raises(aiohttp.ClientError):
            await client.post(path, body)
        with pytest.raises(aiohttp.ClientError):
            await running
        with pytest.raises(aiohttp.ClientError):
            await client.get("/health")
        await asyncio.sleep(0.1)
        assert await client.metric("process_start_time_seconds") > started
        assert await client.metric("vllm:generation_tokens_total") == 0
        assert (await client.get("/weight_info"))[1] == {"weight_version": "default"}
        await client.generate([1, 2, 3, 4, 5], sampling={"max_tokens": 2})
        assert await client.metric("vllm:prefix_cache_hits_total") == 0


async def test_slowness() -> None:
    async with served() as client:
        await switch(client, "slow", seconds=0.1)
        loop = asyncio.get_running_loop()
        started = loop.time()
        await client.generate([1], sampling={"max_tokens": 1})
        assert loop.time() - started >= 0.1


async def test_switches() -> None:
    async with served() as client:
        await switch(client, "reset", on="weights", probability=0.5)
        assert (await client.post("/fake/fault", {"fault": "reset", "probability": 0}))[1] == {
            "faults": []
        }
        await switch(client, "slow")
        async with client.session.delete("/fake/fault") as response:
            assert await response.json() == {"faults": []}
        for bad in ({"fault": "quake"}, {"fault": "reset", "probability": 2}, {}):
            assert (await client.post("/fake/fault", bad))[0] == 400


async def test_a_non_json_body_is_refused_unread() -> None:
    async with (
        served() as client,
        client.session.post("/inference/v1/generate", data=b"{}") as response,
    ):
        assert response.status == 400
        assert "application/json" in await response.text()


async def test_unread_events_are_sent_together() -> None:
    news = _News()
    news.add(0, [1], [-1.0])
    news.add(0, [2, 3], None)
    news.add(1, [9], None)
    assert await news.take() == {0: ([1, 2, 3], [-1.0], None), 1: ([9], [], None)}
    assert not news.seen(0)  # it is being looked at for the first time
    output = Output([1, 2, 3], None, "stop")
    news.add(0, [4], None)
    news.end(0, output)
    assert await news.take() == {0: ([4], [], output)}
    assert news.seen(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await news.take()


async def test_each_choice_of_a_stream_is_whole_and_they_end_together() -> None:
    async with served() as client:
        sampling = {"max_tokens": 6, "n": 2, **FOREVER, "temperature": 1}
        body = {"prompt": PROMPT, "return_token_ids": True, **sampling}
        chunks = await client.stream("/v1/completions", body)
        made: dict[int, list[int]] = {0: [], 1: []}
        for chunk in chunks:
            for choice in chunk["choices"]:
                made[choice["index"]] += choice["token_ids"]
        assert [len(tokens) for tokens in made.values()] == [6, 6]


async def test_a_disconnect_ends_its_requests() -> None:
    async with served() as client:
        task = await begin(client)
        assert await client.metric("vllm:num_requests_running") == 1
        task.cancel()
        await client.until_running(0)


@pytest.mark.parametrize(("before", "after"), [("cmpl-7", "cmpl-8"), ("x", "x1"), ("a9", "a10")])
def test_the_next_one_s_id(before, after):
    assert _next_id(before) == after
