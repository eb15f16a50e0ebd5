"""The gateway's hot path: what a client asks reaches an instance, and what comes back is whole."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.model.events import WeightsPublished
from rollout_sched.integrations.gateway.data_plane.reply import Limits
from rollout_sched.live.ports import InstanceError
from tests.integrations.gateway.data_plane.stage import (
    BODY,
    PARTIAL,
    PROMPT,
    Stage,
    generated,
    segments,
)
from tests.integrations.gateway.scripted import Call, Instance, chunk, completion, text_of
from tests.live.scripted import until


class TestPassingThrough:
    async def test_unknown_fields_and_headers_both_ways(self, stage, instance) -> None:
        body = {**BODY, "vllm_xargs": {"a": 1}, "made_up": [1, {"b": None}]}
        call = stage.call(body, x_policy="7", x_session_id="s", host="us", connection="x")
        asked = await instance.asked()
        assert asked.target == "/v1/completions"
        assert asked.body == {**body, "cache_salt": "v0"}
        assert asked.headers[b"x-policy"] == b"7"
        assert asked.headers[b"x-session-id"] == b"s"
        assert asked.headers[b"authorization"] == b"Bearer secret"
        assert b"host" not in asked.headers
        assert b"connection" not in asked.headers
        said = {**completion([4, 5]), "made_up_too": {"x": 1}}
        await instance.answer(0, said)
        answer = await call.json()
        segments = answer.pop("rollout_sched")["segments"]
        assert answer == said
        assert segments == [{"version": 0, "start": 0, "end": 2, "instance": "i0"}]
        assert call.answer_headers[b"x-rollout-sched-instance"] == b"i0"
        stage.settled()

    async def test_request_names_are_unique_and_legible(self, stage, instance) -> None:
        """Two clients with one name had their responses aborted by each other."""
        stage.call({**BODY, "request_id": "their own"}, x_request_id="mine")
        stage.call(x_request_id="mine")
        stage.call({"token_ids": PROMPT}, "/inference/v1/generate", x_request_id="a b/%s")
        stage.call({"messages": []}, "/v1/chat/completions")
        stage.call(x_request_id="x" * 256)
        asked = [await instance.asked(number) for number in range(5)]
        orders = list(instance.names)
        names = [one.headers[b"x-request-id"].decode() for one in asked]
        assert names == [
            f"mine-{orders[0]}",
            f"mine-{orders[1]}",
            f"a_b__s-{orders[2]}",
            orders[3],
            "x" * 64 + f"-{orders[4]}",
        ]
        assert list(instance.names.values()) == [
            f"cmpl-{names[0]}-0",
            f"cmpl-{names[1]}-0",
            f"generate-tokens-{names[2]}",
            f"chatcmpl-{names[3]}",
            f"cmpl-{names[4]}-0",
        ]

    async def test_an_answer_without_tokens_has_no_segments(self, stage, instance) -> None:
        call = stage.call()
        await instance.answer(0, completion([]))
        answer = await call.json()
        assert answer["choices"][0]["text"] == ""
        assert segments(answer) == []
        stage.settled()

    @pytest.mark.scene(interruption=PARTIAL)
    async def test_token_ids_that_only_the_gateway_requested_are_removed(
        self, stage, instance
    ) -> None:
        call = stage.call()
        assert (await instance.asked()).body["return_token_ids"] is True
        await instance.answer(0, completion([4, 5], prompt=PROMPT))
        choice = (await call.json())["choices"][0]
        assert "token_ids" not in choice
        assert "prompt_token_ids" not in choice
        assert choice["text"] == text_of([4, 5])


class TestErrors:
    @pytest.mark.parametrize(
        ("body", "says"),
        [
            (b"{", "truncated"),
            (b"[]", "object"),
            ({}, "`prompt` is missing"),
            ({**BODY, "max_tokens": 0}, "max_tokens"),
            ({**BODY, "max_tokens": "many"}, "max_tokens"),
            ({**BODY, "n": 0}, "`n`"),
            ({**BODY, "prompt": []}, "`prompt` is empty"),
        ],
    )
    async def test_bad_requests_are_refused_by_the_gateway(
        self, body: Any, says: str, stage, instance
    ) -> None:
        call = stage.call(body)
        error = (await call.json())["error"]
        assert call.status == error["code"] == 400
        assert says in error["message"]
        assert not instance.pool.asked
        stage.settled()

    async def test_a_call_goes_where_it_fits(self) -> None:
        """A prompt was answered 400 and 200 by turns. The length of text is only estimated."""
        small, big = Instance("i0"), Instance("i1")
        small.describes(max_model_len=100)
        async with Stage(small, big) as stage:
            fits = stage.call({**BODY, "prompt": [1] * 90})
            await small.answer(0, completion([4]))
            assert (await fits.json())["choices"]
            for number, body in enumerate(({"prompt": [1] * 91}, {"max_tokens": 99_999})):
                longer = stage.call({**BODY, **body})
                await big.answer(number, completion([4]))
                assert (await longer.json())["choices"]
            text = stage.call({**BODY, "prompt": "x" * 300})
            error = {"message": "This model's maximum context length is 100 tokens."}
            await small.answer(1, {"error": error}, 400)
            await big.answer(2, completion([4]))
            assert (await text.json())["choices"]
            too_long = stage.call({**BODY, "prompt": [1] * 20_000})
            await big.answer(3, {"error": error}, 400)
            assert (await too_long.json())["error"] == error
            stage.settled()

    async def test_beams_are_made_together(self, stage, instance) -> None:
        """With `n` requests, each of one beam, all texts were the best one."""
        body = {**BODY, "use_beam_search": "true", "n": 2}
        one = stage.call({**body, "prompt": [[1], [2, 3]]})
        for number, prompt in enumerate(([1], [2, 3])):
            asked = await instance.asked(number)
            assert (asked.body["prompt"], asked.body["n"]) == (prompt, 2)
            answer = completion([4, 5])
            other = {**answer["choices"][0], "index": 1, "text": f"second of {prompt}"}
            answer["choices"].append(other)
            answer["usage"]["completion_tokens"] = 4
            await instance.answer(number, answer)
        choices = (await one.json())["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert [c["text"] for c in choices[1::2]] == ["second of [1]", "second of [2, 3]"]
        wrong = stage.call(body)
        await instance.answer(2, completion([4]))
        await until(lambda: stage.scheduler.parts.requests)
        assert stage.scheduler.view.in_flight == 0, "it is made again"
        wrong.hang_up()

    @pytest.mark.parametrize("body", [BODY, {**BODY, "max_tokens": 100_000}])
    async def test_an_instances_refusal_is_passed_on(self, body, stage, instance) -> None:
        call = stage.call(body)
        await instance.answer(0, {"error": {"message": "out of vocabulary"}}, 400)
        assert (await call.json())["error"]["message"] == "out of vocabulary"
        assert call.status == 400
        stage.settled()

    async def test_an_unknown_model_is_the_clients_fault(self, stage, first, second) -> None:
        """Else any client could send the whole fleet to rest."""
        call = stage.call()
        error = {"message": "The model `x` does not exist.", "type": "NotFoundError"}
        await first.answer(0, {"error": error}, 404)
        assert (await call.json())["error"] == error
        assert call.status == 404
        stage.settled()

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_model_lost_since_joining_is_the_instances_fault(
        self, stream: bool, stage, first, second
    ) -> None:
        """A server that came back with another model, before a poll has noticed it."""
        stage.call({**BODY, "stream": stream})
        error = {"message": "The model `a model` does not exist.", "type": "NotFoundError"}
        await first.answer(0, {"error": error}, 404)
        await second.asked()
        assert len(first.names) == 1

    @pytest.mark.parametrize("status", [401, 403, 404, 405, 429, 500, 503])
    async def test_an_instances_failure_is_retried_on_another(
        self, status: int, stage, first, second
    ) -> None:
        call = stage.call()
        await first.answer(0, {}, status)
        await second.answer(0, completion([4]))
        await call.json()
        assert call.status == 200

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_call_waits_while_its_instance_is_paused(
        self, stream: bool, stage, instance
    ) -> None:
        """vLLM 0.33 answers a stream with 200 and this error as its only event."""
        call = stage.call({**BODY, "stream": stream})
        error = {"error": {"message": "Generation is paused. Please retry.", "code": 503}}
        for number in range(9):
            if stream:
                await instance.event(number, error)
            else:
                await instance.answer(number, error, 503)
        if stream:
            await instance.event(9, chunk([4], "stop"), end=True)
        else:
            await instance.answer(9, completion([4]))
        await call.over.wait()
        assert call.status == 200
        stage.settled()

    async def test_a_call_that_no_instance_answers_gets_a_502(self, stage, instance) -> None:
        stage.scheduler.parts.outcomes.max_failures = 1
        call = stage.call()
        await instance.answer(0, {}, 500)
        assert "no instance could answer" in (await call.json())["error"]["message"]
        assert call.status == 502
        stage.settled()

    @pytest.mark.scene(data_plane={"keys": ["k1", "k2"]})
    async def test_client_keys_are_checked(self, stage, instance) -> None:
        assert stage.call().status == 401
        assert stage.call(authorization="Bearer k3").status == 401
        assert stage.call(authorization="Bearer k2").status == 0
        asked = await instance.asked()
        assert asked.headers[b"authorization"] == b"Bearer secret"

    async def test_a_call_without_max_tokens_needs_an_instance(self) -> None:
        async with Stage() as stage:
            chat = stage.call({"messages": []}, "/v1/chat/completions")
            assert chat.status == 503
            assert b"retry-after" in chat.answer_headers
            waits = stage.call()
            assert waits.status == 0
            instance = Instance()
            await stage.driver.add_instance(instance)
            await instance.answer(0, completion([4]))
            await waits.json()

    async def test_a_refusal_names_the_exceeded_limit(self) -> None:
        """The refusal said "0 requests are here already"."""

        async def refused(call: Call, status: int = 503) -> str:
            error = (await call.json())["error"]
            assert (call.status, call.answer_headers[b"retry-after"]) == (status, b"1")
            return str(error["message"])

        async with Stage(data_plane={"limits": Limits(requests=3, body_bytes=300)}) as stage:
            assert stage.call().status == 0
            many = stage.call({**BODY, "n": 3})
            assert "1 responses are pending, the limit is 3" in await refused(many)
            long = stage.call({**BODY, "user": "x" * 220})
            held = stage.data_plane.calls.open.body_bytes
            assert f"{held} of the 300 bytes" in await refused(long, 429)
            others = stage.call({**BODY, "user": "x" * 220}, peer="10.0.0.2")
            assert f"pending bodies have {held}, the limit is 300" in await refused(others)
            assert stage.data_plane.refused == 3
            assert stage.data_plane.calls.open.body_bytes == held


class TestHangingUp:
    async def test_a_disconnect_while_waiting_withdraws_the_request(self) -> None:
        instance = Instance(slots=1)
        async with Stage(instance) as stage:
            stage.call()
            waiting = stage.call()
            waiting.hang_up()
            await instance.answer(0, completion([4]))
            await until(lambda: not stage.scheduler.parts.requests)
            assert len(instance.pool.asked) == 1


class TestGoingOn:
    @pytest.mark.scene(interruption=PARTIAL)
    async def test_an_update_shows_only_in_the_segments_field(self, stage, instance) -> None:
        call = stage.call({**BODY, "logprobs": 1, "return_token_ids": True})
        await instance.asked()
        await stage.update(1, instance)
        await instance.answer(0, completion([4, 5], "abort", prompt=PROMPT, logprobs=True))
        again = await instance.asked(1)
        assert again.body["prompt"] == [*PROMPT, 4, 5]
        assert again.body["max_tokens"] == 8
        assert again.body["cache_salt"] == "v1"
        assert again.body["logprobs"] == 1
        await instance.answer(
            1, completion([6, 7], "length", prompt=[*PROMPT, 4, 5], logprobs=True)
        )
        answer = await call.json()
        choice = answer["choices"][0]
        assert choice["token_ids"] == [4, 5, 6, 7]
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["text"] == text_of([4, 5, 6, 7])
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"] == [-0.4, -0.5, -0.6, -0.7]
        assert choice["logprobs"]["text_offset"] == [0, 3, 6, 9]
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
        }
        spans = [(s["version"], s["start"], s["end"]) for s in segments(answer)]
        assert spans == [(0, 0, 2), (1, 2, 4)]
        stage.settled()

    @pytest.mark.scene(interruption=PARTIAL)
    async def test_an_interrupted_chat_continues_as_tokens(self, stage, instance) -> None:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "max_completion_tokens": 9,
            "logprobs": True,
            "top_logprobs": 1,
            "temperature": 0.5,
        }
        call = stage.call(body, "/v1/chat/completions")
        await instance.asked()
        await stage.update(1, instance)
        first = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "prompt_token_ids": PROMPT,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "w4 "},
                    "finish_reason": "abort",
                    "token_ids": [4],
                    "logprobs": {"content": [{"token": "w4 ", "logprob": -0.4}]},
                }
            ],
            "usage": {"prompt_tokens": 3, "completion_tokens": 1},
        }
        await instance.answer(0, first)
        again = await instance.asked(1)
        assert again.target == "/v1/completions"
        assert again.body["prompt"] == [*PROMPT, 4]
        assert again.body["max_tokens"] == 8
        assert again.body["logprobs"] == 1
        assert again.body["temperature"] == 0.5
        assert "messages" not in again.body
        await instance.answer(1, completion([5], prompt=[*PROMPT, 4], logprobs=True))
        answer = await call.json()
        choice = answer["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "w4 w5 "}
        assert [c["logprob"] for c in choice["logprobs"]["content"]] == [-0.4, -0.5]
        assert choice["logprobs"]["content"][1]["top_logprobs"][0]["token"] == "w5 "
        assert answer["object"] == "chat.completion"
        assert "token_ids" not in choice

    @pytest.mark.scene(interruption=PARTIAL)
    async def test_a_chat_with_tools_starts_over(self, stage, instance) -> None:
        tool = {"type": "function", "function": {"name": "add"}}
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 9, "tools": [tool]}
        call = stage.call(body, "/v1/chat/completions")
        await instance.asked()
        await stage.update(1, instance)
        said: dict[str, Any] = {
            "prompt_token_ids": PROMPT,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "<tool_ca"},
                    "finish_reason": "abort",
                    "token_ids": [4],
                }
            ],
            "usage": {"prompt_tokens": 3, "completion_tokens": 1},
        }
        await instance.answer(0, said)
        again = await instance.asked(1)
        assert (again.target, again.body["messages"]) == ("/v1/chat/completions", messages)
        assert again.body["max_tokens"] == 9
        called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
        choice = {**said["choices"][0], "message": called, "finish_reason": "tool_calls"}
        await instance.answer(1, {**said, "choices": [choice]})
        answer = await call.json()
        assert answer["choices"][0]["message"] == called
        assert [s["version"] for s in segments(answer)] == [1]
        stage.settled()

    @pytest.mark.scene(interruption=PARTIAL)
    async def test_generate_joins_its_own_dialect(self, stage, instance) -> None:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 9, "logprobs": 0}}
        call = stage.call(body, "/inference/v1/generate")
        await instance.asked()
        await stage.update(1, instance)
        await instance.answer(0, generated([4], "abort", "0"))
        again = await instance.asked(1)
        assert again.body["token_ids"] == [*PROMPT, 4]
        assert again.body["sampling_params"] == {"max_tokens": 8, "logprobs": 0, "n": 1}
        # An older vLLM, which names tokens otherwise.
        named = generated([5], "stop", "1")
        named["choices"][0]["logprobs"] = {"content": [{"token": "token_id:5", "logprob": -1}]}
        await instance.answer(1, named)
        answer = await call.json()
        choice = answer["choices"][0]
        assert choice["token_ids"] == [4, 5]
        assert choice["logprobs"]["content"] == [
            {"token": "token_id:4", "token_id": 4, "logprob": -0.4},
            {"token": "token_id:5", "token_id": 5, "logprob": -1},
        ]
        assert [s["version"] for s in segments(answer)] == [0, 1]
        assert not stage.scheduler.state.anomalies

    async def test_reported_versions_replace_expected_ones(self, stage, instance) -> None:
        """Where its instance cannot be asked."""
        call = stage.call({"token_ids": PROMPT}, "/inference/v1/generate")
        await instance.answer(0, generated([4], "stop", "9"))
        answer = await call.json()
        assert [s["version"] for s in segments(answer)] == [9]
        assert answer["choices"][0]["logprobs"]["content"] == [
            {"token": "token_id:4", "token_id": 4, "logprob": -0.4}
        ]
        assert stage.scheduler.state.progress.version == 9
        assert stage.driver.versions.contradictions == {"newer": 1}
        assert stage.scheduler.state.anomalies == {}

    @pytest.mark.scene(interruption=PARTIAL)
    async def test_an_answer_without_token_ids_restarts(self, stage, instance) -> None:
        call = stage.call()
        await instance.asked()
        await stage.update(1, instance)
        old = completion([4, 5], "abort")
        del old["choices"][0]["token_ids"]
        await instance.answer(0, old)
        assert (await instance.asked(1)).body["prompt"] == PROMPT
        await instance.answer(1, completion([6, 7]))
        assert (await call.json())["choices"][0]["text"] == text_of([6, 7])

    async def test_a_response_is_made_in_segments_of_the_budget(self) -> None:
        instance = Instance()
        segmented = {**PARTIAL, "segment_tokens": 2}
        async with Stage(instance, interruption=segmented) as stage:
            call = stage.call({**BODY, "max_tokens": 3})
            assert (await instance.asked()).body["max_tokens"] == 2
            await instance.answer(0, completion([4, 5], "length", prompt=PROMPT))
            assert (await instance.asked(1)).body["max_tokens"] == 1
            await instance.answer(1, completion([6], "length", prompt=[*PROMPT, 4, 5]))
            answer = await call.json()
            assert answer["choices"][0]["text"] == text_of([4, 5, 6])
            assert answer["choices"][0]["finish_reason"] == "length"


class TestStreams:
    async def test_stream_events_pass_unchanged(self, stage, instance) -> None:
        call = stage.call({**BODY, "stream": True})
        assert (await instance.asked()).body["return_token_ids"] is True
        await instance.event(0, chunk([4]), chunk([5]))
        assert call.data.count(b"data: ") == 2
        await instance.event(0, chunk([6], "stop"), end=True)
        events = await call.events()
        assert [e["choices"][0]["text"] for e in events[:-1]] == ["w4 ", "w5 ", "w6 "]
        assert events[-1] == b"[DONE]"
        assert [s["end"] for s in segments(events[2])] == [3]
        stage.settled()

    async def test_a_stream_without_finish_reason_ends_with_stop(self, stage, instance) -> None:
        call = stage.call({**BODY, "stream": True})
        await instance.event(0, chunk([4]), end=True)
        events = await call.events()
        assert events[0]["choices"][0]["text"] == "w4 "
        assert events[1]["choices"][0]["finish_reason"] == "stop"
        assert events[2:] == [b"[DONE]"]
        stage.settled()

    async def test_a_long_stream_goes_on_with_every_token(self, stage, first, second) -> None:
        call = stage.call({**BODY, "stream": True, "max_tokens": 400})
        await first.event(0, *(chunk([token]) for token in range(10, 160)))
        (await first.asked()).receiver.on_error(InstanceError("reset"))
        again = await second.asked()
        assert again.body["prompt"] == [*PROMPT, *range(10, 160)]
        assert again.body["max_tokens"] == 250
        await second.event(0, chunk([200], "stop"), end=True)
        events = await call.events()
        assert [s["end"] for s in segments(events[-2])] == [150, 151]

    async def test_a_dead_instances_stream_goes_on_elsewhere(self, stage, first, second) -> None:
        call = stage.call({**BODY, "stream": True})
        await first.event(0, chunk([4]), chunk([5, 6]))
        (await first.asked()).receiver.on_error(InstanceError("reset"))
        again = await second.asked()
        assert again.body["prompt"] == [*PROMPT, 4, 5, 6]
        assert again.body["max_tokens"] == 7
        await second.event(0, {**chunk([7]), "id": "cmpl-2"}, chunk([8], "stop"), end=True)
        events = await call.events()
        texts = [e["choices"][0]["text"] for e in events[:-1]]
        assert "".join(texts) == text_of([4, 5, 6, 7, 8])
        assert {e["id"] for e in events[:-1]} == {"cmpl-1"}
        assert [s["instance"] for s in segments(events[-2])] == ["i0", "i1"]

    @pytest.mark.scene(interruption=PARTIAL)
    async def test_an_abort_never_reaches_the_client(self, stage, instance) -> None:
        call = stage.call({**BODY, "stream": True})
        await instance.event(0, chunk([4]))
        await stage.update(1, instance)
        await instance.event(0, chunk([5], "abort"), end=True)
        assert (await instance.asked(1)).body["prompt"] == [*PROMPT, 4, 5]
        await instance.event(1, chunk([6], "stop"), end=True)
        events = await call.events()
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None, None, "stop"]
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == text_of([4, 5, 6])
        assert events.count(b"[DONE]") == 1
        assert [s["version"] for s in segments(events[-2])] == [0, 1]

    @pytest.mark.scene(interruption=PARTIAL)
    async def test_a_stream_interrupted_at_its_limit_ends_with_length(
        self, stage, instance
    ) -> None:
        call = stage.call({**BODY, "stream": True, "max_tokens": 2})
        await instance.event(0, chunk([4]))
        await stage.update(1, instance)
        await instance.event(0, chunk([5], "abort"), end=True)
        events = await call.events()
        assert [e["choices"][0]["text"] for e in events[:-1]] == ["w4 ", "w5 ", ""]
        assert events[-2]["choices"][0]["finish_reason"] == "length"

    async def test_a_chats_stream_goes_on_as_chat(self, stage, first, second) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        call = stage.call(body, "/v1/chat/completions")
        opening = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "prompt_token_ids": PROMPT,
            "choices": [{"index": 0, "delta": {"role": "assistant"}, "token_ids": None}],
        }
        said = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": {"content": "w4 "}, "token_ids": [4]}],
        }
        await first.event(0, opening, said)
        (await first.asked()).receiver.on_error(InstanceError("reset"))
        again = await second.asked()
        assert again.target == "/v1/completions"
        assert again.body["prompt"] == [*PROMPT, 4]
        await second.event(0, chunk([5]), chunk([6], "stop"), end=True)
        events = await call.events()
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == text_of(
            [4, 5, 6]
        )
        assert {e["object"] for e in events[:-1]} == {"chat.completion.chunk"}

    async def test_a_stream_that_cannot_continue_ends_in_an_error(
        self, stage, first, second
    ) -> None:
        call = stage.call({**BODY, "stream": True})
        await first.event(0, {"id": "x", "choices": [{"text": "hello"}]})
        (await first.asked()).receiver.on_error(InstanceError("reset"))
        events = await call.events()
        assert "broke off" in str(events[-1]["error"])
        assert not second.pool.asked
        stage.settled()

    async def test_an_error_before_the_stream_is_a_plain_response(self, stage, instance) -> None:
        call = stage.call({**BODY, "stream": True})
        receiver = (await instance.asked()).receiver
        receiver.on_head(400, [])
        receiver.on_data(b'{"error":{"message":"no"}}')
        receiver.on_end()
        assert (await call.json())["error"]["message"] == "no"
        assert call.status == 400


class TestSeveral:
    async def test_samples_are_requests_of_their_own(self, stage, first, second) -> None:
        call = stage.call({**BODY, "n": 2, "seed": 5})
        one, two = await first.asked(), await second.asked()
        assert one.body["n"] == two.body["n"] == 1
        assert {one.body["seed"], two.body["seed"]} == {5, 6}
        assert len(stage.scheduler.state.siblings) == 1
        await second.answer(0, completion([5]))
        await first.answer(0, completion([4]))
        answer = await call.json()
        assert [c["index"] for c in answer["choices"]] == [0, 1]
        assert [c["text"] for c in answer["choices"]] == ["w4 ", "w5 "]
        assert [c["rollout_sched"]["segments"][0]["instance"] for c in answer["choices"]] == [
            "i0",
            "i1",
        ]
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 2
        stage.settled()

    async def test_each_prompt_and_sample_is_one_choice(self, stage, instance) -> None:
        call = stage.call({**BODY, "prompt": [[1], [2, 3]], "n": 2})
        prompts = [(await instance.asked(k)).body["prompt"] for k in range(4)]
        assert prompts == [[1], [1], [2, 3], [2, 3]]
        for k in range(4):
            await instance.answer(k, completion([k + 10]))
        answer = await call.json()
        assert [c["text"] for c in answer["choices"]] == [f"w{k + 10} " for k in range(4)]

    async def test_stream_events_carry_the_index_of_their_sample(self, stage, instance) -> None:
        call = stage.call({**BODY, "n": 2, "stream": True})
        await instance.event(1, chunk([5]))
        await instance.event(0, chunk([4], "stop"), end=True)
        await instance.event(1, chunk([6], "stop"), end=True)
        events = await call.events()
        texts: dict[int, str] = {0: "", 1: ""}
        for event in events[:-1]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == {0: "w4 ", 1: "w5 w6 "}
        assert events.count(b"[DONE]") == 1
        stage.settled()


class TestSiblingsAndSessions:
    async def test_the_same_prompt_is_the_same_group(self, stage) -> None:
        stage.call()
        stage.call()
        stage.call({**BODY, "prompt": [9, 9, 9]})
        stage.call(x_group_id="mine")
        assert len(stage.scheduler.state.siblings) == 3

    @pytest.mark.scene(routing="session_affinity")
    async def test_a_session_stays_where_its_kv_is(self, stage, first, second) -> None:
        call = stage.call(x_session_id="talk")
        await first.answer(0, completion([4]))
        await call.json()
        stage.call(x_session_id="talk")
        await first.asked(1)
        stage.driver.tell(WeightsPublished(1))

    async def test_sessions_do_not_avalanche(self) -> None:
        instances = [Instance(f"i{k}", slots=256) for k in range(4)]
        async with Stage(*instances, routing="session_affinity") as stage:
            first = stage.call(x_session_id="s")
            await instances[0].answer(0, completion([4]))
            await first.json()
            for _ in range(64):
                stage.call(x_session_id="s")
            await until(lambda: sum(len(i.pool.asked) for i in instances) == 65)
            assert max(len(i.pool.asked) for i in instances) < 30
