"""All that code outside the core may read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from rollout_sched.core.model.model import GroupState, Instance
from rollout_sched.core.model.records import DeliveredSample
from rollout_sched.core.model.roles import Progress
from rollout_sched.core.state.lifecycle import ACTING, FINISHED, INTERRUPTING
from rollout_sched.core.work.parts import Parts


class RunView(Progress, Protocol):
    """How far the run is: what policies see, the number of delivered batches, and the number of
    groups that the current batch would still take."""

    @property
    def batches(self) -> int: ...
    @property
    def wanted(self) -> int: ...


class SchedulerView:
    """A scheduler as drivers, gateways and metrics see it. It always shows the present state.

    anomalies       counts, by kind, of events that cannot be true or came too late
    keeps_partial   whether an interrupted request goes on from its tokens
    keeps_sessions  whether naming a session has any effect
    """

    def __init__(self, parts: Parts) -> None:
        roles = parts.state.roles
        self.keeps_partial = roles.interruption.keeps_partial
        self.keeps_sessions = roles.keeps_sessions
        self.anomalies: Mapping[str, int] = parts.state.anomalies
        self._state = parts.state
        self._requests = parts.requests
        self._finished = parts.finished

    @property
    def run(self) -> RunView:
        return self._state.progress

    @property
    def loads_newest(self) -> bool:
        """Whether the newest version is ours to load (see WeightsPublished)."""
        return self._state.progress.loads

    @property
    def in_flight(self) -> int:
        """Attempts on instances."""
        return len(self._state.fleet.attempts)

    @property
    def waiting(self) -> int:
        """Requests that wait for an instance."""
        return len(self._requests.waiting)

    @property
    def parked(self) -> int:
        """Requests in the replay buffer."""
        return len(self._requests.replay_buffer)

    @property
    def has_begun(self) -> bool:
        """Whether a group of the trainer's is known, or was delivered."""
        return len(self._state.groups) > 0 or self._state.progress.delivered > 0

    def groups(self, state: GroupState) -> int:
        """How many groups are in a state."""
        return self._state.groups.count(state)

    @property
    def instances(self) -> Collection[Instance]:
        """The instances that have joined."""
        return self._state.fleet.instances.values()

    def instance(self, name: str) -> Instance | None:
        return self._state.fleet.instances.get(name)

    def least_loaded(self) -> Instance | None:
        """The least loaded open instance, or any instance if none is open."""
        fleet = self._state.fleet
        return fleet.least() or next(iter(fleet.instances.values()), None)

    def versions_of(self, attempt: int) -> tuple[int, int] | None:
        """The oldest and the newest version that may have made tokens of an attempt, as far as its
        instance is known; None if the answer is no longer wanted."""
        found = self._state.fleet.attempts.get(attempt)
        if found is None or found.abandoned:
            return None
        return found.version, found.instance.version

    def is_wanted(self, request: str, attempt: int) -> bool:
        """Whether an answer of the attempt, which was made for this request, is still wanted."""
        found = self._state.fleet.attempts.get(attempt)
        return found is not None and not found.abandoned and found.request.id == request

    def is_stopping(self, attempt: int) -> bool:
        """Whether the attempt should not go on: it was interrupted, abandoned or is over."""
        found = self._state.fleet.attempts.get(attempt)
        if found is None or found.abandoned:
            return True
        return found.request.state is INTERRUPTING

    def is_acting(self, request: str, attempt: int) -> bool:
        """Whether the request waits for the tool that follows the turn made by this attempt."""
        found = self._requests.get(request)
        return found is not None and found.state is ACTING and found.last_attempt == attempt

    def to_judge(self, request: str) -> DeliveredSample | None:
        """The sample, if it is finished and its group is judged once whole: its reward may be
        computed at once."""
        found = self._requests.get(request)
        if found is None or found.state is not FINISHED:
            return None
        judged = found.group is not None and found.group.judged
        return self._finished.sample_of(found) if judged else None

    def is_judged(self, group: str, judgement: int) -> bool:
        """Whether the group still waits for the answer to the Judge with this number."""
        found = self._state.groups.get(group)
        return found is not None and found.judgement == judgement != 0

    @property
    def sessions(self) -> int:
        """Sessions whose last instance is known."""
        return len(self._state.sessions)

    @property
    def session_moves(self) -> int:
        """Requests of a session that were sent to another instance than the one before."""
        return self._state.sessions.moves

    def knows_session(self, session: str) -> bool:
        return self._state.sessions.last_instance(session) is not None
