"""What must hold after every event, checked from scratch against the books."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout_sched.core.model import InstanceStatus, RequestState

if TYPE_CHECKING:
    from rollout_sched.core.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError naming the first rule that is broken. O(everything)."""
    _check_instances(scheduler)
    _check_requests(scheduler)
    _check_groups(scheduler)
    _check_no_idle_capacity(scheduler)


def _check_instances(scheduler: Scheduler) -> None:
    fleet = scheduler.fleet
    attempts = {}
    for instance in fleet.instances.values():
        attempts.update(instance.attempts)
        load = sum(a.context_tokens + a.expected_tokens for a in instance.attempts.values())
        assert instance.tokens == load, f"{instance!r}: load {instance.tokens}, attempts {load}"
        is_open = instance.place >= 0
        assert is_open == any(other is instance for other in fleet.open), f"{instance!r}: open?"
        if is_open:
            assert instance.status is InstanceStatus.SERVING, f"{instance!r} is open"
            assert scheduler.roles.admission.admits(instance), f"{instance!r} is full but open"
    assert attempts == fleet.attempts, "attempts in flight do not add up over instances"
    for attempt in fleet.attempts.values():
        owner = attempt.request.attempt
        assert (owner is attempt) != bool(attempt.disowned), f"attempt {attempt.id} has no owner"


def _check_requests(scheduler: Scheduler) -> None:
    for name, request in scheduler.requests.items():
        state = request.state
        assert request.id == name
        assert state is not RequestState.ENDED, f"{request!r} ended but is in the books"
        assert (state is RequestState.WAITING) == (request in scheduler.waiting), f"{request!r}"
        parked = request in scheduler.replay_buffer
        assert (state is RequestState.PARKED) == parked, f"{request!r}"
        in_flight = state in (RequestState.RUNNING, RequestState.INTERRUPTING)
        assert in_flight == (request.attempt is not None), f"{request!r}"
        made = sum(segment.tokens for segment in request.segments)
        assert made == request.response_tokens, f"{request!r}: segments hold {made}"
        assert request.response_tokens <= request.group.max_tokens, f"{request!r} is over its limit"
    assert len(scheduler.waiting) + len(scheduler.replay_buffer) <= len(scheduler.requests)


def _check_groups(scheduler: Scheduler) -> None:
    progress, buffer = scheduler.progress, scheduler.sample_buffer
    active = complete = held = 0
    listed = 0
    for group in scheduler.groups.values():
        active += group.active
        complete += group.complete
        held += group in buffer
        listed += len(group.requests)
        assert not (group.active and group.complete), f"{group!r} is complete but active"
        finished = [r for r in group.requests if r.state is RequestState.FINISHED]
        assert len(finished) == len(group.finished) <= group.samples, f"{group!r}"
        for request in group.requests:
            assert scheduler.requests.get(request.id) is request, f"{request!r} is not in the books"
            for segment in request.segments:
                oldest = segment.version if group.oldest_version is None else group.oldest_version
                assert oldest <= segment.version, f"{group!r} holds older tokens"
    assert active == progress.active, f"{active} active groups, counted {progress.active}"
    assert complete == buffer.complete, f"{complete} complete groups, counted {buffer.complete}"
    assert held == buffer.held, f"{held} held groups, counted {buffer.held}"
    for key, group in scheduler.direct_groups.items():
        assert key == (group.id, group.prompt_tokens, group.max_tokens), f"{group!r} at {key}"
        assert group.requests, f"{group!r} is empty but kept"
    everyone = [*scheduler.direct_groups.values(), *(r.group for r in scheduler.requests.values())]
    for group in {id(group): group for group in everyone if group.direct}.values():
        assert group not in buffer, f"{group!r} is direct but held for a batch"
        assert all(scheduler.requests.get(r.id) is r for r in group.requests), f"{group!r}"
        listed += len(group.requests)
    assert listed == len(scheduler.requests), "a request belongs to no group"
    fresh, deferred = progress.fresh, progress.deferred
    total = fresh + deferred + active + complete
    assert total == len(scheduler.groups), f"{total} groups counted, {len(scheduler.groups)} known"


def _check_no_idle_capacity(scheduler: Scheduler) -> None:
    first, fleet = scheduler.waiting.first(), scheduler.fleet
    if first is not None and fleet.open:
        chosen = scheduler.roles.routing.choose(first, fleet)
        assert chosen is None, f"{first!r} waits although {chosen!r} is open"
