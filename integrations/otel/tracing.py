"""Spans of a live run, made by an observer of the driver; without it, tracing costs nothing.

    rl.sample        a client's request, or a trainer's sample from its first dispatch on
      text_completion  one attempt: instance, version, tokens, finish reason, previous instance
    rl.sync          new weights, from their publication until every instance has them
      rl.sync.load     the load into one instance

The names of phases are those proposed for OpenTelemetry's conventions (semantic-conventions-genai,
issue 88); the names of an attempt come from its conventions for generative AI. Neither is stable.
The parent of a sample is the span that its client named in `traceparent`, or the span in which a
trainer submitted its group. The instance gets the attempt's span as the parent of its own spans.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider as SdkProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rollout_sched import __version__
from rollout_sched.core.model.actions import (
    OF_ONE_SAMPLE,
    Answer,
    Deliver,
    Discard,
    Dispatch,
    UpdateWeights,
)
from rollout_sched.core.model.events import (
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    TurnFinished,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.integrations.vllm import TRACE_LINE
from rollout_sched.live import Driver
from rollout_sched.metrics.fold import Folded, Handler
from rollout_sched.metrics.live import WeightTimes

#: Reads and writes `traceparent` and `tracestate`; `baggage` is nobody's here.
_W3C = TraceContextTextMapPropagator()

#: The attempt number, which follows the run's id in the id of an order.
_NUMBER = re.compile(r"\d+")


class Tracing:
    """Traces one driver; `provider` keeps the spans and sends them."""

    def __init__(self, driver: Driver, provider: TracerProvider) -> None:
        self._tracer = trace.get_tracer("rollout_sched", tracer_provider=provider)
        self._driver = driver
        self._samples: dict[str, Span] = {}
        self._groups: dict[str, Context] = {}  # the context in which each group was submitted
        self._attempts: dict[int, tuple[Span, str]] = {}  # open ones, with their instances
        self._last: dict[str, tuple[Span, str]] = {}  # the last attempt of each request
        self._sync: Span | None = None
        self._loads: dict[str, Span] = {}
        driver.pump.observers.append(Folded(self, WeightTimes(self._synced)).observe)
        for instance in driver.view.instances:
            self._trace_orders(instance.id)

    def handlers(self) -> Mapping[type[Any], Handler]:
        ends = (RequestFinished, RequestInterrupted, TurnFinished, RequestFailed)
        handlers: dict[type[Any], Handler] = {
            RequestSubmitted: self._asked,
            GroupSubmitted: self._submitted,
            Dispatch: self._dispatched,
            Answer: self._answered,
            Deliver: self._delivered,
            Discard: self._discarded,
            InstanceJoined: self._joined,
            InstanceLost: self._lost,
            WeightsPublished: self._published,
            UpdateWeights: self._loading,
            WeightsUpdated: self._loaded,
        }
        handlers.update(dict.fromkeys(ends, self._ended))
        return handlers

    def close(self) -> None:
        """End all open spans now."""
        attempts = [span for span, _ in self._attempts.values()]
        open_spans = [*attempts, *self._samples.values(), *self._loads.values()]
        for span in [*open_spans, *([self._sync] if self._sync else [])]:
            span.end()

    # -- samples ---------------------------------------------------------------------------

    def _asked(self, now: float, event: RequestSubmitted) -> None:
        parent = _named_in(self._driver.front.payloads.get(event.request))
        about = {"rl.request.id": event.request, "session.id": event.session}
        self._samples[event.request] = self._begin("rl.sample", parent, about)

    def _submitted(self, now: float, event: GroupSubmitted) -> None:
        self._groups[event.group] = context.get_current()

    def _dispatched(self, now: float, action: Dispatch) -> None:
        if action.request not in self._samples:
            about = {
                "rl.request.id": action.request,
                "rl.group.id": action.group,
                "rl.sample.index": action.index,
            }
            parent = self._groups.get(action.group)
            self._samples[action.request] = self._begin("rl.sample", parent, about)
        self._begin_attempt(action, self._samples[action.request])

    def _answered(self, now: float, action: Answer) -> None:
        self._over(action.sample)

    def _delivered(self, now: float, action: Deliver) -> None:
        for sample in action.samples:
            self._over(sample)
            self._groups.pop(sample.group, None)

    def _over(self, sample: DeliveredSample) -> None:
        span = self._samples.pop(sample.request, None)
        if span is None:
            return
        span.set_attributes(
            {
                "gen_ai.usage.output_tokens": sample.response_tokens,
                "gen_ai.response.finish_reasons": [sample.finish],
                "rl.staleness": sample.staleness,
                "rl.policy.versions": [segment.version for segment in sample.segments],
            }
        )
        span.end()
        self._last.pop(sample.request, None)

    def _discarded(self, now: float, action: Discard) -> None:
        if not action.ends:
            return
        span = self._samples.pop(action.request, None)
        self._last.pop(action.request, None)
        if span is not None:
            span.set_attribute("rl.discarded", action.reason)
            if action.reason in ("failed", "sample_failed"):
                span.set_status(Status(StatusCode.ERROR))
            span.end()
        if action.reason not in OF_ONE_SAMPLE:
            self._groups.pop(action.group, None)

    # -- attempts; the parent of each span is that of its sample -----------------------------

    def _begin_attempt(self, action: Dispatch, sample: Span) -> None:
        known = self._driver.view.instance(action.instance)
        about: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.usage.input_tokens": action.context_tokens,
            "server.address": action.instance,
            "rl.attempt": action.attempt,
            "rl.policy.version": action.salt if known is None else known.version,
        }
        links = []
        before = self._last.get(action.request)
        if before is not None and action.response_tokens:
            about["rl.resumed_tokens"] = action.response_tokens
            about["rl.resumed_from"] = before[1]
            links.append(Link(before[0].get_span_context()))
        span = self._tracer.start_span(
            "text_completion",
            context=trace.set_span_in_context(sample),
            attributes=about,
            links=links,
        )
        self._attempts[action.attempt] = self._last[action.request] = span, action.instance

    def _ended(self, now: float, event: Any) -> None:
        """An attempt was answered or has failed."""
        found = self._attempts.pop(event.attempt, None)
        if found is None:
            return
        span, _ = found
        if isinstance(event, RequestFailed):
            # The reason is left out, because it may quote a prompt.
            span.set_attribute("error.type", event.blame)
            span.set_status(Status(StatusCode.ERROR))
        else:
            span.set_attribute("gen_ai.usage.output_tokens", event.tokens)
            span.set_attribute("gen_ai.response.finish_reasons", [_finish(event)])
        span.end()

    # -- instances and their weights -------------------------------------------------------

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self._trace_orders(event.instance)

    def _trace_orders(self, instance: str) -> None:
        client = self._driver.supervisors[instance].client
        trace_orders = getattr(client, "trace_orders", None)
        if trace_orders is not None:
            trace_orders(self.lines)

    def lines(self, order_id: str) -> bytes:
        """The header lines that name the attempt's span in an order to an instance; empty if the
        span has ended."""
        attempt = _NUMBER.match(order_id.removeprefix(f"{self._driver.epoch}-"))
        found = self._attempts.get(int(attempt[0])) if attempt else None
        if found is None:
            return b""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, context=trace.set_span_in_context(found[0]))
        return b"".join(f"{name}: {value}\r\n".encode() for name, value in carrier.items())

    def _lost(self, now: float, event: InstanceLost) -> None:
        lost = [n for n, (_, where) in self._attempts.items() if where == event.instance]
        for attempt in lost:
            span, _ = self._attempts.pop(attempt)
            span.set_attribute("error.type", "instance")
            span.set_status(Status(StatusCode.ERROR, "the instance was lost"))
            span.end()
        load = self._loads.pop(event.instance, None)
        if load is not None:
            load.set_status(Status(StatusCode.ERROR, "the instance was lost"))
            load.end()

    def _published(self, now: float, event: WeightsPublished) -> None:
        if self._sync is not None:
            self._sync.end()
        about = {"rl.policy.version": event.version}
        self._sync = self._begin("rl.sync", None, about)

    def _loading(self, now: float, action: UpdateWeights) -> None:
        parent = None if self._sync is None else trace.set_span_in_context(self._sync)
        about = {"server.address": action.instance, "rl.policy.version": action.version}
        self._loads[action.instance] = self._begin("rl.sync.load", parent, about)

    def _loaded(self, now: float, event: WeightsUpdated) -> None:
        load = self._loads.pop(event.instance, None)
        if load is not None:
            load.end()

    def _synced(self, version: int, instances: int, seconds: float) -> None:
        if self._sync is not None:
            self._sync.set_attribute("rl.instances", instances)
            self._sync.end()
            self._sync = None

    def _begin(self, name: str, parent: Context | None, about: dict[str, Any]) -> Span:
        """Start a span; empty attributes are left out."""
        known = {key: value for key, value in about.items() if value != ""}
        return self._tracer.start_span(name, context=parent, attributes=known)


def _named_in(payload: Any) -> Context | None:
    """The parent span that a client has named in its headers."""
    call = getattr(payload, "call", None)
    if call is None:
        return None
    named = TRACE_LINE.findall(call.request.header_lines)
    carrier = {key.decode().lower(): value.decode("latin-1") for key, value in named}
    return _W3C.extract(carrier)


def _finish(event: Any) -> str:
    if isinstance(event, RequestFinished):
        return event.reason
    return "tool_call" if isinstance(event, TurnFinished) else "interrupted"


# ------------------------------------------------------------------------------------------
# Exports spans to a collector, with OTLP over HTTP.

WebHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def export(driver: Driver, app: web.Application, url: str) -> Callable[[], None]:
    """Trace a gateway's driver; a separate thread sends finished spans to `url`/v1/traces. Returns
    a function that stops the tracing and waits until all spans are sent or given up, up to half a
    minute.

    Environment variables (OTEL_*) configure the exporter and the resource further.
    """
    # It writes a line for each header that is not valid, and quotes it: anybody may send one.
    logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
    provider = SdkProvider(resource=_resource(driver.epoch), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracing = Tracing(driver, provider)
    app.middlewares.append(in_named_context)

    def end() -> None:
        tracing.close()
        provider.shutdown()

    return end


@web.middleware
async def in_named_context(request: web.Request, handler: WebHandler) -> web.StreamResponse:
    """Run the handler in the trace that the request's headers name, so that groups which a trainer
    submits belong to it."""
    token = context.attach(_W3C.extract(request.headers))
    try:
        return await handler(request)
    finally:
        context.detach(token)


def _resource(run_id: str) -> Resource:
    about = {"service.name": "rollout-sched", "service.version": __version__, "rl.run.id": run_id}
    return Resource.create(about)
