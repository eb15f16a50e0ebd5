"""Tools at work: what each returns is told once, and nobody hears of one that was thrown away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rollout_sched.core.model.actions import Discard, Dispatch
from rollout_sched.core.model.events import Event, ToolReturned, TrajectoryEnded
from rollout_sched.live.requests.payloads import PayloadBook
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.requests.trajectories import ToolCalls
from tests.live.scripted import until

DISPATCH = Dispatch("r", 1, "i0", 3, 9, 0)


class Link:
    """A tool is wanted as soon as it is expected."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.wanted = True

    def tell(self, event: Event) -> None:
        self.told.append(event)

    def afterwards(self, call: Callable[..., object], *arguments: Any) -> None:
        call(*arguments)

    def when_acting(self, dispatch: Dispatch, begin: Callable[[], None]) -> None:
        if self.wanted:
            begin()


class Turn(TokenPayload):
    """Its tool returns what a test says."""

    def __init__(self) -> None:
        super().__init__([1, 2, 3], {})
        self.returns: asyncio.Future[Sequence[int] | str] = (
            asyncio.get_running_loop().create_future()
        )
        self.observed: list[tuple[int, list[int]]] = []
        self.stubborn = False

    async def act(self) -> Sequence[int] | str:
        while True:
            try:
                return await asyncio.shield(self.returns)
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise

    def observe(self, attempt: int, token_ids: Sequence[int]) -> None:
        self.observed.append((attempt, list(token_ids)))


class Stage:
    """A turn of `r` is over. Make it inside a running event loop."""

    def __init__(self) -> None:
        self.link: Any = Link()
        self.payloads = PayloadBook()
        self.payload = Turn()
        self.payloads.add("r", self.payload)
        self.tools = ToolCalls(self.link, self.payloads)

    async def told(self) -> list[Event]:
        await until(lambda: self.link.told)
        return self.link.told


def test_what_it_returns_is_kept_and_counted() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.tools.expect(DISPATCH, stage.payload)
        assert len(stage.tools) == 1
        stage.payload.returns.set_result([5, 6])
        assert await stage.told() == [ToolReturned("r", 1, 2)]
        assert stage.payload.observed == [(1, [5, 6])]
        assert len(stage.tools) == 0

    asyncio.run(scene())


def test_it_may_say_that_no_turn_follows() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.tools.take_up(DISPATCH)
        stage.payload.returns.set_result("stop")
        assert await stage.told() == [TrajectoryEnded("r", 1, "stop")]
        assert stage.payload.observed == []

    asyncio.run(scene())


def test_what_it_raises_fails_the_trajectory() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.tools.expect(DISPATCH, stage.payload)
        stage.payload.returns.set_exception(ValueError("no such page"))
        assert await stage.told() == [TrajectoryEnded("r", 1, "failed")]

    asyncio.run(scene())


def test_after_the_last_turn_it_is_not_called() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.link.wanted = False
        stage.tools.expect(DISPATCH, stage.payload)
        assert len(stage.tools) == 0

    asyncio.run(scene())


def test_one_that_is_thrown_away_takes_its_tool_with_it() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.tools.expect(DISPATCH, stage.payload)
        await asyncio.sleep(0)
        stage.tools.discard(Discard("r", 3, "stale", attempt=1))
        assert len(stage.tools) == 1, "only what an attempt has brought is thrown away"
        stage.tools.discard(Discard("r", 3, "stale"))
        assert len(stage.tools) == 0
        stage.payload.returns.set_result([5])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert stage.link.told == []
        assert stage.payload.observed == []

    asyncio.run(scene())


def test_one_that_goes_on_although_it_was_cancelled_is_not_heard() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.payload.stubborn = True
        stage.tools.expect(DISPATCH, stage.payload)
        await asyncio.sleep(0)
        stage.tools.cancel_all()
        await asyncio.sleep(0)
        stage.payload.returns.set_result([5])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert stage.link.told == []
        assert stage.payload.observed == []

    asyncio.run(scene())
