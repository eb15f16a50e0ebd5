"""Which facts of a run each event changes: what must be written down to outlive a scheduler.

Law (`tests/laws/test_restarts.py`): at every point of a run, the fold of all changes is the state.

Facts are kept, not the events that led to them: replaying a journal takes longer the older the run
is, and stops working with the first version of our code that decides differently. Changes are
recorded, not searched for: each event records the names of what it changed, and the facts of a
group are assembled once, when they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, get_args

import msgspec

from rollout_sched.core.model.actions import Action, Deliver, Discard, Dispatch, Interrupt
from rollout_sched.core.model.events import Event, GroupSubmitted, OfRequest, Restored
from rollout_sched.core.model.model import Group, GroupState, LengthHistory, Request
from rollout_sched.core.model.records import (
    DeliveredGroup,
    GroupFacts,
    GroupStands,
    PromptFacts,
    RequestFacts,
    RequestStands,
    RunFacts,
    RunState,
    Segment,
)
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.core.state.groups import ACTIVE, COMPLETE, DEFERRED, FRESH, HERE, JUDGING, SPENT
from rollout_sched.core.state.lifecycle import ACTING, FINISHED, PARKED

# ------------------------------------------------------------------------------------------
# A scheduler's present state as facts (see `records.RunState`).

_STANDS: Final[dict[GroupState, GroupStands]] = {
    FRESH: "fresh",
    ACTIVE: "active",
    SPENT: "spent",
    DEFERRED: "deferred",
    JUDGING: "judging",
    COMPLETE: "complete",
}


def state_of(scheduler: Scheduler, now: float) -> RunState:
    """All facts of a scheduler whose last event was at `now`. O(everything)."""
    lengths = scheduler.state.prompt_lengths
    return RunState(
        run_facts(scheduler, now),
        tuple([group_facts(group, scheduler) for group in scheduler.state.groups]),
        () if lengths is None else tuple([prompt_facts(name, lengths) for name in lengths]),
        tuple(scheduler.state.progress.recent),
    )


def run_facts(scheduler: Scheduler, now: float) -> RunFacts:
    progress, fleet = scheduler.state.progress, scheduler.state.fleet
    staying = sum([not instance.leaving for instance in fleet.instances.values()])
    return RunFacts(
        now,
        progress.version,
        progress.loads,
        progress.closed,
        progress.trainer_waiting,
        progress.takes_parts,
        progress.shares_gpus,
        progress.delivered,
        progress.batches,
        progress.parts,
        progress.in_batch,
        progress.whole_at,
        progress.round,
        scheduler.state.selection_window.left,
        scheduler.state.serials.last,
        fleet.dispatched,
        max(staying, scheduler.decider.gathering.expected),
        fleet.contexts.most,
        progress.lost,
    )


def prompt_facts(prompt: str, lengths: LengthHistory) -> PromptFacts:
    """Facts of a prompt that `lengths` knows."""
    return PromptFacts(prompt, lengths.lengths_of(prompt).deliveries)


def group_facts(group: Group, scheduler: Scheduler) -> GroupFacts:
    """Facts of a group that is neither delivered nor lost."""
    siblings, lengths = group.siblings, scheduler.state.prompt_lengths
    history: tuple[tuple[int, ...], ...] = ()
    if siblings.history is not None and lengths is not None and siblings.prompt not in lengths:
        history = siblings.history.deliveries
    return GroupFacts(
        group.id,
        group.serial,
        group.samples,
        siblings.prompt_tokens,
        siblings.max_tokens,
        siblings.prompt,
        siblings.expected_tokens,
        history,
        _STANDS[group.state],
        group in scheduler.state.sample_buffer,
        group.oldest_version,
        group.launch_place,
        group.launch_size,
        tuple([request.index for request in group.finished]),
        tuple([_request_facts(request) for request in group.requests]),
        group.judged,
        group.resumable,
        group.min_samples,
    )


def _request_facts(request: Request) -> RequestFacts:
    """Facts as if the instance that the request runs on were lost now."""
    segments, computed_tokens = request.segments, request.computed_tokens
    context_tokens = request.context_tokens
    attempt = request.attempt
    if attempt is not None and attempt.tokens and request.resumable:
        segments += (Segment(attempt.version, attempt.tokens, attempt.instance.id),)
        computed_tokens = context_tokens + attempt.tokens
    observed_tokens = context_tokens - request.siblings.prompt_tokens - request.response_tokens
    return RequestFacts(
        request.index,
        request.serial,
        _stands(request),
        segments,
        observed_tokens,
        computed_tokens,
        request.turn,
        request.finish,
        request.salt,
        request.last_attempt,
        request.last_instance,
        request.migrations,
    )


def _stands(request: Request) -> RequestStands:
    """A request that rests after a failure waits: blame on instances is not recorded."""
    if request.state is FINISHED:
        return "finished"
    if request.state is ACTING:
        return "acting"
    if not request.active or (request.state is PARKED and not request.rests_until):
        return "parked"
    return "waiting"


ToRequest = Dispatch | Discard | Interrupt

# A lookup by type takes a fifth of the time of isinstance for this many types.
_OF_REQUEST: Final = frozenset(get_args(OfRequest))
_TO_REQUEST: Final = frozenset(get_args(ToRequest))


class Changes(msgspec.Struct, frozen=True):
    """What has changed since the last call of `changes`.

    dropped    groups that were delivered or lost
    recent     the complete list; None if it has not changed
    delivered  deliveries to the trainer
    """

    run: RunFacts
    groups: tuple[GroupFacts, ...] = ()
    dropped: tuple[str, ...] = ()
    prompts: tuple[PromptFacts, ...] = ()
    recent: tuple[DeliveredGroup, ...] | None = None
    delivered: tuple[Deliver, ...] = ()


class FactRecorder:
    """Follows a scheduler from its first event; call `observe` after each event.

    Per event it records only the names of what changed. `changes` builds the facts themselves,
    once per changed group.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._touched: dict[Group, None] = {}
        scheduler.state.groups.touched = self._touched
        self._prompts: dict[str, None] = {}
        self._delivered: list[Deliver] = []
        self._recent_changed = False
        self._now: float | None = None

    def observe(self, now: float, event: Event, actions: Sequence[Action]) -> str | None:
        """An event has been handled. Returns the request whose facts it changes; None if it is not
        about a single request."""
        self._now = now
        about: Any = event
        request: str | None = about.request if type(event) in _OF_REQUEST else None
        if request is not None:
            self._touch_group_of(request)
        elif isinstance(event, GroupSubmitted):
            self._prompts[event.prompt] = None
        elif isinstance(event, Restored):
            self._prompts.update(dict.fromkeys([facts.prompt for facts in event.state.prompts]))
            self._recent_changed = True
        action: Any
        for action in actions:
            kind = type(action)
            if kind in _TO_REQUEST:
                self._touch_group_of(action.request)
            elif kind is Deliver:
                self._delivered.append(action)
                self._recent_changed = True
        return request

    def changes(self) -> Changes | None:
        """All changes since the last call; None if nothing has happened."""
        now, self._now = self._now, None
        if now is None:
            return None
        groups, dropped = self._groups()
        changes = Changes(
            run_facts(self._scheduler, now),
            groups,
            dropped,
            self._prompt_facts(),
            tuple(self._scheduler.state.progress.recent) if self._recent_changed else None,
            tuple(self._delivered),
        )
        self._delivered.clear()
        self._recent_changed = False
        return changes

    def _touch_group_of(self, name: str) -> None:
        """A request that has ended since needs nothing: it moved its group, or it had none."""
        request = self._scheduler.parts.requests.get(name)
        if request is not None and request.group is not None:
            self._touched[request.group] = None

    def _groups(self) -> tuple[tuple[GroupFacts, ...], tuple[str, ...]]:
        here: list[GroupFacts] = []
        dropped: list[str] = []
        for group in self._touched:
            if group.state in HERE:
                here.append(group_facts(group, self._scheduler))
                continue
            self._prompts[group.prompt] = None
            if group.id not in self._scheduler.state.groups:  # else it was submitted again
                dropped.append(group.id)
        self._touched.clear()
        return tuple(here), tuple(dropped)

    def _prompt_facts(self) -> tuple[PromptFacts, ...]:
        lengths = self._scheduler.state.prompt_lengths
        prompts, self._prompts = list(self._prompts), {}
        if lengths is None:
            return ()
        return tuple([prompt_facts(name, lengths) for name in prompts if name in lengths])


class FoldedFacts:
    """The state that a sequence of changes leads to."""

    def __init__(self) -> None:
        self._run = RunFacts()
        self._groups: dict[str, GroupFacts] = {}
        self._prompts: dict[str, PromptFacts] = {}
        self._recent: tuple[DeliveredGroup, ...] = ()

    def add(self, changes: Changes) -> None:
        self._run = changes.run
        for group in changes.groups:
            self._groups[group.group] = group
        for name in changes.dropped:
            self._groups.pop(name, None)  # a group may come and go between two calls
        for prompt in changes.prompts:
            self._prompts[prompt.prompt] = prompt
        if changes.recent is not None:
            self._recent = changes.recent

    @property
    def state(self) -> RunState:
        """Groups in the order they were submitted."""
        groups = sorted(self._groups.values(), key=_serial)
        return RunState(self._run, tuple(groups), tuple(self._prompts.values()), self._recent)


def _serial(facts: GroupFacts) -> int:
    return facts.serial
