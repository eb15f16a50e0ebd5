"""Dispatches carried out: begun where and when they may be, and each end handed on once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollout_sched.core.model.actions import Dispatch, Interrupt
from rollout_sched.core.model.events import (
    Event,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    TokensArrived,
    TurnFinished,
)
from rollout_sched.live.ports import (
    AnswerUntrue,
    ConnectionBroken,
    EnginePaused,
    InstanceError,
    InstanceUnreached,
    Order,
    Outcome,
    RequestRejected,
    RequestTooLong,
)
from rollout_sched.live.requests.attempt import LiveAttempt
from rollout_sched.live.requests.attempts import RunningAttempts
from rollout_sched.live.requests.payloads import Payloads
from rollout_sched.live.requests.token_payload import Piece, TokenPayload
from rollout_sched.live.requests.trajectories import ToolCalls
from rollout_sched.live.settings import Settings
from tests.live.scripted import Scripted, until

DISPATCH = Dispatch("r", 1, "i0", 3, 9, 0)


class Link:
    """Notes what is told (`live.requests.link.SchedulerLink`); a test says what answers are worth,
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

    def defer(self, call: Callable[..., object], *arguments: Any) -> None:
        call(*arguments)

    def fail(self, error: Exception) -> None:
        self.failed.append(error)

    def client(self, instance: str) -> Scripted:
        assert instance == self.instance.name
        return self.instance

    def unverified(self, instance: str) -> asyncio.Event | None:
        return self.to_wait_for

    def suspect(self, instance: str, of: str) -> None: ...

    def judge(self, dispatch: Dispatch, outcome: Outcome, *, stopped: bool) -> Any:
        self.judged.append(outcome)
        return self.verdict


class Stage:
    """One request, `r`. Make it inside a running event loop."""

    def __init__(self, payload: TokenPayload | None = None, *, patience_s: float = 0.0) -> None:
        self.link: Any = Link()
        self.payloads = payloads = Payloads()
        tools, settings = ToolCalls(self.link, payloads), Settings(attempt_timeout_s=patience_s)
        self.running = RunningAttempts(self.link, payloads, tools, settings, "run")
        self.payload = payload or TokenPayload([1, 2, 3], {})
        payloads.add("r", self.payload)

    @property
    def told(self) -> list[Event]:
        return self.link.told

    async def order(self) -> Order:
        return await self.link.instance.order()


async def test_attempt_is_begun_and_its_answer_reported() -> None:
    stage = Stage()
    stage.running.dispatch(DISPATCH)
    order = await stage.order()
    assert (order.id, order.token_ids, order.max_new_tokens) == ("run-1", [1, 2, 3], 9)
    await stage.link.instance.answer(0, [7, 8])
    await until(lambda: stage.told)
    assert stage.told == [RequestFinished("r", 1, 2, (), "stop")]
    assert stage.payload.transcript.token_ids == [7, 8]
    assert not len(stage.running)


async def test_an_attempt_ends_with_its_scheduler_sent_or_not() -> None:
    waiting, sent = Stage(patience_s=60.0), Stage()
    waiting.link.to_wait_for = asyncio.Event()
    for stage in (waiting, sent):
        stage.running.dispatch(DISPATCH)
    await sent.order()
    for stage in (waiting, sent):
        (running,) = stage.running.every()
        stage.running.end(running)
    assert [event.reason for event in waiting.told] == ["given up: it was not sent yet"]
    assert not sent.told
    await until(lambda: ("abort", "run-1") in sent.link.instance.calls)


async def test_unverified_instance_gets_no_requests() -> None:
    stage = Stage()
    verified = stage.link.to_wait_for = asyncio.Event()
    stage.running.dispatch(DISPATCH)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not stage.link.instance.orders
    verified.set()
    await stage.order()


async def test_attempt_ended_while_waiting_is_not_begun() -> None:
    stage = Stage()
    verified = stage.link.to_wait_for = asyncio.Event()
    stage.running.dispatch(DISPATCH)
    (running,) = stage.running.on("i0")
    stage.running.failed(running, InstanceError("it is lost"))
    verified.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not stage.link.instance.orders
    assert len(stage.told) == 1


async def test_payload_error_fails_its_request() -> None:
    stage = Stage()

    def make(index: int) -> Any:
        raise KeyError("prompt 7 is not in the data set")

    stage.payloads.add_group("g", make)
    stage.running.dispatch(Dispatch("g/0", 1, "i0", 3, 9, 0, group="g"))
    (failed,) = stage.told
    assert (failed.request, failed.attempt, failed.blame) == ("g/0", 1, "request")
    assert "prompt 7" in failed.reason
    assert not len(stage.running)


async def test_unsendable_request_fails_alone() -> None:
    class Unsendable(TokenPayload):
        def begin(self, *arguments: Any) -> Any:
            raise ValueError("a bug of the caller's")

    stage = Stage(Unsendable([1], {}))
    stage.running.dispatch(DISPATCH)
    (failed,) = stage.told
    assert "a bug of the caller's" in failed.reason


async def test_disbelieved_answer_is_a_failure() -> None:
    stage = Stage()
    stage.link.verdict = InstanceError("by weights that it cannot have")
    stage.running.dispatch(DISPATCH)
    await stage.order()
    await stage.link.instance.answer(0, [7])
    await until(lambda: stage.told)
    (failed,) = stage.told
    assert isinstance(failed, RequestFailed)
    assert stage.payload.transcript.token_ids == []


async def test_disputed_answer_is_reported_when_settled() -> None:
    stage = Stage()
    asked = asyncio.Event()
    stage.link.verdict = asked.wait
    stage.running.dispatch(DISPATCH)
    await stage.order()
    await stage.link.instance.answer(0, [7])
    await until(lambda: stage.link.judged)
    assert not stage.told
    asked.set()
    await until(lambda: stage.told)
    assert stage.told == [RequestFinished("r", 1, 1, (), "stop")]


async def test_error_while_settling_breaks_the_scheduler_and_not_the_watch() -> None:
    stage = Stage()

    async def settle() -> None:
        raise RuntimeError("a bug of ours")

    stage.link.verdict = settle
    stage.running.dispatch(DISPATCH)
    await stage.order()
    await stage.link.instance.answer(0, [7])
    await until(lambda: stage.link.failed)
    assert [str(error) for error in stage.link.failed] == ["a bug of ours"]


async def test_patience_ends() -> None:
    stage = Stage(patience_s=0.01)
    stage.running.dispatch(DISPATCH)
    await stage.order()
    await until(lambda: stage.told)
    (failed,) = stage.told
    assert "no answer within 0.01 s" in failed.reason


class StageStops:
    def __init__(self) -> None:
        self.book = Book(Settings(abort_timeout_s=0.05, stream_s=0.01))
        self.running = self.book.running

    def begin(self, *, obeys: bool = True, streamed: int = 0) -> LiveAttempt:
        running = self.book.begin(1, streamed=streamed)
        if obeys:
            client = running.client
            aborted = Outcome(2, "abort", (), Piece([5, 5], None))
            client.obey = lambda call: self.book.running.ended(running, aborted)
        return running

    @property
    def told(self) -> list[Event]:
        told: list[Event] = self.book.link.told
        return told


async def test_interrupt_is_reported_after_the_answer() -> None:
    stage = StageStops()
    stage.begin()
    stage.running.interrupt(Interrupt("r1", 1, "i0"))
    await until(lambda: stage.told)
    assert isinstance(stage.told[0], RequestInterrupted)
    stage.running.interrupt(Interrupt("r1", 1, "i0"))
    stage.running.stop(1, "again")
    stage.running.reject_streamed(1)
    await stage.running.close()
    assert len(stage.told) == 1


async def test_attempt_that_does_not_stop_fails_with_the_reason() -> None:
    stage = StageStops()
    running = stage.begin(obeys=False)
    stage.running.stop(1, "it stands still")
    assert running.stopped
    await until(lambda: stage.told)
    (told,) = stage.told
    assert "it stands still" in told.reason
    await stage.running.close()


async def test_only_attempts_with_tokens_can_be_disbelieved() -> None:
    stage = StageStops()
    stage.begin(obeys=False)
    stage.running.reject_streamed(1)
    assert len(stage.running) == 1
    await stage.running.close()
    stage = StageStops()
    stage.begin(obeys=False, streamed=2)
    stage.running.reject_streamed(1)
    assert not len(stage.running)
    (told,) = stage.told
    assert not told.usable
    await stage.running.close()


async def test_loss_is_reported_after_streamed_tokens_and_before_new_dispatches() -> None:
    stage = StageStops()
    stage.begin(obeys=False, streamed=2)
    heard: list[int] = []

    def lost() -> None:
        heard.append(len(stage.told))
        stage.book.begin(2)

    stage.running.lose("i0", lost)
    assert heard == [1]
    assert not len(stage.running)
    await stage.running.close()


class LinkRunningAttempts:
    """Notes what is told."""

    broken = None

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.suspected: list[tuple[str, str]] = []
        self.acting: list[Dispatch] = []

    def tell(self, event: Event) -> None:
        self.told.append(event)

    def defer(self, call: Callable[..., object], *arguments: Any) -> None:
        call(*arguments)

    def suspect(self, instance: str, of: str) -> None:
        self.suspected.append((instance, of))

    def when_acting(self, dispatch: Dispatch, begin: Callable[[], None]) -> None:
        self.acting.append(dispatch)


class Book:
    """Make it inside a running event loop."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.link: Any = LinkRunningAttempts()
        payloads = Payloads()
        self.running = RunningAttempts(
            self.link, payloads, ToolCalls(self.link, payloads), settings or Settings(), "o"
        )

    def begin(self, attempt: int, instance: str = "i0", streamed: int = 0) -> LiveAttempt:
        dispatch = Dispatch(f"r{attempt}", attempt, instance, 3, 9, 0)
        payload = TokenPayload([1], {})
        if streamed:
            payload.transcript.collect(attempt)([5] * streamed, [-1.0] * streamed)
        running = LiveAttempt(dispatch, payload, Scripted(instance), f"o{attempt}", 0.0)
        self.running.add(running)
        return running


def outcome(finish: Any = "stop", tokens: int = 2) -> Outcome:
    return Outcome(tokens, finish, (), Piece([5] * tokens, None))


async def test_end_is_reported_once_and_its_piece_is_kept() -> None:
    book = Book()
    running = book.begin(1)
    book.running.ended(running, outcome())
    book.running.ended(running, outcome())
    book.running.failed(running, ConnectionBroken("late"))
    assert book.link.told == [RequestFinished("r1", 1, 2, (), "stop")]
    assert running.payload.transcript.token_ids == [5, 5]
    assert not len(book.running)


async def test_tokens_beyond_the_limit_are_dropped() -> None:
    book = Book()
    running = book.begin(1)
    book.running.ended(running, outcome(tokens=30))
    assert len(running.payload.transcript.token_ids) == 9


async def test_tool_is_expected_before_its_turn_is_reported() -> None:
    book = Book()
    book.running.ended(book.begin(1), outcome("turn"))
    assert [dispatch.attempt for dispatch in book.link.acting] == [1]
    assert isinstance(book.link.told[0], TurnFinished)


async def test_attempts_of_an_instance_are_in_dispatch_order() -> None:
    book = Book()
    first, other, second = book.begin(1), book.begin(2, "i1"), book.begin(3)
    assert book.running.on("i0") == [first, second]
    assert 2 in book.running
    assert book.running.get(2) is other
    await book.running.close()
    assert book.link.told == []
    assert not len(book.running)
    assert book.running.on("i1") == []


async def test_errors_are_blamed_on_instance_or_request() -> None:
    for error, blame, suspected in (
        (InstanceUnreached("refused"), "instance", [("i0", "restart")]),
        (ConnectionBroken("reset"), "unclear", [("i0", "restart")]),
        (EnginePaused("503"), "nobody", [("i0", "pause")]),
        (RequestRejected("400"), "request", []),
        (RequestTooLong("400"), "length", []),
        (AnswerUntrue("no"), "unclear", []),
    ):
        book = Book()
        book.running.failed(book.begin(1), error)
        (told,) = book.link.told
        assert (told.blame, book.link.suspected) == (blame, suspected)
        assert told.usable is not isinstance(error, AnswerUntrue)


async def test_streamed_tokens_of_a_lost_instance_are_reported_and_kept() -> None:
    book = Book()
    running = book.begin(1, streamed=4)
    book.begin(2, "i1", streamed=4)
    book.running.lose("i0", lambda: None)
    assert book.link.told == [TokensArrived("r1", 1, 4)]
    assert running.payload.transcript.token_ids == [5] * 4
    assert len(book.running) == 1


async def test_a_payload_that_raises_costs_its_own_attempt() -> None:
    book = Book()
    bad, good = book.begin(1, streamed=4), book.begin(2, streamed=4)
    bad.payload.transcript.streamed = lambda attempt: 1 / 0  # type: ignore[method-assign]
    book.running.report_streams()
    assert [type(told) for told in book.link.told] == [RequestFailed, TokensArrived]
    assert book.running.every() == [good]
