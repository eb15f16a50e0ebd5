"""A gateway that is told of a collector sends it what an OTLP receiver reads."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway import serve
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from rollout_sched.simulators.replay.scenario import load_scenario
from tests.integrations.otel.test_tracing import NAMED, TRACE, ask


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self._runner: web.AppRunner

    async def start(self) -> str:
        app = web.Application()
        app.add_routes([web.post("/v1/traces", self._take)])
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _take(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        body = await request.read()
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.requests.append(ExportTraceServiceRequest.FromString(body))
        await self.answers.wait()
        return web.Response()

    async def close(self) -> None:
        await self._runner.cleanup()


@asynccontextmanager
async def collected(collector: Collector) -> AsyncIterator[Service]:
    """A gateway that sends its spans there; stopped at the end."""
    url = await collector.start()
    server = FakeServer(EngineSettings(load_scenario("qwen7b-8xh100").instance, speed=50.0))
    instance = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
    options = Options(policy="dplb", instances=[instance], port=0, grace_s=0.5, otlp=url)
    service = Service(options, lambda said: None)
    await service.open()
    try:
        yield service
    finally:
        await service.close()
        await server.close()
        await collector.close()


@pytest.mark.real_time
async def test_all_spans_are_exported_by_the_end() -> None:
    collector = Collector()
    async with collected(collector) as service:
        await ask(service.url, **NAMED)
    resources = [each for request in collector.requests for each in request.resource_spans]
    named = {
        attribute.key: attribute.value.string_value
        for each in resources
        for attribute in each.resource.attributes
    }
    assert named["service.name"] == "rollout-sched"
    assert named["rl.run.id"] == service.live.driver.epoch
    spans = [span for each in resources for scope in each.scope_spans for span in scope.spans]
    assert {span.name for span in spans} == {"rl.sample", "text_completion"}
    assert {span.trace_id.hex() for span in spans} == {TRACE}


@pytest.mark.real_time
async def test_a_gateway_stops_although_its_collector_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The exporter waits for up to half a minute, after which the kubelet kills."""
    monkeypatch.setattr(serve, "LAST_SPANS_S", 0.1)
    collector = Collector()
    collector.answers.clear()
    async with collected(collector) as service:
        await ask(service.url, **NAMED)
        await service.close()
        assert "the collector has not taken the last spans" in caplog.text
        collector.answers.set()


@pytest.mark.real_time
async def test_odd_trace_headers_are_no_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    async with collected(Collector()) as service:
        for headers in (
            {"traceparent": "x" * 4000},
            {"traceparent": NAMED["traceparent"], "tracestate": "@@@"},
            {"traceparent": NAMED["traceparent"], "tracestate": "a=b," * 1000},
            {"baggage": "=x," * 1000},
        ):
            await ask(service.url, **headers)
            async with (
                aiohttp.ClientSession(headers=headers) as stranger,
                stranger.get(f"{service.url}/health") as answer,
            ):
                assert answer.status == 200
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


@pytest.mark.real_time
async def test_without_the_extra_the_remedy_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rollout_sched.integrations.otel", None)
    with pytest.raises(CallerError, match=r"pip install .*\[otel\]"):
        Service(Options(policy="dplb", instances=[], otlp="http://127.0.0.1:1"), print)
