"""The gateway's counts as Prometheus metrics, built on request with prometheus_client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isinf

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rollout_sched.core.model.events import InstanceReported
from rollout_sched.core.model.model import InstanceStatus
from rollout_sched.integrations.gateway.control_plane.gateway import Gateway, InstanceView
from rollout_sched.metrics import CAUSES
from rollout_sched.metrics.fold import Histogram

#: Label values and the measured value. The labels `instance` and `job` are not used: Prometheus
#: sets them to the scraped target, and would rename ours.
Rows = Iterable[tuple[Mapping[str, str], float]]

_STATUSES = (*(str(s) for s in InstanceStatus if s is not InstanceStatus.LOST), "away")


class GatewayMetrics:
    """The metrics of one gateway; `page` answers /metrics. They are collected at one moment and
    encoded in a thread: with a thousand instances this takes tens of milliseconds, in which streams
    would stop."""

    def __init__(self, gateway: Gateway) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Families(gateway))
        ProcessCollector(registry=self._registry)

    async def page(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics and their content type, chosen by the `Accept` header of the request."""
        encode, content_type = choose_encoder(accept)
        return await asyncio.to_thread(encode, _Collected(self._registry)), content_type


class _Collected(CollectorRegistry):
    """The metrics of a registry at one moment."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._families = list(registry.collect())

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


class _Families(Collector):
    """The metrics that docs/observability.md describes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def describe(self) -> Iterable[Metric]:
        """Empty: otherwise all metrics would be collected once to learn their names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        for families in (_requests, _calls, _queue, _trainer, _weights, _fleet, _instances, _self):
            yield from families(self._gateway)


def _requests(gateway: Gateway) -> Iterator[Metric]:
    counters, clients = gateway.figures.counters, gateway.figures.clients
    yield _counters(
        "requests", "Requests that have ended, by outcome.", _by("outcome", counters.outcomes)
    )
    yield _counters(
        "tokens",
        "Response tokens by outcome: answered, delivered, or why they were discarded.",
        _by("outcome", counters.tokens),
    )
    yield _counter("attempts", "Dispatches to instances.", counters.attempts)
    yield _counter("resumed_attempts", "Dispatches that resumed from tokens.", counters.resumed)
    yield _counter("interruptions", "Attempts stopped from outside.", counters.interrupted)
    yield _counters(
        "failed_attempts",
        "Attempts without an answer, by blame.",
        _by("blame", {"request": 0, "instance": 0, "unclear": 0, **counters.failed}),
    )
    yield _histogram(
        "request_duration_seconds",
        "Duration of clients' requests, from submission to the answer.",
        clients.duration,
    )
    samples = gateway.figures.samples
    yield _histograms(
        "queue_wait_seconds",
        "From submission to the first dispatch, of a client's request or a trainer's group.",
        "source",
        {"client": clients.wait, "trainer": samples.wait},
    )
    yield _histograms(
        "response_tokens",
        "Tokens of a response, by its recipient.",
        "source",
        {"client": clients.tokens, "trainer": gateway.figures.trained.tokens},
    )


def _calls(gateway: Gateway) -> Iterator[Metric]:
    data_plane = gateway.data_plane
    planes = {
        "data": data_plane.calls.responses.by_status,
        "control": gateway.responses.by_status,
        "connection": gateway.turned_away,
    }
    yield _counters(
        "http_responses",
        "Calls that have ended, by HTTP status: 4xx are the client's fault (499: it disconnected).",
        (
            ({"plane": plane, "code": str(code)}, count)
            for plane, by_status in planes.items()
            for code, count in by_status.items()
        ),
    )
    yield _counter("refused", "Calls refused because a limit was reached.", data_plane.refused)
    yield _gauge(
        "open_calls", "Calls of clients that have no answer yet.", data_plane.calls.requests
    )


def _queue(gateway: Gateway) -> Iterator[Metric]:
    view = gateway.driver.view
    yield _gauge("in_flight", "Attempts on instances.", view.in_flight)
    yield _gauge("waiting", "Requests that wait for an instance.", view.waiting)
    yield _gauge("parked", "Requests in the replay buffer.", view.parked)
    yield _gauge("sessions", "Sessions of clients whose last instance is known.", view.sessions)
    yield _counter(
        "session_moves",
        "Requests of a session sent to another instance than the one before.",
        view.session_moves,
    )
    yield _counters(
        "anomalies",
        "Messages of instances that are inconsistent or came too late.",
        _by("kind", view.anomalies),
    )
    yield _counters(
        "version_contradictions",
        "Answers by other versions than those known of their instance.",
        _by("kind", gateway.driver.versions.contradictions),
    )


def _trainer(gateway: Gateway) -> Iterator[Metric]:
    figures = gateway.figures
    steps, samples, trained = figures.steps, figures.samples, figures.trained
    yield _counter("batches", "Batches delivered.", figures.counters.batches)
    yield _histogram("step_duration_seconds", "From one delivery to the next.", steps.duration)
    last = steps.last
    tail = {} if last is None else {"50": last.t50_s, "90": last.t90_s, "99": last.t99_s}
    yield _gauges(
        "last_step_finished_seconds",
        "Seconds into the last step until this percentage of its batch was finished.",
        _by("percent", tail),
    )
    yield _counter("trainer_wait_seconds", "Time the trainer has waited.", steps.trainer_wait_s)
    yield _counter("step_instance_seconds", "Instance-seconds of the steps.", steps.capacity_s)
    yield _counters(
        "step_bubble_seconds",
        "Instance-seconds of the steps with nothing in flight, by cause.",
        _by("cause", {**dict.fromkeys(CAUSES, 0.0), **steps.idle_s}),
    )
    yield _histogram(
        "sample_duration_seconds",
        "Duration of a trainer's samples, from the first dispatch to the end.",
        samples.duration,
    )
    yield _histogram("staleness_versions", "Staleness of delivered samples.", trained.staleness)
    yield _gauge(
        "length_bias_ratio",
        "Mean length of delivered samples over that of all ended ones; below 1 favours short ones.",
        trained.length_ratio,
    )
    now = gateway.driver.pump.now
    yield _gauge(
        "oldest_group_seconds",
        "Time since the first dispatch of the oldest unfinished group.",
        samples.oldest_s(now),
    )


def _weights(gateway: Gateway) -> Iterator[Metric]:
    progress, weights = gateway.driver.view.run, gateway.figures.weights
    versions = {"published": progress.version, "oldest_in_fleet": progress.fleet_version}
    yield _gauges("version", "Policy versions.", _by("which", versions))
    yield _histogram(
        "weight_load_seconds",
        "From the order to load weights until the instance reports that it has them.",
        weights.load,
    )
    yield _histogram(
        "weight_sync_seconds",
        "From the publication of weights until every instance has them.",
        weights.sync,
    )


def _fleet(gateway: Gateway) -> Iterator[Metric]:
    gone, now = gateway.figures.counters.gone, gateway.driver.pump.now
    yield _counter("instances_lost", "Times an instance was lost.", gone["lost"])
    yield _counter("instances_removed", "Times an instance was removed.", gone["removed"])
    yield _counters(
        "instance_seconds",
        "Instance-seconds by state: busy, idle, or why an instance takes no work.",
        _by("state", gateway.figures.fleet.seconds(now)),
    )


def _instances(gateway: Gateway) -> Iterator[Metric]:
    views = [gateway.view(supervisor) for supervisor in gateway.supervisors()]
    joined = [view for view in views if view.version is not None]
    yield _gauges(
        "instance_status",
        "1 for the current status of the instance, 0 for the others.",
        (
            ({"url": view.url, "status": status}, float(view.status == status))
            for view in views
            for status in _STATUSES
        ),
    )
    yield _gauges(
        "instance_in_flight", "Attempts on the instance.", ((_of(v), v.in_flight) for v in joined)
    )
    yield _gauges(
        "instance_version",
        "Policy version it computes with.",
        ((_of(v), v.version or 0) for v in joined),
    )
    yield _gauges(
        "instance_kv_usage",
        "Share of its KV cache in use.",
        ((_of(v), v.kv_usage) for v in joined if v.kv_usage is not None),
    )
    reports = gateway.figures.counters.reports
    for short, about, value in _REPORTED:
        rows = (({"url": name}, value(report)) for name, report in reports.items())
        yield _counters(f"instance_{short}", about, rows)


#: Counters from an instance's last poll, which count since its start.
_REPORTED: tuple[tuple[str, str, Callable[[InstanceReported], int]], ...] = (
    ("generated_tokens", "Tokens it made since it started.", lambda r: r.generated_tokens),
    ("prefill_tokens", "Prompt tokens it computed since it started.", lambda r: r.prefill_tokens),
    (
        "cached_tokens",
        "Prompt tokens that it took from its prefix cache instead.",
        lambda r: r.cached_tokens,
    ),
    ("preemptions", "Preemptions since it started.", lambda r: r.preemptions),
)


def _self(gateway: Gateway) -> Iterator[Metric]:
    yield _histogram(
        "scheduler_lag_seconds",
        "How late the event loop ran callbacks that were due.",
        gateway.figures.lag.seconds,
    )
    journal = gateway.journal
    if journal is not None:
        broken = int(bool(journal.broken))
        yield _gauge("journal_broken", "1 if writing the journal failed before the end.", broken)


# -- families --------------------------------------------------------------------------------


def _of(view: InstanceView) -> dict[str, str]:
    return {"url": view.url}


def _by(label: str, counts: Mapping[str, float]) -> Rows:
    return [({label: value}, count) for value, count in counts.items()]


def _name(short: str) -> str:
    return f"rollout_sched_{short}"


def _counter(short: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(_name(short), about, value=value)


def _gauge(short: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(_name(short), about, value=value)


def _counters(short: str, about: str, rows: Rows) -> Metric:
    family = CounterMetricFamily(_name(short), about)
    for labels, value in rows:
        family.add_sample(f"{family.name}_total", dict(labels), value)
    return family


def _gauges(short: str, about: str, rows: Rows) -> Metric:
    family = GaugeMetricFamily(_name(short), about)
    for labels, value in rows:
        family.add_sample(family.name, dict(labels), value)
    return family


def _histogram(short: str, about: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(_name(short), about, _buckets(histogram), histogram.sum)


def _histograms(short: str, about: str, label: str, histograms: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(_name(short), about, labels=[label])
    for value, histogram in histograms.items():
        family.add_metric([value], _buckets(histogram), histogram.sum)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Buckets with the bounds in the format of Prometheus's own clients."""
    every = histogram.cumulative()
    return [("+Inf" if isinf(bound) else str(float(bound)), count) for bound, count in every]
