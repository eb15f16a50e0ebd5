"""Whatever raises on an answer's way, wherever: the call is answered once, and leaves nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_sched.integrations.gateway.data_plane import (
    answers,
    fanout,
    stream,
    streaming_call,
    unary_call,
)
from rollout_sched.integrations.gateway.data_plane import resume as dialects
from rollout_sched.integrations.gateway.data_plane import stream as client_stream
from rollout_sched.integrations.gateway.data_plane import stream as stream_tokens
from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint
from rollout_sched.live.ports import AnswerUntrue, InstanceError, RequestRejected
from tests.integrations.gateway.data_plane.stage import PARTIAL, Stage
from tests.integrations.gateway.data_plane.test_streaming_call import TARGETS, asked_of, said_of
from tests.integrations.gateway.scripted import Call, Instance, compact, completion

pytestmark = pytest.mark.skipif(
    not streaming_call.__file__.endswith(".py"),
    reason="nothing of compiled classes can be replaced",
)

WHOLE = [
    (unary_call.UnaryReceiver, "_outcome"),
    (unary_call.UnaryTranscript, "append"),
    (unary_call.UnaryTranscript, "drop"),
    (unary_call.UnaryResponder, "_body"),
    (unary_call.UnaryResponder, "_strip"),
    (answers, "read_answer"),
    (answers, "read_object"),
    (dialects, "part_of"),
    (dialects, "join"),
    (fanout.Fanout, "_joined"),
    (fanout.Fanout, "_usage"),
]
STREAMS = [
    (streaming_call.StreamingCall, "_question"),
    (stream.Stream, "receive"),
    (stream.Stream, "outcome"),
    (stream.Stream, "_read"),
    (stream.Stream, "_read_end"),
    (stream.Stream, "_read_after_the_end"),
    (stream.Stream, "_believed"),
    (stream.Stream, "_translated"),
    (stream_tokens.StreamTokens, "add"),
    (stream_tokens.StreamTokens, "add_unread"),
    (stream_tokens.StreamTokens, "_count"),
    (client_stream.ClientStream, "send"),
    (client_stream.ClientStream, "learn"),
    (streaming_call.StreamTranscript, "streamed"),
    (streaming_call.StreamTranscript, "append"),
    (streaming_call.StreamTranscript, "drop"),
    (streaming_call.StreamResponder, "_ending"),
    (answers, "read_event"),
    (answers, "read_object"),
    (dialects, "translate_event"),
    (fanout.Fanout, "write"),
    (fanout.Fanout, "_usage"),
]
ERRORS = [RuntimeError("boom"), AnswerUntrue("boom"), RequestRejected("boom", 502)]


class Willing(Instance):
    """An instance that answers whatever it is asked, and cuts every other stream off."""

    async def serve(self, endpoint: Endpoint) -> None:
        number = 0
        while True:
            asked = await self.asked(number) if number < 100 else None
            assert asked is not None, "asked for ever"
            receiver = asked.receiver
            receiver.on_head(200, [])
            for data in said(endpoint, asked.target, asked.body):
                receiver.on_data(data)
                await asyncio.sleep(0)
            if number % 2 and asked.body.get("stream"):
                receiver.on_error(InstanceError("reset"))
            else:
                receiver.on_end()
            number += 1
            while len(self.pool.asked) <= number:
                await asyncio.sleep(0.001)


def said(endpoint: Endpoint, target: str, body: dict[str, Any]) -> list[bytes]:
    upstream_endpoint: Endpoint = "completions" if target == TARGETS["completions"] else endpoint
    if not body.get("stream"):
        answer = completion([4, 5], prompt=[1, 2, 3])
        answer["choices"][0]["message"] = {"content": "w4 w5 "}
        return [compact(answer)]
    usage = {**said_of(upstream_endpoint, []), "choices": [], "usage": {"completion_tokens": 4}}
    events = [
        said_of(upstream_endpoint, [4]),
        said_of(upstream_endpoint, [5]),
        said_of(upstream_endpoint, [6]),
    ]
    told = [b"data: %b\n\n" % compact(event) for event in events]
    last = b"data: %b\n\n" % compact(said_of(upstream_endpoint, [7], "stop"))
    return [*told, told[0] + told[1], last, b"data: %b\n\n" % compact(usage), b"data: [DONE]\n\n"]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("endpoint", TARGETS)
@pytest.mark.parametrize(
    ("streams", "place", "name"),
    [(False, *at) for at in WHOLE] + [(True, *at) for at in STREAMS],
    ids=lambda value: getattr(value, "__name__", str(value)).rpartition(".")[2],
)
async def test_every_call_ends_after_any_exception(
    streams: bool,
    place: Any,
    name: str,
    endpoint: Endpoint,
    samples: int,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any, **named: Any) -> Any:
        raise error

    instances = [Willing("i0"), Willing("i1")]
    async with Stage(*instances, interruption=PARTIAL) as stage:
        stage.scheduler.max_failures = 2
        stage.scheduler.parts.backoff.first_s = 0.001
        serving = [asyncio.create_task(i.serve(endpoint)) for i in instances]
        monkeypatch.setattr(place, name, fail)
        call = stage.call(body(endpoint, streams, samples), TARGETS[endpoint])
        async with asyncio.timeout(4):
            await call.over.wait()
        assert_ended(call)
        while len(stage.driver.front.payloads):
            await asyncio.sleep(0.001)
        monkeypatch.undo()
        for task in serving:
            task.cancel()
        stage.settled()


def body(endpoint: Endpoint, streams: bool, samples: int) -> dict[str, Any]:
    asked = asked_of(endpoint, 9, stream_options={"include_usage": True})
    if not streams:
        del asked["stream"], asked["stream_options"]
    (asked["sampling_params"] if endpoint == "generate" else asked)["n"] = samples
    return asked


def assert_ended(call: Call) -> None:
    """Well, or with an error; never something between the two."""
    if call.answer_headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        assert call.status == 200
        assert (b'"error"' in call.data) != call.data.endswith(b"data: [DONE]\n\n")
    else:
        assert call.status == 200 or call.status >= 500
        assert (b'"error"' in call.data) == (call.status >= 500)
