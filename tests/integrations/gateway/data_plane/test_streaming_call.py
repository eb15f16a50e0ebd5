"""A stream always ends, and ends well or says that it does not, whatever its instances say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rollout_sched.integrations.gateway.data_plane.call import KEEP_ALIVE
from rollout_sched.integrations.gateway.data_plane.reply import KEEP_ALIVE_S
from rollout_sched.integrations.gateway.data_plane.stream import are_plain_events
from rollout_sched.integrations.vllm.protocol import answers as event_stream
from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint
from rollout_sched.live.ports import InstanceError
from tests.integrations.gateway.data_plane.stage import (
    BODY,
    PARTIAL,
    PROMPT,
    Stage,
    segments,
)
from tests.integrations.gateway.scripted import Call, Instance, chunk, compact, text_of

TARGETS: dict[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "generate": "/inference/v1/generate",
}

#: An event in the middle of a stream, as vLLM writes it.
GOOD = b'data: {"id":"x","choices":[{"token_ids":[1],"finish_reason":null}]}\n\n'


def asked_of(endpoint: Endpoint, tokens: int, **more: Any) -> dict[str, Any]:
    if endpoint == "completions":
        return {**BODY, "max_tokens": tokens, "stream": True, **more}
    if endpoint == "chat":
        messages = [{"role": "user", "content": "hi"}]
        return {"messages": messages, "max_tokens": tokens, "stream": True, **more}
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": tokens}, "stream": True, **more}


def said_of(endpoint: Endpoint, token_ids: list[int], finish: str | None = None) -> dict[str, Any]:
    """An event as vLLM gives it."""
    said: dict[str, Any] = {"created": 7, "model": "tiny"}
    choice: dict[str, Any] = {"index": 0, "token_ids": token_ids, "finish_reason": finish}
    if endpoint == "completions":
        said |= {"id": "cmpl-1", "object": "text_completion"}
        choice["text"] = text_of(token_ids)
    elif endpoint == "chat":
        said |= {"id": "chatcmpl-1", "object": "chat.completion.chunk", "prompt_token_ids": PROMPT}
        choice["delta"] = {"content": text_of(token_ids)}
    else:
        said |= {"request_id": "generate-tokens-1"}
    return {**said, "choices": [choice], "usage": None}


def ids_of(events: list[Any]) -> list[int]:
    return [
        token
        for event in events
        if event != b"[DONE]"
        for choice in event["choices"]
        for token in choice.get("token_ids") or ()
    ]


def assert_ended(call: Call, events: list[Any], finish: str) -> dict[str, Any]:
    """The event that ends it well, after which there may be the usage."""
    assert call.status == 200
    assert events.count(b"[DONE]") == 1
    assert events[-1] == b"[DONE]"
    ends = [e for e in events[:-1] if e["choices"] and e["choices"][0].get("finish_reason")]
    assert [e["choices"][0]["finish_reason"] for e in ends] == [finish]
    last: dict[str, Any] = ends[0]
    assert segments(last)
    return last


class TestTheEnd:
    @pytest.mark.parametrize("usage", [False, True])
    @pytest.mark.parametrize("endpoint", TARGETS)
    async def test_a_stream_of_an_instance_lost_after_the_last_token_ends_with_length(
        self, endpoint: Endpoint, usage: bool, stage, instance
    ) -> None:
        """Nobody has anything left to make then, and the stream hung for ever."""
        more = {"stream_options": {"include_usage": True}} if usage else {}
        call = stage.call(asked_of(endpoint, 2, **more), TARGETS[endpoint])
        await instance.event(0, said_of(endpoint, [4]), said_of(endpoint, [5]))
        stage.driver.fleet.lose("i0", "it is gone")
        events = await call.events()
        last = assert_ended(call, events, "length")
        assert ids_of(events) == [4, 5]
        for name in ("id", "request_id", "object", "created", "model"):
            assert last.get(name) == events[0].get(name)
        assert set(events[0]["choices"][0]) - set(last["choices"][0]) <= {"token_ids"}
        told = [e["usage"] for e in events[:-1] if not e["choices"]]
        assert bool(told) == usage
        if usage:
            assert told[0]["prompt_tokens"] == 3
            assert told[0]["completion_tokens"] == 2
        stage.settled()

    async def test_the_default_limit_of_completions_ends_a_stream(self, stage, instance) -> None:
        """It is the instance's own then."""
        body = {name: value for name, value in BODY.items() if name != "max_tokens"}
        call = stage.call({**body, "stream": True})
        limit = 16  # a completion's
        await instance.event(0, *(chunk([token]) for token in range(limit)))
        (await instance.asked()).receiver.on_error(InstanceError("reset"))
        assert_ended(call, await call.events(), "length")
        stage.settled()

    async def test_a_stream_of_an_instance_lost_after_the_end_ends_with_stop(
        self, stage, first, second
    ) -> None:
        """The text had ended; another instance would have written on."""
        call = stage.call({**BODY, "stream": True})
        await first.event(0, chunk([4]), chunk([5], "stop"))
        stage.driver.fleet.lose("i0", "it is gone")
        events = await call.events()
        assert_ended(call, events, "stop")
        assert ids_of(events) == [4, 5]
        assert not second.pool.asked
        stage.settled()

    @pytest.mark.parametrize("rest", ["", "data: [DO", "data: [DONE]"])
    async def test_a_connection_closed_before_done_ends_well(
        self, rest: str, stage, instance
    ) -> None:
        call = stage.call({**BODY, "stream": True})
        await instance.event(0, chunk([4]), chunk([5], "stop"))
        receiver = (await instance.asked()).receiver
        receiver.on_data(rest.encode())
        receiver.on_error(InstanceError("closed in the middle"))
        assert_ended(call, await call.events(), "stop")
        assert len(instance.pool.asked) == 1
        stage.settled()

    async def test_usage_lost_by_a_close_is_computed(self, stage, instance) -> None:
        options = {"stream_options": {"include_usage": True}}
        call = stage.call({**BODY, "stream": True, **options})
        await instance.event(0, chunk([4]), chunk([5], "stop"))
        (await instance.asked()).receiver.on_error(InstanceError("closed"))
        events = await call.events()
        assert_ended(call, events, "stop")
        assert events[-2]["usage"]["total_tokens"] == 5

    async def test_data_after_the_end_is_dropped(self, stage, instance) -> None:
        call = stage.call({**BODY, "stream": True})
        await instance.event(0, chunk([4], "stop"))
        receiver = (await instance.asked()).receiver
        rubbish = b'data: {"x"\n\n: ping\n\ndata: {"surprise":1}\n\n'
        receiver.on_data(rubbish + b"data: [DONE]\n\n" + b"data: " + compact(chunk([9])))
        receiver.on_data(b"\n\n")
        receiver.on_end()
        receiver.on_error(InstanceError("late"))
        events = await call.events()
        assert_ended(call, events, "stop")
        assert len(events) == 2
        stage.settled()

    async def test_an_open_connection_after_done_ends_the_stream(self, stage, instance) -> None:
        call = stage.call({**BODY, "stream": True})
        await instance.event(0, chunk([4], "stop"), b"data: [DONE]")
        assert_ended(call, await call.events(), "stop")
        stage.settled()

    async def test_more_tokens_after_the_end_are_an_error(self, stage, instance) -> None:
        """The client has what came before, so never may it look good."""
        call = stage.call({**BODY, "stream": True})
        await instance.event(0, chunk([4]), chunk([5], "stop"), chunk([5], "stop"))
        events = await call.events()
        assert "continued after its finish_reason" in str(events[-1]["error"])
        assert b"[DONE]" not in events
        stage.settled()

    @pytest.mark.parametrize("endpoint", TARGETS)
    async def test_a_stream_that_ends_twice_is_made_elsewhere_before_its_client_has_tokens(
        self, endpoint: Endpoint, stage, first, second
    ) -> None:
        call = stage.call(asked_of(endpoint, 3), TARGETS[endpoint])
        opening = {**said_of("chat", []), "id": "chatcmpl-7"}
        opening["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        await first.event(
            0, *[opening][: endpoint == "chat"], *[said_of(endpoint, [4], "stop")] * 2
        )
        await second.event(0, said_of(endpoint, [8]), said_of(endpoint, [9], "stop"), end=True)
        events = await call.events()
        assert_ended(call, events, "stop")
        assert b'"rollout_sched"' in call.data
        assert "[4]" not in call.data.decode()
        stage.settled()

    @pytest.mark.parametrize("endpoint", TARGETS)
    async def test_the_end_of_a_segment_does_not_end_the_stream(self, endpoint: Endpoint) -> None:
        """What the last event of each segment brought was lost."""
        instance = Instance()
        segmented = {**PARTIAL, "segment_tokens": 2}
        async with Stage(instance, interruption=segmented) as stage:
            options = {"stream_options": {"include_usage": True}}
            call = stage.call(asked_of(endpoint, 3, **options), TARGETS[endpoint])
            await instance.event(
                0, said_of(endpoint, [4]), said_of(endpoint, [5], "length"), end=True
            )
            later: Endpoint = "generate" if endpoint == "generate" else "completions"
            usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
            told = {**said_of(later, []), "choices": [], "usage": usage}
            await instance.event(1, said_of(later, [6], "length"), told, end=True)
            events = await call.events()
            assert_ended(call, events, "length")
            assert ids_of(events) == [4, 5, 6]
            assert events[-2]["usage"] == {
                "prompt_tokens": 3,
                "completion_tokens": 3,
                "total_tokens": 6,
            }
            names = {e.get("id", e.get("request_id")) for e in events[:-1]}
            assert len(names) == 1

    async def test_impossible_spans_end_the_stream_in_an_error(self, stage, instance) -> None:
        call = stage.call(asked_of("generate", 9), TARGETS["generate"])
        last = said_of("generate", [5], "stop")
        last["choices"][0]["weight_versions"] = [{"version": "0", "start": 0, "end": 9}]
        await instance.event(0, said_of("generate", [4]), last)
        events = await call.events()
        assert "do not cover" in str(events[-1]["error"])
        stage.settled()

    @pytest.mark.parametrize("finish", ["stop", "abort"])
    async def test_a_restarted_instances_stream_ends_in_an_error(self, finish: str) -> None:
        """The client has its tokens already; the instance is looked at before it gets more."""
        instance = Instance()
        instance.labelled = True
        async with Stage(instance) as stage:
            call = stage.call(asked_of("generate", 9), TARGETS["generate"])
            last = said_of("generate", [5], finish)
            spans = [{"version": "default", "start": 0, "end": 2}]
            last["choices"][0]["weight_versions"] = spans
            await instance.event(0, said_of("generate", [4]), last)
            events = await call.events()
            assert "restarted" in str(events[-1]["error"])
            assert not stage.driver.supervisors["i0"].health.verified.is_set()
            stage.settled()

    async def test_a_begun_stream_with_invalid_tokens_is_not_restarted(
        self, stage, first, second
    ) -> None:
        """The client has its tokens, and nobody knows which weights made them."""
        call = stage.call({**BODY, "stream": True})
        await first.event(0, chunk([4]), chunk([5]))
        (running,) = stage.driver.front.attempts.on("i0")
        stage.driver.front.attempts.reject_streamed(running.dispatch.attempt)
        events = await call.events()
        assert "are not valid" in str(events[-1]["error"])
        assert not second.pool.asked
        stage.settled()

    async def test_an_unread_stream_is_marked_held_back(self, stage, instance) -> None:
        """What it has to say waits in the connection; so does the connection's end."""
        call = stage.call({**BODY, "stream": True})
        await instance.event(0, chunk([4]))
        (running,) = stage.driver.front.attempts.on("i0")
        assert not getattr(running.attempting, "held_back", True)
        call.pause()
        assert getattr(running.attempting, "held_back", False)
        call.resume()
        assert not getattr(running.attempting, "held_back", True)


class TestBrokenOff:
    @pytest.mark.parametrize(
        "broken",
        [
            b"data: {",
            b"data: []",
            b"data: 7",
            b'data: {"choices":7}',
            b'data: {"choices":[7]}',
            b'data: {"choices":[{"finish_reason":7}]}',
            b'data: {"choices":[{"text":"a"},{"text":"b"}]}',
            b'data: {"choices":[{"token_ids":["x"],"text":"x","finish_reason":null}]}',
            b'data: {"x":"\xff"}',
            b'data: {"error":{"message":"it died"}}',
            b'data:  { "error" : "it died" }',
            b'event: error\ndata: {"error":"it died"}',
            b'data: {"id":"cmpl-1","choices":[{"text":"x","finish_reason":"error"}]}',
            b'data: {"choices":[{"token_ids":[5],"text":"\xff","finish_reason":null}]}',
        ],
    )
    @pytest.mark.parametrize("first", [False, True])
    async def test_a_malformed_event_is_retried_elsewhere(self, broken: bytes, first: bool) -> None:
        one, two = Instance("i0"), Instance("i1")
        async with Stage(one, two) as stage:
            call = stage.call({**BODY, "stream": True})
            before = [] if first else [chunk([4]), chunk([5])]
            await one.event(0, *before, broken)
            again = await two.asked()
            assert again.body["prompt"] == ([*PROMPT] if first else [*PROMPT, 4, 5])
            await two.event(0, chunk([6], "stop"), end=True)
            events = await call.events()
            assert_ended(call, events, "stop")
            assert ids_of(events) == ([6] if first else [4, 5, 6])
            stage.settled()

    async def test_another_requests_event_is_not_forwarded(self, stage, first, second) -> None:
        call = stage.call({**BODY, "stream": True})
        await first.asked()
        (order,) = first.names
        own = {**chunk([4]), "id": f"cmpl-{order}"}
        other = {**chunk([9]), "id": f"cmpl-{order}0"}
        await first.event(0, own, other)
        assert (await second.asked()).body["prompt"] == [*PROMPT, 4]
        await second.event(0, chunk([5], "stop"), end=True)
        events = await call.events()
        assert_ended(call, events, "stop")
        assert ids_of(events) == [4, 5]

    @pytest.mark.parametrize(
        "packet",
        [
            GOOD.replace(b',"choices"', b'\n,"choices"'),
            GOOD.replace(b"null}", b'null"finish_reason":null}') + b'data: {"id":"x"\n\n',
            GOOD.replace(b'"token_ids":[1],', b""),
            GOOD.replace(b'"choices"', b'"others"'),
            GOOD + b"**" + GOOD,
            GOOD.replace(b',"choices"', b'\n,"choices"') + GOOD,
        ],
    )
    def test_only_complete_event_lines_pass_unread(self, packet: bytes) -> None:
        opening = b'data: {"id":"x"'
        assert are_plain_events(GOOD, opening)
        assert are_plain_events(GOOD + GOOD, opening)
        assert not are_plain_events(packet, opening)

    async def test_many_events_in_one_packet_are_looked_at_too(self, stage, first, second) -> None:
        call = stage.call({**BODY, "stream": True})
        await first.asked()
        (order,) = first.names
        own = {"id": f"cmpl-{order}", "choices": chunk([4])["choices"]}
        other = {"id": f"cmpl-{order}1", "choices": chunk([9])["choices"]}
        await first.event(0, own)
        packet = [b"data: %b" % compact(e) for e in (own, other, own)]
        await first.event(0, b"\n\n".join(packet))
        assert (await second.asked()).body["prompt"] == [*PROMPT, 4, 4]
        await second.event(0, chunk([5], "stop"), end=True)
        assert ids_of(await call.events()) == [4, 4, 5]

    async def test_an_endless_event_is_cut_off(
        self, monkeypatch: pytest.MonkeyPatch, stage, first, second
    ) -> None:
        monkeypatch.setattr(event_stream, "LONGEST_EVENT", 1000)
        call = stage.call({**BODY, "stream": True})
        receiver = (await first.asked()).receiver
        receiver.on_head(200, [])
        for _ in range(1001):
            receiver.on_data(b"x")
        await second.event(0, chunk([5], "stop"), end=True)
        assert_ended(call, await call.events(), "stop")

    async def test_an_endless_error_is_cut_off(self, stage, first, second) -> None:
        call = stage.call({**BODY, "stream": True})
        receiver = (await first.asked()).receiver
        receiver.on_head(400, [])
        for _ in range(3):
            receiver.on_data(b"x" * 2**19)
        await second.event(0, chunk([5], "stop"), end=True)
        assert_ended(call, await call.events(), "stop")

    async def test_an_error_of_several_lines_stays_one_event(self, stage, first, second) -> None:
        call = stage.call({**BODY, "stream": True})
        await first.event(0, chunk([4]))
        (await first.asked()).receiver.on_error(InstanceError("reset"))
        receiver = (await second.asked()).receiver
        receiver.on_head(400, [])
        receiver.on_data(b'{"error":\n\n {"message": "no"}\n\n}')
        receiver.on_end()
        assert (await call.events())[-1] == {"error": {"message": "no"}}

    async def test_a_stream_with_malformed_ids_cannot_continue(self, stage, first, second) -> None:
        """Passed on unread, they are found when somebody has to go on from them."""
        call = stage.call({**BODY, "stream": True})
        odd = {"id": "cmpl-1", "object": "text_completion"}
        odd["choices"] = [{"text": "x", "token_ids": ["x"], "finish_reason": None}]  # type: ignore[assignment]
        await first.event(0, chunk([4]), odd)
        stage.driver.fleet.lose("i0", "it is gone")
        assert "no token_ids" in str((await call.events())[-1]["error"])
        stage.settled()

    async def test_a_chat_that_had_only_opened_begins_anew(self, stage, first, second) -> None:
        call = stage.call(asked_of("chat", 2), TARGETS["chat"])
        opening = said_of("chat", [])
        opening["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        await first.event(0, opening)
        (await first.asked()).receiver.on_error(InstanceError("reset"))
        assert (await second.asked()).target == TARGETS["chat"]
        last = {**said_of("chat", [4, 5], "length"), "id": "chatcmpl-2"}
        await second.event(0, {**opening, "id": "chatcmpl-2"}, last, end=True)
        events = await call.events()
        assert_ended(call, events, "length")
        assert {e["id"] for e in events[:-1]} == {"chatcmpl-1"}
        assert [e["choices"][0]["delta"].get("role") for e in events[:-1]] == [
            "assistant",
            None,
            None,
        ]
        assert [s["end"] for s in segments(events[-2])] == [2]


class TestShapes:
    @pytest.mark.parametrize("size", [1, 3, 10_000])
    @pytest.mark.parametrize("line", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
    async def test_events_pass_with_any_line_ending(
        self, line: str, size: int, stage, instance
    ) -> None:
        events = [
            ": ping",
            f"event: token\ndata: {json.dumps(chunk([4]))}",
            f"id: 7\nretry: 9\ndata:{json.dumps(chunk([5]))}",
            "data: " + json.dumps(chunk([6]), indent=1).replace("\n", "\ndata: "),
            ": ping\n: pong",
            "event: nothing",
            'data: {"choices": null}',
            'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}',
            f"data: {json.dumps(chunk([7], 'stop'))}",
            "data: [DONE]",
        ]
        data = "".join(f"{event}\n\n" for event in events).replace("\n", line).encode()
        call = stage.call({**BODY, "stream": True})
        receiver = (await instance.asked()).receiver
        receiver.on_head(200, [])
        for start in range(0, len(data), size):
            receiver.on_data(data[start : start + size])
        receiver.on_end()
        told = await call.events()
        last = assert_ended(call, told[:3] + told[5:], "stop")
        assert ids_of([e for e in told[:-1] if e["choices"]]) == [4, 5, 6, 7]
        assert [s["end"] for s in segments(last)] == [4]
        assert b"\r" not in call.data
        stage.settled()


class TestLate:
    async def test_late_data_of_an_ended_attempt_changes_nothing(
        self, stage, first, second
    ) -> None:
        call = stage.call({**BODY, "stream": True})
        await first.event(0, chunk([4]))
        late = (await first.asked()).receiver
        stage.driver.fleet.lose("i0", "it is gone")
        await second.event(0, chunk([5]))
        late.on_head(200, [])
        late.on_data(b"data: %b\n\n" % compact(chunk([9])))
        late.on_data(b"data: %b\n\ndata: [DONE]\n\n" % compact(chunk([9], "stop")))
        late.on_end()
        late.on_error(InstanceError("late"))
        await second.event(0, chunk([6], "stop"), end=True)
        events = await call.events()
        assert_ended(call, events, "stop")
        assert ids_of(events) == [4, 5, 6]
        assert not stage.scheduler.state.anomalies
        stage.settled()


class TestSlowClients:
    async def test_an_attempt_started_while_paused_begins_paused(
        self, stage, first, second
    ) -> None:
        call = stage.call({**BODY, "stream": True})
        await first.event(0, chunk([4]))
        call.pause()
        (await first.asked()).receiver.on_error(InstanceError("reset"))
        await second.asked()
        assert second.pool.exchanges[0].paused == 1
        call.resume()
        assert second.pool.exchanges[0].paused == 0


class TestKeepAlive:
    async def test_a_comment_of_the_instance_reaches_the_client(self, stage, instance) -> None:
        call = stage.call({**BODY, "stream": True})
        await instance.event(0, chunk([4], prompt_token_ids=PROMPT), b": keep-alive")
        assert call.data.endswith(KEEP_ALIVE)
        await instance.event(0, chunk([5], "stop"), end=True)
        assert [event for event in await call.events() if event == b"[DONE]"]

    async def test_a_silent_stream_gets_comments_and_a_busy_one_none(self, stage, instance) -> None:
        silent, busy = stage.call({**BODY, "stream": True}), stage.call({**BODY, "stream": True})
        for number in range(2):
            await instance.event(number, chunk([4], prompt_token_ids=PROMPT))
        for token in range(10):
            await asyncio.sleep(KEEP_ALIVE_S / 2)
            await instance.event(1, chunk([token]))
        assert silent.data.count(KEEP_ALIVE) in (4, 5)
        assert KEEP_ALIVE not in busy.data

    async def test_a_call_without_a_beginning_gets_none(self, stage, instance) -> None:
        call = stage.call({**BODY, "stream": True})
        await asyncio.sleep(3 * KEEP_ALIVE_S)
        assert not call.data
