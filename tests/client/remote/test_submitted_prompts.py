"""What was asked for and has not come, by name."""

from __future__ import annotations

from rollout_sched.client.remote.client import ForgottenPrompts, SubmittedPrompts
from rollout_sched.live.trainer.samples import Batch, FailedGroup, Sample


def sample(uid: str) -> Sample:
    return Sample(uid, 0, [1], [2], [1], None, [0], [], 0, "stop", "COMPLETED", 0)


def test_received_and_failed_prompts_are_not_waited_for() -> None:
    book = SubmittedPrompts()
    book.add(["a", "b", "c", "d"])
    book.received(Batch(0, 0, [sample("b"), sample("b")], [FailedGroup("d", "it cannot be made")]))
    assert book.uids == ["a", "c"]
    book.remove(["c", "unheard of"])
    assert book.uids == ["a"]
    book.received(Batch(1, 0, [], filtered=["a"]))
    assert not book.uids


def test_the_error_has_all_names_and_shows_a_few() -> None:
    few = ForgottenPrompts(["a", "b"])
    assert "2 of the submitted prompts" in str(few)
    assert "'a', 'b';" in str(few)
    many = ForgottenPrompts([f"g{number}" for number in range(9)])
    assert "'g4' and 4 more" in str(many)
    assert len(many.uids) == 9
