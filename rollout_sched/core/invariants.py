"""Invariants that hold after every event, checked from scratch against the state."""

from __future__ import annotations

from collections import Counter

from rollout_sched.core.decide.order import Decider
from rollout_sched.core.model.model import GroupState, InstanceStatus, Request, RequestState
from rollout_sched.core.state.groups import HERE
from rollout_sched.core.work.parts import Parts


def check(parts: Parts, decider: Decider) -> None:
    """Raise AssertionError that names the first violated rule. O(everything)."""
    _check_instances(parts)
    _check_shares(parts)
    _check_requests(parts)
    _check_groups(parts)
    _check_budgets(parts)
    _check_no_idle_capacity(parts, decider)


def _check_instances(parts: Parts) -> None:
    fleet = parts.state.fleet
    attempts = {}
    for instance in fleet.instances.values():
        attempts.update(instance.attempts)
        load = sum(a.context_tokens + a.expected_tokens for a in instance.attempts.values())
        assert instance.tokens == load, f"{instance!r}: load {instance.tokens}, attempts {load}"
        is_open = instance.open_index >= 0
        assert is_open == any(other is instance for other in fleet.open), f"{instance!r}: open?"
        if is_open:
            assert instance.status is InstanceStatus.SERVING, f"{instance!r} is open"
            assert not instance.gate_closed, f"{instance!r} is open although its gate is closed"
            assert parts.state.roles.admission.admits(instance), f"{instance!r} is full but open"
        for request in instance.resident.values():
            assert request.kv_instance is instance, f"{request!r} has left {instance!r}"
        sessions = parts.state.roles.sessions
        accepts_sessions = is_open and sessions is not None and sessions.begins(instance)
        assert instance.accepts_sessions == accepts_sessions, f"{instance!r}: takes new ones?"
    assert fleet.sessions.taking == sum(i.accepts_sessions for i in fleet.instances.values()), (
        "instances that take new ones"
    )
    assert attempts == fleet.attempts, "attempts in flight do not add up over instances"
    for attempt in fleet.attempts.values():
        owner = attempt.request.attempt
        assert (owner is attempt) != bool(attempt.abandoned), f"attempt {attempt.id} has no owner"


def _check_shares(parts: Parts) -> None:
    shares = parts.state.shares
    attempts = parts.state.fleet.attempts
    assert attempts.keys() >= shares.yielding, "what has ended yields no more"
    held = Counter([a.request.client for n, a in attempts.items() if n not in shares.yielding])
    for client, flow in [("", shares.trainer), *shares.clients.items()]:
        assert flow.in_flight == held.pop(client, 0), f"{client!r}: in flight"
    assert not held, f"{held} are nobody's"


def _check_requests(parts: Parts) -> None:
    requests = parts.requests
    for request in requests:
        state = request.state
        assert requests.get(request.id) is request
        assert state is not RequestState.ENDED, f"{request!r} ended but is in the books"
        assert (state is RequestState.WAITING) == (request in requests.waiting), f"{request!r}"
        parked = request in requests.replay_buffer
        assert (state is RequestState.PARKED) == parked, f"{request!r}"
        if request.kv_instance is not None:
            assert state in (RequestState.ACTING, RequestState.WAITING), f"{request!r} has a home"
            assert request.kv_instance.resident.get(request.id) is request, (
                f"{request!r} is not at home"
            )
        in_flight = state in (RequestState.RUNNING, RequestState.INTERRUPTING)
        assert in_flight == (request.attempt is not None), f"{request!r}"
        made = sum(segment.tokens for segment in request.segments)
        assert made == request.response_tokens, f"{request!r}: segments hold {made}"
        assert request.remaining_tokens >= 0, f"{request!r} is over its limit"
    assert len(requests.waiting) + len(requests.replay_buffer) <= len(requests)


def _check_groups(parts: Parts) -> None:
    groups, buffer, requests = (
        parts.state.groups,
        parts.state.sample_buffer,
        parts.requests,
    )
    started = listed = 0
    for group in groups:
        started += group in buffer
        listed += len(group.requests)
        whole = len(group.finished) >= group.samples
        judging = group.state is GroupState.JUDGING
        assert whole == (judging or group.state is GroupState.COMPLETE), f"{group!r}"
        assert judging == bool(group.judgement), f"{group!r}: judgement {group.judgement}"
        assert any(group is other for other in groups.in_state(group.state)), (
            f"{group!r} is misplaced"
        )
        finished = [r for r in group.requests if r.state is RequestState.FINISHED]
        assert len(finished) == len(group.finished) <= group.samples, f"{group!r}"
        for request in group.requests:
            assert requests.get(request.id) is request, f"{request!r} is not in the books"
            assert request.group is group, f"{request!r} is listed in {group!r}"
            for segment in request.segments:
                oldest = segment.version if group.oldest_version is None else group.oldest_version
                assert oldest <= segment.version, f"{group!r} holds older tokens"
    assert sum(groups.count(state) for state in HERE) == len(groups), "groups by state"
    complete = groups.count(GroupState.COMPLETE)
    assert complete == buffer.complete, f"{complete} complete groups, counted {buffer.complete}"
    window, fresh = parts.state.selection_window.left, groups.count(GroupState.FRESH)
    assert 0 <= window <= fresh, f"{window} groups of {fresh} fresh ones are in the window"
    assert started == buffer.started, f"{started} started groups, counted {buffer.started}"
    direct = [request for request in requests if request.group is None]
    assert listed + len(direct) == len(requests), "a request belongs to no group"
    for request in direct:
        assert request in request.siblings.requests, f"{request!r} is not among its siblings"
    for siblings in parts.state.siblings.values():
        assert siblings.requests, f"{siblings!r} is empty but kept"
        assert all(requests.get(r.id) is r for r in siblings.requests), f"{siblings!r}"


def _check_budgets(parts: Parts) -> None:
    groups, progress = parts.state.groups, parts.state.progress
    for group in groups.in_state(GroupState.ACTIVE):
        assert any(map(_can_go_on, group.requests)), f"{group!r}: nothing of it can go on"
    for group in groups.in_state(GroupState.SPENT):
        assert not any(map(_can_go_on, group.requests)), f"{group!r}: something of it can go on"
    if progress.in_progress < progress.prompts_per_step:
        assert not progress.spent, "spent groups wait although the batch lacks groups"


def _can_go_on(request: Request) -> bool:
    parked = request.state is RequestState.PARKED and not request.rests_until
    return not parked and request.state is not RequestState.FINISHED


def _check_no_idle_capacity(parts: Parts, decider: Decider) -> None:
    waiting, fleet = parts.requests.waiting, parts.state.fleet
    if decider.gathering.expected:
        return
    held_back = fleet.sessions.bound is not None and not fleet.sessions.taking
    for first in waiting.each_first() if fleet.open else ():
        if not (held_back and first.kv_instance is None):
            chosen = parts.state.roles.routing.choose(first, fleet)
            assert chosen is None, f"{first!r} waits although {chosen!r} is open"
    for request in waiting.aside:
        fitting = [instance for instance in fleet.open if fleet.may_take(request, instance)]
        assert not fitting, f"{request!r} was set aside although it fits on {fitting}"
