"""Attempts end once, however they end."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.integrations.otel.tracing import Generations


class View:
    def instance(self, name: str) -> None:
        return None


class Bench:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")
        self.sample = self.tracer.start_span("rl.sample")
        self.generations = Generations(self.tracer, View())  # type: ignore[arg-type]

    def begin(self, attempt: int, instance: str, made: int = 0) -> None:
        dispatch = act.Dispatch("r", attempt, instance, 5, 9, 3, response_tokens=made)
        self.generations.begin(dispatch, self.sample)

    def ended(self) -> list[dict[str, Any]]:
        return [dict(span.attributes or {}) for span in self.exporter.get_finished_spans()]


@pytest.mark.parametrize(
    ("event", "finish"),
    [
        (ev.RequestFinished("r", 1, 7, reason="stop"), "stop"),
        (ev.RequestInterrupted("r", 1, 7), "interrupted"),
        (ev.TurnFinished("r", 1, 7), "tool_call"),
    ],
)
def test_an_answer(event: Any, finish: str) -> None:
    bench = Bench()
    bench.begin(1, "a")
    assert bench.generations.lines(1).startswith(b"traceparent: 00-")
    bench.generations.end(event)
    bench.generations.end(event)
    (about,) = bench.ended()
    assert about["gen_ai.response.finish_reasons"] == (finish,)
    assert about["gen_ai.usage.output_tokens"] == 7
    assert about["rl.policy.version"] == 3
    assert bench.generations.lines(1) == b"", "it is over"


def test_a_failure_does_not_quote_what_was_answered() -> None:
    bench = Bench()
    bench.begin(1, "a")
    bench.generations.end(ev.RequestFailed("r", 1, "the prompt 'secret' is", "request"))
    (span,) = bench.exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert dict(span.attributes or {})["error.type"] == "request"
    assert "secret" not in span.to_json()


def test_a_resumed_attempt_is_linked_to_the_lost_one() -> None:
    bench = Bench()
    bench.begin(1, "a")
    bench.generations.lose("a")
    bench.begin(2, "b", made=4)
    bench.generations.end(ev.RequestFinished("r", 2, 5))
    lost, resumed = bench.exporter.get_finished_spans()
    about = dict(resumed.attributes or {})
    assert (about["rl.resumed_from"], about["rl.resumed_tokens"]) == ("a", 4)
    assert resumed.links[0].context.span_id == lost.context.span_id
    bench.generations.forget("r")
    bench.begin(3, "b", made=4)
    bench.generations.close()
    assert "rl.resumed_from" not in bench.ended()[-1]
