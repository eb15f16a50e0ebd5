"""Attempts end once, however they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.integrations.otel.tracing import Tracing


class Bench:
    """A traced driver without instances or payloads."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        view = SimpleNamespace(instances=(), instance=lambda name: None)
        self.pump: Any = SimpleNamespace(observers=[])
        driver: Any = SimpleNamespace(view=view, pump=self.pump, epoch="run")
        self.tracing = Tracing(driver, provider)

    def tell(self, event: Any, *actions: Any) -> None:
        for observe in self.pump.observers:
            observe(0.0, event, actions)

    def begin(self, attempt: int, instance: str, made: int = 0) -> None:
        self.tell(ev.Woke(), act.Dispatch("r", attempt, instance, 5, 9, 3, response_tokens=made))

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
    assert bench.tracing.lines("run-1").startswith(b"traceparent: 00-")
    bench.tell(event)
    bench.tell(event)
    (about,) = bench.ended()
    assert about["gen_ai.response.finish_reasons"] == (finish,)
    assert about["gen_ai.usage.output_tokens"] == 7
    assert about["rl.policy.version"] == 3
    assert bench.tracing.lines("run-1") == b"", "it is over"


def test_a_failure_does_not_quote_what_was_answered() -> None:
    bench = Bench()
    bench.begin(1, "a")
    bench.tell(ev.RequestFailed("r", 1, "the prompt 'secret' is", "request"))
    (span,) = bench.exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert dict(span.attributes or {})["error.type"] == "request"
    assert "secret" not in span.to_json()


def test_a_resumed_attempt_is_linked_to_the_lost_one() -> None:
    bench = Bench()
    bench.begin(1, "a")
    bench.tell(ev.InstanceLost("a"))
    bench.begin(2, "b", made=4)
    bench.tell(ev.RequestFinished("r", 2, 5))
    lost, resumed = bench.exporter.get_finished_spans()
    about = dict(resumed.attributes or {})
    assert (about["rl.resumed_from"], about["rl.resumed_tokens"]) == ("a", 4)
    assert resumed.links[0].context.span_id == lost.context.span_id
    bench.tell(ev.Woke(), act.Discard("r", 0, "stale"))
    bench.begin(3, "b", made=4)
    bench.tracing.close()
    assert "rl.resumed_from" not in bench.ended()[-1]
