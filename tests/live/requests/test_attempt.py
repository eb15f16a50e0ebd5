"""Attempts under way: an end is seen by whoever asks for it, before or after."""

from __future__ import annotations

import asyncio

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.live.ports import InstanceError, Outcome
from rollout_sched.live.requests.attempt import AttemptTask, LiveAttempt
from rollout_sched.live.requests.token_payload import TokenPayload
from tests.live.scripted import Scripted


def running() -> LiveAttempt:
    dispatch = Dispatch("r", 1, "i0", 3, 9, 0)
    return LiveAttempt(dispatch, TokenPayload([1], {}), Scripted(), "o", 0.0)


async def test_end_is_seen_by_earlier_and_later_waiters() -> None:
    attempt = running()
    before = attempt.ended()
    assert not before.done()
    attempt.end()
    assert before.done()
    late = running()
    late.end()
    assert late.ended().done()


async def test_coroutine_reports_its_end_once() -> None:
    async def makes() -> Outcome:
        return Outcome(1, "stop", (), None)

    async def breaks() -> Outcome:
        raise InstanceError("reset")

    told: list[Outcome | Exception] = []
    AttemptTask(makes(), told.append)
    AttemptTask(breaks(), told.append)
    assert not told, "not before it has begun"
    await asyncio.sleep(0.01)
    assert [type(result) for result in told] == [Outcome, InstanceError]


async def test_cancelled_attempt_reports_nothing() -> None:
    told: list[Outcome | Exception] = []
    AttemptTask(asyncio.sleep(0.01, Outcome(1, "stop", (), None)), told.append).cancel()
    await asyncio.sleep(0.03)
    assert told == []
