"""The link within one process: what is told is handled at once, and answered at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import RequestSubmitted, RequestWithdrawn
from rollout_sched.live.driver import Driver
from rollout_sched.live.requests.link import DirectLink
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.settings import Settings
from tests.core.told import make_scheduler
from tests.live.scripted import Scripted


class Stage:
    def __init__(self) -> None:
        self.driver = Driver(make_scheduler(), settings=Settings(poll_s=1000.0))
        driver = self.driver
        self.link = DirectLink(driver.pump, driver.view, driver.supervisors, driver.checks)


@asynccontextmanager
async def staged() -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.driver.add_instance(Scripted())
    try:
        async with asyncio.timeout(10):
            yield stage
    finally:
        await stage.driver.close()


async def test_failed_instance_is_waited_for_until_polled() -> None:
    async with staged() as stage:
        assert stage.link.client("i0").name == "i0"
        assert stage.link.unverified("i0") is None
        stage.link.suspect("i0", "restart")
        stage.link.suspect("nobody", "restart")
        unverified = stage.link.unverified("i0")
        await unverified.wait()


async def test_events_are_handled_at_once() -> None:
    async with staged() as stage:
        payload = TokenPayload([1], {})
        stage.driver.front.payloads.add("r", payload)
        stage.link.tell(RequestSubmitted("r", "r", 1, 9))
        assert stage.driver.view.in_flight == 1
        stage.link.tell(RequestWithdrawn("r"))
        assert stage.driver.view.is_stopping(1)


async def test_no_tool_begins_for_an_unwanted_turn() -> None:
    async with staged() as stage:
        begun: list[int] = []
        stage.link.when_acting(Dispatch("r", 1, "i0", 1, 9, 0), lambda: begun.append(1))
        stage.link.tell(RequestSubmitted("q", "q", 1, 9))
        assert begun == []
        error = RuntimeError("its own")
        stage.link.fail(error)
        assert stage.link.broken is error
