"""The spans of attempts; the parent of each is the span of its sample."""

from __future__ import annotations

from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.trace import Link, Span, Status, StatusCode, Tracer

from rollout_sched.core import SchedulerView
from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import RequestFailed, RequestFinished, TurnFinished


class Generations:
    """The open spans by attempt number, and the last span and instance of each request."""

    def __init__(self, tracer: Tracer, view: SchedulerView) -> None:
        self._tracer = tracer
        self._view = view
        self._open: dict[int, tuple[Span, str]] = {}
        self._last: dict[str, tuple[Span, str]] = {}

    def begin(self, action: Dispatch, sample: Span) -> None:
        known = self._view.instance(action.instance)
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
        self._open[action.attempt] = self._last[action.request] = span, action.instance

    def lines(self, attempt: int) -> bytes:
        """The header lines that name the attempt's span to an instance; empty if the span has
        ended."""
        found = self._open.get(attempt)
        if found is None:
            return b""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, context=trace.set_span_in_context(found[0]))
        return b"".join(f"{name}: {value}\r\n".encode() for name, value in carrier.items())

    def end(self, event: Any) -> None:
        """End the span of an attempt that was answered or has failed."""
        found = self._open.pop(event.attempt, None)
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

    def lose(self, instance: str) -> None:
        """End the spans of all attempts on a lost instance."""
        lost = [attempt for attempt, (_, where) in self._open.items() if where == instance]
        for attempt in lost:
            span, _ = self._open.pop(attempt)
            span.set_attribute("error.type", "instance")
            span.set_status(Status(StatusCode.ERROR, "the instance was lost"))
            span.end()

    def forget(self, request: str) -> None:
        """Drop the last span of a request that has ended."""
        self._last.pop(request, None)

    def close(self) -> None:
        for span, _ in self._open.values():
            span.end()


def _finish(event: Any) -> str:
    if isinstance(event, RequestFinished):
        return event.reason
    return "tool_call" if isinstance(event, TurnFinished) else "interrupted"
