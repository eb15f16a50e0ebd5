"""Migration: who goes where, from hand-made loads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rollout_sched.core.model.model import Attempt, Instance, InstanceStatus, RequestState
from rollout_sched.core.model.roles import Migrant
from rollout_sched.policies.migration import ByCost, NoMigration, Repack
from tests.policies.running import Running

KV = 10**6  # tokens of each instance


def moves(migrants: Sequence[Migrant]) -> list[tuple[int, str]]:
    """Attempts, and where their requests go."""
    return [(migrant.attempt.id, migrant.instance.id) for migrant in migrants]


def test_stay_migrates_nothing() -> None:
    fleet = Running(2)
    fleet.run(0, 5000, 5000, 5000)
    assert NoMigration().choose(fleet.fleet) == ()
    assert NoMigration().interval_s == float("inf")


class TestByCost:
    def test_fullest_gives_to_emptiest_until_level(self) -> None:
        fleet = Running(3)
        fleet.run(0, *[8000] * 5)
        fleet.run(1, *[8000] * 3)
        moved = ByCost().choose(fleet.fleet)
        assert [migrant.instance.id for migrant in moved] == ["i2", "i2"]
        assert all(migrant.attempt.instance.id == "i0" for migrant in moved)

    def test_attempts_with_little_left_stay(self) -> None:
        """k n (2 c) < c / p while n < 1 / (2 k p), for the second of two that leaves one alone."""
        assert not self.alone(600, margin=1.0)
        assert self.alone(800, margin=1.0)
        assert not self.alone(800, margin=2.0)

    def alone(self, made: int, margin: float) -> list[tuple[int, str]]:
        fleet = Running(2)
        fleet.run(0, made, made, context=4000)
        policy = ByCost(context_s=3e-8, prefill_tokens_per_s=25_000, margin=margin)
        return moves(policy.choose(fleet.fleet))

    def test_siblings_predict_the_remaining_tokens(self) -> None:
        fleet = Running(2)
        one, two = fleet.run(0, 800, 800, context=4000)
        one.request.siblings.estimate = 820
        two.request.siblings.estimate = 9000
        assert moves(ByCost().choose(fleet.fleet)) == [(two.id, "i1")]

    def test_no_migration_between_level_instances(self) -> None:
        fleet = Running(2)
        fleet.run(0, *[8000] * 4)
        fleet.run(1, *[8000] * 3)
        assert not ByCost().choose(fleet.fleet)

    def test_migrants_cause_no_return_migration(self) -> None:
        fleet = Running(2)
        fleet.run(0, 20_000, 8000)
        fleet.run(1, 9000)
        policy = ByCost(margin=1e-6)
        for migrant in policy.choose(fleet.fleet):
            self.go(fleet, migrant)
        assert not policy.choose(fleet.fleet)

    def go(self, fleet: Running, migrant: Migrant) -> None:
        attempt = migrant.attempt
        fleet.fleet.close(attempt)
        fleet.run(int(migrant.instance.id[1:]), attempt.tokens, context=attempt.context_tokens)

    def test_polls_give_the_length_without_streams(self) -> None:
        fleet = Running(2)
        fleet.run(0, 0, 0, 0)
        assert not ByCost().choose(fleet.fleet)
        fleet.poll(0, 3 * 8000 / KV)
        assert len(ByCost().choose(fleet.fleet)) == 1

    def test_queued_requests_count_as_running(self) -> None:
        fleet = Running(2)
        fleet.run(0, 0, 0, 0, 0)
        fleet.poll(0, 2 * 8000 / KV, running=2, waiting=2)
        assert len(ByCost().choose(fleet.fleet)) == 2

    def test_a_request_migrates_a_limited_number_of_times(self) -> None:
        fleet = Running(2)
        for attempt in fleet.run(0, *[8000] * 4):
            attempt.request.migrations = 2
        assert not ByCost(most=2).choose(fleet.fleet)
        assert ByCost(most=3).choose(fleet.fleet)

    def test_migrant_must_fit_the_cache(self) -> None:
        fleet = Running(2)
        fleet.run(0, *[8000] * 4)
        fleet[1].kv_tokens = 8000
        assert not ByCost().choose(fleet.fleet)
        fleet[1].kv_tokens = 10_000
        assert len(ByCost().choose(fleet.fleet)) == 1
        assert not ByCost(fill=0.5).choose(fleet.fleet)

    def test_migrant_needs_a_slot(self) -> None:
        fleet = Running(2, slots=9)
        fleet.run(0, *[8000] * 6)
        fleet[1].slots = 1
        assert len(ByCost().choose(fleet.fleet)) == 1


def unsuitable(how: str, fleet: Running, attempts: list[Attempt], target: Instance) -> None:
    for attempt in attempts:
        if how == "interrupted":
            attempt.request.state = RequestState.INTERRUPTING
        elif how == "abandoned":
            attempt.abandoned = "surplus"
        elif how == "a client's":
            attempt.request.group = None
    if how == "closed":
        target.leaving = True
        fleet.fleet.touch(target)
    elif how == "paused":
        attempts[0].instance.status = InstanceStatus.PAUSING
    elif how == "other weights":
        target.version = 1


@pytest.mark.parametrize(
    "how", ["", "interrupted", "abandoned", "a client's", "closed", "paused", "other weights"]
)
@pytest.mark.parametrize("policy", [ByCost(), Repack()])
def test_only_eligible_requests_migrate_to_open_instances(
    policy: ByCost | Repack, how: str
) -> None:
    """`Repack` fills up the second, `ByCost` levels the two."""
    fleet = Running(2)
    by_cost = isinstance(policy, ByCost)
    attempts = fleet.run(0, *[8000] * (4 if by_cost else 2))
    others = fleet.run(1, *[8000] * (1 if by_cost else 3))
    fleet.poll(0, 0.5, 0.1)
    unsuitable(how, fleet, attempts, others[0].instance)
    assert bool(policy.choose(fleet.fleet)) == (not how)


class TestRepack:
    def test_the_emptiest_past_its_plateau_goes_to_the_fullest_with_room(self) -> None:
        fleet = Running(3)
        fleet.run(0, 8000, 8000)
        (alone,) = fleet.run(1, 8000)
        fleet.run(2, 8000, 8000, 8000)
        for number in range(3):
            fleet.poll(number, 0.5, 0.01)
        # i1 goes first, then i0, which has received nothing; i2 has, and stays.
        moved = moves(Repack().choose(fleet.fleet))
        assert moved[0] == (alone.id, "i2")
        assert [where for _, where in moved] == ["i2"] * 3

    @pytest.mark.parametrize("usages", [(0.5,), (0.4, 0.5), (0.5, 0.5)])
    def test_instance_below_its_peak_or_unknown_is_not_emptied(
        self, usages: tuple[float, ...]
    ) -> None:
        fleet = Running(2)
        fleet.run(0, 8000)
        fleet.run(1, 8000, 8000)
        fleet.poll(0, *usages)
        assert not Repack().choose(fleet.fleet)

    def test_instance_with_a_queue_is_not_emptied(self) -> None:
        fleet = Running(2)
        fleet.run(0, 8000)
        fleet.run(1, 8000, 8000)
        fleet.poll(0, 0.5, 0.4, waiting=1)
        assert not Repack().choose(fleet.fleet)

    def test_nothing_migrates_unless_all_requests_find_room(self) -> None:
        fleet = Running(2)
        fleet.run(0, 8000, 8000)
        fleet.run(1, *[8000] * 3)
        fleet.poll(0, 0.5, 0.1)
        # From 24,300 tokens to 40,500: 1.405 / 1.243 = 1.1303.
        assert not Repack(slowdown=1.13, weights_tokens=100_000).choose(fleet.fleet)
        assert len(Repack(slowdown=1.131, weights_tokens=100_000).choose(fleet.fleet)) == 2
        fleet[1].kv_tokens = 45_000
        assert not Repack(fill=0.8).choose(fleet.fleet)
        assert len(Repack(fill=1.0).choose(fleet.fleet)) == 2

    def test_an_idle_instance_receives_nothing(self) -> None:
        fleet = Running(2)
        fleet.run(0, 8000, 8000)
        fleet.poll(0, 0.5, 0.1)
        assert not Repack().choose(fleet.fleet)

    def test_draining_instance_is_emptied_to_load_weights(self) -> None:
        fleet = Running(2)
        fleet.run(0, 8000)
        fleet.run(1, 8000, 8000)
        fleet.poll(0, 0.5, 0.1)
        fleet[0].status = InstanceStatus.DRAINING
        fleet.fleet.touch(fleet[0])
        assert moves(Repack().choose(fleet.fleet)) == [(1, "i1")]
