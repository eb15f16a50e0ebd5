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
class TestDeliveredGroups:
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
class TestLostGroups:
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


TAIL = TailBatching(1.25, 1.25)  # RollPacker: long rounds for whole batches of deferred prompts
HALF = TailBatching(1.25, 1.25, 0.5)
POOL = Pooled(4)  # SortedRL: four batches start, and nobody else before the last is trained


def case(
    name: str, policy: Any, launch: Launch | None, prompts_per_step: int = 4, **progress: Any
) -> Any:
    return pytest.param(policy, ProgressView(prompts_per_step, **progress), launch, id=name)


@pytest.mark.parametrize(
    ("policy", "progress", "launch"),
    [
        case("sync starts a batch", Sync(), Launch(4), fresh=9),
        case("sync starts more when over-sampling", Sync(1.5), Launch(6), fresh=9),
        case("1.1 of ten are 11, not 12", Sync(1.1), Launch(11), 10, fresh=20),
        case("over-sampling takes what there is", Sync(1.5), Launch(5), fresh=5),
        case("deferred groups go first", Sync(1.5), Launch(4, 2), fresh=9, deferred=2),
        case("complete groups count", Sync(), Launch(1), fresh=9, complete=3),
        case("a batch is complete", Sync(), Launch(), fresh=9, complete=6),
        case("sync waits for submissions", Sync(), None, fresh=3),
        case("the last round is short", Sync(), Launch(3), fresh=3, closed=True),
        case("a short round over-samples", TAIL, Launch(10, 0, 1.25), 8, fresh=20),
        case("deferred groups lie by", TAIL, Launch(10, 0, 1.25), 8, fresh=20, deferred=7),
        case("the last short round", TAIL, Launch(9, 0, 1.25), 8, fresh=9, closed=True),
        case("a batch is deferred", TAIL, Launch(0, 8), 8, fresh=20, deferred=8),
        case("more than a batch is deferred", TAIL, Launch(0, 8), 8, fresh=20, deferred=11),
        case("less than a share is deferred", HALF, Launch(10, 0, 1.25), 8, fresh=20, deferred=3),
        case("a share of a batch is deferred", HALF, Launch(4, 4), 8, fresh=20, deferred=4),
        case("the end of the data", TAIL, Launch(5, 2), 8, fresh=5, deferred=2, closed=True),
        case("the last deferred groups", TAIL, Launch(0, 3), 8, deferred=3, closed=True),
        case("both together are too few", TAIL, None, 8, fresh=5, deferred=2),
        case("both together fill a batch", TAIL, Launch(4, 4), 8, fresh=5, deferred=4),
        case("a short round lacks five", TAIL, Launch(7, 0, 1.25), 8, fresh=20, complete=3),
        case("a long round lacks five", TAIL, Launch(0, 5), 8, fresh=20, deferred=8, complete=3),
        case("never fewer than none", TAIL, Launch(0, 0, 1.25), 8, fresh=20, complete=12),
        case("a pool is of four batches", POOL, Launch(16), fresh=99),
        case("a pool takes what there is", POOL, Launch(9), fresh=9),
        case("the rest of a pool", POOL, Launch(0, 12), fresh=99, deferred=12),
        case("the last batch of a pool", POOL, Launch(0, 1), fresh=99, deferred=1, complete=3),
        case("a pool is complete", POOL, Launch(), fresh=99, complete=4),
        case("no batch is left of a pool", POOL, Launch(15, 1), fresh=99, deferred=1),
        case("the last pool is short", POOL, Launch(0, 3), deferred=3, closed=True),
        case("a pool waits for submissions", POOL, None, fresh=3),
        case("one step ahead", OneStepOff(), Launch(4), fresh=9, trainer_waiting=False),
        case("a batch runs", OneStepOff(), None, fresh=9, round=Launch(4), active=4),
        case("a batch is ahead", OneStepOff(), None, fresh=9, round=Launch(4), complete=4),
        case("both", OneStepOff(), None, fresh=9, round=Launch(4), active=1, complete=3),
        case("weights are on their way", OneStepOff(), None, fresh=9, update_pending=True),
        case("one step off waits for submissions", OneStepOff(), None, fresh=3),
        case("the last step is short", OneStepOff(), Launch(3), fresh=3, closed=True),
        case("nothing is left", OneStepOff(), None, closed=True),
        case("all at once", FullyAsync(), Launch(9, 2), fresh=9, deferred=2, active=3),
        case("nothing to start", FullyAsync(), None, active=3),
        case("one batch ahead", FullyAsync(max_ahead=1.0), Launch(1), 10, fresh=20, active=9),
        case("1.1 are 11, not 12", FullyAsync(max_ahead=1.1), Launch(2), 10, fresh=20, active=9),
    ],
)
def test_a_launch(policy: Any, progress: ProgressView, launch: Launch | None) -> None:
    assert policy.launch(progress) == launch


def test_groups_that_spent_their_budget_are_replaced() -> None:
    progress = ProgressView(fresh=9, round=Launch(fresh=6), active=4, complete=1, spent=1)
    assert Sync(1.5).launch(progress) == Launch(fresh=1)
    assert Sync().launch(progress) == Launch(), "a batch is on its way"


class TestFullyAsync:
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

    def test_the_tighter_bound_holds(self) -> None:
        progress = ProgressView(fresh=9, active=3, complete=2)
        assert FullyAsync(max_groups=4, max_ahead=2.0).launch(progress) == Launch(fresh=1)
        assert FullyAsync(max_groups=9, max_ahead=1.5).launch(progress) == Launch(fresh=1)

    def test_a_bound_below_one_batch_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"max_ahead = 0\.9: fewer groups than a batch"):
            FullyAsync(max_ahead=0.9)
        with pytest.raises(ValueError, match="window_fraction is a share of max_ahead"):
            FullyAsync(window_fraction=0.3)

    def test_its_window_is_a_share_of_the_groups_ahead(self) -> None:
        assert FullyAsync(max_ahead=1.5).window(ProgressView(prompts_per_step=10)) == 0
        windowed = FullyAsync(max_ahead=1.5, window_fraction=0.3)
        assert windowed.window(ProgressView(prompts_per_step=10)) == 5


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
