"""The gateway's counts as Prometheus metrics, which docs/observability.md describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import Metric

from rollout_sched.core.model.events import InstanceReported
from rollout_sched.core.model.model import InstanceStatus
from rollout_sched.integrations.gateway import families
from rollout_sched.integrations.gateway.control_plane.gateway import Gateway, InstanceView
from rollout_sched.live.trainer.samples import Mismatch, TokenMismatch
from rollout_sched.metrics import CAUSES

_STATUSES = (*(str(s) for s in InstanceStatus if s is not InstanceStatus.LOST), "away")


def metrics_of(gateway: Gateway) -> Iterator[Metric]:
    """The metrics of one gateway at this moment."""
    for group in (
        _requests,
        _calls,
        _queue,
        _trainer,
        _mismatch,
        _weights,
        _fleet,
        _instances,
        _self,
    ):
        yield from group(gateway)


def _requests(gateway: Gateway) -> Iterator[Metric]:
    counters, clients = gateway.figures.counters, gateway.figures.clients
    yield families.counters(
        "requests",
        "Requests that have ended, by outcome.",
        families.by("outcome", counters.outcomes),
    )
    yield families.counters(
        "tokens",
        "Response tokens by outcome: answered, delivered, or why they were discarded.",
        families.by("outcome", counters.tokens),
    )
    yield families.counter("attempts", "Dispatches to instances.", counters.attempts)
    yield families.counter(
        "resumed_attempts", "Dispatches that resumed from tokens.", counters.resumed
    )
    yield families.counter("interruptions", "Attempts stopped from outside.", counters.interrupted)
    yield families.counters(
        "failed_attempts",
        "Attempts without an answer, by blame.",
        families.by("blame", {"request": 0, "instance": 0, "unclear": 0, **counters.failed}),
    )
    yield families.histogram(
        "request_duration_seconds",
        "Duration of clients' requests, from submission to the answer.",
        clients.duration,
    )
    samples = gateway.figures.samples
    yield families.histograms(
        "queue_wait_seconds",
        "From submission to the first dispatch, of a client's request or a trainer's group.",
        "source",
        {"client": clients.wait, "trainer": samples.wait},
    )
    yield families.histograms(
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
    yield from families.calls(planes, data_plane)


def _queue(gateway: Gateway) -> Iterator[Metric]:
    view = gateway.driver.view
    yield families.gauge("in_flight", "Attempts on instances.", view.in_flight)
    yield families.gauge("waiting", "Requests that wait for an instance.", view.waiting)
    yield families.gauge("parked", "Requests in the replay buffer.", view.parked)
    yield families.gauge(
        "sessions", "Sessions of clients whose last instance is known.", view.sessions
    )
    yield families.counter(
        "session_moves",
        "Requests of a session sent to another instance than the one before.",
        view.session_moves,
    )
    yield families.counters(
        "anomalies",
        "Messages of instances that are inconsistent or came too late.",
        families.by("kind", view.anomalies),
    )
    yield families.counters(
        "version_contradictions",
        "Answers by other versions than those known of their instance.",
        families.by("kind", gateway.driver.versions.contradictions),
    )


def _trainer(gateway: Gateway) -> Iterator[Metric]:
    figures = gateway.figures
    steps, samples, trained = figures.steps, figures.samples, figures.trained
    yield families.counter("batches", "Batches delivered.", figures.counters.batches)
    yield families.histogram(
        "step_duration_seconds", "From one delivery to the next.", steps.duration
    )
    last = steps.last
    tail = {} if last is None else {"50": last.t50_s, "90": last.t90_s, "99": last.t99_s}
    yield families.gauges(
        "last_step_finished_seconds",
        "Seconds into the last step until this percentage of its batch was finished.",
        families.by("percent", tail),
    )
    yield families.counter(
        "trainer_wait_seconds", "Time the trainer has waited.", steps.trainer_wait_s
    )
    yield families.counter(
        "step_instance_seconds", "Instance-seconds of the steps.", steps.capacity_s
    )
    yield families.counters(
        "step_bubble_seconds",
        "Instance-seconds of the steps with nothing in flight, by cause.",
        families.by("cause", {**dict.fromkeys(CAUSES, 0.0), **steps.idle_s}),
    )
    yield families.histogram(
        "sample_duration_seconds",
        "Duration of a trainer's samples, from the first dispatch to the end.",
        samples.duration,
    )
    yield families.histogram(
        "staleness_versions", "Staleness of delivered samples.", trained.staleness
    )
    yield families.gauge(
        "length_bias_ratio",
        "Mean length of delivered samples over that of all ended ones; below 1 favours short ones.",
        trained.length_ratio,
    )
    now = gateway.driver.pump.now
    yield families.gauge(
        "oldest_group_seconds",
        "Time since the first dispatch of the oldest unfinished group.",
        samples.oldest_s(now),
    )


def _mismatch(gateway: Gateway) -> Iterator[Metric]:
    told = gateway.trainer.mismatch or Mismatch(0, [])
    kinds = [
        ({"age": str(told.version - kind.version), "longest": str(kind.longest)}, kind)
        for kind in told.kinds
    ]
    for short, about, value in _COMPARED:
        yield families.gauges(f"mismatch_{short}", about, ((of, value(k)) for of, k in kinds))


#: What a trainer last reported of its log-probs and the rollouts'.
_COMPARED: tuple[tuple[str, str, Callable[[TokenMismatch], float]], ...] = (
    ("tokens", "Tokens whose log-probs the trainer last compared.", lambda k: k.tokens),
    ("k3", "KL divergence of rollouts from the trainer, by the k3 estimator.", lambda k: k.k3),
    ("max_ratio", "The largest probability over that of the rollout.", lambda k: k.max_ratio),
    ("clipped_ratio", "Share of tokens whose importance weight is cut.", lambda k: k.clipped),
)


def _weights(gateway: Gateway) -> Iterator[Metric]:
    progress, weights = gateway.driver.view.run, gateway.figures.weights
    versions = {"published": progress.version, "oldest_in_fleet": progress.fleet_version}
    yield families.gauges("version", "Policy versions.", families.by("which", versions))
    yield families.histogram(
        "weight_load_seconds",
        "From the order to load weights until the instance reports that it has them.",
        weights.load,
    )
    yield families.histogram(
        "weight_sync_seconds",
        "From the publication of weights until every instance has them.",
        weights.sync,
    )


def _fleet(gateway: Gateway) -> Iterator[Metric]:
    gone, now = gateway.figures.counters.gone, gateway.driver.pump.now
    yield families.counter("instances_lost", "Times an instance was lost.", gone["lost"])
    yield families.counter("instances_removed", "Times an instance was removed.", gone["removed"])
    yield families.counters(
        "instance_seconds",
        "Instance-seconds by state: busy, idle, or why an instance takes no work.",
        families.by("state", gateway.figures.fleet.seconds(now)),
    )


def _instances(gateway: Gateway) -> Iterator[Metric]:
    views = [gateway.view(supervisor) for supervisor in gateway.supervisors()]
    joined = [view for view in views if view.version is not None]
    yield families.gauges(
        "instance_status",
        "1 for the current status of the instance, 0 for the others.",
        (
            ({"url": view.url, "status": status}, float(view.status == status))
            for view in views
            for status in _STATUSES
        ),
    )
    yield families.gauges(
        "instance_in_flight", "Attempts on the instance.", ((_of(v), v.in_flight) for v in joined)
    )
    yield families.gauges(
        "instance_version",
        "Policy version it computes with.",
        ((_of(v), v.version or 0) for v in joined),
    )
    yield families.gauges(
        "instance_kv_usage",
        "Share of its KV cache in use.",
        ((_of(v), v.kv_usage) for v in joined if v.kv_usage is not None),
    )
    reports = gateway.figures.counters.reports
    for short, about, value in _REPORTED:
        rows = (({"url": name}, value(report)) for name, report in reports.items())
        yield families.counters(f"instance_{short}", about, rows)


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
    ("drafted_tokens", "Tokens that were drafted for it.", lambda r: r.drafted_tokens),
    ("accepted_tokens", "Drafted tokens that its model accepted.", lambda r: r.accepted_tokens),
)


def _self(gateway: Gateway) -> Iterator[Metric]:
    yield families.histogram(
        "scheduler_lag_seconds",
        "How late the event loop ran callbacks that were due.",
        gateway.figures.lag.seconds,
    )
    journal = gateway.journal
    if journal is not None:
        broken = int(bool(journal.broken))
        yield families.gauge(
            "journal_broken", "1 if writing the journal failed before the end.", broken
        )


def _of(view: InstanceView) -> dict[str, str]:
    return {"url": view.url}
