"""An administrator's pause: the instance is told, and it is known whose it is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rollout_sched.live.instances.control import PauseControl
from rollout_sched.live.instances.membership import JOIN, Membership
from rollout_sched.live.instances.pause import InstancePause, PausedBy
from rollout_sched.live.ports import InstanceError
from rollout_sched.live.settings import Settings
from tests.live.scripted import Scripted


class Paused:
    """One instance's, which has joined if it is told so."""

    def __init__(self, *, joined: bool) -> None:
        self.client = Scripted()
        self.pause = InstancePause("i0")
        self.lock = asyncio.Lock()
        self.resumed = 0
        membership = Membership("i0")
        if joined:
            membership.move(JOIN)
        self.control = PauseControl(
            self.client, Settings(), membership, self.pause, self.lock, on_resumed=self._go_on
        )

    def _go_on(self) -> None:
        self.resumed += 1


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def test_it_is_held_until_it_is_released() -> None:
    async def scene() -> None:
        one = Paused(joined=True)
        await one.control.hold("abort", clear_cache=True)
        assert one.control.held
        assert one.resumed == 0
        await one.control.release()
        assert not one.control.held
        assert one.client.calls == [("pause", "abort", True), "resume"]
        assert one.resumed == 1, "from now on its gauges are to move"

    run(scene())


def test_one_that_is_away_goes_on_when_it_joins() -> None:
    async def scene() -> None:
        one = Paused(joined=False)
        one.control.note_held()
        await one.control.release()
        assert one.client.calls == [], "nobody is there who could be told"
        assert not one.control.held
        assert one.pause.ours, "whoever lets it join resumes it"

    run(scene())


def test_a_pause_that_failed_holds_nothing() -> None:
    async def scene() -> None:
        one = Paused(joined=True)

        async def pause(mode: str, clear_cache: bool) -> None:
            raise InstanceError("500")

        one.client.pause = pause  # type: ignore[method-assign]
        with pytest.raises(InstanceError, match="500"):
            await one.control.hold("keep", clear_cache=False)
        assert not one.control.held
        assert one.pause.by is PausedBy.NOBODY

    run(scene())


def test_nobody_comes_between() -> None:
    """What an update does under the lock is done before an administrator's pause is passed on."""

    async def scene() -> None:
        one = Paused(joined=True)
        async with one.lock:
            holding = asyncio.create_task(one.control.hold("keep", clear_cache=False))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert one.client.calls == []
        await holding
        assert one.client.calls == [("pause", "keep", False)]

    run(scene())


def test_what_an_earlier_run_left_paused_is_ours_to_resume() -> None:
    one = Paused(joined=False)
    one.control.note_left_paused()
    assert one.pause.by is PausedBy.US
    assert not one.control.held
