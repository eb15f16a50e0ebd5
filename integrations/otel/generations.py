"""The spans of attempts, each below its sample's."""

from __future__ import annotations

from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.trace import Link, Span, Status, StatusCode, Tracer

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.events import RequestFailed, RequestFinished, TurnFinished
from rollout_sched.core.view import SchedulerView


class Generations:
    """Those under way, by the number of the attempt; and where each request was last."""

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
        """The header lines by which an instance learns of it; none if it is over."""
        found = self._open.get(attempt)
        if found is None:
            return b""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, context=trace.set_span_in_context(found[0]))
        return b"".join(f"{name}: {value}\r\n".encode() for name, value in carrier.items())

    def end(self, event: Any) -> None:
        """It was answered, or not."""
        found = self._open.pop(event.attempt, None)
        if found is None:
            return
        span, _ = found
        if isinstance(event, RequestFailed):
            # Its reason may quote a prompt.
            span.set_attribute("error.type", event.blame)
            span.set_status(Status(StatusCode.ERROR))
        else:
            span.set_attribute("gen_ai.usage.output_tokens", event.tokens)
            span.set_attribute("gen_ai.response.finish_reasons", [_finish(event)])
        span.end()

    def lose(self, instance: str) -> None:
        """What ran there is answered no more."""
        lost = [attempt for attempt, (_, where) in self._open.items() if where == instance]
        for attempt in lost:
            span, _ = self._open.pop(attempt)
            span.set_attribute("error.type", "instance")
            span.set_status(Status(StatusCode.ERROR, "its instance was lost"))
            span.end()

    def forget(self, request: str) -> None:
        """It is over."""
        self._last.pop(request, None)

    def close(self) -> None:
        for span, _ in self._open.values():
            span.end()


def _finish(event: Any) -> str:
    if isinstance(event, RequestFinished):
        return event.reason
    return "tool_call" if isinstance(event, TurnFinished) else "interrupted"
