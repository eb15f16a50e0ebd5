"""A journal as Chrome's trace events, which Perfetto and chrome://tracing draw.

A process is an instance, a thread a place on it, a slice what one attempt made under one version,
in the colour of that version. Arrows lead from an attempt to the one that went on from it.
Counters: what runs and waits and how full the KV cache is by instance, as polled; staleness of each
batch. Instants: weights published, instances paused, lost and back, batches.

The format: "Trace Event Format", Google, 2016; times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush
from typing import Any, NamedTuple

from rollout_sched.core.actions import Deliver, Dispatch, Pause, Resume
from rollout_sched.core.events import (
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    PrefixVerified,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    TurnFinished,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.metrics.fold import Handler

Ended = RequestFinished | RequestInterrupted | TurnFinished | RequestFailed

#: Process of what concerns the whole fleet.
FLEET = 1

#: Names of Chrome's palette, told apart by the colour-blind; versions take turns.
COLOURS = (
    "thread_state_running",
    "rail_load",
    "thread_state_iowait",
    "cq_build_passed",
    "rail_animation",
    "generic_work",
)


class _Running(NamedTuple):
    start_s: float
    dispatch: Dispatch
    version: int
    place: int


class _Places:
    """The lowest place that is free."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._most = 0

    def take(self) -> int:
        if self._free:
            return heappop(self._free)
        self._most += 1
        return self._most

    def leave(self, place: int) -> None:
        heappush(self._free, place)


class TimelineFold:
    """Gathers trace events; `events()` gives them."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._processes: dict[str, int] = {}
        self._places: dict[str, _Places] = {}
        self._versions: dict[str, int] = {}
        self._running: dict[int, _Running] = {}
        self._left_off: dict[str, tuple[float, int, int]] = {}  # when and where a request stopped
        self._arrows = 0

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            Dispatch: self._begun,
            RequestFinished: self._ended,
            RequestInterrupted: self._ended,
            TurnFinished: self._ended,
            RequestFailed: self._ended,
            PrefixVerified: self._verified,
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
        """All of them; what still runs ends at `end_s`."""
        for attempt in list(self._running):
            self._close(attempt, end_s, (), "still running")
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
        place = self._places.setdefault(action.instance, _Places()).take()
        version = self._versions.get(action.instance, 0)
        self._running[action.attempt] = _Running(now, action, version, place)
        before = self._left_off.pop(action.request, None)
        if before is not None and action.computed_tokens:
            self._arrow(before, (now, self._process(action.instance), place))

    def _arrow(self, source: tuple[float, int, int], target: tuple[float, int, int]) -> None:
        self._arrows += 1
        for phase, (at_s, pid, tid) in (("s", source), ("f", target)):
            event = {"ph": phase, "id": self._arrows, "name": "goes on", "cat": "resume"}
            end = {"bp": "e"} if phase == "f" else {}
            self._events.append({**event, **end, "pid": pid, "tid": tid, "ts": at_s * 1e6})

    def _verified(self, now: float, event: PrefixVerified) -> None:
        running = self._running.get(event.attempt)
        if running is not None:
            pid = self._process(running.dispatch.instance)
            self._instant("verified", now, pid, running.place, {"tokens": event.tokens})

    def _ended(self, now: float, event: Ended) -> None:
        running = self._running.get(event.attempt)
        if running is None:
            return
        if not isinstance(event, RequestFinished):
            place = self._process(running.dispatch.instance), running.place
            self._left_off[event.request] = (now, *place)
        if isinstance(event, RequestFailed):
            self._close(event.attempt, now, (), f"failed: {event.reason}")
        else:
            spans = event.spans or ((running.version, event.tokens),)
            self._close(event.attempt, now, spans, _OUTCOMES[type(event)])

    def _close(
        self, attempt: int, now: float, spans: Iterable[tuple[int, int]], outcome: str
    ) -> None:
        running = self._running.pop(attempt)
        dispatch = running.dispatch
        self._places[dispatch.instance].leave(running.place)
        said = {
            "group": dispatch.group,
            "attempt": attempt,
            "context_tokens": dispatch.context_tokens,
            "response_tokens_before": dispatch.response_tokens,
            "turn": dispatch.turn,
            "outcome": outcome,
        }
        for start_s, length_s, version, tokens in _pieces(running, now, spans):
            self._events.append(
                {
                    "ph": "X",
                    "name": dispatch.request,
                    "cat": "attempt",
                    "pid": self._process(dispatch.instance),
                    "tid": running.place,
                    "ts": start_s * 1e6,
                    "dur": length_s * 1e6,
                    "cname": COLOURS[version % len(COLOURS)],
                    "args": {**said, "version": version, "tokens": tokens},
                }
            )

    # -- instances -------------------------------------------------------------------------

    def _process(self, instance: str) -> int:
        return self._processes.setdefault(instance, FLEET + 1 + len(self._processes))

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self._gone(now, event.instance, "restarted")
        self._versions[event.instance] = event.version
        self._note("joined", now, event.instance, {"version": event.version})

    def _lost(self, now: float, event: InstanceLost) -> None:
        self._gone(now, event.instance, "lost")
        self._note("lost", now, event.instance, {"reason": event.reason})

    def _gone(self, now: float, instance: str, outcome: str) -> None:
        for attempt, running in list(self._running.items()):
            if running.dispatch.instance == instance:
                pid = self._process(instance)
                self._left_off[running.dispatch.request] = (now, pid, running.place)
                self._close(attempt, now, (), outcome)

    def _updated(self, now: float, event: WeightsUpdated) -> None:
        self._versions[event.instance] = event.version
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


_OUTCOMES: dict[type[Any], str] = {
    RequestFinished: "finished",
    RequestInterrupted: "interrupted",
    TurnFinished: "turn finished",
}


def _pieces(
    running: _Running, now: float, spans: Iterable[tuple[int, int]]
) -> Iterator[tuple[float, float, int, int]]:
    """(start, seconds, version, tokens) of what an attempt made: its time shared out by tokens,
    for nothing says when one version took over."""
    made = [(version, tokens) for version, tokens in spans if tokens]
    if not made:
        yield running.start_s, now - running.start_s, running.version, 0
        return
    each_s = (now - running.start_s) / sum(tokens for _, tokens in made)
    start_s = running.start_s
    for version, tokens in made:
        yield start_s, tokens * each_s, version, tokens
        start_s += tokens * each_s
