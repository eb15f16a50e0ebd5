"""A journal told again: every event with what the scheduler answered."""

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
    """One journal: plain or gzip, also one that is still written, up to its last whole line.

    `policy`: the file that it was recorded under, where that is none of the shipped ones. Raises
    JournalError for what is no journal, CallerError where the policy is not known.
    """

    def __init__(self, path: Path, policy: str | None = None) -> None:
        self.path = path
        self.header, _ = journal.read(path)
        self._policy = _policy_of(self.header, path, policy)
        self._scheduler = self._fresh()

    def events(self) -> Iterator[tuple[float, Event]]:
        """What happened, without what was answered: (seconds, event)."""
        _, entries = journal.read(self.path)
        return ((entry.now, entry.event) for entry in entries)

    def slots(self) -> dict[str, int]:
        """Of every instance that was ever here."""
        joined = (event for _, event in self.events() if isinstance(event, InstanceJoined))
        return {event.instance: event.slots for event in joined}

    def waiting(self) -> int:
        """How many requests wait for an instance, at the event that is being told."""
        return self._scheduler.view.waiting

    def tell(self, observers: Iterable[Observer]) -> float:
        """Show the observers everything, in order; the time of the last event, in seconds.

        Raises JournalError if the scheduler refuses an event: then the policy is another one.
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
                self._scheduler = self._fresh()  # the one before has died
            try:
                actions = self._scheduler.handle(event, now)
            except CallerError as error:
                raise journal.JournalError(
                    f"{self.path}:{number}: the scheduler refuses this event ({error}); was it "
                    f"recorded under {self._policy.name!r}? --policy names another"
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
            f"{path}: it was recorded under {header.policy!r}, which is not shipped; name its file "
            f"by --policy"
        )
    return load_policy(header.policy)
