"""The page of one run, or of several side by side, from a replay or a journal."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_sched.core.model.actions import Action, Deliver, Dispatch
from rollout_sched.core.model.events import (
    Event,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    Restored,
    WeightsPublished,
)
from rollout_sched.metrics.attempts import OUTCOMES, AttemptSpans, Closed
from rollout_sched.metrics.fold import Fold, Folded, Handler
from rollout_sched.metrics.waits import CAUSES, SINCE, Waits
from rollout_sched.page.assembly import page

# ------------------------------------------------------------------------------------------
# The data that a page draws of one run: every attempt, in columns, and the fleet over time.

Column = npt.NDArray[np.generic]

#: The index of a request without a group; its group name is the request's own name.
ALONE = 2**32 - 1

#: Number of quantiles of a distribution.
QUANTILES = 201


class RunRecord(msgspec.Struct):
    """One run. Times are seconds of the run's clock; it ends at `end_s`. A column has a value for
    each row.

    instances  names
    groups     names; for a request without a group the request's name
    requests   group, index (ALONE: without a group)
    attempts   request, instance, place (from 1), context and earlier response tokens, turn, seconds
               waited, since what and why (of `metrics.waits`), outcome (of `metrics.attempts`)
    spans      attempt, start, length, version, tokens
    fleet      width_s: width of a time bucket; by name: the level in each bucket
    marks      (seconds, kind, text): versions, batches, instances that joined and left
    curves     for each step: seconds by which a share of its samples was finished, for even shares
               from none to all
    lengths    quantiles of the delivered response lengths, evenly from 0 to 1
    """

    end_s: float
    instances: list[str]
    groups: list[str]
    requests: dict[str, Column]
    attempts: dict[str, Column]
    spans: dict[str, Column]
    fleet: dict[str, Any]
    marks: list[tuple[float, str, str]]
    lengths: list[int]
    curves: list[list[float]] = []

    def __len__(self) -> int:
        """The number of attempts."""
        return len(self.attempts["request"])

    def thinned(self, each: int) -> RunRecord:
        """A record with the attempts of only one in `each` requests."""
        keep = self.attempts["request"].astype(np.int64) % each == 0
        number = np.cumsum(keep) - 1
        of_spans = self.spans["attempt"]
        kept_spans = keep[of_spans]
        spans = {name: column[kept_spans] for name, column in self.spans.items()}
        spans["attempt"] = number[spans["attempt"]].astype(of_spans.dtype)
        attempts = {name: column[keep] for name, column in self.attempts.items()}
        return msgspec.structs.replace(self, attempts=attempts, spans=spans)


def quantiles(values: Any) -> list[int]:
    """Quantiles of whole numbers, evenly from the smallest to the largest; empty for no values."""
    if not len(values):
        return []
    at = np.quantile(np.asarray(values), np.linspace(0, 1, QUANTILES), method="inverted_cdf")
    return [int(value) for value in at]


#: Most attempts on a page, so that a browser can open the file.
MAX_RECORDS = 400_000


class DrawnRun(msgspec.Struct):
    """The run of one policy. steps: as `metrics.Step`; idle, vacant: shares of the instances' time
    by cause; staleness: samples by staleness in versions."""

    name: str
    record: RunRecord
    steps: Sequence[Mapping[str, Any]]
    idle: Mapping[str, float]
    vacant: Mapping[str, float]
    staleness: Mapping[str, float]


def run_page(
    title: str,
    runs: Sequence[DrawnRun],
    *,
    about: Sequence[str] = (),
    verdict: Sequence[str] = (),
    warnings: Sequence[str] = (),
    tables: Sequence[Mapping[str, Any]] = (),
    offered: Sequence[int] = (),
    answer: Mapping[str, Any] | None = None,
    serve: str | None = None,
    made: Sequence[str] = (),
) -> bytes:
    """The page. `about`, `verdict` and `warnings` are paragraphs; `tables` have a title, columns
    (label, means) and rows (name, cells); `offered` are quantiles of the requested lengths, as
    `RunRecord.lengths`; `answer` is a table with a point for each row; `serve` and the first of
    `made` are commands."""
    runs, note = _fitting(runs)
    data = {
        "title": title,
        "about": about,
        "verdict": verdict,
        "warnings": warnings,
        "tables": tables,
        "policies": runs,
        "offered": offered,
        "answer": answer,
        "serve": serve,
        "made": made,
        "note": note,
        "words": {"since": SINCE, "causes": CAUSES, "outcomes": OUTCOMES},
    }
    return page(title, "report", data)


def _fitting(runs: Sequence[DrawnRun]) -> tuple[Sequence[DrawnRun], str]:
    each = -(-sum(len(run.record) for run in runs) // MAX_RECORDS)
    if each <= 1:
        return runs, ""
    thinned = [msgspec.structs.replace(run, record=run.record.thinned(each)) for run in runs]
    return thinned, f"One request in {each} is drawn; figures and curves include all requests."


# ------------------------------------------------------------------------------------------
# Gathers the attempts of a run in growing columns.

_OUTCOME = {outcome: place for place, outcome in enumerate(OUTCOMES)}


class _Table:
    """Growing columns; the types are those of `array`."""

    def __init__(self, **types: str) -> None:
        self._columns = {name: array(kind) for name, kind in types.items()}
        self._append = [column.append for column in self._columns.values()]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def add(self, *row: float) -> int:
        """Append a row and return its number."""
        for append, value in zip(self._append, row, strict=True):
            append(value)  # type: ignore[arg-type]
        return len(self) - 1

    def change(self, place: int, column: str, value: int) -> None:
        self._columns[column][place] = value

    def columns(self) -> dict[str, Column]:
        return {name: np.array(column) for name, column in self._columns.items()}


class AttemptTables:
    """Folds attempts into the tables of a RunRecord.

    instances, groups  name -> number
    """

    def __init__(self) -> None:
        self.instances: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        self._spans = AttemptSpans(self._closed)
        self._waits = Waits()
        self._requests: dict[str, int] = {}
        self._rows: dict[int, int] = {}  # rows of the attempts in flight
        self._tables = _tables()

    @property
    def folds(self) -> tuple[Fold, ...]:
        """All folds, in the order in which they must run."""
        return self._spans, self._waits, self

    @property
    def in_flight(self) -> int:
        return len(self._spans.running)

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {Dispatch: self._dispatched}

    def columns(self, end_s: float) -> dict[str, dict[str, Column]]:
        """The columns by table; attempts that still run end at `end_s`."""
        self._spans.end(end_s)
        return {name: table.columns() for name, table in self._tables.items()}

    def instance(self, name: str) -> int:
        return self.instances.setdefault(name, len(self.instances))

    def _request(self, action: Dispatch) -> int:
        place = self._requests.get(action.request)
        if place is None:
            name, index = action.group, action.index
            if not name:
                name, index = action.request, ALONE
            group = self.groups.setdefault(name, len(self.groups))
            place = self._tables["requests"].add(group, index)
            self._requests[action.request] = place
        return place

    def _dispatched(self, now: float, action: Dispatch) -> None:
        wait = self._waits.last
        self._rows[action.attempt] = self._tables["attempts"].add(
            self._request(action),
            self.instance(action.instance),
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


#: Buckets of a series; when all are used, pairs of them are merged.
MAX_BUCKETS = 512

#: Initial width of a bucket in seconds.
FINEST_S = 0.125


class LevelSeries:
    """The mean and the peak of a level in a bounded number of buckets of time, however long the run
    is.

    The level is 0 until it is set. `width_s` is the current width of a bucket.
    """

    def __init__(self) -> None:
        self.width_s = FINEST_S
        self._areas: list[float] = []
        self._peaks: list[float] = []
        self._level = 0.0
        self._now = 0.0

    def set(self, now: float, level: float) -> None:
        """Set the level from `now` on; `now` must not go back."""
        self._pass(now)
        self._level = level
        if self._peaks and now < len(self._peaks) * self.width_s:
            self._peaks[-1] = max(self._peaks[-1], level)

    def means(self, end_s: float) -> list[float]:
        """The mean of each bucket up to `end_s`; the last bucket may be shorter."""
        self._pass(end_s)
        lengths = [self.width_s] * len(self._areas)
        if lengths:
            lengths[-1] = self._now - self.width_s * (len(lengths) - 1)
        return [
            area / length if length > 0 else self._level
            for area, length in zip(self._areas, lengths, strict=True)
        ]

    def peaks(self, end_s: float) -> list[float]:
        self._pass(end_s)
        return list(self._peaks)

    def _pass(self, now: float) -> None:
        while now > self.width_s * MAX_BUCKETS:
            self._merge()
        while self._now < now:
            place = min(int(self._now / self.width_s), MAX_BUCKETS - 1)
            if place == len(self._areas):
                self._areas.append(0.0)
                self._peaks.append(self._level)
            ends = (place + 1) * self.width_s
            until = now if now < ends else ends
            if until <= self._now:  # rounding error in the sum of widths
                until = now
            self._areas[place] += self._level * (until - self._now)
            self._peaks[place] = max(self._peaks[place], self._level)
            self._now = until

    def _merge(self) -> None:
        self.width_s *= 2
        odd = len(self._areas) % 2
        areas, peaks = [*self._areas, *[0.0] * odd], [*self._peaks, *[0.0] * odd]
        self._areas = [a + b for a, b in zip(areas[::2], areas[1::2], strict=True)]
        self._peaks = [max(a, b) for a, b in zip(peaks[::2], peaks[1::2], strict=True)]


class FleetLevels:
    """Requests in flight, waiting in the scheduler and queued in the instances; KV usage."""

    def __init__(self) -> None:
        self._series = {
            name: LevelSeries() for name in ("in_flight", "waiting", "queued", "kv", "kv_most")
        }
        self._reports: dict[str, InstanceReported] = {}
        self._reported_s = 0.0

    def set(self, now: float, in_flight: int, waiting: int) -> None:
        self._series["in_flight"].set(now, in_flight)
        self._series["waiting"].set(now, waiting)

    def instance_gone(self, instance: str) -> None:
        self._reports.pop(instance, None)

    def report(self, now: float, event: InstanceReported) -> None:
        if now > self._reported_s:
            self._look()  # once per time: many instances report at the same time
            self._reported_s = now
        self._reports[event.instance] = event

    def summary(self, end_s: float) -> dict[str, Any]:
        self._look()
        levels: dict[str, Any] = {
            name: series.means(end_s) for name, series in self._series.items()
        }
        levels["kv_most"] = self._series["kv_most"].peaks(end_s)
        return {"width_s": self._series["in_flight"].width_s, **levels}

    def _look(self) -> None:
        """Set the levels from the latest reports of all instances."""
        reports = self._reports.values()
        if reports:
            now, usages = self._reported_s, [report.kv_usage for report in reports]
            self._series["queued"].set(now, sum(report.waiting for report in reports))
            self._series["kv"].set(now, sum(usages) / len(usages))
            self._series["kv_most"].set(now, max(usages))


class RunFold:
    """Gathers a RunRecord.

    `waiting`: returns how many requests wait for an instance now.
    """

    def __init__(self, waiting: Callable[[], int] = lambda: 0) -> None:
        self._waiting = waiting
        self._now = 0.0
        self._attempts = AttemptTables()
        self._fleet = FleetLevels()
        self._marks: list[tuple[float, str, str]] = []
        self._lengths = array("I")
        self._folded = Folded(*self._attempts.folds, self)

    def observe(self, now: float, event: Event, actions: Iterable[Action]) -> None:
        """Take the next entry of the journal and the actions of the scheduler."""
        self._now = now
        self._folded.observe(now, event, actions)
        self._fleet.set(now, self._attempts.in_flight, self._waiting())

    def record(self, end_s: float, curves: list[list[float]]) -> RunRecord:
        """The record of a run that ended at `end_s`, or at the last event if that is later;
        `curves` are those of its steps (see `Metrics`)."""
        end_s = max(end_s, self._now)
        return RunRecord(
            end_s=end_s,
            instances=list(self._attempts.instances),
            groups=list(self._attempts.groups),
            **self._attempts.columns(end_s),
            fleet=self._fleet.summary(end_s),
            marks=self._marks,
            lengths=quantiles(self._lengths),
            curves=curves,
        )

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            Deliver: self._delivered,
            InstanceJoined: self._joined,
            InstanceLost: self._lost,
            InstanceReported: self._fleet.report,
            WeightsPublished: self._published,
            Restored: self._restored,
        }

    def _joined(self, now: float, event: InstanceJoined) -> None:
        if now > 0:
            self._marks.append((now, "joined", f"{event.instance} joined"))
        self._attempts.instance(event.instance)
        self._fleet.instance_gone(event.instance)

    def _lost(self, now: float, event: InstanceLost) -> None:
        if event.requested:
            self._marks.append((now, "left", f"{event.instance} was {event.reason}"))
        else:
            self._marks.append((now, "lost", f"{event.instance} was lost: {event.reason}"))
        self._fleet.instance_gone(event.instance)

    def _published(self, now: float, event: WeightsPublished) -> None:
        self._marks.append((now, "published", f"version {event.version} published"))

    def _delivered(self, now: float, action: Deliver) -> None:
        self._lengths.extend([sample.response_tokens for sample in action.samples])
        if action.last:
            self._marks.append((now, "delivered", f"batch {action.batch} delivered"))

    def _restored(self, now: float, event: Restored) -> None:
        self._marks.append((now, "restarted", "the scheduler restarted"))
