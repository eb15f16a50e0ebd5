"""Converts a journal to Chrome's trace events, which Perfetto and chrome://tracing draw.

A process is an instance, a thread is a place on it, and a slice is what one attempt generated under
one version, in the colour of that version. Arrows lead from an attempt to the one that continued
it. Counters: running and waiting requests and KV cache usage of each instance, as polled; staleness
of each batch. Instants: weights published, instances paused, lost and back, batches.

The format: "Trace Event Format", Google, 2016; times in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_sched.core.model.actions import Deliver, Dispatch, Pause, Resume
from rollout_sched.core.model.events import (
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.inspection.recording import Recording, metrics_of, rows, summary
from rollout_sched.metrics.attempts import AttemptSpans, Closed
from rollout_sched.metrics.fold import Handler
from rollout_sched.page.run_page import DrawnRun, RunFold, run_page

#: The process for events of the whole fleet.
FLEET = 1

#: Names from Chrome's palette that colour-blind people can distinguish; versions use them in turn.
COLOURS = (
    "thread_state_running",
    "rail_load",
    "thread_state_iowait",
    "cq_build_passed",
    "rail_animation",
    "generic_work",
)


class TimelineFold:
    """Gathers trace events; `events()` returns them.

    spans  fold it before this one
    """

    def __init__(self) -> None:
        self.spans = AttemptSpans(self._closed)
        self._events: list[dict[str, Any]] = []
        self._processes: dict[str, int] = {}
        self._left_off: dict[str, tuple[float, int, int]] = {}  # when and where requests stopped
        self._arrows = 0

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            Dispatch: self._begun,
            InstanceJoined: self._joined,
            InstanceLost: self._lost,
            InstanceReported: self._reported,
            WeightsUpdated: self._updated,
            WeightsPublished: self._published,
            Pause: self._paused,
            Resume: self._resumed,
            Deliver: self._delivered,
        }

    def events(self, end_s: float) -> list[dict[str, Any]]:
        """All events; attempts that still run end at `end_s`."""
        self.spans.end(end_s)
        names = [("fleet", FLEET), *self._processes.items()]
        return [
            *(
                {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
                for name, pid in names
            ),
            *self._events,
        ]

    # -- attempts --------------------------------------------------------------------------

    def _begun(self, now: float, action: Dispatch) -> None:
        before = self._left_off.pop(action.request, None)
        if before is not None and action.computed_tokens:
            place = self.spans.running[action.attempt].place
            self._arrow(before, (now, self._process(action.instance), place))

    def _arrow(self, source: tuple[float, int, int], target: tuple[float, int, int]) -> None:
        self._arrows += 1
        for phase, (at_s, pid, tid) in (("s", source), ("f", target)):
            event = {"ph": phase, "id": self._arrows, "name": "goes on", "cat": "resume"}
            end = {"bp": "e"} if phase == "f" else {}
            self._events.append({**event, **end, "pid": pid, "tid": tid, "ts": at_s * 1e6})

    def _closed(self, closed: Closed) -> None:
        running = closed.attempt
        dispatch, pid = running.dispatch, self._process(running.dispatch.instance)
        if closed.outcome != "finished":
            self._left_off[dispatch.request] = closed.end_s, pid, running.place
        said = {
            "group": dispatch.group,
            "attempt": dispatch.attempt,
            "context_tokens": dispatch.context_tokens,
            "response_tokens_before": dispatch.response_tokens,
            "turn": dispatch.turn,
            "outcome": f"{closed.outcome}: {closed.reason}" if closed.reason else closed.outcome,
        }
        for span in closed.spans:
            self._events.append(
                {
                    "ph": "X",
                    "name": dispatch.request,
                    "cat": "attempt",
                    "pid": pid,
                    "tid": running.place,
                    "ts": span.start_s * 1e6,
                    "dur": span.length_s * 1e6,
                    "cname": COLOURS[span.version % len(COLOURS)],
                    "args": {**said, "version": span.version, "tokens": span.tokens},
                }
            )

    # -- instances -------------------------------------------------------------------------

    def _process(self, instance: str) -> int:
        return self._processes.setdefault(instance, FLEET + 1 + len(self._processes))

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self._note("joined", now, event.instance, {"version": event.version})

    def _lost(self, now: float, event: InstanceLost) -> None:
        how = "left" if event.requested else "lost"
        self._note(how, now, event.instance, {"reason": event.reason})

    def _updated(self, now: float, event: WeightsUpdated) -> None:
        self._note("weights loaded", now, event.instance, {"version": event.version})

    def _paused(self, now: float, action: Pause) -> None:
        self._note("pause", now, action.instance, {"mode": action.mode})

    def _resumed(self, now: float, action: Resume) -> None:
        self._note("resume", now, action.instance, {})

    def _reported(self, now: float, event: InstanceReported) -> None:
        pid = self._process(event.instance)
        self._counter("requests", now, pid, {"running": event.running, "waiting": event.waiting})
        self._counter("KV cache used", now, pid, {"share": event.kv_usage})

    # -- the fleet -------------------------------------------------------------------------

    def _published(self, now: float, event: WeightsPublished) -> None:
        self._instant("weights published", now, FLEET, 0, {"version": event.version})

    def _delivered(self, now: float, action: Deliver) -> None:
        said = {"batch": action.batch, "part": action.part, "samples": len(action.samples)}
        self._instant("batch delivered", now, FLEET, 0, said)
        if action.samples:
            ages = [sample.staleness for sample in action.samples]
            figures = {"mean": sum(ages) / len(ages), "most": max(ages)}
            self._counter("staleness", now, FLEET, figures)

    def _note(self, name: str, now: float, instance: str, args: dict[str, Any]) -> None:
        self._instant(name, now, self._process(instance), 0, args)

    def _instant(self, name: str, now: float, pid: int, tid: int, args: dict[str, Any]) -> None:
        event = {"ph": "i", "s": "p", "name": name, "cat": "event", "args": args}
        self._events.append({**event, "pid": pid, "tid": tid, "ts": now * 1e6})

    def _counter(self, name: str, now: float, pid: int, args: Mapping[str, float]) -> None:
        self._events.append({"ph": "C", "name": name, "pid": pid, "ts": now * 1e6, "args": args})


def journal_page(recording: Recording) -> bytes:
    """A page with the figures and the timeline of the run."""
    metrics, drawn = metrics_of(recording.slots()), RunFold(recording.waiting)
    found = summary(recording, metrics, [drawn.observe])
    run = DrawnRun(
        name=found["policy"],
        record=drawn.record(found["total_s"], metrics.curves),
        steps=found["per_step"],
        idle=found["idle_bubble_by_cause"],
        vacant=found["occupancy_bubble_by_cause"],
        staleness=found["staleness_histogram"],
    )
    return run_page(
        recording.path.name,
        [run],
        about=[f"Recorded under {found['policy']}, {found['instances']} instances."],
        tables=[_table(rows(found))],
    )


def _table(pairs: Sequence[tuple[str, str]]) -> dict[str, object]:
    return {
        "title": "Figures",
        "columns": [{"label": "", "means": ""}],
        "rows": [{"name": label.strip(), "cells": [shown]} for label, shown in pairs],
    }
