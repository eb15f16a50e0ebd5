"""Admission: when an instance is full."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.model.events import InstanceReported
from rollout_sched.core.model.model import Instance
from rollout_sched.policies import admission
from rollout_sched.policies.routing import LeastRequests
from tests.helpers import Loads, make_request


def instance(in_flight: int, *, slots: int = 4, context: int = 100, kv: int = 1000) -> Instance:
    loads = Loads(LeastRequests(), 1, slots=slots)
    loads.send(0, in_flight, context=context)
    loads[0].kv_tokens = kv
    for attempt in loads[0].attempts.values():
        attempt.request.siblings.id = f"in flight {attempt.id}"
    return loads[0]


def test_unbounded_never_refuses() -> None:
    assert admission.Unbounded().admits(instance(100))


@pytest.mark.parametrize(
    ("factor", "in_flight", "admitted"),
    [(1.0, 3, True), (1.0, 4, False), (1.5, 5, True), (1.5, 6, False), (0.5, 2, False)],
)
def test_slots_admits_a_multiple_of_the_slots(
    factor: float, in_flight: int, admitted: bool
) -> None:
    assert admission.Slots(factor).admits(instance(in_flight)) is admitted


def test_slots_counts_cancelled_attempts_that_still_run() -> None:
    """It holds its slot until the instance has answered."""
    full = instance(4)
    next(iter(full.attempts.values())).abandoned = "surplus"
    assert not admission.Slots().admits(full)


class TestKvTokens:
    def test_takes_no_more_than_the_cache_holds(self) -> None:
        policy = admission.KvTokens()
        assert policy.admits(instance(2, context=499))
        assert not policy.admits(instance(2, context=500))

    def test_fill_scales_the_cache(self) -> None:
        assert not admission.KvTokens(fill=0.5).admits(instance(2, context=250))
        assert admission.KvTokens(fill=2.0).admits(instance(2, context=999))

    def test_an_idle_instance_always_takes_one(self) -> None:
        assert admission.KvTokens(fill=1e-9).admits(instance(0))

    def test_slots_are_a_limit_too(self) -> None:
        assert not admission.KvTokens(fill=100.0).admits(instance(4))


class TestKvGrowth:
    def test_counts_what_is_sent_until_some_have_finished(self) -> None:
        policy = admission.KvGrowth()
        assert policy.admits(instance(3, context=250))
        assert not policy.admits(instance(3, context=251))

    def test_counts_expected_growth_once_some_have_finished(self) -> None:
        policy = admission.KvGrowth()
        grown = instance(3, context=10)
        grown.finished, grown.finished_tokens = 2, 500
        assert policy.admits(grown)
        grown.finished_tokens = 502
        assert not policy.admits(grown)

    def test_fill_scales_the_cache(self) -> None:
        assert not admission.KvGrowth(fill=0.5).admits(instance(2, context=200))
        assert admission.KvGrowth(fill=2.0).admits(instance(2, context=600))

    def test_an_idle_instance_always_takes_one_but_slots_are_a_limit(self) -> None:
        assert admission.KvGrowth(fill=1e-9).admits(instance(0))
        assert not admission.KvGrowth(fill=100.0).admits(instance(4))


def observed(policy: Any, on: Instance, *reports: InstanceReported) -> Any:
    """What it makes of the last of some polls."""
    for report in reports:
        on.observed = policy.observe(on, report)
        on.report = report
    return on.observed


def poll(usage: float = 0.7, *, preemptions: int = 0, waiting: int = 0) -> InstanceReported:
    return InstanceReported("i0", 4, waiting, usage, preemptions)


def keep(on: Instance, contexts: list[int]) -> None:
    """Trajectories between two turns."""
    for number, context in enumerate(contexts):
        on.resident[str(number)] = request = make_request(context=context)
        request.siblings.id = f"kept {number}"


class TestAimdConcurrency:
    policy = admission.AimdConcurrency(longest=100)

    def limit(self, on: Instance, *reports: InstanceReported) -> float:
        return float(observed(self.policy, on, *reports).limit)

    def test_starts_where_the_longest_contexts_fit(self) -> None:
        assert self.policy.begins(instance(9, slots=20))
        assert not self.policy.begins(instance(10, slots=20))
        assert admission.AimdConcurrency(longest=10_000).begins(instance(0))

    def test_attempts_between_turns_count(self) -> None:
        full = instance(6, slots=20)
        keep(full, [10] * 4)
        assert not self.policy.begins(full)
        assert self.policy.continues(full)
        assert self.policy.admits(full)

    def test_grows_after_a_full_window_of_answers(self) -> None:
        busy = instance(9, slots=20)
        busy.finished = 9
        assert self.limit(busy, poll(0.0)) == 10
        busy.finished = 10
        assert self.limit(busy, poll(0.0)) == 12
        assert self.limit(busy, poll(0.0)) == 12, "10 of them have been counted"

    @pytest.mark.parametrize(("usage", "limit"), [(0.0, 12.0), (0.4, 11.0), (0.8, 10.0)])
    def test_growth_tapers_as_the_cache_fills(self, usage: float, limit: float) -> None:
        busy = instance(9, slots=20)
        busy.finished = 10
        assert self.limit(busy, poll(usage)) == pytest.approx(limit)

    def test_does_not_grow_while_it_does_not_bind(self) -> None:
        idle = instance(8, slots=20)
        idle.finished = 10
        assert self.limit(idle, poll(0.5)) == 10

    def test_never_exceeds_its_maximum(self) -> None:
        policy = admission.AimdConcurrency(longest=1, most=5)
        full = instance(5, slots=20)
        full.finished = 99
        assert observed(policy, full, poll(0.1)).limit == 5

    def test_cap_is_cut_to_the_cache_size(self) -> None:
        assert self.limit(instance(8, slots=20), poll(0.875)) == pytest.approx(6.4)

    def test_cap_is_cut_after_a_preemption(self) -> None:
        assert self.limit(instance(8), poll(preemptions=1)) == 8
        assert self.limit(instance(8), poll(preemptions=0)) == 10

    def test_cap_is_cut_when_a_long_queue_persists(self) -> None:
        assert self.limit(instance(8), *[poll(waiting=3)] * 5) == 10
        assert self.limit(instance(8), *[poll(waiting=3)] * 6) == 9
        assert self.limit(instance(8), *[poll(waiting=2)] * 9) == 10

    def test_rests_after_a_cut_and_is_halved_if_that_did_not_help(self) -> None:
        full = instance(9, slots=20)
        cuts = [poll(preemptions=number + 1) for number in range(8)]
        limits = [self.limit(full, cut) for cut in cuts]
        assert limits == [8.0] * 7 + [4.0]

    def test_cap_is_never_below_one(self) -> None:
        tiny = instance(0, kv=100)
        assert self.limit(tiny, *[poll(preemptions=number) for number in range(40)]) == 1
        assert self.policy.begins(tiny)


class TestSessionCap:
    policy = admission.SessionCap(fill=0.9, overfill=1.2)

    def test_takes_all_until_the_instance_has_reported(self) -> None:
        assert self.policy.begins(instance(9, context=500))
        assert self.policy.continues(instance(9, context=500))

    def test_begins_while_all_attempts_fit_the_cache(self) -> None:
        there = instance(2, context=100)
        keep(there, [200, 200])
        observed(self.policy, there, poll(0.1))
        assert there.sessions == 4
        assert self.policy.begins(there), "five times 150 tokens fit 900"
        keep(there, [300, 300])
        observed(self.policy, there, poll(0.1))
        assert not self.policy.begins(there), "five times 200 do not"

    def test_expects_newcomers_to_grow(self) -> None:
        there = instance(2, context=100)
        there.finished, there.finished_tokens = 3, 2100
        observed(self.policy, there, poll(0.1))
        assert self.policy.begins(there), "700 tokens fit beside 200"
        there.finished_tokens = 2103
        assert not self.policy.begins(there)
        assert self.policy.continues(there)

    def test_attempts_that_outgrow_the_cache_release_their_kv(self) -> None:
        there = instance(2, context=100)
        keep(there, [500, 500])
        observed(self.policy, there, poll(0.1))
        assert self.policy.continues(there)
        keep(there, [500, 504])
        observed(self.policy, there, poll(0.1))
        assert not self.policy.continues(there)

    def test_reported_running_count_is_believed(self) -> None:
        there = instance(2, context=100)
        keep(there, [350, 350])
        observed(self.policy, there, poll(0.5))
        assert self.policy.continues(there)
        observed(self.policy, there, poll(0.51))
        assert not self.policy.continues(there)

    def test_shared_prompt_counts_once(self) -> None:
        there = instance(0)
        keep(there, [350, 350, 350])
        for request in there.resident.values():
            request.siblings.prompt_tokens = 200
            request.siblings.id = "g"
        assert observed(self.policy, there, poll(0.0)).tokens == (350 + 150 + 150) / 3

    def test_a_preemption_takes_a_fifth_until_it_has_grown_back(self) -> None:
        there = instance(2, context=100)
        shares = [observed(self.policy, there, poll(preemptions=1)).share for _ in range(20)]
        assert shares[:3] == pytest.approx([0.8, 0.8 * 1.02, 0.8 * 1.02**2])
        assert shares[-1] == 1.0

    def test_both_bounds_shrink(self) -> None:
        there = instance(2, context=100)
        keep(there, [400, 400])
        observed(self.policy, there, poll(0.1))
        assert self.policy.continues(there), "1000 of 1200 tokens"
        observed(self.policy, there, poll(0.1, preemptions=1))
        assert not self.policy.continues(there), "of 960"

    def test_an_instance_without_sessions_takes_one(self) -> None:
        empty = instance(0, kv=1)
        observed(self.policy, empty, poll(1.0))
        assert self.policy.begins(empty)
