"""Replays a journal, every event with the actions of the scheduler, and computes its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollout_sched import journal
from rollout_sched.config import PolicyFile, load_policy, parse_policy, refuse_code
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.events import (
    Event,
    InstanceJoined,
    Restored,
)
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.inspection.rounds import find_rounds, round_figures
from rollout_sched.journal import JournalHeader
from rollout_sched.metrics import Metrics
from rollout_sched.metrics.fold import Folded
from rollout_sched.metrics.outages import DirectFold, OutageFold
from rollout_sched.terminal import count, percent, seconds

Observer = Callable[[float, Event, Iterable[Action]], None]


class Recording:
    """One journal, plain or gzip. A journal that is still being written is read up to its last
    complete line.

    `policy`: replaces the one in the journal; `allow_code`: as in `load_policy`. Raises
    JournalError if the file is not a journal, CallerError if the policy cannot be used.
    """

    def __init__(self, path: Path, policy: str | None = None, *, allow_code: bool = False) -> None:
        self.path = path
        self.header, _ = journal.read(path)
        self.allow_code = allow_code
        self.policy = _policy_of(self.header, policy, allow_code=allow_code)
        self._scheduler = self._fresh()

    @property
    def begins_late(self) -> bool:
        """Whether its first events are missing, so that the actions cannot be known."""
        return self.header.part > 0

    @property
    def continues_at(self) -> float:
        """When it goes on with an earlier run, in seconds of that run; 0 if it does not."""
        now, event = next(self.events(), (0.0, None))
        return now if self.begins_late or isinstance(event, Restored) else 0.0

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

        Raises JournalError if the first events are missing, or if the scheduler refuses an event,
        because the policy is a different one.
        """
        if self.begins_late:
            raise journal.JournalError(
                f"{self.path} begins in the middle of a run, and the file before it, "
                f"{journal.earlier(self.path)}, is missing or of another run; only a journal from "
                f"the first event on can be replayed"
            )
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
                    f"was not recorded under {self.policy.name!r}, pass its policy with --policy"
                ) from error
            yield now, event, actions

    def _fresh(self) -> Scheduler:
        header = self.header
        return self.policy.scheduler(
            header.prompts_per_step, version=header.version, seed=header.seed
        )


def _policy_of(header: JournalHeader, policy: str | None, *, allow_code: bool) -> PolicyFile:
    if policy is not None or not header.tables:
        return load_policy(policy or header.policy, allow_code=allow_code)
    if not allow_code:
        refuse_code(header.policy, header.tables)
    return parse_policy(header.policy, header.tables)


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
    rounds = round_figures(find_rounds(recording.events()))
    return {
        "schema": SCHEMA,
        "policy": recording.header.policy,
        "instances": len(slots),
        **figures,
        "direct": msgspec.to_builtins(direct.figures()),
        "rounds": msgspec.to_builtins(rounds),
        "outages": msgspec.to_builtins(outages.figures(total_s)),
        "per_step": [msgspec.to_builtins(step, str_keys=True) for step in metrics.steps],
    }


def metrics_of(slots: Mapping[str, int]) -> Metrics:
    """Metrics for a journal whose instances have these slots."""
    return Metrics(max(slots.values(), default=1))


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """A label and a text for each figure; an indented label is part of the one above."""
    idle = found["idle_bubble_by_cause"]
    direct, outages, rounds = found["direct"], found["outages"], found["rounds"]
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
    if found["drafted_tokens"]:
        shown += [
            ("tokens drafted", count(found["drafted_tokens"])),
            ("  accepted", percent(found["draft_acceptance"])),
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
    if rounds is not None:
        steps = f"{rounds['rounds']} of {rounds['prompts']} x {rounds['samples']}"
        shown += [
            ("rounds, prompts x samples", steps),
            ("  t50", seconds(rounds["t50_s"])),
            ("  t90", seconds(rounds["t90_s"])),
            ("  length", seconds(rounds["length_s"])),
            ("  silence between", seconds(rounds["silence_s"])),
        ]
    return shown
