"""Replays a journal, every event with the actions of the scheduler, and computes its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollout_sched import journal
from rollout_sched.config import PolicyFile, load_policy, shipped
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Action, Answer, Deliver, Dispatch
from rollout_sched.core.model.events import (
    Event,
    GroupSubmitted,
    InstanceJoined,
    RequestSubmitted,
    Restored,
    ToolReturned,
    TrajectoryEnded,
    TurnFinished,
)
from rollout_sched.core.model.records import DeliveredSample as Made
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.journal import JournalHeader
from rollout_sched.metrics import Metrics
from rollout_sched.metrics.fold import Folded, Handler
from rollout_sched.metrics.outages import DirectFold, OutageFold
from rollout_sched.simulators.traces.model import Gatherer, SampleRecord, Trace, Turn
from rollout_sched.terminal import count, percent, seconds

Observer = Callable[[float, Event, Iterable[Action]], None]


class Recording:
    """One journal, plain or gzip. A journal that is still being written is read up to its last
    complete line.

    `policy`: the policy file of the recorded run, unless it was a preset; `allow_code`: as in
    `load_policy`. Raises JournalError if
    the file is not a journal, CallerError if the policy is unknown.
    """

    def __init__(self, path: Path, policy: str | None = None, *, allow_code: bool = False) -> None:
        self.path = path
        self.header, _ = journal.read(path)
        self._policy = _policy_of(self.header, path, policy, allow_code)
        self._scheduler = self._fresh()

    def events(self) -> Iterator[tuple[float, Event]]:
        """The events without the scheduler's actions: (seconds, event)."""
        _, entries = journal.read(self.path)
        return ((entry.now, entry.event) for entry in entries)

    def slots(self) -> dict[str, int]:
        """The slots of every instance that ever joined."""
        joined = (event for _, event in self.events() if isinstance(event, InstanceJoined))
        return {event.instance: event.slots for event in joined}

    def waiting(self) -> int:
        """How many requests wait for an instance, at the event that `tell` has reached."""
        return self._scheduler.view.waiting

    def tell(self, observers: Iterable[Observer]) -> float:
        """Show the observers every event in order. Returns the time of the last one, in seconds.

        Raises JournalError if the scheduler refuses an event, because the policy is a different
        one.
        """
        self._scheduler = self._fresh()
        last = 0.0
        told = tuple(observers)
        for now, event, actions in self._told():
            last = now
            for observe in told:
                observe(now, event, actions)
        return last

    def _told(self) -> Iterator[tuple[float, Event, list[Action]]]:
        for number, (now, event) in enumerate(self.events(), start=2):
            if isinstance(event, Restored):
                self._scheduler = self._fresh()  # the previous scheduler has died
            try:
                actions = self._scheduler.handle(event, now)
            except CallerError as error:
                raise journal.JournalError(
                    f"{self.path}:{number}: the scheduler refuses this event ({error}); if the run "
                    f"was not recorded under {self._policy.name!r}, pass its policy with --policy"
                ) from error
            yield now, event, actions

    def _fresh(self) -> Scheduler:
        header = self.header
        return self._policy.scheduler(
            header.prompts_per_step, version=header.version, seed=header.seed
        )


def _policy_of(
    header: JournalHeader, path: Path, policy: str | None, allow_code: bool
) -> PolicyFile:
    if policy is not None:
        return load_policy(policy, allow_code=allow_code)
    if header.policy not in shipped("policies/presets"):
        raise CallerError(
            f"{path}: recorded under {header.policy!r}, which is not a preset; pass the policy "
            f"file with --policy"
        )
    return load_policy(header.policy)


class TraceFold:
    """Makes a trace from a journal, so that the recorded run can be replayed under other policies.
    Gathers the delivered and answered samples; a group is a prompt and its samples.

    The tokens of a turn are those that were kept. Discarded tokens are not in the trace, and
    neither are samples that were incomplete when the journal ended. A direct request is a sample of
    the group that its client named, or its own group. Only direct requests have arrival times: a
    trainer's groups wait for the scheduler.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._gatherer = Gatherer(where)
        self._asked_s: dict[str, float] = {}
        self._first_s: float | None = None
        self._turns: dict[str, list[Turn]] = {}
        self._dispatched: dict[str, Dispatch] = {}
        self._ended_s: dict[str, float] = {}
        self._direct: dict[str, int] = {}
        self._most = 0

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            GroupSubmitted: self._submitted,
            RequestSubmitted: self._asked,
            Dispatch: self._begun,
            TurnFinished: self._turn_over,
            ToolReturned: self._tool_over,
            TrajectoryEnded: self._trajectory_over,
            Deliver: self._delivered,
            Answer: self._answered,
        }

    def trace(self, name: str) -> Trace:
        """Raises TraceError if nothing was delivered or answered."""
        return Trace(
            name,
            self._gatherer.groups(),
            about="recorded by rollout_sched",
            max_response_tokens=self._most or None,
        )

    def _submitted(self, now: float, event: GroupSubmitted) -> None:
        self._most = max(self._most, event.max_tokens)

    def _asked(self, now: float, event: RequestSubmitted) -> None:
        self._most = max(self._most, event.max_tokens)
        if self._first_s is None:
            self._first_s = now
        self._asked_s[event.request] = now - self._first_s

    def _begun(self, now: float, action: Dispatch) -> None:
        self._dispatched[action.request] = action
        if action.request in self._turns:
            del self._turns[action.request][action.turn :]  # those were discarded

    def _turn_over(self, now: float, event: TurnFinished) -> None:
        dispatch = self._dispatched.get(event.request)
        if dispatch is None or dispatch.attempt != event.attempt:
            return
        turns = self._turns.setdefault(event.request, [])
        made = dispatch.response_tokens + event.tokens - sum(t.output_tokens for t in turns)
        turns.append(Turn(max(1, made)))
        self._ended_s[event.request] = now

    def _tool_over(self, now: float, event: ToolReturned) -> None:
        turns = self._turns.get(event.request)
        if turns:
            turns[-1] = Turn(
                turns[-1].output_tokens,
                event.observation_tokens,
                now - self._ended_s[event.request],
            )

    def _trajectory_over(self, now: float, event: TrajectoryEnded) -> None:
        self._ended_s.pop(event.request, None)

    def _delivered(self, now: float, action: Deliver) -> None:
        for sample in action.samples:
            self._add(sample, sample.group, sample.index)

    def _answered(self, now: float, action: Answer) -> None:
        made = action.sample
        group = made.group or made.request
        index = self._direct[group] = self._direct.get(group, -1) + 1
        self._add(made, group, index, self._asked_s.pop(made.request))

    def _add(self, made: Made, group: str, index: int, arrival_s: float = 0.0) -> None:
        self._dispatched.pop(made.request, None)
        self._ended_s.pop(made.request, None)
        earlier = self._turns.pop(made.request, [])
        left = made.response_tokens - sum(turn.output_tokens for turn in earlier)
        turns = [*earlier, Turn(left)] if left > 0 else _closed(earlier)
        self._gatherer.add(
            SampleRecord(
                group,
                index,
                made.prompt_tokens,
                tuple(turns),
                arrival_s=arrival_s,
                finish="length" if made.finish == "length" else "stop",
                version=min((segment.version for segment in made.segments), default=None),
            )
        )


def _closed(turns: list[Turn]) -> list[Turn]:
    """The turns, with no tool call after the last one."""
    return [*turns[:-1], Turn(turns[-1].output_tokens)]


# ------------------------------------------------------------------------------------------
# The figures of a journal, as in the report of a replay.

SCHEMA = "rollout-sched-journal-summary/1"


def summary(
    recording: Recording, metrics: Metrics | None = None, also: Iterable[Observer] = ()
) -> dict[str, Any]:
    """The figures: times in seconds, shares from 0 to 1. The occupancy bubble refers to the
    instances' slots, because a journal has neither the reference batch nor the offered lengths.

    `metrics`: the metrics to fold; None for new ones. `also`: further observers of the journal.
    """
    slots = recording.slots()
    metrics = metrics or metrics_of(slots)
    direct, outages = DirectFold(), OutageFold()
    total_s = recording.tell([metrics.observe, Folded(direct, outages).observe, *also])
    figures: dict[str, Any] = msgspec.to_builtins(metrics.summary(total_s), str_keys=True)
    del figures["length_bias"]
    return {
        "schema": SCHEMA,
        "policy": recording.header.policy,
        "instances": len(slots),
        **figures,
        "direct": msgspec.to_builtins(direct.figures()),
        "outages": msgspec.to_builtins(outages.figures(total_s)),
        "per_step": [msgspec.to_builtins(step, str_keys=True) for step in metrics.steps],
    }


def metrics_of(slots: Mapping[str, int]) -> Metrics:
    """Metrics for a journal whose instances have these slots."""
    return Metrics(max(slots.values(), default=1))


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """A label and a text for each figure; an indented label is part of the one above."""
    idle = found["idle_bubble_by_cause"]
    direct, outages = found["direct"], found["outages"]
    shown = [
        ("length", seconds(found["total_s"])),
        ("batches", count(found["steps"])),
        ("samples delivered", count(found["samples_delivered"])),
        ("tokens/s generated", count(found["tokens_per_s"])),
        ("tokens/s delivered", count(found["accepted_tokens_per_s"])),
        ("tokens discarded", count(found["discarded_tokens"])),
        ("tokens prefilled again", count(found["reprefilled_tokens"])),
        ("t50 of a step", seconds(found["t50_s"])),
        ("t90", seconds(found["t90_s"])),
        ("t99", seconds(found["t99_s"])),
        ("trainer waits", seconds(found["trainer_wait_s"])),
        ("staleness, mean", f"{found['staleness_mean']:.2f}"),
        ("staleness, most", count(found["staleness_max"])),
        ("idle", percent(found["idle_bubble"])),
        *((f"  {cause.replace('_', ' ')}", percent(share)) for cause, share in idle.items()),
        ("preemptions", count(found["preemptions"])),
        ("instances lost", count(outages["instances_lost"])),
        ("attempts failed", count(outages["failed_attempts"])),
        ("prompts failed", count(outages["failed_prompts"])),
    ]
    if direct["submitted"]:
        shown += [
            ("requests of clients", count(direct["submitted"])),
            ("  answered", count(direct["answered"])),
            ("  withdrawn", count(direct["withdrawn"])),
            ("  failed", count(direct["failed"])),
            ("  latency p50", seconds(direct["latency_p50_s"])),
            ("  latency p99", seconds(direct["latency_p99_s"])),
        ]
    return shown
