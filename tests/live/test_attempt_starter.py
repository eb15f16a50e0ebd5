"""Dispatches carried out: begun where and when they may be, and each end handed on once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import Event, RequestFailed, RequestFinished
from rollout_sched.live.ports import InstanceError, Order, Outcome
from rollout_sched.live.requests.attempts import AttemptStarter, AttemptTable, RunningAttempts
from rollout_sched.live.requests.payloads import PayloadBook
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.requests.trajectories import ToolCalls
from rollout_sched.live.settings import Settings
from tests.live.scripted import Scripted, until

DISPATCH = Dispatch("r", 1, "i0", 3, 9, 0)


class Link:
    """Notes what is told (`live.scheduler_link.SchedulerLink`); a test says what answers are worth,
    and whether the instance may be sent something."""

    broken = None

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.failed: list[Exception] = []
        self.instance = Scripted()
        self.to_wait_for: asyncio.Event | None = None
        self.verdict: Any = None
        self.judged: list[Outcome] = []

    def tell(self, event: Event) -> None:
        self.told.append(event)

    def afterwards(self, call: Callable[..., object], *arguments: Any) -> None:
        call(*arguments)

    def fail(self, error: Exception) -> None:
        self.failed.append(error)

    def client(self, instance: str) -> Scripted:
        assert instance == self.instance.name
        return self.instance

    def unverified(self, instance: str) -> asyncio.Event | None:
        return self.to_wait_for

    def restart_suspected(self, instance: str) -> None: ...

    def judge(self, dispatch: Dispatch, outcome: Outcome, *, stopped: bool) -> Any:
        self.judged.append(outcome)
        return self.verdict


class Stage:
    """One request, `r`. Make it inside a running event loop."""

    def __init__(self, payload: TokenPayload | None = None, *, patience_s: float = 0.0) -> None:
        self.link: Any = Link()
        self.payloads = payloads = PayloadBook()
        self.running = RunningAttempts(self.link, payloads, ToolCalls(self.link, payloads))
        table = AttemptTable(self.running, Settings())
        self.payload = payload or TokenPayload([1, 2, 3], {})
        payloads.add("r", self.payload)
        self.starter = AttemptStarter(self.link, payloads, self.running, table, patience_s, "run")

    @property
    def told(self) -> list[Event]:
        return self.link.told

    async def order(self) -> Order:
        return await self.link.instance.order()


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def test_an_attempt_is_begun_and_its_answer_told() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.starter.dispatch(DISPATCH)
        order = await stage.order()
        assert (order.id, order.token_ids, order.max_new_tokens) == ("run-1", [1, 2, 3], 9)
        await stage.link.instance.answer(0, [7, 8])
        await until(lambda: stage.told)
        assert stage.told == [RequestFinished("r", 1, 2, (), "stop")]
        assert stage.payload.transcript.token_ids == [7, 8]
        assert not len(stage.running)

    run(scene())


def test_nothing_is_sent_to_who_must_be_verified_first() -> None:
    async def scene() -> None:
        stage = Stage()
        verified = stage.link.to_wait_for = asyncio.Event()
        stage.starter.dispatch(DISPATCH)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not stage.link.instance.orders
        verified.set()
        await stage.order()

    run(scene())


def test_one_that_is_over_while_it_waits_is_not_begun() -> None:
    async def scene() -> None:
        stage = Stage()
        verified = stage.link.to_wait_for = asyncio.Event()
        stage.starter.dispatch(DISPATCH)
        (running,) = stage.running.on("i0")
        stage.running.failed(running, InstanceError("it is lost"))
        verified.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not stage.link.instance.orders
        assert len(stage.told) == 1

    run(scene())


def test_a_payload_that_cannot_be_made_fails_its_request() -> None:
    async def scene() -> None:
        stage = Stage()

        def make(index: int) -> Any:
            raise KeyError("prompt 7 is not in the data set")

        stage.payloads.add_group("g", make)
        stage.starter.dispatch(Dispatch("g/0", 1, "i0", 3, 9, 0, group="g"))
        (failed,) = stage.told
        assert isinstance(failed, RequestFailed)
        assert (failed.request, failed.attempt, failed.blame) == ("g/0", 1, "request")
        assert "prompt 7" in failed.reason
        assert not len(stage.running)

    run(scene())


def test_one_that_cannot_be_sent_fails_by_the_request() -> None:
    class Unsendable(TokenPayload):
        def begin(self, *arguments: Any) -> Any:
            raise ValueError("a bug of the caller's")

    async def scene() -> None:
        stage = Stage(Unsendable([1], {}))
        stage.starter.dispatch(DISPATCH)
        (failed,) = stage.told
        assert isinstance(failed, RequestFailed)
        assert "a bug of the caller's" in failed.reason

    run(scene())


def test_an_answer_that_is_not_believed_is_no_answer() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.link.verdict = InstanceError("by weights that it cannot have")
        stage.starter.dispatch(DISPATCH)
        await stage.order()
        await stage.link.instance.answer(0, [7])
        await until(lambda: stage.told)
        (failed,) = stage.told
        assert isinstance(failed, RequestFailed)
        assert stage.payload.transcript.token_ids == []

    run(scene())


def test_an_answer_that_has_to_be_settled_is_told_when_it_is() -> None:
    async def scene() -> None:
        stage = Stage()
        asked = asyncio.Event()
        stage.link.verdict = asked.wait
        stage.starter.dispatch(DISPATCH)
        await stage.order()
        await stage.link.instance.answer(0, [7])
        await until(lambda: stage.link.judged)
        assert not stage.told
        asked.set()
        await until(lambda: stage.told)
        assert stage.told == [RequestFinished("r", 1, 1, (), "stop")]

    run(scene())


def test_who_cannot_settle_it_ends_the_scheduler_and_not_the_watch() -> None:
    async def scene() -> None:
        stage = Stage()

        async def settle() -> None:
            raise RuntimeError("a bug of ours")

        stage.link.verdict = settle
        stage.starter.dispatch(DISPATCH)
        await stage.order()
        await stage.link.instance.answer(0, [7])
        await until(lambda: stage.link.failed)
        assert [str(error) for error in stage.link.failed] == ["a bug of ours"]

    run(scene())


def test_patience_ends() -> None:
    async def scene() -> None:
        stage = Stage(patience_s=0.01)
        stage.starter.dispatch(DISPATCH)
        await stage.order()
        await until(lambda: stage.told)
        (failed,) = stage.told
        assert isinstance(failed, RequestFailed)
        assert "no answer within 0.01 s" in failed.reason

    run(scene())
