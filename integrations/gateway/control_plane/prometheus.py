"""The metrics in Prometheus's text format (version 0.0.4), written when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from rollout_sched.core.events import InstanceLost, RequestFailed, RequestInterrupted
from rollout_sched.core.model import InstanceStatus
from rollout_sched.integrations.gateway.control_plane.counters import STALENESS_BOUNDS
from rollout_sched.integrations.gateway.control_plane.gateway import Gateway, InstanceView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Label values and what was measured.
Rows = Iterable[tuple[Mapping[str, str], float]]

_STATUSES = (*(str(s) for s in InstanceStatus if s is not InstanceStatus.LOST), "away")


def prometheus_text(gateway: Gateway) -> str:
    """Everything that is counted, as one page."""
    return "".join([*_of_requests(gateway), *_of_samples(gateway), *_of_instances(gateway)])


def _of_requests(gateway: Gateway) -> Iterator[str]:
    counters, view, data_plane = gateway.counters, gateway.driver.view, gateway.data_plane
    events = counters.events
    yield _family(
        "requests_total", "Requests that are over, by outcome.", _by("outcome", counters.outcomes)
    )
    yield _family(
        "tokens_total", "Response tokens, by what became of them.", _by("outcome", counters.tokens)
    )
    yield _one("attempts_total", "Dispatches to instances.", counters.attempts)
    yield _one("resumed_attempts_total", "Dispatches that went on from tokens.", counters.resumed)
    yield _one("interruptions_total", "Attempts stopped from outside.", events[RequestInterrupted])
    yield _one("failed_attempts_total", "Attempts without an answer.", events[RequestFailed])
    yield _one("refused_total", "Calls refused because too much was here.", data_plane.refused)
    yield _family(
        "anomalies_total",
        "What instances said that cannot be true or came too late.",
        _by("kind", view.anomalies),
    )
    yield _family(
        "version_contradictions_total",
        "Answers by other versions than were known of their instance.",
        _by("kind", gateway.driver.versions.contradictions),
    )
    yield _one("in_flight", "Attempts on instances.", view.in_flight)
    yield _one("waiting", "Requests that wait for an instance.", view.waiting)
    yield _one("sessions", "Sessions of clients whose last instance is known.", view.sessions)
    yield _one(
        "session_moves_total",
        "Requests of a session sent elsewhere than the one before.",
        view.session_moves,
    )
    yield _one("parked", "Requests in the replay buffer.", view.parked)
    journal = gateway.journal
    if journal is not None:
        broken = int(bool(journal.broken))
        yield _one("journal_broken", "1 if the journal ended before its time.", broken)
    yield _one(
        "open_calls", "Calls of clients that are not answered yet.", data_plane.calls.requests
    )


def _of_samples(gateway: Gateway) -> Iterator[str]:
    counters, progress = gateway.counters, gateway.driver.view.run
    yield _one("batches_total", "Batches delivered.", counters.batches)
    bounds = [*map(str, STALENESS_BOUNDS), "+Inf"]
    buckets = zip(bounds, accumulate(counters.staleness), strict=True)
    name = _name("staleness_versions")
    yield f"# HELP {name} Staleness of delivered samples.\n# TYPE {name} histogram\n"
    yield "".join(f'{name}_bucket{{le="{bound}"}} {count}\n' for bound, count in buckets)
    yield f"{name}_sum {counters.staleness_sum}\n{name}_count {sum(counters.staleness)}\n"
    versions = {"published": progress.version, "oldest_in_fleet": progress.fleet_version}
    yield _family("version", "Policy versions.", _by("which", versions))


def _of_instances(gateway: Gateway) -> Iterator[str]:
    counters = gateway.counters
    views = [gateway.view(supervisor) for supervisor in gateway.supervisors()]
    joined = [view for view in views if view.version is not None]
    yield _one("instances_lost_total", "Times an instance was lost.", counters.events[InstanceLost])
    yield _family(
        "instance_status",
        "1 for the status an instance has.",
        (
            ({"instance": view.url, "status": status}, float(view.status == status))
            for view in views
            for status in _STATUSES
        ),
    )
    yield _family(
        "instance_in_flight", "Attempts on the instance.", ((_of(v), v.in_flight) for v in joined)
    )
    yield _family(
        "instance_version",
        "Policy version it computes with.",
        ((_of(v), v.version or 0) for v in joined),
    )
    yield _family(
        "instance_kv_usage",
        "Share of its KV cache in use.",
        ((_of(v), v.kv_usage) for v in joined if v.kv_usage is not None),
    )
    yield _family(
        "instance_generated_tokens_total",
        "Tokens it made since it started.",
        _by("instance", counters.generated),
    )


def _of(view: InstanceView) -> dict[str, str]:
    return {"instance": view.url}


def _by(label: str, counts: Mapping[str, float]) -> Rows:
    return [({label: value}, count) for value, count in counts.items()]


def _name(short: str) -> str:
    return f"rollout_sched_{short}"


def _one(short: str, about: str, value: float) -> str:
    return _family(short, about, [({}, value)])


def _family(short: str, about: str, rows: Rows) -> str:
    name = _name(short)
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    for labels, value in rows:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
