"""Lending: who makes way for the trainer, from hand-made loads."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.model import InstanceStatus
from rollout_sched.policies.lending import NoLending, StageFusion
from tests.helpers import ProgressView
from tests.policies.running import Running


def progress(complete: int = 8, *, in_batch: int = 0, size: int = 10) -> ProgressView:
    return ProgressView(prompts_per_step=size, complete=complete, in_batch=in_batch)


def tail() -> Running:
    """Four instances, of which the first has the most to do."""
    fleet = Running(4)
    for number, requests in enumerate([4, 3, 2, 1]):
        fleet.run(number, *[8000] * requests)
    return fleet


def lent(fleet: Running, how: StageFusion | None = None, **how_far: int) -> list[str]:
    policy = how or StageFusion()
    return [i.id for i in policy.choose(fleet.fleet, progress(**how_far))]


def test_keep_lends_no_instance() -> None:
    assert not NoLending().lends
    assert NoLending().choose(tail().fleet, progress()) == ()


def test_instances_with_the_fewest_tokens_are_lent_first() -> None:
    assert lent(tail()) == ["i3", "i2"]
    assert lent(tail(), StageFusion(lent=0.26)) == ["i3"]
    assert lent(tail(), StageFusion(lent=0.24)) == []


@pytest.mark.parametrize(
    ("in_batch", "complete", "enough"),
    [(0, 7, False), (0, 8, True), (8, 0, True), (4, 4, True), (4, 3, False), (6, 4, False)],
)
def test_lends_once_most_but_not_all_groups_are_complete(
    in_batch: int, complete: int, enough: bool
) -> None:
    assert bool(lent(tail(), in_batch=in_batch, complete=complete)) == enough


@pytest.mark.parametrize("status", [InstanceStatus.LENT, InstanceStatus.UPDATING])
def test_lends_nothing_while_an_instance_is_busy_otherwise(status: InstanceStatus) -> None:
    fleet = tail()
    fleet[0].status = status
    assert not lent(fleet)


def test_instance_with_client_requests_is_not_lent() -> None:
    fleet = tail()
    (attempt,) = fleet[3].attempts.values()
    attempt.request.group = None
    assert lent(fleet) == ["i2", "i1"]


def test_leaving_instance_is_not_lent() -> None:
    fleet = tail()
    fleet[3].leaving = True
    assert lent(fleet) == ["i2", "i1"]


class TestWhatStaysHasToBearIt:
    def test_remaining_kv_cache_must_hold_the_moved_requests(self) -> None:
        """Ten requests of 8,100 tokens, which grow by another 8,000 each."""
        fleet = tail()
        for number in range(4):
            fleet[number].kv_tokens = 100_000
        assert not lent(fleet)
        assert lent(fleet, StageFusion(fill=0.81))

    def test_remaining_slots_must_suffice(self) -> None:
        fleet = tail()
        fleet[0].slots = fleet[1].slots = 4
        assert not lent(fleet)
        fleet[0].slots = 6
        assert lent(fleet)

    def test_lending_must_not_slow_the_rest_down_much(self) -> None:
        """From 20,250 tokens on each of four to 40,500 on each of two: 1.405 / 1.2025 = 1.168."""
        assert lent(tail(), StageFusion(slowdown=1.17, weights_tokens=100_000))
        assert not lent(tail(), StageFusion(slowdown=1.16, weights_tokens=100_000))
