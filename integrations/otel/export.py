"""Exports spans to a collector, with OTLP over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from opentelemetry import context, propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from rollout_sched import __version__
from rollout_sched.integrations.otel.tracing import Tracing
from rollout_sched.live import Driver

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def export(driver: Driver, app: web.Application, url: str) -> Callable[[], None]:
    """Trace a gateway's driver; a separate thread sends finished spans to `url`/v1/traces. Returns
    a function that stops the tracing and waits until all spans are sent or given up.

    Environment variables (OTEL_*) configure the exporter and the resource further.
    """
    provider = TracerProvider(resource=_resource(driver.epoch))
    exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracing = Tracing(driver, provider)
    app.middlewares.append(in_named_context)

    def end() -> None:
        tracing.close()
        provider.shutdown()

    return end


@web.middleware
async def in_named_context(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Run the handler in the trace that the request's headers name, so that groups which a trainer
    submits belong to it."""
    token = context.attach(propagate.extract(request.headers))
    try:
        return await handler(request)
    finally:
        context.detach(token)


def _resource(run_id: str) -> Resource:
    about = {"service.name": "rollout-sched", "service.version": __version__, "rl.run.id": run_id}
    return Resource.create(about)
