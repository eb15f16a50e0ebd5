"""Families of Prometheus metrics, as a gateway and a front expose them at /metrics."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rollout_sched.integrations.gateway.data_plane.data_plane import DataPlane
from rollout_sched.metrics.fold import Histogram

#: Label values and the measured value. The labels `instance` and `job` are not used: Prometheus
#: sets them to the scraped target, and would rename ours.
Rows = Iterable[tuple[Mapping[str, str], float]]


class _Collected(Collector):
    """Families that were collected before."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


#: Seconds for which a page is kept. Everybody may scrape, and a page of a large fleet takes tens of
#: milliseconds: however many scrape, there is one a second of each format.
KEPT_S = 1.0


class MetricsPage:
    """`collect` yields the families of a moment; those of this process are added."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect
        self._kept: dict[str, tuple[float, asyncio.Task[bytes]]] = {}  # by content type

    async def text(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type, chosen by the `Accept` header of the request: a new one,
        or the one that was begun less than KEPT_S ago. It is collected at one moment and encoded in
        a thread: with a thousand instances that takes tens of milliseconds, in which streams would
        stop."""
        now = asyncio.get_running_loop().time()
        encode, content_type = choose_encoder(accept)
        at, page = self._kept.get(content_type, (-math.inf, None))
        if page is None or now - at >= KEPT_S or _failed(page):
            registry = CollectorRegistry()
            registry.register(_Collected(list(self._collect())))
            ProcessCollector(registry=registry)
            page = asyncio.create_task(asyncio.to_thread(encode, registry))
            self._kept[content_type] = now, page
        return await asyncio.shield(page), content_type


def _failed(page: asyncio.Task[bytes]) -> bool:
    return page.done() and (page.cancelled() or page.exception() is not None)


def calls(planes: Mapping[str, Mapping[int, int]], data_plane: DataPlane) -> Iterator[Metric]:
    """Clients' calls; `planes`: ended calls by status, by what has answered them."""
    yield counters(
        "http_responses",
        "Calls that have ended, by HTTP status: 4xx are the client's fault (499: it disconnected).",
        (
            ({"plane": plane, "code": str(code)}, count)
            for plane, by_status in planes.items()
            for code, count in by_status.items()
        ),
    )
    yield counter("refused", "Calls refused because a limit was reached.", data_plane.refused)
    yield gauge(
        "open_calls", "Calls of clients that have no answer yet.", data_plane.calls.open.requests
    )


def by(label: str, counts: Mapping[str, float]) -> Rows:
    return [({label: value}, count) for value, count in counts.items()]


def _name(short: str) -> str:
    return f"rollout_sched_{short}"


def counter(short: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(_name(short), about, value=value)


def gauge(short: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(_name(short), about, value=value)


def counters(short: str, about: str, rows: Rows) -> Metric:
    family = CounterMetricFamily(_name(short), about)
    for labels, value in rows:
        family.add_sample(f"{family.name}_total", dict(labels), value)
    return family


def gauges(short: str, about: str, rows: Rows) -> Metric:
    family = GaugeMetricFamily(_name(short), about)
    for labels, value in rows:
        family.add_sample(family.name, dict(labels), value)
    return family


def histogram(short: str, about: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(_name(short), about, _buckets(histogram), histogram.sum)


def histograms(short: str, about: str, label: str, histograms: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(_name(short), about, labels=[label])
    for value, histogram in histograms.items():
        family.add_metric([value], _buckets(histogram), histogram.sum)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Buckets with the bounds in the format of Prometheus's own clients."""
    every = histogram.cumulative()
    return [("+Inf" if math.isinf(bound) else str(float(bound)), count) for bound, count in every]
