"""Spans of a live run for OpenTelemetry: an observer of the driver."""

from rollout_sched.integrations.otel.tracing import export

__all__ = ["export"]
