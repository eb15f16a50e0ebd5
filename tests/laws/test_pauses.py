"""Only the party that paused an instance resumes it, whatever is lost, restarted, updated, held or
released meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_sched.live.instances.membership import UNFIT
from rollout_sched.live.ports import Description, Gauges, InstanceError, InstanceGone
from rollout_sched.live.settings import Settings
from tests.live.supervised import Fleet
from tests.virtual_loop import VirtualLoop

SETTINGS = Settings(poll_s=1.0, control_timeout_s=3.0, stall_s=20.0, misses=2)
SECONDS = st.sampled_from([0.0, 0.15, 2.5])
LONG_S = 100.0  # until everything has settled and a stall is noticed


class Engine:
    """An instance that knows who has paused it; it has one request, which a pause stops."""

    name = "i0"

    def __init__(self) -> None:
        self.alive = True
        self.started_at = 1.0
        self.paused = False
        self.by_somebody_else = False
        #: It was paused before we knew that it was a new process. Then it is unknown who paused
        #: it, and it is left alone.
        self.by_nobody_we_know = False
        self.described = 0.0
        self.held = False  # by an administrator, and not released
        self.by_hand = False  # the current call comes from an administrator
        self.answers_to_lose = 0
        self.wrongly_resumed = False
        self._tokens = 0

    async def describe(self) -> Description:
        await self._answer()
        self.described = self.started_at
        return Description(
            8,
            1000,
            1000,
            version=0,
            started_at=self.started_at,
            capabilities=frozenset({"pause"}),
            paused=self.paused,
        )

    async def gauges(self) -> Gauges:
        await self._answer()
        self._tokens += not self.paused
        return Gauges(1, 0, 0.5, generated_tokens=self._tokens, started_at=self.started_at)

    async def pause(self, mode: str, clear_cache: bool) -> None:
        await self._answer()
        self.paused = True
        self.by_nobody_we_know = self.started_at != self.described
        self._lose_the_answer()

    async def resume(self) -> None:
        await self._answer()
        if not self.by_hand and (self.held or self.by_somebody_else):
            self.wrongly_resumed = True  # an error here would only cause a retry
        self.paused = self.by_somebody_else = self.by_nobody_we_know = False
        self._lose_the_answer()

    async def set_version(self, version: int) -> None:
        await self._answer()

    async def close(self) -> None: ...

    def restart(self) -> None:
        self.alive = True
        self.started_at += 1.0
        self.paused = self.by_somebody_else = self.by_nobody_we_know = False
        self._tokens = 0

    async def _answer(self) -> None:
        await asyncio.sleep(0.1)
        if not self.alive:
            raise InstanceGone("connection refused")

    def _lose_the_answer(self) -> None:
        if self.answers_to_lose and not self.by_hand:
            self.answers_to_lose -= 1
            raise InstanceError("the call was executed, but its answer was lost")


class Pauses(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.engine = Engine()
        self.loads: asyncio.Future[None] | None = None
        self.run(self.open())

    async def open(self) -> None:
        self.fleet = Fleet(self.engine, SETTINGS)
        self.supervisor = self.fleet.supervisor
        await self.supervisor.start()

    def run(self, scene: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(scene)

    def teardown(self) -> None:
        self.run(self.supervisor.close())
        self.loop.close()

    # -- events ----------------------------------------------------------------------------

    @precondition(lambda self: self.fleet.joined and not self.fleet.updating)
    @rule(after_s=SECONDS)
    def an_update_begins(self, after_s: float) -> None:
        async def load(client: Any, version: int) -> None:
            self.loads = asyncio.get_running_loop().create_future()
            await self.loads

        async def begin() -> None:
            self.fleet.update(load)
            await asyncio.sleep(after_s)

        self.run(begin())

    @precondition(lambda self: self.loads is not None and not self.loads.done())
    @rule(well=st.booleans(), after_s=SECONDS)
    def the_weights_are_loaded(self, well: bool, after_s: float) -> None:
        assert self.loads is not None
        if well:
            self.loads.set_result(None)
        else:
            self.loads.set_exception(InstanceError("500 from reload_weights"))
        self.run(asyncio.sleep(after_s))

    @rule(past_us=st.booleans())
    def an_administrator_holds_it(self, past_us: bool) -> None:
        self.run(self.hold(past_us))

    async def hold(self, past_us: bool) -> None:
        with contextlib.suppress(InstanceError):
            if past_us:
                async with self.supervisor.control_lock:
                    await self.by_hand(self.engine.pause("keep", False))
                    self.supervisor.control.note_held()
            else:
                await self.by_hand(self.supervisor.control.hold("keep", False))
            self.engine.held, self.engine.by_somebody_else = True, False

    @rule()
    def an_administrator_releases_it(self) -> None:
        self.run(self.release())

    async def release(self) -> None:
        held, self.engine.held = self.engine.held, False
        try:
            await self.by_hand(self.supervisor.control.release())
        except InstanceError:
            self.engine.held = held

    async def by_hand(self, call: Coroutine[Any, Any, None]) -> None:
        """Run the call alone: calls of the supervisor would count as an administrator's."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(setattr, self.engine, "by_hand", False)
            self.engine.by_hand = True
            await call

    @precondition(lambda self: self.engine.alive)
    @rule(after_s=SECONDS)
    def it_dies(self, after_s: float) -> None:
        self.engine.alive = False
        self.run(asyncio.sleep(after_s))

    @precondition(lambda self: not self.engine.alive)
    @rule(after_s=SECONDS)
    def it_is_reached_again(self, after_s: float) -> None:
        self.engine.alive = True
        self.run(asyncio.sleep(after_s))

    @rule(after_s=SECONDS)
    def it_is_restarted(self, after_s: float) -> None:
        self.engine.restart()
        self.run(asyncio.sleep(after_s))

    @rule()
    def an_answer_will_be_lost(self) -> None:
        self.engine.answers_to_lose = 1

    @precondition(lambda self: not self.fleet.joined and self.nobodys)
    @rule()
    def somebody_else_pauses_it(self) -> None:
        self.engine.paused = self.engine.by_somebody_else = True

    @property
    def nobodys(self) -> bool:
        """Whether neither we nor an administrator would resume it: the owner of a new pause would
        be unknown."""
        return not (self.engine.held or self.engine.paused or self.supervisor.pause.ours)

    @precondition(lambda self: not (self.fleet.joined or self.engine.held))
    @rule()
    def somebody_else_resumes_it(self) -> None:
        engine = self.engine
        engine.paused = engine.by_somebody_else = engine.by_nobody_we_know = False

    # -- laws ------------------------------------------------------------------------------

    @invariant()
    def what_others_have_paused_is_left_alone(self) -> None:
        assert not self.engine.wrongly_resumed

    @invariant()
    def held_is_what_administrators_hold(self) -> None:
        assert self.supervisor.control.held == self.engine.held

    @invariant()
    def who_is_away_says_why(self) -> None:
        assert bool(self.supervisor.reason) != self.supervisor.joined
        assert self.supervisor.joined == self.fleet.joined

    @rule()
    def at_rest_it_serves_unless_something_speaks_against_it(self) -> None:
        self.run(asyncio.sleep(LONG_S))
        engine, supervisor = self.engine, self.supervisor
        if not engine.alive or engine.by_somebody_else:
            assert not supervisor.joined
        elif supervisor.membership.state is not UNFIT and not engine.by_nobody_we_know:
            assert supervisor.joined, supervisor.reason
            if not self.fleet.updating:
                assert engine.paused == engine.held


TestPauses = Pauses.TestCase
TestPauses.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
