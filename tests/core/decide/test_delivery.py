"""Which groups make a batch, and whether they may go."""

from __future__ import annotations

import pytest

from rollout_sched.core.errors import PolicyError
from rollout_sched.core.model.actions import Deliver, Interrupt, UpdateWeights
from rollout_sched.core.model.events import (
    BatchRequested,
    GroupSubmitted,
    InstanceJoined,
    InstancePaused,
    RequestFinished,
    RequestInterrupted,
    SubmissionsClosed,
    ToolReturned,
    TurnFinished,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.core.model.records import Launch
from rollout_sched.core.model.roles import Batching, Progress
from tests.core.told import (
    BIG,
    LIMIT,
    PROMPT,
    Told,
    begun,
    delivered,
    dispatched,
    resumed,
    sample,
    sent,
    tail,
    thrown,
    with_roles,
)

PARTIAL = {"use": "partial", "at_update": "in_place"}


class TestStaleness:
    def test_too_old_is_masked_and_goes(self) -> None:
        bounded = {"use": "bounded", "max_staleness": 0, "when_stale": "mask"}
        told = Told(
            1,
            batching="fully_async",
            freshness=bounded,
            interruption={"use": "partial", "kv": "recompute", "at_update": "in_place"},
            weights={"use": "all_at_once", "when": "now"},
        )
        told.submit("a", samples=2)
        told(RequestFinished("a/0", 1, 5))
        told(WeightsPublished(1))
        told(InstancePaused("i0"))
        told(WeightsUpdated("i0", 1))
        told(RequestFinished("a/1", 2, 9, ((0, 4), (1, 5))))
        (deliver,) = told(BatchRequested())
        old, mixed = deliver.samples
        assert [(s.version, s.tokens, s.masked) for s in old.segments] == [(0, 5, True)]
        assert [(s.version, s.masked) for s in mixed.segments] == [(0, True), (1, False)]
        assert (old.staleness, old.masked_tokens) == (0, 5)
        assert (mixed.staleness, mixed.masked_tokens) == (0, 4)

    def test_too_old_is_dropped_and_starts_over(self) -> None:
        bounded = {"use": "bounded", "max_staleness": 0, "when_stale": "drop"}
        told = Told(2, slots=2, batching="fully_async", freshness=bounded)
        told.submit("a", samples=2)
        told.submit("b")
        told(RequestFinished("a/0", 1, 5))
        assert told.running == ["a/1", "b/0"]
        assert told(WeightsPublished(1)) == [
            thrown("a/0", 5, "stale"),
            Interrupt("a/1", 2, "i0"),
            Interrupt("b/0", 3, "i0"),
        ]
        for group in told.scheduler.state.groups:
            assert group.oldest_version is None
        assert told(RequestInterrupted("a/1", 2, 9)) == [thrown("a/1", 9, "stale", attempt=2)]
        assert told(RequestInterrupted("b/0", 3, 0)) == [UpdateWeights("i0", 1)]
        assert told(WeightsUpdated("i0", 1)) == [
            sent("a/0", 4, salt=1),
            sent("a/1", 5, salt=1),
        ]

    def test_nothing_is_sent_where_it_would_be_too_old_at_once(self) -> None:
        """b had begun on an instance that was young enough, and went on where none of it could
        count: it was delivered too old."""
        told = Told(
            2,
            slots=1,
            batching="fully_async",
            freshness={"use": "bounded", "max_staleness": 1},
            interruption={"use": "partial", "at_update": "resubmit"},
            weights={"use": "all_at_once", "when": "between_batches"},
        )
        told.submit("a")
        told(WeightsPublished(1), InstanceJoined("i1", 1, BIG, 1))
        told.submit("b", samples=2)
        assert told.running == ["a/0", "b/0"]
        told(WeightsPublished(2), BatchRequested())
        assert dispatched(told(RequestInterrupted("a/0", 1, 5))) == [], "i0 is still at version 0"
        told(RequestInterrupted("b/0", 2, 5))
        told(InstancePaused("i0"), InstancePaused("i1"), WeightsUpdated("i0", 2))
        assert dispatched(told(WeightsUpdated("i1", 2))) == ["a/0", "b/0"]
        samples: list[DeliveredSample] = []
        for _ in range(5):
            attempt = next(iter(told.scheduler.state.fleet.attempts.values()), None)
            if attempt is None:
                break
            actions = told(RequestFinished(attempt.request.id, attempt.id, 7))
            samples += [s for a in actions if isinstance(a, Deliver) for s in a.samples]
        assert {(s.request, s.staleness) for s in samples} == {("a/0", 0), ("b/0", 0), ("b/1", 0)}

    def test_young_enough_is_delivered_with_its_age(self) -> None:
        bounded = {"use": "bounded", "max_staleness": 1, "when_stale": "drop"}
        told = Told(batching="fully_async", freshness=bounded)
        told.submit("a")
        told(RequestFinished("a/0", 1, 5), WeightsPublished(1))
        assert told(BatchRequested()) == [
            Deliver(0, 1, (sample("a/0", (0, 5, "i0"), staleness=1),))
        ]

    def test_starting_over_needs_room_again(self) -> None:
        bounded = {"use": "bounded", "max_staleness": 0, "when_stale": "drop"}
        told = Told(batching="fully_async", freshness=bounded)
        told.submit("a", "b")
        assert told.running == ["a/0"]
        told(WeightsPublished(1))
        assert told.scheduler.state.progress.active == 0, "what is made now would be too old"
        told(RequestInterrupted("a/0", 1, 3))
        assert (told.scheduler.state.progress.active, told.scheduler.state.progress.fresh) == (1, 1)

    def test_starting_over_forgets_the_cache_and_the_turns(self) -> None:
        retain = {"use": "partial", "kv": "retain"}
        bounded = {"use": "bounded", "max_staleness": 0, "when_stale": "drop"}
        told = Told(batching="fully_async", freshness=bounded, interruption=retain)
        told.submit("a")
        told(TurnFinished("a/0", 1, 20))
        assert told(WeightsPublished(1)) == [
            thrown("a/0", 20, "stale"),
            UpdateWeights("i0", 1),
        ]
        assert told(ToolReturned("a/0", 1, 30)) == []
        assert told.anomalies == {"unknown_turn": 1}
        assert told(WeightsUpdated("i0", 1)) == [sent("a/0", 2, salt=1)]


class TestWaiting:
    """when_stale = "wait": no batch goes that would leave a group behind that cannot go in time."""

    def test_no_delivery_until_the_due_group_is_complete(self) -> None:
        bounded = {"use": "bounded", "max_staleness": 1}
        told = Told(1, batching="fully_async", freshness=bounded, interruption=PARTIAL)
        told.submit("a", "b", "c")
        told(BatchRequested())
        assert delivered(told(RequestFinished("b/0", 2, 5))) == ["b/0"], "a has another batch"
        told(WeightsPublished(1), InstancePaused("i0"), WeightsUpdated("i0", 1))
        assert told.running == ["a/0", "c/0"]
        told(BatchRequested())
        assert told(RequestFinished("c/0", 3, 5)) == [], "a is due now"
        assert told(RequestFinished("a/0", 1, 50, ((0, 30), (1, 20)))) == [
            Deliver(1, 1, (sample("a/0", (0, 30, "i0"), (1, 20, "i0"), staleness=1),))
        ]

    def test_a_batch_recalls_the_groups_set_back_that_it_waits_for(self) -> None:
        """Short rounds leave the tail alone until a batch of it is there, or until it is due."""
        bounded = {"use": "bounded", "max_staleness": 1}
        told = Told(2, batching=tail(1.5, 1.0), freshness=bounded, interruption=PARTIAL)
        told.submit(*"abcdef")
        told(BatchRequested())
        assert told.running == ["a/0", "b/0", "c/0"]
        told(RequestFinished("a/0", 1, 5))
        assert Interrupt("c/0", 3, "i0") in told(RequestFinished("b/0", 2, 5))
        told(RequestInterrupted("c/0", 3, 40))
        told(WeightsPublished(1), WeightsUpdated("i0", 1))
        assert dispatched(told(BatchRequested())) == ["d/0", "e/0", "f/0"]
        told(RequestFinished("d/0", 4, 5))
        assert told(RequestFinished("e/0", 5, 5)) == [resumed("c/0", 7, made=40, salt=1)]
        assert delivered(told(RequestFinished("c/0", 7, 5))) == ["c/0", "d/0"]


class TestLastBatch:
    def summary(self) -> Told:
        told = begun("a", "b", "c", prompts_per_step=2)
        told(RequestFinished("a/0", 1, 5), RequestFinished("b/0", 2, 5))
        told(BatchRequested())
        return told

    def test_is_not_short_before_submissions_close(self) -> None:
        told = self.summary()
        assert told.running == [], "one prompt is no batch, and another may come"
        assert dispatched(told(SubmissionsClosed())) == ["c/0"]
        assert delivered(told(RequestFinished("c/0", 3, 5))) == ["c/0"]

    def test_a_full_one_is_made_of_another_prompt(self) -> None:
        told = self.summary()
        assert dispatched(told.submit("d")) == ["c/0", "d/0"]


def test_a_batch_of_more_than_there_is() -> None:
    class Greedy(Batching):
        stops_at_delivery = False

        def launch(self, progress: Progress) -> Launch | None:
            return None

        def batch(self, progress: Progress) -> int:
            return 3

    told = with_roles(Told(instances=0), batching=Greedy())
    with pytest.raises(PolicyError, match="asked for 3 of 0 complete groups"):
        told(BatchRequested())


class TestSelection:
    """Rounds of two out of three like ones, in a window of two rounds; three more come later."""

    def summary(self) -> Told:
        alike = {"use": "like_lengths", "window": 2, "max_step_bias": 1.0}
        told = Told(2, slots=9, batching=tail(1.5, 1.0), selection=alike)
        for group, length in zip("abcdefghi", (60, 10, 50, 20, 40, 30, 5, 1, 3), strict=True):
            told(GroupSubmitted(group, 1, PROMPT, LIMIT, group, (length,)))
        told(BatchRequested())
        return told

    def step(self, told: Told, *finished: str) -> list[str]:
        """These finish, the batch is trained; who runs then."""
        for request in finished:
            attempt = told.request(request).attempt
            told(RequestFinished(request, attempt.id, 5))
        attempts = [a for a in told.scheduler.state.fleet.attempts.values() if a.abandoned]
        for attempt in attempts:
            told(RequestInterrupted(attempt.request.id, attempt.id, 1))
        version = told.scheduler.state.progress.version + 1
        told(WeightsPublished(version), WeightsUpdated("i0", version), BatchRequested())
        return sorted(told.running)

    def test_prompts_of_like_length_start_together(self) -> None:
        told = self.summary()
        assert sorted(told.running) == ["b/0", "d/0", "f/0"]
        assert self.step(told, "b/0", "d/0") == ["a/0", "c/0", "e/0"]

    def test_long_round_collects_deferred_groups_and_defers_none_twice(self) -> None:
        told = self.summary()
        self.step(told, "b/0", "d/0")
        assert self.step(told, "c/0", "e/0") == ["a/0", "f/0"]
        assert self.step(told, "a/0", "f/0") == ["g/0", "h/0", "i/0"]


def test_groups_know_their_place_among_those_launched_with_them() -> None:
    told = begun("a", "b", "c", "d", prompts_per_step=3, batching="sync")

    def places() -> list[tuple[str, int, int]]:
        return [(g.id, g.launch_place, g.launch_size) for g in told.scheduler.state.groups]

    assert places() == [("a", 0, 3), ("b", 1, 3), ("c", 2, 3), ("d", 0, 1)]
