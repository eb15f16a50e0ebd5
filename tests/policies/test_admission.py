"""Admission: when an instance is full."""

from __future__ import annotations

import pytest

from rollout_sched.core.model import Instance
from rollout_sched.policies import admission
from rollout_sched.policies.routing import LeastRequests
from tests.helpers import Loads


def instance(in_flight: int, *, slots: int = 4, context: int = 100, kv: int = 1000) -> Instance:
    loads = Loads(LeastRequests(), 1, slots=slots)
    loads.send(0, in_flight, context=context)
    loads[0].kv_tokens = kv
    return loads[0]


def test_unbounded_never_refuses() -> None:
    assert admission.Unbounded().admits(instance(100))


@pytest.mark.parametrize(
    ("factor", "in_flight", "admitted"),
    [(1.0, 3, True), (1.0, 4, False), (1.5, 5, True), (1.5, 6, False), (0.5, 2, False)],
)
def test_slots_admits_so_many_times_the_slots(
    factor: float, in_flight: int, admitted: bool
) -> None:
    assert admission.Slots(factor).admits(instance(in_flight)) is admitted


def test_slots_counts_an_attempt_nobody_wants_any_more() -> None:
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
