"""What one client asks for costs the others nothing, and every call ends once."""

from __future__ import annotations

import asyncio
import json
import logging
import tracemalloc
from typing import Any

import pytest

from rollout_sched.core.model.events import RequestFinished, RequestSubmitted
from rollout_sched.integrations.gateway.data_plane.reply import Limits
from rollout_sched.live.ports import InstanceError
from tests.integrations.gateway.data_plane.test_data_plane import BODY, PARTIAL, PROMPT, Stage
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
    @pytest.mark.parametrize("n", [1025, 1_000_000_000, 10**30])
    @pytest.mark.parametrize("path", ENDPOINTS)
    async def test_more_responses_than_a_call_may_ask_for(self, path: str, n: int) -> None:
        """All their bodies were made before any limit was looked at."""
        async with Stage(Instance()) as stage:
            body = json.loads(json.dumps(ENDPOINTS[path]))
            body.get("sampling_params", body)["n"] = n
            text = refusal(stage.call(body, path))
            assert f"asks for {n} responses" in text
            assert "the limit per call is 1024; send it as several calls" in text
            stage.settled()

    async def test_prompts_count_as_well(self) -> None:
        limits = Limits(samples=5)
        async with Stage(Instance(), data_plane={"limits": limits}) as stage:
            assert "asks for 6" in refusal(stage.call({**BODY, "prompt": [[1]] * 3, "n": 2}))
            assert "more than 5 prompts" in refusal(stage.call({**BODY, "prompt": ["a"] * 6}))
            assert stage.call({**BODY, "prompt": ["a"] * 5}).status == 0

    async def test_a_call_that_never_fits_has_no_retry_after(self) -> None:
        limits = Limits(requests=3, body_bytes=300)
        async with Stage(data_plane={"limits": limits}) as stage:
            assert "the limit per call is 3" in refusal(stage.call({**BODY, "n": 4}))
            text = refusal(stage.call({**BODY, "n": 3, "user": "x" * 60}), 413)
            assert "the limit for all bodies is 300" in text
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
                assert stage.data_plane.calls.body_bytes == held(call.body)
                assert call.on_disconnect is not None
                call.on_disconnect()
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
            assert stage.data_plane.calls.requests == 128
            assert held < len(body)
            assert peak < 3 * len(body)


class TestPoison:
    @pytest.mark.parametrize(
        "spice",
        [
            b'"temperature":1e999',
            b'"top_k":123456789012345678901234567890',
            b'"logit_bias":{"5":-1e999}',
        ],
    )
    @pytest.mark.parametrize("beside", [b'"cache_salt":"x"', b'"n":2', b'"cache_salt":null'])
    async def test_values_pass_as_they_were_written(self, spice: bytes, beside: bytes) -> None:
        """Decoded and encoded again they raised, for each instance in turn."""
        instance = Raw()
        async with Stage(instance) as stage:
            body = b'{"prompt":[1,2,3],"max_tokens":10,%b,%b}' % (spice, beside)
            call = stage.call(body)
            await until(lambda: instance.bodies)
            assert call.status == 0
            assert spice in instance.bodies[0]

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
    async def test_a_path_outside_ascii_is_refused(self, body: dict[str, Any]) -> None:
        instance = Instance()
        async with Stage(instance) as stage:
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
    async def test_invalid_json_is_refused_by_the_gateway(self, extra: bytes, n: int) -> None:
        instance = Instance()
        async with Stage(instance) as stage:
            assert refusal(stage.call(b'{"prompt":[1],"n":%d,%b}' % (n, extra)))
            assert not instance.pool.asked

    @pytest.mark.parametrize("prompt", [b"[1,2x]", b"[1,2}]"])
    async def test_skipped_ids_are_read_where_a_body_is_changed(self, prompt: bytes) -> None:
        async with Stage(Instance()) as stage:
            long = prompt.replace(b"[1", b"[1" + b",1" * 2000)
            assert "cannot be read" in refusal(stage.call(b'{"prompt":%b,"n":2}' % long))
            salted = stage.call(b'{"prompt":%b,"cache_salt":"x"}' % long)
            assert refusal(salted)
            stage.settled()

    @pytest.mark.parametrize("seed", [b'"x"', b"1.5", b"[]", b"true", b"1e999", b"9" * 4300])
    async def test_a_seed_that_cannot_be_counted_up(self, seed: bytes) -> None:
        async with Stage(Instance()) as stage:
            for path, body in (
                ("/v1/completions", b'{"prompt":"a","n":2,"seed":%b}'),
                ("/v1/completions", b'{"prompt":["a","b"],"n":2,"seed":%b}'),
                (
                    "/inference/v1/generate",
                    b'{"token_ids":[1],"sampling_params":{"n":2,"seed":%b}}',
                ),
            ):
                assert "`seed` must be a 64-bit integer" in refusal(stage.call(body % seed, path))

    @pytest.mark.parametrize(
        ("headers", "says"),
        [
            ({"content_encoding": "gzip"}, "'gzip' is not supported"),
            ({"content_type": "application/json; charset=utf-16"}, "'utf-16' is not supported"),
            ({"content_type": 'application/json;CHARSET="latin1"'}, "'latin1' is not supported"),
        ],
    )
    async def test_codings_are_refused_as_such(self, headers: dict[str, str], says: str) -> None:
        async with Stage(Instance()) as stage:
            assert says in refusal(stage.call(**headers), 415)
            for good in ("application/json", "application/json; charset=UTF-8", "text/plain"):
                assert stage.call(content_type=good, content_encoding="identity").status == 0


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
    @pytest.mark.parametrize(
        "theirs",
        [
            b'"cache_salt":null',
            b'"cache_salt":"a","cache_salt":null',
            b'"cache\\u005fsalt":null',
            b'"cache_salt":""',
        ],
    )
    async def test_the_gateways_salt_wins(self, theirs: bytes) -> None:
        """Else the KV of old weights is read under new ones."""
        instance = Instance()
        async with Stage(instance) as stage:
            stage.call(b'{"prompt":[1,2,3],"max_tokens":10,%b}' % theirs)
            assert (await instance.asked()).body["cache_salt"] == "v0"

    @pytest.mark.parametrize("theirs", [b"false", b"null", b'true,"return_token_ids":false'])
    async def test_the_gateways_request_for_token_ids_wins(self, theirs: bytes) -> None:
        instance = Instance()
        async with Stage(instance, interruption=PARTIAL) as stage:
            body = b'{"prompt":[1,2,3],"max_tokens":10,"return_token_ids":%b}' % theirs
            call = stage.call(body)
            assert (await instance.asked()).body["return_token_ids"] is True
            await instance.answer(0, completion([4], prompt=PROMPT))
            assert "token_ids" not in (await call.json())["choices"][0]

    @pytest.mark.parametrize("path", ENDPOINTS)
    @pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
    async def test_a_segments_limit_wins(self, path: str, field: str) -> None:
        instance = Instance()
        async with Stage(instance, interruption={**PARTIAL, "segment_tokens": 2}) as stage:
            body = json.loads(json.dumps(ENDPOINTS[path]))
            if "chat" in path:
                body[field] = 9
            stage.call(body, path)
            said = (await instance.asked()).body
            told = said.get("sampling_params", said)
            # As vLLM's chat reads it.
            assert (told.get("max_completion_tokens") or told["max_tokens"]) == 2

    async def test_a_null_limit_means_as_many_as_fit(self) -> None:
        """It counted as 16 here, and the server made as many as fit."""
        instance = Instance()
        async with Stage(instance, interruption={**PARTIAL, "segment_tokens": 20}) as stage:
            stage.call({"prompt": PROMPT, "max_tokens": None})
            stage.call({"prompt": PROMPT})
            assert (await instance.asked(0)).body["max_tokens"] == 20
            assert "max_tokens" not in (await instance.asked(1)).body


class TestNames:
    @pytest.mark.parametrize("header", ["X-Session-ID", "X-Group-ID", "X-Request-Id"])
    async def test_a_header_is_bounded(self, header: str) -> None:
        """A hundred thousand sessions of any length were kept, and journaled."""
        async with Stage(Instance(slots=9)) as stage:
            name = header.lower()
            assert stage.call(**{name: "x" * 256}).status == 0
            assert f"`{header}` is longer than 256" in refusal(stage.call(**{name: "x" * 257}))
            assert "is not printable" in refusal(stage.call(**{name: "a\tb"}))


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
                    assert (stage.data_plane.calls.requests, stage.data_plane.calls.body_bytes) == (
                        0,
                        0,
                    )
                    assert not stage.data_plane.calls.replies
        assert at > 4

    @pytest.mark.parametrize("body", KINDS)
    @pytest.mark.parametrize("at", [1, 2, 3])
    async def test_an_observers_exception_ends_no_call(self, body: dict[str, Any], at: int) -> None:
        """Answered with what went wrong, or as if nothing had; never both, never neither."""
        instance = Instance(slots=9)
        async with Stage(instance) as stage:
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
    async def test_an_end_that_cannot_be_written_ends_the_call(self, n: int) -> None:
        """It raised into another call's turn, and the stream stayed open for good."""
        instance = Instance(slots=9)
        async with Stage(instance) as stage:

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
    async def test_an_invalid_sample_ends_the_call(self, at: int, stream: bool) -> None:
        instance = Instance(slots=9)
        async with Stage(instance) as stage:
            prompts = [[k] for k in range(3)]
            prompts[at] *= 100_000
            call = stage.call({**BODY, "prompt": prompts, "stream": stream})
            assert "KV tokens" in refusal(call)
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
    async def test_a_shutdown_ends_every_call(self, body: dict[str, Any]) -> None:
        """The connections were closed without a word."""
        instance = Instance(slots=9)
        async with Stage(instance) as stage:
            fresh, begun = stage.call(body), stage.call(body)
            await instance.asked()
            if body.get("stream"):
                children = len(instance.pool.asked) // 2
                await instance.event(children, chunk([4]))
            stage.data_plane.shut_down()
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

    async def test_an_exception_in_another_calls_turn_ends_only_its_call(self) -> None:
        """The other call heard of it, and those that waited never had their turn."""
        instance = Instance(slots=9)
        async with Stage(instance) as stage:
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
