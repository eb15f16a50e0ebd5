"""Checks of what a caller asks. They run before anything is applied, so that a CallerError changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.events import (
    GroupSubmitted,
    InstanceJoined,
    RequestSubmitted,
    Restored,
    WeightsPublished,
)
from rollout_sched.core.work.parts import Parts


def _group_submitted(parts: Parts, event: GroupSubmitted) -> None:
    if event.group in parts.state.groups:
        raise CallerError(f"group {event.group!r} is already here; give each group its own id")
    if event.samples < 1 or event.max_tokens < 1 or event.prompt_tokens < 1:
        raise CallerError(
            f"group {event.group!r}: samples, prompt_tokens and max_tokens must be at least 1, "
            f"not {event.samples}, {event.prompt_tokens} and {event.max_tokens}"
        )
    if not 0 <= event.min_samples <= event.samples:
        raise CallerError(
            f"group {event.group!r}: min_samples is {event.min_samples}; it can be from 1 to "
            f"samples, {event.samples}, or 0 for all of them"
        )
    if event.expected_tokens < 0 or any(length < 0 for length in event.history):
        raise CallerError(
            f"group {event.group!r}: lengths of responses in history and expected_tokens cannot "
            f"be negative; leave out what is not known"
        )
    if parts.state.progress.closed:
        raise CallerError(f"group {event.group!r} came after submissions were closed")
    # A trajectory ends where its context does, so only the KV cache bounds what may be asked for.
    needed = event.prompt_tokens + event.max_tokens
    _check_fits(f"group {event.group!r}", needed, parts.state.fleet.contexts.largest_kv)


def _request_submitted(parts: Parts, event: RequestSubmitted) -> None:
    if event.request in parts.requests:
        raise CallerError(f"request {event.request!r} is already here; ids are used once")
    if event.prompt_tokens < 1 or event.max_tokens < 1:
        raise CallerError(
            f"request {event.request!r}: prompt_tokens and max_tokens must be at least 1, "
            f"not {event.prompt_tokens} and {event.max_tokens}"
        )
    if event.prior_segments:
        made = [segment.tokens for segment in event.prior_segments]
        if min(made) < 1 or sum(made) > event.max_tokens:
            raise CallerError(
                f"request {event.request!r}: segments of {made} tokens are not a response of at "
                f"most {event.max_tokens} tokens"
            )
    needed = event.prompt_tokens + event.max_tokens
    largest = parts.state.fleet.contexts.largest
    if largest is not None and needed > largest:
        raise CallerError(
            f"request {event.request!r}: prompt_tokens + max_tokens is {needed}, but no instance "
            f"takes more than {largest} tokens of prompt and response; lower max_tokens, or add an "
            f"instance with a higher --max-model-len"
        )


def _instance_joined(parts: Parts, event: InstanceJoined) -> None:
    name, newest = event.instance, parts.state.progress.version
    if event.slots < 1 or event.kv_tokens < 1:
        raise CallerError(
            f"instance {name!r}: slots and kv_tokens must be at least 1, "
            f"not {event.slots} and {event.kv_tokens}"
        )
    if event.version > newest:
        raise CallerError(
            f"instance {name!r} joined with version {event.version}, but the trainer is at "
            f"{newest}; start the scheduler with version={event.version}, or reload it"
        )
    if event.version < newest and not parts.state.progress.loads:
        raise CallerError(
            f"instance {name!r} joined with version {event.version}, but the trainer brings "
            f"{newest} to the instances itself; the instance can join once it has that version"
        )
    others = [i.kv_tokens for i in parts.state.fleet.instances.values() if i.id != name]
    largest = max(parts.state.groups, key=lambda group: group.tokens, default=None)
    if largest is not None:
        room = max([event.kv_tokens, *others])
        _check_fits(f"group {largest.id!r}", largest.tokens, room)


def _weights_published(parts: Parts, event: WeightsPublished) -> None:
    newest = parts.state.progress.version
    told_how = event.version == newest and event.loads and not parts.state.progress.loads
    if event.version <= newest and not told_how:
        raise CallerError(f"version {event.version} is not after {newest}; versions must increase")
    progress = parts.state.progress
    if progress.in_batch and event.loads:
        raise CallerError(
            f"version {event.version} was published while batch {progress.batches} is delivered in "
            f"part, {progress.in_batch} groups so far; take its parts up to the last, then publish"
        )


def _restored(parts: Parts, event: Restored) -> None:
    begun = (
        parts.state.progress.must_decide or parts.state.serials.last or parts.state.fleet.instances
    )
    if begun or parts.state.progress.trainer_waiting or parts.state.progress.closed:
        raise CallerError("only a scheduler without events can be restored; make a new one")
    here, wanted = event.state.run.in_batch, parts.state.progress.prompts_per_step
    if here >= wanted:
        raise CallerError(
            f"{here} groups of the current batch were already delivered, but prompts_per_step is "
            f"{wanted}; restore with the prompts_per_step that the run began with"
        )
    for group in event.state.groups:
        indices = [request.index for request in group.requests]
        if len({*indices}) < len(indices) or not {*group.finished} <= {*indices}:
            raise CallerError(
                f"group {group.group!r}: samples {list(group.finished)} are said to be finished, "
                f"but its requests are {indices}; restore from another copy of the store or journal"
            )


def _check_fits(what: str, tokens: int, kv_tokens: int | None) -> None:
    if kv_tokens is not None and tokens > kv_tokens:
        raise CallerError(
            f"{what}: prompt_tokens + max_tokens is {tokens}, but the largest instance holds "
            f"only {kv_tokens} KV tokens, so it could never run; lower max_tokens or give the "
            f"instances more KV memory"
        )


#: Events that a caller is responsible for, and the checks that refuse them.
CHECKS: Final[dict[type[Any], Callable[[Parts, Any], None]]] = {
    GroupSubmitted: _group_submitted,
    RequestSubmitted: _request_submitted,
    InstanceJoined: _instance_joined,
    Restored: _restored,
    WeightsPublished: _weights_published,
}
