"""Traces of a live run for OpenTelemetry (the extra `otel`)."""
