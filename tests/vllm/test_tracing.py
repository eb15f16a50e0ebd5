"""Spans of real vLLM come below ours: `traceparent` reaches the engine, whoever has asked.

Gateway and vLLM send their spans to the same collector, by OTLP over HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from rollout_sched.client import Prompt, RolloutScheduler
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from tests.integrations.otel.test_export import Collector
from tests.vllm import servers

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
NAMED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
PATIENCE_S = 60
PROMPT = list(range(10, 50))
LIMIT_S = servers.START_LIMIT_S + 120


class Traced:
    """A collector, and what came to it."""

    def __init__(self) -> None:
        self._collector = Collector()

    async def start(self) -> str:
        return await self._collector.start()

    async def close(self) -> None:
        await self._collector.close()

    def spans(self, name: str) -> list[Any]:
        return [
            span
            for request in self._collector.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.name == name
        ]

    async def wait_for(self, name: str, count: int) -> list[Any]:
        """They are sent some time after they have ended."""
        limit = time.monotonic() + PATIENCE_S
        while len(self.spans(name)) < count:
            assert time.monotonic() < limit, f"{count} spans {name!r}: {len(self.spans(name))} came"
            await asyncio.sleep(0.05)
        return self.spans(name)


@asynccontextmanager
async def traced(model: Path, logs: Path) -> AsyncIterator[tuple[Traced, Service]]:
    """A gateway before a server; both are stopped, so that all has been sent, by whoever asks."""
    collector = Traced()
    url = await collector.start()
    flags = ("--enable-scale-out", "--otlp-traces-endpoint", f"{url}/v1/traces")
    told = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with servers.serving(model, logs, *flags, dev_mode=True, core=0, **told) as server:
        instance = await asyncio.to_thread(server.wait)
        options = Options(
            policy="dplb", instances=[instance], port=0, grace_s=0.5, otlp=url, prompts_per_step=1
        )
        service = Service(options, lambda said: None)
        await service.open()
        try:
            yield collector, service
        finally:
            await collector.close()


def below(engines: list[Any], ours: list[Any]) -> bool:
    """Whether each span of the engine's is the child of another one of ours."""
    attempts = {(span.trace_id, span.span_id) for span in ours}
    return {(span.trace_id, span.parent_span_id) for span in engines} == attempts


def test_what_the_engine_does_is_a_child_of_our_attempt(models: list[Path], tmp_path: Path) -> None:
    """A client's request that is passed on, and a trainer's samples, which are asked for by us."""

    async def scene() -> None:
        async with traced(models[0], tmp_path) as (collector, service):
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
            async with (
                aiohttp.ClientSession(service.url) as client,
                client.post("/v1/completions", json=body, headers=NAMED) as answer,
            ):
                assert answer.status == 200
            async with RolloutScheduler.connect(service.url) as rollouts:
                sampling = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0}
                await rollouts.submit([Prompt("g", PROMPT, 3, 8, sampling)])
                await rollouts.next_batch()
            engines = await collector.wait_for("llm_request", 4)
            await service.close()
            ours = await collector.wait_for("text_completion", 4)
            assert below(engines, ours)
            (asked,) = [span for span in engines if span.trace_id.hex() == TRACE]
            tokens = {each.key: each.value.int_value for each in asked.attributes}
            assert tokens["gen_ai.usage.prompt_tokens"] == len(PROMPT)
            assert tokens["gen_ai.usage.completion_tokens"] == 8

    asyncio.run(asyncio.wait_for(scene(), LIMIT_S))
