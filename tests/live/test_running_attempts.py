"""The book of attempts under way: by instance, and each end told once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import (
    Event,
    RequestFailed,
    RequestFinished,
    TokensArrived,
    TurnFinished,
)
from rollout_sched.live.ports import (
    AnswerUntrue,
    ConnectionBroken,
    InstanceUnreached,
    Outcome,
    RequestRejected,
)
from rollout_sched.live.requests.attempt import LiveAttempt
from rollout_sched.live.requests.attempts import RunningAttempts
from rollout_sched.live.requests.payloads import PayloadBook
from rollout_sched.live.requests.token_payload import Piece, TokenPayload
from rollout_sched.live.requests.trajectories import ToolCalls
from tests.live.scripted import Scripted


class Link:
    """Notes what is told."""

    broken = None

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.suspected: list[str] = []
        self.acting: list[Dispatch] = []

    def tell(self, event: Event) -> None:
        self.told.append(event)

    def afterwards(self, call: Callable[..., object], *arguments: Any) -> None:
        call(*arguments)

    def restart_suspected(self, instance: str) -> None:
        self.suspected.append(instance)

    def when_acting(self, dispatch: Dispatch, begin: Callable[[], None]) -> None:
        self.acting.append(dispatch)


class Book:
    def __init__(self) -> None:
        self.link: Any = Link()
        payloads = PayloadBook()
        self.running = RunningAttempts(self.link, payloads, ToolCalls(self.link, payloads))

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


def test_an_end_is_told_once_and_its_piece_is_kept() -> None:
    book = Book()
    running = book.begin(1)
    book.running.ended(running, outcome())
    book.running.ended(running, outcome())
    book.running.failed(running, ConnectionBroken("late"))
    assert book.link.told == [RequestFinished("r1", 1, 2, (), "stop")]
    assert running.payload.transcript.token_ids == [5, 5]
    assert not len(book.running)


def test_what_goes_beyond_its_limit_is_not_kept() -> None:
    book = Book()
    running = book.begin(1)
    book.running.ended(running, outcome(tokens=30))
    assert len(running.payload.transcript.token_ids) == 9


def test_a_turn_is_expected_to_be_followed_by_a_tool_before_it_is_told() -> None:
    book = Book()
    book.running.ended(book.begin(1), outcome("turn"))
    assert [dispatch.attempt for dispatch in book.link.acting] == [1]
    assert isinstance(book.link.told[0], TurnFinished)


def test_by_instance_in_the_order_of_their_dispatch() -> None:
    book = Book()
    first, other, second = book.begin(1), book.begin(2, "i1"), book.begin(3)
    assert book.running.on("i0") == [first, second]
    assert 2 in book.running
    assert book.running.get(2) is other
    book.running.forget("i0")
    assert book.running.every() == [other]
    assert book.link.told == []
    book.running.clear()
    assert not len(book.running)
    assert book.running.on("i1") == []


def test_whose_fault_it_was() -> None:
    for error, blame, suspected in (
        (InstanceUnreached("refused"), "instance", ["i0"]),
        (ConnectionBroken("reset"), "unclear", ["i0"]),
        (RequestRejected("400"), "request", []),
        (AnswerUntrue("no"), "unclear", []),
    ):
        book = Book()
        book.running.failed(book.begin(1), error)
        (told,) = book.link.told
        assert isinstance(told, RequestFailed)
        assert (told.blame, book.link.suspected) == (blame, suspected)
        assert told.usable is not isinstance(error, AnswerUntrue)


def test_what_streams_of_a_lost_instance_have_brought_is_told_and_kept_without_an_end() -> None:
    book = Book()
    running = book.begin(1, streamed=4)
    book.begin(2, "i1", streamed=4)
    book.running.lose("i0")
    assert book.link.told == [TokensArrived("r1", 1, 4)]
    assert running.payload.transcript.token_ids == [5] * 4
    assert len(book.running) == 1


def test_a_payload_that_raises_costs_its_own_attempt() -> None:
    async def scene() -> None:
        book = Book()
        bad, good = book.begin(1, streamed=4), book.begin(2, streamed=4)
        bad.payload.transcript.streamed = lambda attempt: 1 / 0  # type: ignore[method-assign]
        book.running.report_streams()
        assert [type(told) for told in book.link.told] == [RequestFailed, TokensArrived]
        assert book.running.every() == [good]

    asyncio.run(scene())
