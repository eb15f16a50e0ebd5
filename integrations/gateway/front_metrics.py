"""Prometheus metrics of one front; the scheduler's process has the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rollout_sched.integrations.gateway.data_plane.data_plane import DataPlane
from rollout_sched.link.front_calls import FrontCalls


class FrontMetrics(Collector):
    """Metrics have the gateway's metric names where those exist; `page` answers /metrics."""

    def __init__(self, calls: FrontCalls, data_plane: DataPlane) -> None:
        self._calls = calls
        self._data_plane = data_plane
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics and their content type, chosen by the `Accept` header of the request."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        calls, data_plane = self._calls, self._data_plane
        responses = CounterMetricFamily(
            "rollout_sched_http_responses",
            "Calls that have ended, by HTTP status (499: the client disconnected).",
            labels=("plane", "code"),
        )
        for code, count in data_plane.calls.responses.by_status.items():
            responses.add_metric(("data", str(code)), count)
        yield responses
        yield CounterMetricFamily(
            "rollout_sched_refused",
            "Calls refused because a limit was reached.",
            value=data_plane.refused,
        )
        yield GaugeMetricFamily(
            "rollout_sched_open_calls",
            "Calls of clients that have no answer yet.",
            value=data_plane.calls.requests,
        )
        yield GaugeMetricFamily(
            "rollout_sched_scheduler_connected",
            "Whether a scheduler is connected to this front.",
            value=calls.connected,
        )
        yield CounterMetricFamily(
            "rollout_sched_schedulers",
            "Connections to a scheduler that this front has had so far.",
            value=calls.connections,
        )
        yield CounterMetricFamily(
            "rollout_sched_refused_orders",
            "Orders refused because they came from an epoch other than the connected scheduler's.",
            value=calls.refused,
        )
