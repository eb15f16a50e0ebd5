"""Restoring: a fresh scheduler goes on where an earlier one of the same run ended.

Groups and requests come back in their earlier states, but nothing runs: a request that was in
flight waits, with its kept tokens. Attempt ids and serials continue, so an answer to an attempt of
the earlier scheduler matches no attempt. Instances join by their own events, as if for the first
time; suspects, rests, loans and migrations are forgotten.

`Restored` is the first event of the fresh scheduler, so the journal of a continued run replays by
itself. Time goes on from the earlier run and never back. An instance with old weights gets the new
ones before it is given work, as always, so it does not matter how far an update had come.
"""

from __future__ import annotations

from typing import Final

from rollout_sched.core.decide.order import Decider
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.events import Restored
from rollout_sched.core.model.model import (
    Group,
    GroupState,
    PromptLengths,
    Request,
    RequestState,
    Siblings,
)
from rollout_sched.core.model.records import GroupFacts, RequestFacts, RequestStands, RunState
from rollout_sched.core.model.request_ids import request_id
from rollout_sched.core.state.groups import COMPLETE, JUDGING
from rollout_sched.core.state.lifecycle import ACTING, FINISHED, INTERRUPTING, PARKED
from rollout_sched.core.work.parts import Parts

#: A request that waited or was in flight is treated as one whose attempt has just ended.
_STATES: Final[dict[RequestStands, RequestState]] = {
    "waiting": INTERRUPTING,
    "parked": PARKED,
    "acting": ACTING,
    "finished": FINISHED,
}


class Restorer:
    """Puts the facts of a run back into the state of a fresh scheduler."""

    def __init__(self, parts: Parts, decider: Decider) -> None:
        self._parts = parts
        self._state = parts.state
        self._decider = decider

    def restored(self, event: Restored, now: float) -> None:
        stored = event.state
        if now < stored.run.now:
            raise CallerError(
                f"the run is already at {stored.run.now} s, so it cannot be restored at the "
                f"earlier time {now} s"
            )
        self._restore_run(stored, now)
        survivors = [
            request
            for facts in sorted(stored.groups, key=_serial)
            for request in self._restore_group(facts)
        ]
        for request in survivors:  # an earlier one may complete its group and end a sibling
            if request.id in self._parts.requests:
                self._parts.outcomes.requeue(request)

    def _restore_run(self, stored: RunState, now: float) -> None:
        run, state = stored.run, self._state
        state.progress.restore(run, stored.recent)
        state.fleet.dispatched = run.attempts
        state.fleet.contexts.restore(run.max_kv_tokens)
        state.selection_window.left = run.window
        state.serials.last = run.serials
        self._decider.migrator.due_at = now
        self._decider.gathering.begin(run.instances, now)
        if state.prompt_lengths is not None:
            for prompt in stored.prompts:
                _remember(state.prompt_lengths.lengths_of(prompt.prompt), prompt.deliveries)

    def _restore_group(self, facts: GroupFacts) -> list[Request]:
        """Returns the requests of the group that may go on."""
        siblings = Siblings(
            facts.group,
            facts.prompt_tokens,
            facts.max_tokens,
            facts.prompt,
            self._history(facts),
            facts.expected_tokens,
        )
        group = Group(
            facts.group,
            facts.serial,
            facts.samples,
            siblings,
            judged=facts.judged,
            resumable=facts.resumable,
            min_samples=facts.min_samples,
        )
        group.state = GroupState(facts.state)
        group.launch_place, group.launch_size = facts.launch_place, facts.launch_size
        self._state.groups.add(group)
        survivors = self._restore_requests(group, facts)
        samples = self._state.sample_buffer
        if facts.started:
            samples.add(group)
            samples.set_version(group, facts.oldest_version)
        if group.state is COMPLETE:
            samples.completed(group)
        elif group.state is JUDGING:
            self._parts.finished.judge(group)
        return survivors

    def _restore_requests(self, group: Group, facts: GroupFacts) -> list[Request]:
        survivors: list[Request] = []
        requests = {known.index: self._request(known, group) for known in facts.requests}
        for known in facts.requests:
            request = requests[known.index]
            self._parts.requests.add(request)
            if request.state is PARKED:
                self._parts.requests.replay_buffer.add(request)
            elif request.state is INTERRUPTING:
                survivors.append(request)
        group.finished = [requests[index] for index in facts.finished]
        lengths = [request.response_tokens for request in group.finished]
        group.siblings.lengths = sorted(lengths)
        if lengths:
            self._parts.requests.expectations.learn(group.siblings)
        return survivors

    def _request(self, facts: RequestFacts, group: Group) -> Request:
        name, siblings = request_id(group.id, facts.index), group.siblings
        request = Request(name, siblings, group, facts.index, facts.serial, 0)
        request.state = _STATES[facts.state]
        request.segments = facts.segments
        request.response_tokens = facts.response_tokens
        request.context_tokens = (
            siblings.prompt_tokens + facts.response_tokens + facts.observed_tokens
        )
        request.computed_tokens = facts.computed_tokens
        request.turn = facts.turn
        request.finish = facts.finish
        request.salt = facts.salt
        request.last_attempt = facts.last_attempt
        request.last_instance = facts.last_instance
        request.migrations = facts.migrations
        return request

    def _history(self, facts: GroupFacts) -> PromptLengths | None:
        lengths = self._state.prompt_lengths
        if lengths is None:
            return None
        if facts.prompt in lengths:
            return lengths.lengths_of(facts.prompt)
        own = PromptLengths()
        _remember(own, facts.history)
        return own


def _remember(lengths: PromptLengths, deliveries: tuple[tuple[int, ...], ...]) -> None:
    for delivery in deliveries:
        lengths.note(delivery)


def _serial(facts: GroupFacts) -> int:
    return facts.serial
