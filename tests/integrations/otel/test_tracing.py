"""Spans of a gateway at work, by the real SDK, and what instances hear of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollout_sched.client import Prompt, Reload, RolloutScheduler
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.integrations.otel.tracing import Tracing, in_named_context
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from rollout_sched.simulators.replay.scenario import load_scenario
from tests.integrations.vllm.scripted import ScriptedVllm, generated

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
NAMED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


class Heard(ScriptedVllm):
    """Keeps the traces that generating calls name."""

    def __init__(self) -> None:
        super().__init__()
        self.traces: list[list[str]] = []
        made = generated([10, 11, 12], "length", [("0", 0, 3)])
        usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
        self.answer("/inference/v1/generate", {**made, "usage": usage})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/inference/v1/generate":
            self.traces.append(request.headers.getall("traceparent", []))
        return await super()._serve(request)


class Traced:
    def __init__(self, service: Service) -> None:
        self.service = service
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(service.live.driver, provider)
        service.app.middlewares.append(in_named_context)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


@asynccontextmanager
async def before(urls: list[str], policy: str, **options: Any) -> AsyncIterator[Traced]:
    service = Service(
        Options(policy=policy, instances=urls, port=0, grace_s=0.5, **options), lambda said: None
    )
    the = Traced(service)
    await service.open()
    try:
        yield the
    finally:
        await service.close()
        the.tracing.close()


@asynccontextmanager
async def traced(policy: str = "dplb", instances: int = 1, **options: Any) -> AsyncIterator[Traced]:
    spec = load_scenario("qwen7b-8xh100").instance
    servers = [FakeServer(EngineSettings(spec, speed=50.0, seed=n)) for n in range(instances)]
    ports = [await server.start("127.0.0.1", 0) for server in servers]
    async with before([f"http://127.0.0.1:{port}" for port in ports], policy, **options) as the:
        yield the
    for server in servers:
        await server.close()


def run(scene: Any) -> None:
    asyncio.run(asyncio.wait_for(scene, 60))


async def ask(url: str, **headers: str) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True}
    async with (
        aiohttp.ClientSession(url) as client,
        client.post("/v1/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status == 200


@pytest.mark.real_time
async def test_a_client_s_request_with_its_attempt() -> None:
    async with traced() as the:
        await ask(the.service.url, **NAMED)
        (sample,), (attempt,) = the.spans("rl.sample"), the.spans("text_completion")
        assert sample.context.trace_id == int(TRACE, 16)
        assert sample.parent is not None
        assert sample.parent.span_id == int(SPAN, 16)
        assert attempt.parent is not None
        assert attempt.parent.span_id == sample.context.span_id
        about = dict(attempt.attributes or {})
        assert about["server.address"] == next(iter(the.service.live.driver.supervisors))
        assert about["gen_ai.usage.input_tokens"] == 3
        assert about["gen_ai.usage.output_tokens"] == 20
        assert about["gen_ai.response.finish_reasons"] == ("length",)
        assert about["rl.policy.version"] == 0
        assert "rl.resumed_from" not in about


@pytest.mark.real_time
async def test_without_a_parent_it_is_a_trace_of_its_own() -> None:
    async with traced() as the:
        await ask(the.service.url)
        (sample,) = the.spans("rl.sample")
        assert sample.parent is None


@pytest.mark.real_time
async def test_a_trainer_s_samples_and_its_weights(tmp_path: Path) -> None:
    async with traced("april", 2, prompts_per_step=1) as the:
        async with RolloutScheduler.connect(the.service.url) as rollouts:
            await rollouts.submit([Prompt("g", [1] * 9, samples=3, max_tokens=30)])
            batch = await anext(rollouts.batches())
            (tmp_path / "1").mkdir()
            weights = Reload(f"{tmp_path}/{{version}}", visible_here=False)
            await rollouts.publish_weights(batch.version + 1, weights, wait=True)
        samples = the.spans("rl.sample")
        assert len(samples) == 3
        assert {dict(one.attributes or {})["rl.group.id"] for one in samples} == {"g"}
        by_id = {one.context.span_id for one in samples}
        attempts = the.spans("text_completion")
        assert {one.parent.span_id for one in attempts if one.parent} == by_id
        (sync,), loads = the.spans("rl.sync"), the.spans("rl.sync.load")
        assert dict(sync.attributes or {}) == {"rl.policy.version": 1, "rl.instances": 2}
        assert {one.parent.span_id for one in loads if one.parent} == {sync.context.span_id}
        where = {dict(one.attributes or {})["server.address"] for one in loads}
        assert where == set(the.service.live.driver.supervisors)


@pytest.mark.real_time
async def test_no_span_contains_what_was_said() -> None:
    said, key = "a prompt of words", "a-key-of-a-client"
    async with traced() as the, aiohttp.ClientSession(the.service.url) as client:
        body = {"prompt": said, "max_tokens": 20, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {key}"}
        async with client.post("/v1/completions", json=body, headers=headers) as answer:
            (choice,) = (await answer.json())["choices"]
        spans = the.spans("rl.sample") + the.spans("text_completion")
        assert len(spans) == 2
        for words in (said, key, *choice["text"].split()):
            assert not any(words in span.to_json() for span in spans)


@pytest.mark.real_time
async def test_a_trainer_that_names_its_trace_is_the_parent() -> None:
    async with traced("round_robin_sync", prompts_per_step=1) as the:
        group = {"uid": "g", "prompt_ids": [1, 2], "samples": 1, "max_tokens": 5}
        async with aiohttp.ClientSession(the.service.url) as trainer:
            path = "/rollout/v1/groups"
            async with trainer.post(path, json=[group], headers=NAMED) as answer:
                assert answer.status < 300, await answer.text()
            async with trainer.post("/rollout/v1/batches/next", json={}) as answer:
                assert answer.status == 200
        (sample,) = the.spans("rl.sample")
        assert sample.context.trace_id == int(TRACE, 16)


@pytest.mark.real_time
@pytest.mark.parametrize("whose", ["a client", "the trainer"])
async def test_an_instance_hears_of_the_attempt_alone(whose: str) -> None:
    server = Heard()
    async with (
        server.serving(),
        before([server.url], "round_robin_sync", prompts_per_step=1) as the,
        aiohttp.ClientSession(the.service.url, headers=NAMED) as client,
    ):
        server.traces.clear()  # its joining's
        if whose == "a client":
            body: Any = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}}
            async with client.post("/inference/v1/generate", json=body) as answer:
                assert answer.status == 200
        else:
            body = [{"uid": "g", "prompt_ids": [1, 2], "samples": 1, "max_tokens": 3}]
            async with client.post("/rollout/v1/groups", json=body) as answer:
                assert answer.status < 300
            async with client.post("/rollout/v1/batches/next", json={}) as answer:
                assert answer.status == 200
        (attempt,) = the.spans("text_completion")
        assert server.traces == [[f"00-{TRACE}-{attempt.context.span_id:016x}-01"]]


@pytest.mark.real_time
async def test_a_resumed_attempt_names_its_first_instance() -> None:
    async with traced("april", 2) as the, aiohttp.ClientSession() as client:
        driver = the.service.live.driver
        body = {"prompt": [1, 2], "max_tokens": 4000, "ignore_eos": True, "stream": True}
        async with client.post(f"{the.service.url}/v1/completions", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            (first,) = [one.id for one in driver.view.instances if one.in_flight]
            await driver.remove_instance(first)
            assert (await answer.text()).endswith("data: [DONE]\n\n")
        lost, resumed = the.spans("text_completion")
        assert dict(lost.attributes or {})["error.type"] == "instance"
        assert lost.status.status_code is trace.StatusCode.ERROR
        about = dict(resumed.attributes or {})
        assert about["server.address"] != first
        assert about["rl.resumed_from"] == first
        assert resumed.links[0].context.span_id == lost.context.span_id
