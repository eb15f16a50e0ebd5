"""One call for several responses: ended once, by all of them or by the first error."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.integrations.gateway.data_plane.call import JSON
from rollout_sched.integrations.gateway.data_plane.fanout import Fanout
from rollout_sched.live.ports import InstanceError
from tests.integrations.gateway.data_plane.stage import BODY, Stage, segments
from tests.integrations.gateway.scripted import Instance, chunk, completion
from tests.live.scripted import until

STREAM = {**BODY, "n": 2, "stream": True}


class TestStreams:
    async def test_a_client_that_does_not_read_slows_all_of_them_down(
        self, stage, first, second
    ) -> None:
        """Their events were kept for it, without bound."""
        call = stage.call(STREAM)
        await first.event(0, chunk([4]))
        await second.event(0, chunk([5]))
        exchanges = [first.pool.exchanges[0], second.pool.exchanges[0]]
        call.pause()
        assert [e.paused for e in exchanges] == [1, 1]
        call.resume()
        assert [e.paused for e in exchanges] == [0, 0]

    async def test_an_attempt_begins_paused_for_a_slow_client(self) -> None:
        instance = Instance(slots=1)
        async with Stage(instance) as stage:
            call = stage.call(STREAM)
            await instance.event(0, chunk([4]))
            call.pause()
            await instance.event(0, chunk([5], "stop"), end=True)
            await instance.asked(1)
            assert instance.pool.exchanges[1].paused == 1
            call.resume()
            assert instance.pool.exchanges[1].paused == 0

    async def test_a_sample_of_an_instance_lost_before_the_end_is_complete(
        self, stage, first, second
    ) -> None:
        call = stage.call({**STREAM, "max_tokens": 2})
        await first.event(0, chunk([4]), chunk([5]))
        await second.event(0, chunk([6]), chunk([7], "length"), end=True)
        stage.driver.fleet.lose("i0", "it is gone")
        events = await call.events()
        assert events.count(b"[DONE]") == 1
        ends = [
            choice["index"]
            for event in events[:-1]
            for choice in event["choices"]
            if choice["finish_reason"] == "length"
        ]
        assert sorted(ends) == [0, 1]
        stage.settled()

    async def test_the_usage_of_all_samples_is_sent_once(self, stage, instance) -> None:
        call = stage.call({**STREAM, "stream_options": {"include_usage": True}})
        for number, made in ((0, 4), (1, 5)):
            usage = {"prompt_tokens": 3, "completion_tokens": made, "total_tokens": 0}
            told = {"id": "cmpl-1", "choices": [], "usage": usage}
            await instance.event(number, chunk([4], "stop"), told, end=True)
        events = await call.events()
        (usage,) = [e["usage"] for e in events[:-1] if not e["choices"]]
        assert usage == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
        assert events[-1] == b"[DONE]"
        assert events[-2]["usage"] == usage

    @pytest.mark.parametrize("begun", [False, True])
    async def test_one_error_ends_all_and_withdraws_the_others(
        self, begun: bool, stage, first, second
    ) -> None:
        call = stage.call(STREAM)
        if begun:
            await first.event(0, chunk([4]))
            await second.event(0, chunk([5]))
            await first.event(0, chunk([6], "stop"), chunk([7]))
            error = (await call.events())[-1]["error"]
            assert "continued after its finish_reason" in error["message"]
            assert b"[DONE]" not in call.data
        else:
            await first.answer(0, {"error": {"message": "no"}}, 400)
            assert (await call.json())["error"]["message"] == "no"
            assert call.status == 400
        data = call.data
        await until(lambda: any(c[0] == "abort" for c in second.calls))
        await second.event(0, chunk([8]), chunk([9], "abort"), end=True)
        await until(lambda: not stage.driver.front.attempts.on("i1"))
        assert call.data == data
        stage.settled()

    async def test_a_malformed_event_restarts_its_sample_elsewhere(
        self, stage, first, second
    ) -> None:
        """Nothing of a packet reaches the client, or all of it."""
        call = stage.call(STREAM)
        await second.event(0, chunk([9], "stop"), end=True)
        head = b'data: {"id":"cmpl-1",'
        good = head + b'"choices":[{"text":"w4 ","token_ids":[4],"finish_reason":null}]}'
        bad = head + b'"choices":[{"text":"w5 ","token_ids":[5],"finish_reason":null]}'
        await first.event(0, good, b"\n\n".join([good, bad]))
        again = await second.asked(1)
        assert again.body["prompt"] == [1, 2, 3, 4]
        await second.event(1, chunk([5], "stop"), end=True)
        events = await call.events()
        texts = [
            choice["text"]
            for event in events[:-1]
            for choice in event["choices"]
            if choice["index"] == 0
        ]
        assert texts == ["w4 ", "w5 "]


class TestAnswers:
    async def test_a_mixture_of_errors_answers_once(self, stage, instance) -> None:
        call = stage.call({**BODY, "n": 4})
        await instance.asked(3)
        await instance.answer(0, completion([4]))
        await instance.answer(1, {"error": {"message": "first"}}, 400)
        await instance.answer(2, {"error": {"message": "second"}}, 422)
        await instance.answer(3, completion([4]))
        assert (await call.json())["error"]["message"] == "first"
        assert call.status == 400
        await until(lambda: not stage.driver.front.attempts.on("i0"))
        stage.settled()


class Reply:
    aborted = False

    def __init__(self) -> None:
        self.said: list[Any] = []

    def upstream(self, upstream_call: Any) -> None: ...

    def paced(self, over: Any, outcome: Any) -> None: ...

    def answer(self, status: int, headers: Any, body: bytes) -> None:
        self.said.append((status, body))

    def begin(self, headers: Any) -> Any:
        return self.said.append

    def end(self, status: int = 200) -> None:
        self.said.append(f"end as {status}")

    def withdraw(self) -> None:
        self.said.append("withdraw")


@pytest.mark.parametrize("usage", [b"7", b'{"prompt_tokens":"x"}', b'{"completion_tokens":[]}'])
def test_answers_that_cannot_be_joined_are_a_502(usage: bytes) -> None:
    reply = Reply()
    fanout = Fanout(reply, 2, 2)
    body = b'{"choices":[{"text":""}],"usage":%b}' % usage
    for index in (0, 1, 0):
        fanout.child(index).answer(200, [JSON], body)
    assert [said if said == "withdraw" else said[0] for said in reply.said] == [502, "withdraw"]


def test_usages_that_cannot_be_joined_end_the_stream_with_an_error() -> None:
    reply = Reply()
    fanout = Fanout(reply, 2, 2)
    for index in (0, 1):
        child = fanout.child(index)
        child.begin([])(b'data: {"choices":[],"usage":{"prompt_tokens":"x"}}\n\n')
        child.end()
        child.end()
    error, *rest = reply.said
    assert b'"error"' in error
    assert rest == ["end as 502", "withdraw"]


@pytest.mark.parametrize(
    "events", [b"data: {\n\n", b"data: 7\n\n", b'data: {"choices":[7]}\n\n', b"data: \xff\n\n"]
)
def test_malformed_events_are_not_forwarded(events: bytes) -> None:
    reply = Reply()
    write = Fanout(reply, 1, 1).child(0).begin([])
    with pytest.raises(InstanceError):
        write(b'data: {"choices":[]}\n\n' + events)
    assert not reply.said


async def test_each_sample_has_its_own_segments(stage, instance) -> None:
    call = stage.call({**BODY, "n": 2})
    await instance.answer(1, completion([4, 5]))
    await instance.answer(0, completion([6]))
    choices = (await call.json())["choices"]
    assert [segments(choice)[-1]["end"] for choice in choices] == [1, 2]
