"""Replays a journal: every event with the actions of the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rollout_sched import journal
from rollout_sched.config import PolicyFile, load_policy, shipped
from rollout_sched.core.actions import Action
from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import Event, InstanceJoined, Restored
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.journal import JournalHeader

Observer = Callable[[float, Event, Iterable[Action]], None]


class Recording:
    """One journal, plain or gzip. A journal that is still being written is read up to its last
    complete line.

    `policy`: the policy file of the recorded run, unless it was a preset. Raises JournalError if
    the file is not a journal, CallerError if the policy is unknown.
    """

    def __init__(self, path: Path, policy: str | None = None) -> None:
        self.path = path
        self.header, _ = journal.read(path)
        self._policy = _policy_of(self.header, path, policy)
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


def _policy_of(header: JournalHeader, path: Path, policy: str | None) -> PolicyFile:
    if policy is not None:
        return load_policy(policy)
    if header.policy not in shipped("policies/presets"):
        raise CallerError(
            f"{path}: recorded under {header.policy!r}, which is not a preset; pass the policy "
            f"file with --policy"
        )
    return load_policy(header.policy)
