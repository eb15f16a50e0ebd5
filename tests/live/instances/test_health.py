"""What polls and failed attempts prove about an instance."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.live.instances.health import (
    DraftAcceptance,
    HealthChecks,
    Liveness,
    Movement,
    Shortfall,
    Streams,
)
from rollout_sched.live.ports import Gauges, InstanceError, InstanceGone
from rollout_sched.live.requests.attempt import LiveAttempt
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.settings import Settings
from tests.live.scripted import Scripted

SETTINGS = Settings(poll_s=1.0, poll_timeout_s=2.0, misses=3, stall_s=10.0)


class Polled:
    """Answers polls as a test says: with gauges, an error, or never."""

    name = "i0"

    def __init__(self) -> None:
        self.answer: Gauges | Exception | None = Gauges(0, 0, 0.0)

    async def gauges(self) -> Gauges:
        if self.answer is None:
            await asyncio.sleep(1e6)
        if isinstance(self.answer, Exception):
            raise self.answer
        assert self.answer is not None
        return self.answer


def made(started_at: float = 0.0) -> tuple[Polled, HealthChecks]:
    client: Any = Polled()
    health = HealthChecks(client, SETTINGS)
    health.joined(started_at)
    return client, health


async def test_a_poll_brings_gauges() -> None:
    client, health = made()
    poll = await health.poll()
    assert poll.gauges is health.gauges is client.answer
    assert (poll.lost, poll.restarted) == ("", False)


@pytest.mark.parametrize(
    ("answer", "lost_after", "why"),
    [
        (InstanceGone("connection refused"), 1, "connection refused"),
        (InstanceError("500"), 3, "500"),
        (None, 3, "no answer within 2 s"),
    ],
)
async def test_misses_make_it_lost(answer: Exception | None, lost_after: int, why: str) -> None:
    client, health = made()
    client.answer = answer
    lost = [(await health.poll()).lost for _ in range(lost_after)]
    assert lost == [""] * (lost_after - 1) + [why]


async def test_misses_count_in_a_row_and_from_when_it_joins() -> None:
    client, health = made()
    for end in (health.poll, None):
        client.answer = InstanceError("500")
        assert [(await health.poll()).lost for _ in range(2)] == ["", ""]
        client.answer = Gauges(0, 0, 0.0)
        if end is None:
            health.joined(0.0)
        else:
            await end()

    client.answer = InstanceError("500")
    assert (await health.poll()).lost == ""


async def test_first_miss_polls_at_once_and_later_ones_at_intervals() -> None:
    now = asyncio.get_running_loop().time
    client, health = made()
    client.answer = InstanceError("500")
    due = []
    for _ in range(3):
        await health.until_due()
        due.append(now())
        await health.poll()
    assert due == [1.0, 1.0, 2.0]


async def test_failure_unverifies_until_a_poll_that_began_after_it() -> None:
    _, health = made()
    assert health.verified.is_set()
    before = await health.poll()
    health.check_now()
    assert not health.verified.is_set()
    health.verify(before)
    assert not health.verified.is_set()
    health.verify(await health.poll())
    assert health.verified.is_set()


async def test_a_check_is_due_at_once_after_a_failure() -> None:
    _, health = made()
    health.check_now()
    await health.until_due()
    assert asyncio.get_running_loop().time() == 0.0
    await health.until_due()
    assert asyncio.get_running_loop().time() == 1.0


async def test_a_missed_poll_verifies_nothing() -> None:
    client, health = made()
    client.answer = InstanceError("500")
    await health.poll()
    assert not health.verified.is_set()


@pytest.mark.parametrize(
    ("joined_at", "before", "after", "restarted"),
    [
        (1.0, Gauges(0, 0, 0.0, started_at=1.0), Gauges(0, 0, 0.0, started_at=1.0), False),
        (1.0, Gauges(0, 0, 0.0, started_at=1.0), Gauges(0, 0, 0.0, started_at=2.0), True),
        # Where it says when it began, counters are not asked.
        (
            1.0,
            Gauges(0, 0, 0.0, started_at=1.0, generated_tokens=9),
            Gauges(0, 0, 0.0, started_at=1.0, generated_tokens=3),
            False,
        ),
        (0.0, Gauges(0, 0, 0.0, generated_tokens=9), Gauges(0, 0, 0.0, generated_tokens=3), True),
        (0.0, Gauges(0, 0, 0.0, generated_tokens=9), Gauges(0, 0, 0.0, generated_tokens=9), False),
    ],
)
async def test_restarts(joined_at: float, before: Gauges, after: Gauges, restarted: bool) -> None:
    client, health = made(joined_at)
    client.answer = before
    assert not (await health.poll()).restarted
    client.answer = after
    assert (await health.poll()).restarted is restarted


async def test_counters_from_before_it_joined_are_not_compared_with() -> None:
    client, health = made()
    client.answer = Gauges(0, 0, 0.0, generated_tokens=9)
    await health.poll()
    health.joined(0.0)
    assert health.gauges is None
    client.answer = Gauges(0, 0, 0.0, generated_tokens=3)
    assert not (await health.poll()).restarted


async def test_a_stall_is_counted_from_the_end_of_a_pause() -> None:
    _, health = made()
    still = Gauges(1, 0, 0.5, generated_tokens=9)
    for second in range(30):
        health.forget_progress()
        assert not health.judge(still, []).lost, second
        await asyncio.sleep(1.0)
    await asyncio.sleep(8.0)  # 9 s after it was judged first
    assert not health.judge(still, []).lost
    await asyncio.sleep(1.0)
    assert "no progress for 10 s" in health.judge(still, []).lost


class TestMovement:
    def test_nothing_moves_while_requests_run(self) -> None:
        movement = Movement(0.0)
        movement.note(1.0, Gauges(2, 0, 0.5, generated_tokens=7))
        assert not movement.note(2.0, Gauges(2, 0, 0.5, generated_tokens=7))
        assert movement.since == 1.0

    def test_idle_instance_does_not_stall(self) -> None:
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
    def test_shortfall_must_last(self) -> None:
        shortfall = Shortfall(10.0)
        assert [shortfall.note(float(now), 1) for now in range(12)] == [0] * 10 + [1, 1]

    def test_smallest_shortfall_over_time_counts(self) -> None:
        shortfall = Shortfall(3.0)
        told = [shortfall.note(float(now), missing) for now, missing in enumerate([5, 2, 9, 4, 4])]
        assert told == [0, 0, 0, 2, 2]

    def test_poll_with_all_requests_ends_a_shortfall(self) -> None:
        shortfall = Shortfall(2.0)
        assert [shortfall.note(float(n), m) for n, m in enumerate([1, 1, 0, 1, 1, 1])][-2:] == [
            0,
            1,
        ]

    def test_surplus_requests_are_no_shortfall(self) -> None:
        shortfall = Shortfall(0.0)
        assert shortfall.note(0.0, -5) == 0


def test_a_stream_stands_still_from_its_last_token_on() -> None:
    streams = Streams()
    assert streams.note(0.0, [(1, 0), (2, 4)]) == {2: 0.0}
    assert streams.note(1.0, [(1, 1), (2, 4)]) == {1: 1.0, 2: 0.0}
    assert streams.note(2.0, [(1, 1), (2, 5)]) == {1: 1.0, 2: 2.0}
    assert streams.note(3.0, [(2, 5)]) == {2: 2.0}


@pytest.mark.parametrize(("generated", "noticed_s"), [(1, 10), (0, 60)])
def test_instance_without_tokens_may_be_in_its_first_step(generated: int, noticed_s: int) -> None:
    """It compiles kernels then, and says that it has nothing to do until that is over."""
    settings = Settings(forgotten_s=10.0, stall_s=60.0)
    liveness = Liveness(settings, 0.0)
    dispatch = Dispatch("d", 1, "i0", 1, 100, 0)
    running = LiveAttempt(dispatch, TokenPayload([1], {}), Scripted(), "o-1", 0.0)
    gauges = Gauges(0, 0, 0.0, generated_tokens=generated)
    verdicts = (liveness.judge(float(now), gauges, [running]) for now in range(1, 100))
    first = next(now for now, verdict in enumerate(verdicts, start=1) if verdict.stop)
    assert noticed_s <= first <= noticed_s + 2


def test_drafts_that_are_not_accepted_are_told_once_until_they_are_again() -> None:
    drafts, drafted, accepted = DraftAcceptance(0.1), 0, 0

    def told(made: int, share: float) -> bool:
        nonlocal drafted, accepted
        drafted, accepted = drafted + made, accepted + int(made * share)
        gauges = Gauges(1, 0, 0.5, drafted_tokens=drafted, accepted_tokens=accepted)
        return bool(drafts.note(gauges))

    shares = [(9_000, 0.0), (3_000, 0.6), (1_900, 0.0), (200, 0.0), (7_188, 0.0), (3_000, 0.1)]
    # What was drafted before the first poll does not count, nor does too little.
    assert [told(*one) for one in shares] == [False, False, False, True, False, False]
    drafted = accepted = 0  # a restart
    assert not told(0, 0.0)
    assert told(2_000, 0.0)
