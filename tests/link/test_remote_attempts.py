"""Attempts at other fronts, by number and by instance."""

from __future__ import annotations

import asyncio

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.link.connected_front import RemoteAttempt, RemoteAttempts


def test_each_ends_once_and_whoever_waits_hears_it() -> None:
    async def scene() -> None:
        attempts = RemoteAttempts()
        for number in (1, 2, 3):
            instance = f"i{number % 2}"
            attempts.add(RemoteAttempt(Dispatch(f"r{number}", number, instance, 1, 1, 0), 0.0))
        assert [one.dispatch.attempt for one in attempts.on("i1")] == [1, 3]
        first = attempts.get(1)
        assert first is not None
        ended = first.ended()
        assert attempts.take(1) is first
        assert attempts.take(1) is None
        assert ended.done()
        late = attempts.take(3)
        assert late is not None
        assert late.ended().done()
        assert attempts.on("i1") == []
        assert len(attempts) == len(attempts.every()) == 1

    asyncio.run(scene())
