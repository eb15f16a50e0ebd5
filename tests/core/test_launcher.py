"""Which groups start, and in which order."""

from __future__ import annotations

from rollout_sched.core.model.events import (
    BatchRequested,
    GroupSubmitted,
    RequestFinished,
    RequestInterrupted,
    WeightsPublished,
    WeightsUpdated,
)
from tests.core.told import (
    LIMIT,
    PROMPT,
    Told,
    tail,
)


class TestSelection:
    """Rounds of two out of three like ones, in a window of two rounds; three more come later."""

    def told(self) -> Told:
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
            assert attempt is not None
            told(RequestFinished(request, attempt.id, 5))
        attempts = [a for a in told.scheduler.books.fleet.attempts.values() if a.abandoned]
        for attempt in attempts:
            told(RequestInterrupted(attempt.request.id, attempt.id, 1))
        version = told.scheduler.books.progress.version + 1
        told(WeightsPublished(version), WeightsUpdated("i0", version), BatchRequested())
        return sorted(told.running)

    def test_those_of_like_length_start_together(self) -> None:
        told = self.told()
        assert sorted(told.running) == ["b/0", "d/0", "f/0"]
        assert self.step(told, "b/0", "d/0") == ["a/0", "c/0", "e/0"]

    def test_a_long_round_collects_what_was_set_back_and_nobody_is_set_back_twice(self) -> None:
        told = self.told()
        self.step(told, "b/0", "d/0")
        assert self.step(told, "c/0", "e/0") == ["a/0", "f/0"]
        assert self.step(told, "a/0", "f/0") == ["g/0", "h/0", "i/0"]


def test_groups_know_their_place_among_those_launched_with_them() -> None:
    told = Told(3, batching="sync")
    told.submit("a", "b", "c", "d")
    told(BatchRequested())

    def places() -> list[tuple[str, int, int]]:
        return [(g.id, g.launch_place, g.launch_size) for g in told.scheduler.books.groups]

    assert places() == [("a", 0, 3), ("b", 1, 3), ("c", 2, 3), ("d", 0, 1)]
