"""A scheduler's present state as facts (see `run_state`)."""

from __future__ import annotations

from typing import Final

from rollout_sched.core.groups import ACTIVE, COMPLETE, DEFERRED, FRESH, JUDGING, SPENT
from rollout_sched.core.length_history import LengthHistory
from rollout_sched.core.lifecycle import ACTING, FINISHED, PARKED
from rollout_sched.core.model import Group, GroupState, Request
from rollout_sched.core.run_state import (
    GroupFacts,
    GroupStands,
    PromptFacts,
    RequestFacts,
    RequestStands,
    RunFacts,
    RunState,
)
from rollout_sched.core.samples import Segment
from rollout_sched.core.scheduler import Scheduler

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
    lengths = scheduler.books.prompt_lengths
    return RunState(
        run_facts(scheduler, now),
        tuple([group_facts(group, scheduler) for group in scheduler.books.groups]),
        () if lengths is None else tuple([prompt_facts(name, lengths) for name in lengths]),
        tuple(scheduler.books.progress.recent),
    )


def run_facts(scheduler: Scheduler, now: float) -> RunFacts:
    progress, fleet, verification = (
        scheduler.books.progress,
        scheduler.books.fleet,
        scheduler.work.verification,
    )
    staying = sum([not instance.leaving for instance in fleet.instances.values()])
    return RunFacts(
        now,
        progress.version,
        scheduler.decider.updater.loads,
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
        scheduler.books.selection_window.left,
        scheduler.books.serials.last,
        fleet.dispatched,
        max(staying, scheduler.decider.gathering.expected),
        fleet.kv.most,
        verification.tested,
        verification.rejected,
        scheduler.view.tuned,
        progress.lost,
    )


def prompt_facts(prompt: str, lengths: LengthHistory) -> PromptFacts:
    """Facts of a prompt that `lengths` knows."""
    return PromptFacts(prompt, lengths.of(prompt).deliveries)


def group_facts(group: Group, scheduler: Scheduler) -> GroupFacts:
    """Facts of a group that is neither delivered nor lost."""
    siblings, lengths = group.siblings, scheduler.books.prompt_lengths
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
        group in scheduler.books.sample_buffer,
        group.oldest_version,
        group.launch_place,
        group.launch_size,
        tuple([request.index for request in group.finished]),
        tuple([_request_facts(request) for request in group.requests]),
        group.judged,
    )


def _request_facts(request: Request) -> RequestFacts:
    """Facts as if the instance that the request runs on were lost now."""
    segments, computed_tokens = request.segments, request.computed_tokens
    context_tokens = request.context_tokens
    attempt = request.attempt
    if attempt is not None and attempt.tokens:
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
        request.settled_tokens,
        request.turn,
        request.ends,
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
