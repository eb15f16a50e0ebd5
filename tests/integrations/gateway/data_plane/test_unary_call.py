"""An answer that is passed on is whole and its own client's; another is made elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.integrations.gateway.data_plane.unary_call import failure
from rollout_sched.integrations.http.errors import AnswerBroken
from rollout_sched.live.ports import InstanceError, RequestRejected
from tests.integrations.gateway.data_plane.stage import (
    BODY,
    PARTIAL,
    PROMPT,
    Stage,
    generated,
    segments,
)
from tests.integrations.gateway.scripted import Call, Instance, chunk, completion

WHOLE = json.dumps(completion([4])).encode()
POLICIES: list[dict[str, Any]] = [{}, {"interruption": PARTIAL}]

#: What passes for an answer where one looks only for its finish_reason and its usage.
LIES = {
    "truncated": WHOLE[:-1],
    "truncated in the text": b'{"choices":[{"finish_reason":"stop","x"',
    "no JSON": WHOLE.replace(b'"index"', b"index"),
    "no UTF-8": WHOLE.replace(b'"text_completion"', b'"\xff"'),
    "no choices": b'{"finish_reason":"stop","usage":{"completion_tokens":1}}',
    "no choice": b'{"choices":[],"finish_reason":"stop","usage":{"completion_tokens":1}}',
    "no text": WHOLE.replace(b'"text"', b'"test"'),
    "other tokens": WHOLE.replace(b'"completion_tokens": 1', b'"completion_tokens": 2'),
}


@pytest.mark.parametrize("roles", POLICIES, ids=["starts anew", "keeps partials"])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("lie", LIES)
async def test_a_malformed_answer_is_retried_elsewhere(
    lie: str, samples: int, roles: dict[str, Any]
) -> None:
    """It was passed on as a 200, or never answered."""
    one, two = Instance("i0"), Instance("i1")
    async with Stage(one, two, **roles) as stage:
        call = stage.call({**BODY, "n": samples})
        await one.answer(0, LIES[lie])
        for number in range(samples):
            await two.answer(number, completion([5]))
        answer = await call.json()
        assert call.status == 200
        assert [choice["text"] for choice in answer["choices"]] == ["w5 "] * samples
        stage.settled()


@pytest.mark.parametrize(
    ("target", "body", "field", "prefix"),
    [
        ("/v1/completions", BODY, "id", "cmpl"),
        ("/inference/v1/generate", {"token_ids": PROMPT}, "request_id", "generate-tokens"),
    ],
)
async def test_another_requests_answer_is_retried_elsewhere(
    target: str, body: dict[str, Any], field: str, prefix: str, stage, first, second
) -> None:
    """A server that answers twice had it passed on to the next client."""
    call = stage.call(body, target)
    await first.asked()
    (order,) = first.names
    other = generated([4], "stop", "0") if field == "request_id" else completion([4])
    await first.answer(0, {**other, field: f"{prefix}-{order}0"})
    await second.asked()
    (order,) = second.names
    own = generated([5], "stop", "0") if field == "request_id" else completion([5])
    await second.answer(0, {**own, field: f"{prefix}-{order}"})
    answer = await call.json()
    assert [s["instance"] for s in segments(answer)] == ["i1"]
    stage.settled()


@pytest.mark.parametrize("finish", ["stop", "abort"])
async def test_a_restarted_instances_answer_is_retried_elsewhere(finish: str) -> None:
    """It answers before any poll has seen that it was restarted; its label tells."""
    one, two = Instance("i0"), Instance("i1")
    one.labelled = two.labelled = True
    async with Stage(one, two, interruption=PARTIAL) as stage:
        call = stage.call({"token_ids": PROMPT}, "/inference/v1/generate")
        await one.answer(0, generated([4], finish, "default"))
        assert not stage.driver.supervisors["i0"].health.verified.is_set()  # it is looked at
        await two.answer(0, generated([5], "stop", "0"))
        answer = await call.json()
        assert answer["choices"][0]["token_ids"] == [5]
        assert [s["instance"] for s in segments(answer)] == ["i1"]
        stage.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_versions_are_asked_for_where_the_server_has_them(stream: bool) -> None:
    """vLLM 0.33, at an instance that an update cuts off."""
    one = Instance("i0")
    one.asks_versions = True
    async with Stage(one, interruption=PARTIAL) as stage:
        call = stage.call({**BODY, "stream": stream})
        for number, (ids, finish) in enumerate((([4, 5], "abort"), ([6], "stop"))):
            assert (await one.asked(number)).body["return_weight_versions"] is True
            spans = [{"version": "0", "start": 0, "end": len(ids)}]
            if stream:
                await one.event(number, chunk(ids, finish, weight_versions=spans), end=True)
            else:
                await one.answer(number, completion(ids, finish, weight_versions=spans))
        answer = (await call.events())[-2] if stream else await call.json()
        (told,) = answer["choices"][0]["weight_versions"]
        assert (told["start"], told["end"]) == (0, 3)
        stage.settled()


async def test_the_default_label_is_ignored_without_labels(stage, instance) -> None:
    call = stage.call({"token_ids": PROMPT}, "/inference/v1/generate")
    await instance.answer(0, generated([4], "stop", "default"))
    answer = await call.json()
    assert [s["version"] for s in segments(answer)] == [0]
    stage.settled()


@pytest.mark.scene(interruption=PARTIAL)
async def test_an_empty_last_attempt_keeps_earlier_tokens(stage, instance) -> None:
    call = stage.call({**BODY, "return_token_ids": True})
    await instance.asked()
    await stage.update(1, instance)
    await instance.answer(0, completion([4], "abort", prompt=PROMPT))
    await instance.answer(1, completion([], "stop"))
    answer = await call.json()
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([4], "stop")
    assert answer["usage"]["total_tokens"] == 4
    stage.settled()


@pytest.mark.parametrize("target", ["/v1/completions", "/v1/chat/completions"])
async def test_an_empty_response_is_answered_with_length(target: str, stage, instance) -> None:
    """As where the KV cache has no room left for the first token."""
    body = {**BODY, "messages": [], "max_tokens": 3}
    call = stage.call(body, target)
    await instance.asked()
    (request,) = stage.driver.front.payloads._payloads
    payload = next(iter(stage.driver.front.payloads._payloads.values()))
    payload.responder.answer(DeliveredSample(request, "g", 0, 3, 0, (), 0, "length"))
    answer = await call.json()
    assert call.status == 200
    assert answer["choices"][0]["finish_reason"] == "length"
    assert segments(answer) == []


async def test_late_data_of_an_ended_attempt_changes_nothing(stage, first, second) -> None:
    call = stage.call()
    late = (await first.asked()).receiver
    stage.driver.fleet.lose("i0", "it is gone")
    await second.asked()
    late.on_head(200, [])
    late.on_data(WHOLE)
    late.on_end()
    late.on_error(InstanceError("late"))
    await second.answer(0, completion([5]))
    await second.answer(0, completion([6]))
    assert (await call.json())["choices"][0]["text"] == "w5 "
    assert not stage.scheduler.state.anomalies
    stage.settled()


async def test_an_endless_answer_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, stage, first, second
) -> None:
    call: Call = stage.call()
    receiver = (await first.asked()).receiver
    receiver._left = receiver._most = 1000
    receiver.on_head(200, [])
    receiver.on_data(b"x" * 1000)
    with pytest.raises(AnswerBroken) as broken:  # and so the exchange ends with it
        receiver.on_data(b"x")
    receiver.on_error(broken.value)
    await second.answer(0, completion([5]))
    assert (await call.json())["choices"][0]["text"] == "w5 "


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (None, 502, "no instance could answer"),
        (InstanceError("a \ud800 b"), 502, "a   b"),
        (RequestRejected("no", 400, b""), 400, "no"),
        (RequestRejected("no", 400, b"<html>\n\n</html>"), 400, "no"),
        (RequestRejected("no", 422, b'{"error":\n\n{"message":"never"}}'), 422, "never"),
        (RequestRejected("no", 400, b'{"error":"\xff"}'), 400, "no"),
    ],
)
def test_an_error_is_json_on_one_line(error: Exception | None, status: int, says: str) -> None:
    told, body = failure(error)
    assert told == status
    assert says in json.loads(body)["error"]["message"]
    assert b"\n" not in body
