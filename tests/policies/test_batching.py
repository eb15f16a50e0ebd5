"""Batching: which rounds start, and which batches go, from hand-made progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollout_sched.core.model.records import DeliveredGroup, Launch
from rollout_sched.core.model.roles import Capacity
from rollout_sched.policies.batching import FullyAsync, OneStepOff, Pooled, Sync, TailBatching
from tests.helpers import ProgressView

ALL = [Sync(), TailBatching(), Pooled(), OneStepOff(), FullyAsync()]


@pytest.mark.parametrize("policy", ALL)
class TestBatch:
    def test_batch_is_delivered_when_full(self, policy: Any) -> None:
        assert policy.batch(ProgressView(complete=3, active=5)) == 0
        assert policy.batch(ProgressView(complete=4, active=5)) == 4
        assert policy.batch(ProgressView(complete=7, active=5)) == 4

    def test_last_fifo_batch_may_be_short(self, policy: Any) -> None:
        assert policy.batch(ProgressView(complete=3, closed=True)) == 3
        assert policy.batch(ProgressView(complete=3, closed=False)) == 0

    @pytest.mark.parametrize("where", ["active", "spent", "deferred", "fresh"])
    def test_last_batch_waits_for_all_remaining_groups(self, policy: Any, where: str) -> None:
        one: dict[str, Any] = {where: 1}
        assert policy.batch(ProgressView(complete=3, closed=True, **one)) == 0

    def test_nothing_left_is_no_batch(self, policy: Any) -> None:
        assert policy.batch(ProgressView(closed=True)) == 0


IN_PARTS = [
    Sync(part_prompts=2),
    TailBatching(part_prompts=2),
    Pooled(part_prompts=2),
    OneStepOff(part_prompts=2),
    FullyAsync(part_prompts=2),
]


@pytest.mark.parametrize("policy", IN_PARTS)
class TestParts:
    """Of at least so many groups, but for the last."""

    @pytest.mark.parametrize(
        ("complete", "in_batch", "size"),
        [(1, 0, 0), (2, 0, 2), (3, 0, 3), (4, 0, 4), (9, 0, 4), (1, 2, 0), (2, 2, 2), (1, 3, 1)],
    )
    def test_batch_takes_complete_groups(
        self, policy: Any, complete: int, in_batch: int, size: int
    ) -> None:
        progress = ProgressView(complete=complete, in_batch=in_batch, active=5)
        assert policy.batch(progress) == size

    def test_the_last_batch_may_be_short(self, policy: Any) -> None:
        assert policy.batch(ProgressView(complete=1, in_batch=2, closed=True)) == 1
        assert policy.batch(ProgressView(complete=1, in_batch=2, closed=True, active=1)) == 0


@pytest.mark.parametrize("policy", [Sync(1.5), TailBatching(), Pooled(), OneStepOff()])
class TestWhatHasGone:
    """Groups of the batch that the trainer has are on the way no less than those that run."""

    def test_is_not_launched_again(self, policy: Any) -> None:
        progress = ProgressView(fresh=5, round=Launch(fresh=6), active=2, complete=1, in_batch=1)
        assert policy.launch(progress) is None
        progress = ProgressView(fresh=5, round=Launch(fresh=6), active=1, complete=1, in_batch=1)
        assert policy.launch(progress) == Launch(fresh=1)


@pytest.mark.parametrize(
    ("policy", "fresh"), [(Sync(1.5), 5), (TailBatching(1.5, 1.0), 5), (OneStepOff(), 3)]
)
def test_a_round_counts_what_has_gone_before_it(policy: Any, fresh: int) -> None:
    progress = ProgressView(fresh=9, in_batch=1)
    assert policy.launch(progress) == Launch(fresh=fresh)


@pytest.mark.parametrize("policy", [Sync(), TailBatching(), Pooled()])
@pytest.mark.parametrize(
    "progress",
    [
        ProgressView(fresh=9, trainer_waiting=False),
        ProgressView(fresh=9, round=Launch(fresh=4), active=4),
    ],
)
def test_rounds_start_one_by_one_when_the_trainer_asks(policy: Any, progress: ProgressView) -> None:
    assert policy.launch(progress) is None


@pytest.mark.parametrize("policy", [Sync(1.5), TailBatching(), Pooled(), OneStepOff()])
class TestMakingUp:
    """A group that failed leaves its round; another takes its place if a batch would be short."""

    def test_launches_the_groups_a_batch_lacks(self, policy: Any) -> None:
        progress = ProgressView(fresh=5, round=Launch(fresh=4), active=2, complete=1)
        assert policy.launch(progress) == Launch(fresh=1)

    def test_launches_nothing_while_enough_are_active(self, policy: Any) -> None:
        progress = ProgressView(fresh=5, round=Launch(fresh=6), active=3, complete=1)
        assert policy.launch(progress) is None


@pytest.mark.parametrize("policy", [Sync(1.5), TailBatching(), Pooled(), OneStepOff()])
class TestWhatARoundHasLost:
    """The round keeps its size, whatever a batch takes."""

    @pytest.mark.parametrize("lost", [1, 2])
    def test_each_lost_group_is_replaced_by_one(self, policy: Any, lost: int) -> None:
        progress = ProgressView(
            fresh=5, round=Launch(fresh=8), active=3, judging=1, complete=2, lost=lost
        )
        assert policy.launch(progress) == Launch(fresh=lost)

    def test_deferred_groups_replace_lost_ones_first(self, policy: Any) -> None:
        progress = ProgressView(
            fresh=5, round=Launch(fresh=6), active=4, complete=1, lost=2, deferred=1
        )
        assert policy.launch(progress) == Launch(fresh=1, deferred=1)

    def test_groups_under_judgement_are_not_replaced(self, policy: Any) -> None:
        progress = ProgressView(fresh=5, round=Launch(fresh=4), active=1, judging=2, complete=1)
        assert policy.launch(progress) is None


@pytest.mark.parametrize(
    ("policy", "fresh"), [(Sync(1.5), 4), (TailBatching(1.5, 1.0), 4), (OneStepOff(), 2)]
)
def test_a_round_counts_what_is_still_judged(policy: Any, fresh: int) -> None:
    progress = ProgressView(fresh=9, judging=1, complete=1)
    assert policy.launch(progress) == Launch(fresh=fresh)


def test_groups_under_judgement_count_as_ahead_of_the_trainer() -> None:
    ahead = FullyAsync(max_ahead=2.0)
    assert ahead.launch(ProgressView(fresh=9, active=3, judging=2, complete=1)) == Launch(fresh=2)
    assert ahead.launch(ProgressView(fresh=9, active=3, judging=4, complete=1)) is None
    at_once = FullyAsync(max_groups=4)
    assert at_once.launch(ProgressView(fresh=9, active=3, judging=4)) == Launch(fresh=1)


class TestSync:
    def test_starts_a_batch(self) -> None:
        assert Sync().launch(ProgressView(fresh=9)) == Launch(fresh=4)

    def test_starts_more_when_over_sampling(self) -> None:
        assert Sync(1.5).launch(ProgressView(fresh=9)) == Launch(fresh=6)
        assert Sync(1.1).launch(ProgressView(10, fresh=20)) == Launch(fresh=11)  # not 12
        assert Sync(1.5).launch(ProgressView(fresh=5)) == Launch(fresh=5)

    def test_takes_deferred_groups_first_and_counts_complete_ones(self) -> None:
        assert Sync(1.5).launch(ProgressView(fresh=9, deferred=2)) == Launch(fresh=4, deferred=2)
        assert Sync().launch(ProgressView(fresh=9, complete=3)) == Launch(fresh=1)
        assert Sync().launch(ProgressView(fresh=9, complete=6)) == Launch()

    def test_replaces_groups_that_spent_their_budget(self) -> None:
        progress = ProgressView(fresh=9, round=Launch(fresh=6), active=4, complete=1, spent=1)
        assert Sync(1.5).launch(progress) == Launch(fresh=1)
        assert Sync().launch(progress) == Launch(), "a batch is on its way"

    def test_waits_for_submissions_until_they_are_closed(self) -> None:
        assert Sync().launch(ProgressView(fresh=3)) is None
        assert Sync().launch(ProgressView(fresh=3, closed=True)) == Launch(fresh=3)


class TestTailBatching:
    """RollPacker: long rounds for whole batches of set-back prompts, else short ones."""

    policy = TailBatching(1.25, 1.25)

    def test_short_round_over_samples_fresh_prompts(self) -> None:
        progress = ProgressView(8, fresh=20)
        assert self.policy.launch(progress) == Launch(fresh=10, oversample=1.25)

    def test_short_round_leaves_deferred_groups_alone(self) -> None:
        progress = ProgressView(8, fresh=20, deferred=7)
        assert self.policy.launch(progress) == Launch(fresh=10, oversample=1.25)

    def test_short_round_takes_the_groups_available(self) -> None:
        progress = ProgressView(8, fresh=9, closed=True)
        assert self.policy.launch(progress) == Launch(fresh=9, oversample=1.25)

    def test_long_round_starts_when_a_batch_is_deferred(self) -> None:
        progress = ProgressView(8, fresh=20, deferred=8)
        assert self.policy.launch(progress) == Launch(deferred=8)
        progress = ProgressView(8, fresh=20, deferred=11)
        assert self.policy.launch(progress) == Launch(deferred=8)

    def test_a_share_of_a_batch_may_start_a_filled_up_long_round(self) -> None:
        policy = TailBatching(1.25, 1.25, 0.5)
        progress = ProgressView(8, fresh=20, deferred=3)
        assert policy.launch(progress) == Launch(fresh=10, oversample=1.25)
        progress = ProgressView(8, fresh=20, deferred=4)
        assert policy.launch(progress) == Launch(fresh=4, deferred=4)

    def test_end_of_data_goes_into_long_rounds(self) -> None:
        progress = ProgressView(8, fresh=5, deferred=2, closed=True)
        assert self.policy.launch(progress) == Launch(fresh=5, deferred=2)
        progress = ProgressView(8, deferred=3, closed=True)
        assert self.policy.launch(progress) == Launch(deferred=3)

    def test_waits_while_submissions_are_missing(self) -> None:
        assert self.policy.launch(ProgressView(8, fresh=5, deferred=2)) is None

    def test_mixes_when_both_together_fill_a_batch(self) -> None:
        progress = ProgressView(8, fresh=5, deferred=4)
        assert self.policy.launch(progress) == Launch(fresh=4, deferred=4)

    def test_counts_complete_groups(self) -> None:
        progress = ProgressView(8, fresh=20, complete=3)
        assert self.policy.launch(progress) == Launch(fresh=7, oversample=1.25)
        progress = ProgressView(8, fresh=20, deferred=8, complete=3)
        assert self.policy.launch(progress) == Launch(deferred=5)

    def test_never_asks_for_fewer_than_none(self) -> None:
        launch = self.policy.launch(ProgressView(8, fresh=20, complete=12))
        assert launch.fresh == 0


class TestPooled:
    """SortedRL: four batches start, and nobody else before the last of them is trained."""

    policy = Pooled(4)

    def test_starts_the_prompts_of_several_batches(self) -> None:
        assert self.policy.launch(ProgressView(fresh=99)) == Launch(fresh=16)
        assert self.policy.launch(ProgressView(fresh=9)) == Launch(fresh=9)

    @pytest.mark.parametrize(("deferred", "complete"), [(12, 0), (1, 3), (0, 4)])
    def test_pool_starts_no_prompts_beside_running_batches(
        self, deferred: int, complete: int
    ) -> None:
        progress = ProgressView(fresh=99, deferred=deferred, complete=complete)
        assert self.policy.launch(progress) == Launch(deferred=deferred)

    def test_pool_starts_again_when_no_batch_is_left(self) -> None:
        assert self.policy.launch(ProgressView(fresh=99, deferred=1)) == Launch(15, 1)

    def test_remaining_groups_form_the_last_batch(self) -> None:
        assert self.policy.launch(ProgressView(deferred=3, closed=True)) == Launch(deferred=3)

    def test_waits_for_submissions(self) -> None:
        assert self.policy.launch(ProgressView(fresh=3)) is None


class TestOneStepOff:
    def test_generates_ahead_of_the_trainer(self) -> None:
        assert OneStepOff().launch(ProgressView(fresh=9, trainer_waiting=False)) == Launch(fresh=4)

    @pytest.mark.parametrize("busy", [{"active": 4}, {"complete": 4}, {"active": 1, "complete": 3}])
    def test_stays_at_most_one_batch_ahead(self, busy: dict[str, Any]) -> None:
        progress = ProgressView(fresh=9, round=Launch(fresh=4), **busy)
        assert OneStepOff().launch(progress) is None

    def test_round_starts_with_the_newest_weights(self) -> None:
        assert OneStepOff().launch(ProgressView(fresh=9, update_pending=True)) is None

    def test_waits_for_a_full_batch_of_submissions(self) -> None:
        assert OneStepOff().launch(ProgressView(fresh=3)) is None
        assert OneStepOff().launch(ProgressView(fresh=3, closed=True)) == Launch(fresh=3)
        assert OneStepOff().launch(ProgressView(closed=True)) is None


class TestFullyAsync:
    def test_asks_for_everything_whatever_the_trainer_does(self) -> None:
        progress = ProgressView(fresh=9, deferred=2, trainer_waiting=False, active=3)
        assert FullyAsync().launch(progress) == Launch(fresh=9, deferred=2)

    def test_asks_for_nothing_when_there_is_nothing(self) -> None:
        assert FullyAsync().launch(ProgressView(active=3)) is None

    @pytest.mark.parametrize(
        ("active", "launch"),
        [
            (0, Launch(fresh=3, deferred=2)),
            (3, Launch(fresh=0, deferred=2)),
            (4, Launch(fresh=0, deferred=1)),
            (5, None),
            (6, None),
        ],
    )
    def test_bounds_the_groups_in_flight(self, active: int, launch: Launch | None) -> None:
        progress = ProgressView(fresh=9, deferred=2, active=active)
        assert FullyAsync(max_groups=5).launch(progress) == launch

    @pytest.mark.parametrize(
        ("active", "complete", "launch"),
        [
            (0, 0, Launch(fresh=4, deferred=2)),
            (4, 0, Launch(fresh=0, deferred=2)),
            (3, 2, Launch(fresh=0, deferred=1)),
            (0, 6, None),
            (2, 5, None),
        ],
    )
    def test_bounds_batches_ahead_of_the_trainer(
        self, active: int, complete: int, launch: Launch | None
    ) -> None:
        progress = ProgressView(fresh=9, deferred=2, active=active, complete=complete)
        assert FullyAsync(max_ahead=1.5).launch(progress) == launch

    def test_a_bound_of_one_batch_admits_one_batch(self) -> None:
        progress = ProgressView(10, fresh=20, active=3, complete=6)
        assert FullyAsync(max_ahead=1.0).launch(progress) == Launch(fresh=1)
        assert FullyAsync(max_ahead=1.1).launch(progress) == Launch(fresh=2)  # not 3

    def test_the_tighter_bound_holds(self) -> None:
        progress = ProgressView(fresh=9, active=3, complete=2)
        assert FullyAsync(max_groups=4, max_ahead=2.0).launch(progress) == Launch(fresh=1)
        assert FullyAsync(max_groups=9, max_ahead=1.5).launch(progress) == Launch(fresh=1)

    def test_a_bound_below_one_batch_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"max_ahead = 0\.9: fewer groups than a batch"):
            FullyAsync(max_ahead=0.9)


class TestOverProvisioningByRecords:
    """Groups of a batch of 4, of which a quarter has the tail, or none has."""

    TAIL = tuple(DeliveredGroup(9, (length,)) for length in (100, 100, 100, 9000)) * 4
    ALIKE = tuple(DeliveredGroup(9, (500,)) for _ in range(16))

    def launch(self, recent: Sequence[DeliveredGroup], **view: Any) -> Launch | None:
        policy = TailBatching(1.5, 1.0, least_gain=0.1)
        return policy.launch(ProgressView(fresh=9, recent=recent, **view))

    def test_over_sampling_follows_the_records(self) -> None:
        assert self.launch(self.TAIL) == Launch(fresh=6)
        assert self.launch(self.ALIKE) == Launch(fresh=4)

    def test_over_sampling_is_maximal_until_a_cycle_of_rounds_ends(self) -> None:
        assert self.launch(self.ALIKE[:11]) == Launch(fresh=6)
        assert self.launch(self.ALIKE[:12]) == Launch(fresh=4)

    def test_over_sampling_is_maximal_without_instances(self) -> None:
        assert self.launch(self.ALIKE, capacity=Capacity(0, 0, 0)) == Launch(fresh=6)

    def test_fixed_over_sampling_needs_no_records(self) -> None:
        assert TailBatching(least_gain=0.1).uses_recent
        assert not TailBatching().uses_recent
        policy = TailBatching(1.5, 1.0)
        assert policy.launch(ProgressView(fresh=9, recent=self.ALIKE)) == Launch(fresh=6)
