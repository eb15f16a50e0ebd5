"""A batch in parts: groups go to the trainer as they become whole, and the last part ends it."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Action, Deliver, Interrupt
from rollout_sched.core.model.events import (
    BatchRequested,
    InstancePaused,
    RequestFailed,
    RequestFinished,
    SubmissionsClosed,
    WeightsPublished,
    WeightsUpdated,
)
from tests.core.told import Told

IN_PARTS = BatchRequested(parts=True)
PARTIAL = {"use": "partial", "at_update": "in_place"}


def parts(actions: list[Action]) -> list[tuple[int, int, bool, list[str]]]:
    """Of every delivery: the batch, the part, whether it is the last, and its groups."""
    return [
        (a.batch, a.part, a.last, [sample.group for sample in a.samples])
        for a in actions
        if isinstance(a, Deliver)
    ]


def rounds(least: int = 1, **other: Any) -> dict[str, Any]:
    return {"use": "sync", "part_prompts": least, **other}


def asynchronous(staleness: int, least: int = 1) -> dict[str, Any]:
    return {
        "batching": {"use": "fully_async", "part_prompts": least},
        "freshness": {"use": "bounded", "max_staleness": staleness},
        "interruption": PARTIAL,
    }


def three(**roles: Any) -> Told:
    """Three groups a batch, and three of four under way; the trainer takes parts."""
    told = Told(3, batching=rounds(), **roles)
    told.submit("a", "b", "c", "d")
    told(IN_PARTS)
    assert told.running == ["a/0", "b/0", "c/0"]
    return told


class TestRound:
    def test_groups_go_as_they_become_whole(self) -> None:
        told = three()
        progress = told.scheduler.state.progress
        assert parts(told(RequestFinished("b/0", 2, 5))) == [(0, 0, False, ["b"])]
        assert (progress.in_batch, progress.missing, progress.delivered) == (1, 2, 1)
        assert progress.trainer_waiting
        assert progress.round is not None
        assert parts(told(RequestFinished("a/0", 1, 5))) == [(0, 1, False, ["a"])]
        assert parts(told(RequestFinished("c/0", 3, 5))) == [(0, 2, True, ["c"])]
        assert (progress.in_batch, progress.batches, progress.delivered) == (0, 1, 3)
        assert not progress.trainer_waiting
        assert progress.round is None

    def test_trainer_without_parts_gets_full_batches(self) -> None:
        told = three()
        told(BatchRequested())
        assert parts(told(RequestFinished("a/0", 1, 5), RequestFinished("b/0", 2, 5))) == []
        assert parts(told(RequestFinished("c/0", 3, 5))) == [(0, 0, True, ["a", "b", "c"])]

    def test_trainer_switching_to_parts_gets_the_complete_groups(self) -> None:
        told = three()
        told(BatchRequested(), RequestFinished("a/0", 1, 5), RequestFinished("b/0", 2, 5))
        assert parts(told(IN_PARTS)) == [(0, 0, False, ["a", "b"])]
        assert parts(told(BatchRequested())) == []
        assert parts(told(RequestFinished("c/0", 3, 5))) == [(0, 1, True, ["c"])]

    def test_a_part_has_so_many_groups_at_least(self) -> None:
        told = Told(5, batching=rounds(2))
        told.submit(*"abcde")
        told(IN_PARTS)
        said = [parts(told(RequestFinished(f"{g}/0", n, 5))) for n, g in enumerate("abcde", 1)]
        assert said == [
            [],
            [(0, 0, False, ["a", "b"])],
            [],
            [(0, 1, False, ["c", "d"])],
            [(0, 2, True, ["e"])],
        ]

    def test_the_last_part_ends_the_round(self) -> None:
        """What is left over is set back then, and not before."""
        told = Told(2, batching=rounds(over_prompts=1.5))
        told.submit(*"abc")
        told(IN_PARTS)
        assert told.running == ["a/0", "b/0", "c/0"]
        assert parts(told(RequestFinished("b/0", 2, 5))) == [(0, 0, False, ["b"])]
        assert told.running == ["a/0", "c/0"]
        assert parts(told(RequestFinished("a/0", 1, 5))) == [(0, 1, True, ["a"])]
        assert told.running == []
        assert told.scheduler.state.progress.deferred == 1

    def test_a_failed_group_is_replaced(self) -> None:
        told = three()
        told(RequestFinished("a/0", 1, 5))
        told(RequestFailed("b/0", 2, "too long", blame="request"))
        assert told.running == ["c/0", "d/0"]
        assert parts(told(RequestFinished("c/0", 3, 5))) == [(0, 1, False, ["c"])]
        assert parts(told(RequestFinished("d/0", 4, 5))) == [(0, 2, True, ["d"])]

    def test_leftover_complete_group_is_the_first_part_of_the_next_batch(self) -> None:
        """And counts for its round."""
        told = Told(
            2, batching=rounds(over_prompts=2.0), interruption=PARTIAL, freshness="unbounded"
        )
        told.submit(*"abcdef")
        told(IN_PARTS)
        told(RequestFinished("a/0", 1, 5), RequestFinished("b/0", 2, 5))
        told(RequestFinished("c/0", 3, 5))  # it outran its interrupt
        assert told.scheduler.state.progress.complete == 1
        answer = told(IN_PARTS)
        assert parts(answer) == [(1, 0, False, ["c"])]
        progress = told.scheduler.state.progress
        assert (progress.in_batch, progress.active) == (1, 3), "twice two are on the way"


class TestTheEnd:
    def test_a_batch_that_can_never_be_filled_ends_without_samples(self) -> None:
        told = Told(2, batching=rounds())
        told.submit("a", "b")
        told(IN_PARTS, SubmissionsClosed())
        assert parts(told(RequestFinished("a/0", 1, 5))) == [(0, 0, False, ["a"])]
        failed = told(RequestFailed("b/0", 2, "too long", blame="request"))
        assert parts(failed) == [(0, 1, True, [])]
        assert told.scheduler.state.progress.batches == 1
        assert told(IN_PARTS) == [], "nothing is left"

    def test_batch_lacking_submissions_ends_without_samples(self) -> None:
        told = Told(2, batching={"use": "fully_async", "part_prompts": 1}, freshness="unbounded")
        told.submit("a")
        told(IN_PARTS, RequestFinished("a/0", 1, 5))
        assert told.scheduler.state.progress.in_batch == 1
        assert parts(told(SubmissionsClosed())) == [(0, 1, True, [])]


class TestWeights:
    def test_none_may_be_published_while_a_batch_is_delivered_in_part(self) -> None:
        told = three()
        told(RequestFinished("a/0", 1, 5))
        with pytest.raises(CallerError, match=r"batch 0 .* 1 groups so far; take its parts up to"):
            told(WeightsPublished(1))
        told(RequestFinished("b/0", 2, 5), RequestFinished("c/0", 3, 5))
        told(WeightsPublished(1))
        assert told.scheduler.state.progress.version == 1


class TestStaleness:
    """What stays behind can still go in time, counting what the present batch still lacks."""

    def older_and_newer(self, least: int) -> Told:
        """Three a batch, one version of slack. a, e and f are of version 0, and due; a runs."""
        told = Told(3, slots=99, **asynchronous(1, least))
        told.submit(*"abcdefghi")
        told(IN_PARTS)
        for n, group in enumerate("bcdef", 2):
            told(RequestFinished(f"{group}/0", n, 5))
        assert told.scheduler.state.progress.batches == 1
        told(WeightsPublished(1), InstancePaused("i0"), WeightsUpdated("i0", 1))
        assert told.running == ["a/0", "g/0", "h/0", "i/0"]
        return told

    def test_slots_are_kept_for_due_groups(self) -> None:
        told = self.older_and_newer(1)
        assert parts(told(IN_PARTS)) == [(1, 0, False, ["e", "f"])]
        for attempt, group in enumerate("ghi", 7):
            assert parts(told(RequestFinished(f"{group}/0", attempt, 5))) == []
        assert parts(told(RequestFinished("a/0", 1, 50, ((0, 50),)))) == [(1, 1, True, ["a"])]

    def test_all_allowed_groups_go(self) -> None:
        """Four of the five would fill the batch but for one: a must have the last place."""
        told = Told(4, slots=99, **asynchronous(1))
        told.submit(*"abcdefghijkl")
        told(IN_PARTS)
        for n, group in enumerate("bcdefgh", 2):
            told(RequestFinished(f"{group}/0", n, 5))
        told(WeightsPublished(1), InstancePaused("i0"), WeightsUpdated("i0", 1))
        for attempt, group in enumerate("ijkl", 9):
            told(RequestFinished(f"{group}/0", attempt, 5))
        assert told.scheduler.state.progress.complete == 7
        assert parts(told(IN_PARTS)) == [(1, 0, False, ["f", "g", "h"])]
        assert parts(told(RequestFinished("a/0", 1, 50, ((0, 50),)))) == [(1, 1, True, ["a"])]

    def test_no_fewer_groups_go_than_a_part_needs(self) -> None:
        told = self.older_and_newer(3)
        assert parts(told(IN_PARTS)) == []
        for attempt, group in enumerate("ghi", 7):
            assert parts(told(RequestFinished(f"{group}/0", attempt, 5))) == []
        last = told(RequestFinished("a/0", 1, 50, ((0, 50),)))
        assert parts(last) == [(1, 0, True, ["a", "e", "f"])]

    def test_groups_outdated_by_a_version_without_a_batch_start_over(self) -> None:
        """Two groups are due with one batch: the second can never go, and the first would wait."""
        told = Told(1, slots=99, **asynchronous(1, 0))
        told.submit(*"ab")
        told(WeightsPublished(1), InstancePaused("i0"), WeightsUpdated("i0", 1), BatchRequested())
        answer = told(RequestFinished("a/0", 1, 5, ((0, 5),)))
        assert parts(answer) == [(0, 0, True, ["a"])]
        assert [a.request for a in answer if isinstance(a, Interrupt)] == ["b/0"]
        assert told.scheduler.state.groups["b"].oldest_version == 1

    def test_a_trainer_that_resumes_at_a_later_version_is_paced_like_any_other(self) -> None:
        """Else more would be launched than can ever go in time, and no batch could."""
        for version in (0, 7):
            told = Told(1, slots=99, version=version, **asynchronous(1, 0))
            told.submit(*"abcdefgh")
            assert told.running == ["a/0", "b/0"]
            told(BatchRequested())
            assert parts(told(RequestFinished("b/0", 2, 5))) == [(0, 0, True, ["b"])]
