"""From a journal to what a page draws of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from rollout_sched.core.actions import Action, Deliver, Dispatch
from rollout_sched.core.events import (
    Event,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    Restored,
    WeightsPublished,
)
from rollout_sched.metrics.attempt_spans import OUTCOMES, AttemptSpans, Closed
from rollout_sched.metrics.fold import Handler
from rollout_sched.metrics.folded import Folded
from rollout_sched.metrics.waits import Waits
from rollout_sched.page.levels import LevelSeries
from rollout_sched.page.run_record import ALONE, Column, RunRecord, quantiles

_OUTCOME = {outcome: place for place, outcome in enumerate(OUTCOMES)}


class _Table:
    """Columns that grow; the types are those of `array`."""

    def __init__(self, **types: str) -> None:
        self._columns = {name: array(kind) for name, kind in types.items()}
        self._append = [column.append for column in self._columns.values()]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def add(self, *row: float) -> int:
        """Its place."""
        for append, value in zip(self._append, row, strict=True):
            append(value)  # type: ignore[arg-type]
        return len(self) - 1

    def change(self, place: int, column: str, value: int) -> None:
        self._columns[column][place] = value

    def columns(self) -> dict[str, Column]:
        return {name: np.array(column) for name, column in self._columns.items()}


class FleetLevels:
    """How busy the fleet was: in flight, waiting here and inside the instances, KV in use."""

    def __init__(self) -> None:
        self._series = {
            name: LevelSeries() for name in ("in_flight", "waiting", "queued", "kv", "kv_most")
        }
        self._reports: dict[str, InstanceReported] = {}
        self._reported_s = 0.0

    def set(self, now: float, in_flight: int, waiting: int) -> None:
        self._series["in_flight"].set(now, in_flight)
        self._series["waiting"].set(now, waiting)

    def gone(self, instance: str) -> None:
        self._reports.pop(instance, None)

    def report(self, now: float, event: InstanceReported) -> None:
        if now > self._reported_s:
            self._look()  # many report at once
            self._reported_s = now
        self._reports[event.instance] = event

    def told(self, end_s: float) -> dict[str, Any]:
        self._look()
        levels: dict[str, Any] = {
            name: series.means(end_s) for name, series in self._series.items()
        }
        levels["kv_most"] = self._series["kv_most"].peaks(end_s)
        return {"width_s": self._series["in_flight"].width_s, **levels}

    def _look(self) -> None:
        """What all have reported by the last time that any did."""
        reports = self._reports.values()
        if reports:
            now, usages = self._reported_s, [report.kv_usage for report in reports]
            self._series["queued"].set(now, sum(report.waiting for report in reports))
            self._series["kv"].set(now, sum(usages) / len(usages))
            self._series["kv_most"].set(now, max(usages))


class RunFold:
    """Gathers a RunRecord.

    `waiting`: how many requests wait for an instance at that moment, by whoever can tell.
    """

    def __init__(self, waiting: Callable[[], int] = lambda: 0) -> None:
        self._spans = AttemptSpans(self._closed)
        self._waits = Waits()
        self._waiting = waiting
        self._now = 0.0
        self._instances: dict[str, tuple[int, int, int]] = {}  # its place, slots, KV tokens
        self._groups: dict[str, int] = {}
        self._requests: dict[str, int] = {}
        self._rows: dict[int, int] = {}  # of the attempts in flight
        self._tables = _tables()
        self._fleet = FleetLevels()
        self._marks: list[tuple[float, str, str]] = []
        self._lengths = array("I")
        self._folded = Folded(self._spans, self._waits, self)

    def observe(self, now: float, event: Event, actions: Iterable[Action]) -> None:
        """Take the next entry of the journal and what the scheduler answered."""
        self._now = now
        self._folded.observe(now, event, actions)
        self._fleet.set(now, len(self._spans.running), self._waiting())

    def record(self, end_s: float, curves: list[list[float]]) -> RunRecord:
        """Of a run that ended then, or with the last event if that came later; `curves` are those
        of its steps (see `Metrics`)."""
        end_s = max(end_s, self._now)
        self._spans.end(end_s)
        instances = self._instances.values()
        return RunRecord(
            end_s=end_s,
            instances=list(self._instances),
            slots=[slots for _, slots, _ in instances],
            kv_tokens=[kv_tokens for _, _, kv_tokens in instances],
            groups=list(self._groups),
            requests=self._tables["requests"].columns(),
            attempts=self._tables["attempts"].columns(),
            spans=self._tables["spans"].columns(),
            fleet=self._fleet.told(end_s),
            marks=self._marks,
            lengths=quantiles(self._lengths),
            curves=curves,
        )

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            Dispatch: self._dispatched,
            Deliver: self._delivered,
            InstanceJoined: self._joined,
            InstanceLost: self._lost,
            InstanceReported: self._fleet.report,
            WeightsPublished: self._published,
            Restored: self._restored,
        }

    # -- attempts --------------------------------------------------------------------------

    def _request(self, action: Dispatch) -> int:
        place = self._requests.get(action.request)
        if place is None:
            name, index = action.group, action.index
            if not name:
                name, index = action.request, ALONE
            group = self._groups.setdefault(name, len(self._groups))
            place = self._tables["requests"].add(group, index)
            self._requests[action.request] = place
        return place

    def _dispatched(self, now: float, action: Dispatch) -> None:
        wait = self._waits.last
        self._rows[action.attempt] = self._tables["attempts"].add(
            self._request(action),
            self._place(action.instance),
            self._spans.running[action.attempt].place,
            action.context_tokens,
            action.response_tokens,
            action.turn,
            wait.seconds,
            wait.since,
            wait.cause,
            _OUTCOME["still running"],
        )

    def _closed(self, closed: Closed) -> None:
        self._waits.closed(closed)
        row = self._rows.pop(closed.attempt.dispatch.attempt)
        self._tables["attempts"].change(row, "outcome", _OUTCOME[closed.outcome])
        for span in closed.spans:
            version = max(0, span.version)
            self._tables["spans"].add(row, span.start_s, span.length_s, version, span.tokens)

    # -- the fleet -------------------------------------------------------------------------

    def _place(self, instance: str) -> int:
        return self._instances.setdefault(instance, (len(self._instances), 0, 0))[0]

    def _joined(self, now: float, event: InstanceJoined) -> None:
        if now > 0:
            self._marks.append((now, "joined", f"{event.instance} joined"))
        place = self._place(event.instance)
        self._instances[event.instance] = place, event.slots, event.kv_tokens
        self._fleet.gone(event.instance)

    def _lost(self, now: float, event: InstanceLost) -> None:
        if event.asked:
            self._marks.append((now, "left", f"{event.instance} was {event.reason}"))
        else:
            self._marks.append((now, "lost", f"{event.instance} was lost: {event.reason}"))
        self._fleet.gone(event.instance)

    def _published(self, now: float, event: WeightsPublished) -> None:
        self._marks.append((now, "published", f"version {event.version} published"))

    def _delivered(self, now: float, action: Deliver) -> None:
        self._lengths.extend([sample.response_tokens for sample in action.samples])
        if action.last:
            self._marks.append((now, "delivered", f"batch {action.batch} delivered"))

    def _restored(self, now: float, event: Restored) -> None:
        self._marks.append((now, "restarted", "the scheduler restarted"))


def _tables() -> dict[str, _Table]:
    return {
        "requests": _Table(group="I", index="I"),
        "attempts": _Table(
            request="I",
            instance="I",
            place="I",
            context="I",
            before="I",
            turn="I",
            waited="f",
            since="B",
            cause="B",
            outcome="B",
        ),
        "spans": _Table(attempt="I", start="f", length="f", version="I", tokens="I"),
    }
