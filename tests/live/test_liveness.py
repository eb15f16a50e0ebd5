"""What gauges and streams prove about who will never answer, poll by poll."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.live.instances.health import Liveness, Movement, Shortfall, Streams
from rollout_sched.live.ports import Gauges
from rollout_sched.live.requests.attempt import LiveAttempt
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.settings import Settings
from tests.live.scripted import Scripted


class TestMovement:
    def test_nothing_moves_while_requests_run(self) -> None:
        movement = Movement(0.0)
        movement.note(1.0, Gauges(2, 0, 0.5, generated_tokens=7))
        assert not movement.note(2.0, Gauges(2, 0, 0.5, generated_tokens=7))
        assert movement.since == 1.0

    def test_where_nothing_runs_nothing_stands_still(self) -> None:
        movement = Movement(0.0)
        for now in (1.0, 2.0, 3.0):
            movement.note(now, Gauges(0, 0, 0.0))
        assert movement.since == 3.0

    @pytest.mark.parametrize(
        "after",
        [
            Gauges(1, 0, 0.5, generated_tokens=8),
            Gauges(1, 0, 0.6, generated_tokens=7),  # a prefill that goes on, chunk by chunk
            Gauges(1, 0, 0.5, generated_tokens=7, prefill_tokens=100),
            Gauges(1, 0, 0.5, generated_tokens=7, cached_tokens=100),
            Gauges(1, 0, 0.5, generated_tokens=7, preemptions=1),
        ],
    )
    def test_any_sign_of_work_is_progress(self, after: Gauges) -> None:
        movement = Movement(0.0)
        movement.note(1.0, Gauges(1, 0, 0.5, generated_tokens=7))
        assert movement.note(2.0, after)
        assert movement.since == 2.0


class TestShortfall:
    def test_it_must_last(self) -> None:
        shortfall = Shortfall(10.0)
        assert [shortfall.note(float(now), 1) for now in range(12)] == [0] * 10 + [1, 1]

    def test_the_least_of_the_whole_time_counts(self) -> None:
        shortfall = Shortfall(3.0)
        told = [shortfall.note(float(now), missing) for now, missing in enumerate([5, 2, 9, 4, 4])]
        assert told == [0, 0, 0, 2, 2]

    def test_a_poll_that_tells_of_all_ends_it(self) -> None:
        shortfall = Shortfall(2.0)
        assert [shortfall.note(float(n), m) for n, m in enumerate([1, 1, 0, 1, 1, 1])][-2:] == [
            0,
            1,
        ]

    def test_more_than_we_know_of_is_no_shortfall(self) -> None:
        shortfall = Shortfall(0.0)
        assert shortfall.note(0.0, -5) == 0


def test_a_stream_stands_still_from_its_last_token_on() -> None:
    streams = Streams()
    assert streams.note(0.0, [(1, 0), (2, 4)]) == {2: 0.0}
    assert streams.note(1.0, [(1, 1), (2, 4)]) == {1: 1.0, 2: 0.0}
    assert streams.note(2.0, [(1, 1), (2, 5)]) == {1: 1.0, 2: 2.0}
    assert streams.note(3.0, [(2, 5)]) == {2: 2.0}


@pytest.mark.parametrize(("generated", "noticed_s"), [(1, 10), (0, 60)])
def test_one_that_has_never_made_a_token_may_still_be_in_its_first_step(
    generated: int, noticed_s: int
) -> None:
    """It compiles kernels then, and says that it has nothing to do until that is over."""
    settings = Settings(forgotten_s=10.0, stall_s=60.0)
    liveness = Liveness(settings, 0.0)
    dispatch = Dispatch("d", 1, "i0", 1, 100, 0)
    running = LiveAttempt(dispatch, TokenPayload([1], {}), Scripted(), "o-1", 0.0)
    gauges = Gauges(0, 0, 0.0, generated_tokens=generated)
    verdicts = (liveness.judge(float(now), gauges, [running]) for now in range(1, 100))
    first = next(now for now, verdict in enumerate(verdicts, start=1) if verdict.stop)
    assert noticed_s <= first <= noticed_s + 2
