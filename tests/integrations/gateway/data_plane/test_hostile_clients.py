"""What one client asks for costs the others nothing, and every call ends once."""

from __future__ import annotations

import asyncio
import json
import logging
import tracemalloc
from typing import Any

import pytest

from rollout_sched.core.model.events import RequestFinished, RequestSubmitted
from rollout_sched.live.ports import InstanceError
from tests.integrations.gateway.data_plane.stage import BODY, PARTIAL, PROMPT, Stage
from tests.integrations.gateway.scripted import Call, Instance, chunk, completion
from tests.live.scripted import until

ENDPOINTS = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 10},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 10}},
}


def refusal(call: Call, status: int = 400) -> str:
    assert call.status == status, call.data
    return str(json.loads(call.data)["error"]["message"])


class TestCountedBeforeItIsMade:
    @pytest.mark.parametrize("n", [16_385, 1_000_000_000, 2**63 - 1])
    @pytest.mark.parametrize("path", ENDPOINTS)
    async def test_more_responses_than_a_call_may_ask_for(self, path: str, n: int, stage) -> None:
        """All their bodies were made before any limit was looked at."""
        body = json.loads(json.dumps(ENDPOINTS[path]))
        body.get("sampling_params", body)["n"] = n
        text = refusal(stage.call(body, path))
        assert f"asks for {n} responses" in text
        assert "the limit per call is 16384; send it as several calls" in text
        stage.settled()

    async def test_bytes_are_those_that_go_to_instances(self) -> None:
        async with Stage() as stage:
            for body, held in (
                (BODY, lambda raw: len(raw)),
                ({**BODY, "n": 3}, lambda raw: 3 * len(raw)),
                (
                    {**BODY, "prompt": ["a" * 100, "b" * 50], "n": 3},
                    lambda raw: 6 * (len(raw) - 158) + 3 * (102 + 52),
                ),
            ):
                call = stage.call(body)
                assert stage.data_plane.calls.open.body_bytes == held(call.body)
                call.hang_up()
                stage.settled()

    @pytest.mark.parametrize("asks", [{"n": 128}, {"n": 128, "seed": 1, "cache_salt": "x"}])
    async def test_while_they_wait_responses_share_the_clients_body(
        self, asks: dict[str, Any]
    ) -> None:
        body = json.dumps({**BODY, "prompt": list(range(300_000)), **asks}).encode()
        async with Stage() as stage:
            tracemalloc.start()
            try:
                stage.call(body)
                held, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert stage.data_plane.calls.open.requests == 128
            assert held < len(body)
            assert peak < 3 * len(body)


class TestPoison:
    async def test_an_answer_that_cannot_continue_is_the_requests_fault(self) -> None:
        first, second = Raw("i0"), Raw("i1")
        async with Stage(first, second) as stage:
            body = b'{"prompt":[1,2,3],"max_tokens":10,"temperature":1e999,"stream":true}'
            call = stage.call(body)
            receiver = first.pool.asked[0].receiver
            receiver.on_head(200, [])
            receiver.on_data(b"data: " + json.dumps(chunk([4])).encode() + b"\n\n")
            receiver.on_error(InstanceError("reset"))
            events = await call.events()
            assert "cannot be passed on" in events[-1]["error"]["message"]
            assert not second.bodies
            stage.settled()

    @pytest.mark.parametrize("body", [BODY, {**BODY, "n": 2}, {**BODY, "stream": True}])
    async def test_a_path_outside_ascii_is_refused(
        self, body: dict[str, Any], stage, instance
    ) -> None:
        call = Call("", body)
        call.target = b"/v1/completions?\xff"
        stage.data_plane.handle(call)
        assert "percent-encode" in refusal(call)
        assert not instance.pool.asked
        stage.settled()

    @pytest.mark.parametrize("n", [1, 2])
    @pytest.mark.parametrize(
        "extra", [b'"x":"\xff"', b'"x":"\\ud800"', b'"x":%b' % (b"[" * 5000 + b"]" * 5000)]
    )
    async def test_invalid_json_is_refused_by_the_gateway(
        self, extra: bytes, n: int, stage, instance
    ) -> None:
        assert refusal(stage.call(b'{"prompt":[1],"n":%d,%b}' % (n, extra)))
        assert not instance.pool.asked

    @pytest.mark.parametrize("prompt", [b"[1,2x]", b"[1,2}]"])
    async def test_skipped_ids_are_read_where_a_body_is_changed(self, prompt: bytes, stage) -> None:
        long = prompt.replace(b"[1", b"[1" + b",1" * 2000)
        assert "cannot be read" in refusal(stage.call(b'{"prompt":%b,"n":2}' % long))
        salted = stage.call(b'{"prompt":%b,"cache_salt":"x"}' % long)
        assert refusal(salted)
        stage.settled()


class Raw(Instance):
    """An instance that is asked with JSON that not everybody reads."""

    def __init__(self, name: str = "i0") -> None:
        super().__init__(name)
        self.bodies: list[bytes] = []

    def pass_on(
        self, order: str, engine: str, path: str, lines: bytes, body: bytes, to: Any
    ) -> Any:
        self.bodies.append(body)
        return super().pass_on(order, engine, path, lines, b"{}", to)


class TestOursIsTheValueThatCounts:
    @pytest.mark.parametrize("theirs", [b"false", b"null", b'true,"return_token_ids":false'])
    @pytest.mark.scene(interruption=PARTIAL)
    async def test_the_gateways_request_for_token_ids_wins(
        self, theirs: bytes, stage, instance
    ) -> None:
        body = b'{"prompt":[1,2,3],"max_tokens":10,"return_token_ids":%b}' % theirs
        call = stage.call(body)
        assert (await instance.asked()).body["return_token_ids"] is True
        await instance.answer(0, completion([4], prompt=PROMPT))
        assert "token_ids" not in (await call.json())["choices"][0]

    @pytest.mark.scene(interruption={**PARTIAL, "segment_tokens": 20})
    async def test_a_null_limit_means_as_many_as_fit(self, stage, instance) -> None:
        """It counted as 16 here, and the server made as many as fit."""
        stage.call({"prompt": PROMPT, "max_tokens": None})
        stage.call({"prompt": PROMPT})
        assert (await instance.asked(0)).body["max_tokens"] == 20
        assert "max_tokens" not in (await instance.asked(1)).body


class Stumbling(Call):
    """A client's request that raises when it is looked at for the so-maniest time."""

    def __init__(self, body: Any, at: int) -> None:
        super().__init__("/v1/completions", body)
        self.looks = 0
        self.at = at
        self.answers = 0

    def answer(self, status: int, headers: Any, body: bytes) -> None:
        self.answers += 1
        super().answer(status, headers, body)

    def __getattribute__(self, name: str) -> Any:
        if name in ("fields", "headers", "body", "target", "disconnected"):
            self.looks += 1
            if self.looks == self.at:
                raise RuntimeError("stumbled")
        return super().__getattribute__(name)


KINDS = [
    BODY,
    {**BODY, "stream": True},
    {**BODY, "n": 3},
    {**BODY, "n": 3, "stream": True},
    {**BODY, "prompt": [[1], [2], [3]]},
]


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.usefixtures("quiet")
class TestEveryCallEndsOnce:
    @pytest.mark.parametrize("body", KINDS)
    async def test_an_exception_during_admission_ends_the_call(self, body: dict[str, Any]) -> None:
        at, stumbled = 0, True
        while stumbled:
            at += 1
            async with Stage(Instance(slots=9)) as stage:
                call = Stumbling(body, at)
                stage.data_plane.handle(call)
                stumbled = call.answers > 0
                if stumbled:
                    assert call.status == 500
                    assert (
                        stage.data_plane.calls.open.requests,
                        stage.data_plane.calls.open.body_bytes,
                    ) == (
                        0,
                        0,
                    )
                    assert not stage.data_plane.calls.replies
        assert at > 4

    @pytest.mark.parametrize("body", KINDS)
    @pytest.mark.parametrize("at", [1, 2, 3])
    async def test_an_observers_exception_ends_no_call(
        self, body: dict[str, Any], at: int, stage, instance
    ) -> None:
        """Answered with what went wrong, or as if nothing had; never both, never neither."""
        seen = 0

        def observe(now: float, event: Any, actions: Any) -> None:
            nonlocal seen
            if isinstance(event, RequestSubmitted):
                seen += 1
                if seen == at:
                    raise RuntimeError("an observer's own")

        stage.driver.pump.observers.append(observe)
        call = stage.call(body)
        await end_all(instance, bool(body.get("stream")))
        async with asyncio.timeout(5):
            await call.over.wait()
        assert call.status in (200, 500)
        stage.settled()
        assert not stage.data_plane.calls.replies
        assert stage.data_plane.calls.pacer.streams == 0

    @pytest.mark.parametrize("n", [1, 2])
    async def test_an_end_that_cannot_be_written_ends_the_call(
        self, n: int, stage, instance
    ) -> None:
        """It raised into another call's turn, and the stream stayed open for good."""

        def observe(now: float, event: Any, actions: Any) -> None:
            if isinstance(event, RequestFinished):
                raise RuntimeError("an observer's own")

        stage.driver.pump.observers.append(observe)
        call = stage.call({**BODY, "stream": True, "n": n})
        await end_all(instance, True)
        last = (await call.events())[-1]
        assert last == b"[DONE]" or last["error"]["code"] == 500
        stage.settled()
        assert stage.data_plane.calls.pacer.streams == 0

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("at", [0, 1, 2])
    async def test_an_invalid_sample_ends_the_call(
        self, at: int, stream: bool, stage, instance
    ) -> None:
        prompts = [[k] for k in range(3)]
        prompts[at] *= 100_000
        stage.driver.fleet.max_model_len = 200_000  # of an instance that was lost since
        call = stage.call({**BODY, "prompt": prompts, "stream": stream})
        assert "takes more than" in refusal(call)
        stage.settled()
        for number in range(at):
            order = list(instance.names)[number]
            await until(lambda order=order: ("abort", order) in instance.calls)
            await instance.answer(number, completion([4], "abort"))
        await until(lambda: not stage.driver.front.attempts.on("i0"))
        stage.settled()

    async def test_a_child_that_fails_at_once_is_the_answer(self) -> None:
        instance = Refusing(slots=9)
        async with Stage(instance) as stage:
            call = stage.call({**BODY, "n": 5})
            assert "not by us" in refusal(call)
            assert instance.begun == 1
            stage.settled()

    @pytest.mark.parametrize("body", KINDS)
    async def test_a_shutdown_ends_every_call(self, body: dict[str, Any], stage, instance) -> None:
        """The connections were closed without a word."""
        fresh, begun = stage.call(body), stage.call(body)
        await instance.asked()
        if body.get("stream"):
            children = len(instance.pool.asked) // 2
            await instance.event(children, chunk([4]))
        stage.data_plane.refuse("the gateway is shutting down")
        assert "shutting down" in refusal(fresh, 503)
        assert fresh.answer_headers[b"retry-after"] == b"1"
        if body.get("stream"):
            assert (await begun.events())[-1]["error"]["code"] == 503
            await instance.event(children, chunk([5]))  # nobody is there any more
        else:
            assert refusal(begun, 503)
        late = stage.call(body)
        assert "shutting down" in refusal(late, 503)
        assert late.answer_headers[b"retry-after"] == b"1"
        stage.settled()
        assert stage.data_plane.calls.pacer.streams == 0
        await end_all(instance, False)
        await until(lambda: not stage.driver.front.attempts.on("i0"))
        stage.settled()

    async def test_an_exception_in_another_calls_turn_ends_only_its_call(
        self, stage, instance
    ) -> None:
        """The other call heard of it, and those that waited never had their turn."""
        stream = stage.call({**BODY, "stream": True})
        await instance.event(0, chunk([7]))
        stage.call()
        bad, good = Stumbling(BODY, 4), stage.call
        stage.data_plane.handle(bad)
        after = good()
        await bad.json()
        assert bad.status == 500
        await instance.answer(2, completion([4]))
        assert (await after.json())["choices"][0]["text"] == "w4 "
        await instance.event(0, chunk([8], "stop"), end=True)
        assert (await stream.events())[-1] == b"[DONE]"


class Refusing(Instance):
    """An instance that says no before the call has come back."""

    begun = 0

    def pass_on(
        self, order: str, engine: str, path: str, lines: bytes, body: bytes, to: Any
    ) -> Any:
        from rollout_sched.live.ports import RequestRejected

        self.begun += 1
        raise RequestRejected("no", 400, b'{"error":{"message":"not by us"}}')


async def end_all(instance: Instance, stream: bool) -> None:
    """Every response comes, whether it was asked to stop or not."""
    await asyncio.sleep(0)
    stopped = any(call[0] == "abort" for call in instance.calls)
    for number in range(len(instance.pool.asked)):
        if stream:
            await instance.event(number, chunk([4], "stop"), end=True)
        else:
            await instance.answer(number, completion([4], "abort" if stopped else "stop"))
