"""From a request to its answer."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.live.ports import Output
from rollout_sched.simulators.fake_instance.server import _News, _next_id
from tests.simulators.fake_instance.served import FOREVER, PROMPT, begin, play, served


def test_what_is_no_json_is_refused_before_it_is_read() -> None:
    async def scene() -> None:
        async with (
            served() as client,
            client.session.post("/inference/v1/generate", data=b"{}") as response,
        ):
            assert response.status == 400
            assert "application/json" in await response.text()

    play(scene)


def test_what_comes_faster_than_it_is_taken_is_taken_together() -> None:
    async def scene() -> None:
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

    play(scene)


def test_each_choice_of_a_stream_is_whole_and_they_end_together() -> None:
    async def scene() -> None:
        async with served() as client:
            sampling = {"max_tokens": 6, "n": 2, **FOREVER, "temperature": 1}
            body = {"prompt": PROMPT, "return_token_ids": True, **sampling}
            chunks = await client.stream("/v1/completions", body)
            made: dict[int, list[int]] = {0: [], 1: []}
            for chunk in chunks:
                for choice in chunk["choices"]:
                    made[choice["index"]] += choice["token_ids"]
            assert [len(tokens) for tokens in made.values()] == [6, 6]

    play(scene)


def test_where_a_client_leaves_nothing_runs_on() -> None:
    async def scene() -> None:
        async with served() as client:
            task = await begin(client)
            assert await client.metric("vllm:num_requests_running") == 1
            task.cancel()
            await client.until_running(0)

    play(scene)


@pytest.mark.parametrize(("before", "after"), [("cmpl-7", "cmpl-8"), ("x", "x1"), ("a9", "a10")])
def test_the_next_one_s_id(before, after):
    assert _next_id(before) == after
