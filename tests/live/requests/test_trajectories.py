"""Trajectories: turns and tools, through the driver, to samples with masks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import Event, ToolReturned, TrajectoryEnded
from rollout_sched.live.driver import Driver
from rollout_sched.live.requests.payloads import Payloads
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.requests.trajectories import ToolCalls, Trajectory
from rollout_sched.live.settings import Settings
from rollout_sched.live.trainer.samples import Prompt, Span
from rollout_sched.live.trainer.session import TrainerSession
from tests.core.told import make_scheduler
from tests.live.scripted import Scripted, until


class Tools:
    """A tool whose answers a test gives by hand."""

    def __init__(self) -> None:
        self.calls: list[Trajectory] = []
        self.cancelled = 0
        self._answers: list[asyncio.Future[Sequence[int] | None]] = []

    async def __call__(self, trajectory: Trajectory) -> Sequence[int] | None:
        self.calls.append(trajectory)
        answer: asyncio.Future[Sequence[int] | None] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def answer(self, number: int, returned: Sequence[int] | Exception | None) -> None:
        await until(lambda: len(self._answers) > number)
        if isinstance(returned, Exception):
            self._answers[number].set_exception(returned)
        else:
            self._answers[number].set_result(returned)


class Stage:
    def __init__(self, prompts_per_step: int = 1, **roles: Any) -> None:
        self.instance = Scripted()
        self.tools = Tools()
        self.events: list[ev.Event] = []
        self.scheduler = make_scheduler(prompts_per_step, **roles)
        self.driver = Driver(
            self.scheduler,
            settings=Settings(poll_s=1000.0),
            observers=[lambda now, event, actions: self.events.append(event)],
        )
        self.trainer = TrainerSession(self.driver)

    def submit(self, *uids: str, samples: int = 1, max_tokens: int = 20, tool: Any = None) -> None:
        prompts = [
            Prompt(uid, [1, 2], samples, max_tokens, {"logprobs": 0}, extra={"task": uid})
            for uid in uids
        ]
        self.trainer.submit(prompts, self.tools if tool is None else tool)

    def count(self, kind: type[Any]) -> int:
        return sum(type(event) is kind for event in self.events)


#: One sample more than the group needs.
SURPLUS = {"use": "tail_batching", "over_prompts": 1.0, "over_samples": 2.0}


@asynccontextmanager
async def staged(**roles: Any) -> AsyncIterator[Stage]:
    stage = Stage(**roles)
    await stage.driver.add_instance(stage.instance)
    yield stage
    await stage.driver.close()
    stage.scheduler.check_invariants()
    assert not stage.scheduler.state.anomalies


async def test_turns_and_what_the_tool_returned_become_one_sample() -> None:
    async with staged() as stage:
        stage.submit("a")
        asking = asyncio.create_task(stage.trainer.next_batch())
        await stage.instance.answer(0, [5, 6])
        await stage.tools.answer(0, [90, 91])
        assert (await stage.instance.order(1)).token_ids == [1, 2, 5, 6, 90, 91]
        assert (await stage.instance.order(1)).max_new_tokens == 18
        await stage.instance.answer(1, [7])
        await stage.tools.answer(1, None)
        batch = await asking
        (sample,) = batch.samples
        assert sample.response_ids == [5, 6, 90, 91, 7]
        assert sample.response_mask == [1, 1, 0, 0, 1]
        assert sample.versions == [0, 0, -1, -1, 0]
        assert sample.rollout_log_probs == [-0.5, -0.5, 0.0, 0.0, -0.5]
        assert sample.segments == [Span(0, "i0", 0, 2), Span(0, "i0", 4, 5)]
        assert (sample.status, sample.num_interruptions) == ("COMPLETED", 0)
        first, second = stage.tools.calls
        assert (first.uid, first.index, first.turn, first.extra) == ("a", 0, 1, {"task": "a"})
        assert (first.prompt_ids, first.response_ids, first.turn_ids) == ([1, 2], [5, 6], [5, 6])
        assert (second.turn, second.turn_ids) == (2, [7])
        assert second.response_mask == [1, 1, 0, 0, 1]


async def test_while_a_tool_works_another_request_has_the_slot() -> None:
    async with staged(prompts_per_step=2) as stage:
        await stage.driver.remove_instance("i0")
        stage.instance = Scripted(slots=1)
        await stage.driver.add_instance(stage.instance)
        stage.submit("a", "b")
        asking = asyncio.create_task(stage.trainer.next_batch())
        await stage.instance.answer(0, [5])
        order = await stage.instance.order(1)  # b, while the tool of a works
        assert order.token_ids == [1, 2]
        await stage.instance.answer(1, [6])
        await stage.tools.answer(0, None)
        await stage.tools.answer(1, None)
        assert await asking is not None


async def test_discarded_surplus_trajectory_cancels_its_tool() -> None:
    """Surplus of a group that is whole: nobody waits for its tool, and what it returns is lost."""

    async with staged(batching=SURPLUS) as stage:
        stage.submit("a")
        asking = asyncio.create_task(stage.trainer.next_batch())
        await stage.instance.answer(0, [5])
        await stage.instance.answer(1, [6])
        await until(lambda: len(stage.tools.calls) == 2)
        await stage.tools.answer(1, None)
        batch = await asking
        assert [sample.response_ids for sample in batch.samples] == [[6]]
        await until(lambda: stage.tools.cancelled == 1)
        assert len(stage.driver.front.tools) == 0


async def test_a_tool_that_does_not_stop_changes_nothing() -> None:
    async with staged(batching=SURPLUS) as stage:
        going_on = asyncio.Event()

        async def stubborn(trajectory: Trajectory) -> list[int] | None:
            if stage.count(ev.TurnFinished) > 1:
                return None
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                going_on.set()
            return [90]

        stage.submit("a", tool=stubborn)
        asking = asyncio.create_task(stage.trainer.next_batch())
        await stage.instance.answer(0, [5])
        await until(lambda: len(stage.driver.front.tools) == 1)
        await stage.instance.answer(1, [6])
        assert await asking is not None
        await going_on.wait()
        await asyncio.sleep(0.01)
        assert stage.count(ev.ToolReturned) == 0


async def test_tool_result_without_room_ends_the_trajectory() -> None:
    async with staged() as stage:
        await stage.driver.remove_instance("i0")
        small = stage.instance = Scripted(kv_tokens=10_000)
        small.describes(max_model_len=8)
        await stage.driver.add_instance(small)
        stage.submit("a")
        asking = asyncio.create_task(stage.trainer.next_batch())
        assert (await small.order()).max_new_tokens == 6
        await small.answer(0, [5, 6])
        await stage.tools.answer(0, [90, 91, 92, 93])
        batch = await asking
        (sample,) = batch.samples
        assert (sample.response_ids, sample.status) == ([5, 6], "TRUNCATED")


async def test_an_interrupted_turn_goes_on_where_it_was() -> None:
    async with staged() as stage:
        stage.submit("a")
        asking = asyncio.create_task(stage.trainer.next_batch())
        await stage.instance.answer(0, [5])
        await stage.tools.answer(0, [90])
        order = await stage.instance.order(1)
        await stage.driver.remove_instance("i0")
        other = Scripted("i1")
        await stage.driver.add_instance(other)
        again = await other.order()
        assert again.token_ids == order.token_ids == [1, 2, 5, 90]
        await other.answer(0, [7])
        await stage.tools.answer(1, None)
        batch = await asking
        assert batch.samples[0].response_ids == [5, 90, 7]


async def test_closing_cancels_the_tools() -> None:
    async with staged() as stage:
        stage.submit("a")
        asking = asyncio.create_task(stage.trainer.next_batch())
        await stage.instance.answer(0, [5])
        await until(lambda: stage.tools.calls)
        await stage.driver.close()
        await until(lambda: stage.tools.cancelled)
        asking.cancel()


@pytest.mark.parametrize("streams", [False, True])
async def test_greedy_text_in_turns_is_the_text_in_one(streams: bool) -> None:
    """Each turn is asked for with all that came before: nothing is lost between them."""

    async with staged() as stage:
        stage.trainer.submissions.payloads.stream_every = 1 if streams else 0
        turns = [[10, 11], [12], [13, 14, 15]]
        stage.submit("a")
        asking = asyncio.create_task(stage.trainer.next_batch())
        context = [1, 2]
        for number, turn in enumerate(turns):
            order = await stage.instance.order(number)
            assert order.token_ids == context
            if streams:
                await stage.instance.stream(number, turn)
            await stage.instance.answer(number, turn)
            returned = [100 + number] if number < 2 else None
            await stage.tools.answer(number, returned)
            context = [*context, *turn, *(returned or ())]
        batch = await asking
        assert batch.samples[0].response_ids == context[2:]


DISPATCH = Dispatch("r", 1, "i0", 3, 9, 0)


class Link:
    """A tool is wanted as soon as it is expected."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.wanted = True

    def tell(self, event: Event) -> None:
        self.told.append(event)

    def defer(self, call: Callable[..., object], *arguments: Any) -> None:
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


class StageToolCalls:
    """A turn of `r` is over. Make it inside a running event loop."""

    def __init__(self) -> None:
        self.link: Any = Link()
        self.payloads = Payloads()
        self.payload = Turn()
        self.payloads.add("r", self.payload)
        self.tools = ToolCalls(self.link, self.payloads)

    async def told(self) -> list[Event]:
        await until(lambda: self.link.told)
        return self.link.told


async def test_tool_result_is_kept_and_counted() -> None:
    stage = StageToolCalls()
    stage.tools.expect(DISPATCH, stage.payload)
    assert len(stage.tools) == 1
    stage.payload.returns.set_result([5, 6])
    assert await stage.told() == [ToolReturned("r", 1, 2)]
    assert stage.payload.observed == [(1, [5, 6])]
    assert len(stage.tools) == 0


async def test_tool_may_end_the_trajectory() -> None:
    stage = StageToolCalls()
    stage.tools.restore(DISPATCH)
    stage.payload.returns.set_result("stop")
    assert await stage.told() == [TrajectoryEnded("r", 1, "stop")]
    assert stage.payload.observed == []


async def test_tool_error_fails_the_trajectory() -> None:
    stage = StageToolCalls()
    stage.tools.expect(DISPATCH, stage.payload)
    stage.payload.returns.set_exception(ValueError("no such page"))
    assert await stage.told() == [TrajectoryEnded("r", 1, "failed")]


async def test_tool_is_not_called_after_the_last_turn() -> None:
    stage = StageToolCalls()
    stage.link.wanted = False
    stage.tools.expect(DISPATCH, stage.payload)
    assert len(stage.tools) == 0


async def test_result_of_a_cancelled_tool_is_ignored() -> None:
    stage = StageToolCalls()
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
