"""The payloads of what is here, and the last errors."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Answer, Deliver, Discard, Dispatch
from rollout_sched.core.model.events import Woke
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.core.model.request_ids import request_id
from rollout_sched.live.event_pump import EventPump
from rollout_sched.live.ports import RequestRejected
from rollout_sched.live.requests.payloads import Completions, Payloads
from rollout_sched.live.requests.token_payload import Piece, TokenPayload
from tests import virtual_net
from tests.core.told import make_scheduler


def dispatch(group: str, index: int) -> Dispatch:
    return Dispatch(f"{group}/{index}", index + 1, "i0", 1, 9, 0, group=group, index=index)


def sample(group: str, index: int) -> DeliveredSample:
    return DeliveredSample(f"{group}/{index}", group, index, 1, 0, (), 0, "stop")


def made(index: int) -> TokenPayload:
    return TokenPayload([index], {})


def with_group(name: str) -> Payloads:
    book = Payloads()
    book.add_group(name, made)
    return book


def test_a_payload_is_made_once() -> None:
    book = with_group("a")
    payload = book.payload_of(dispatch("a", 0))
    assert book.payload_of(sample("a", 0)) is payload
    assert book.of_sample("a", 0, "a/0") is payload
    assert book.get("a/0") is payload
    assert book.of_group("a") == ["a/0"]
    assert len(book) == 1


def test_payloads_of_group_are_the_open_ones() -> None:
    book = with_group("a")
    book.add_group("a/b", made)
    book.add("client", made(0))
    for group, index in (("a", 2), ("a/b", 0), ("a", 0)):
        book.of_sample(group, index, request_id(group, index))
    assert [book.of_group(name) for name in ("a", "a/b", "", "c")] == [
        ["a/2", "a/0"],
        ["a/b/0"],
        [],
        [],
    ]
    book.forget("a/2")
    book.forget("client")
    assert book.of_group("a") == ["a/0"]
    book.take(sample("a", 0))
    assert book.of_group("a") == []
    book.take_all()
    assert book.of_group("a/b") == []


def test_payloads_of_group_are_found_without_a_search_through_all() -> None:
    def seconds(groups: int) -> float:
        book = Payloads()
        for number in range(groups):
            book.add_group(f"g{number}", made)
            for index in range(8):
                book.of_sample(f"g{number}", index, request_id(f"g{number}", index))
        return min(timeit.repeat(lambda: book.of_group("g0"), number=100, repeat=9))

    few = seconds(100)
    assert seconds(1000) < 3 * few, "ten times as many payloads"


def test_group_is_added_once() -> None:
    book = with_group("a")
    with pytest.raises(CallerError, match="already here"):
        book.add_group("a", made)
    assert book.has_group("a")
    book.forget_group("a")
    assert not book.has_group("a")
    book.add_group("a", made)


def test_taken_payload_is_removed() -> None:
    book = with_group("a")
    payload = book.payload_of(dispatch("a", 0))
    assert book.take(sample("a", 0)) is payload
    assert "a/0" not in book
    assert book.take(sample("a", 1)) is not payload
    assert not len(book)


def test_last_error_is_reported_once() -> None:
    book = with_group("a")
    book.note_error(dispatch("a", 0), RuntimeError("first"))
    book.note_error(dispatch("a", 1), RuntimeError("last"))
    assert str(book.forget_group("a")) == "last"
    assert book.forget_group("a") is None
    book.add("r", made(0))
    book.note_error(Dispatch("r", 1, "i0", 1, 9, 0), RuntimeError("boom"))
    assert str(book.forget("r")) == "boom"
    assert book.forget("r") is None


def test_error_of_an_ended_request_is_not_kept() -> None:
    """As of an attempt that nobody wanted any more when it failed."""
    book = with_group("a")
    book.release("a", ["a/0"])
    book.note_error(dispatch("a", 0), RuntimeError("late"))
    book.note_group_error("a", RuntimeError("late"))
    book.note_error(Dispatch("gone", 1, "i0", 1, 9, 0), RuntimeError("late"))
    assert book.forget("gone") is None
    assert book.forget_group("a") is None


def test_take_all_empties_the_book() -> None:
    book = with_group("a")
    payload = book.payload_of(dispatch("a", 0))
    assert book.take_all() == ([payload], ["a"])
    assert book.take_all() == ([], [])


class Client:
    """A responder that notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def answer(self, sample: DeliveredSample) -> None:
        self.heard.append(sample)

    def fail(self, reason: str, error: Exception | None) -> None:
        self.heard.append((reason, str(error)))


class Book:
    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.failed: list[tuple[str, str]] = []
        self.pump = EventPump(make_scheduler(), [], lambda error: None)
        self.book = Payloads()
        self.endings = Completions(
            self.pump,
            self.book,
            lambda action, payloads: self.batches.append(payloads),
            lambda group, error: self.failed.append((group, str(error))),
        )

    def settle(self) -> None:
        self.pump.tell(Woke())

    def group(self, name: str, samples: int) -> list[TokenPayload]:
        made = [TokenPayload([1], {}) for _ in range(samples)]
        self.book.add_group(name, made.__getitem__)
        for index in range(samples):
            self.book.payload_of(dispatch(name, index))
        return made


def ends(group: str, index: int, reason: str = "failed") -> Discard:
    return Discard(f"{group}/{index}", 0, reason, ends=True, group=group, index=index)


def run(scene: Callable[[Book], None]) -> None:
    async def inside() -> None:
        scene(Book())

    virtual_net.run(inside())


def test_a_batch_takes_its_payloads_with_it() -> None:
    def scene(it: Book) -> None:
        made = it.group("a", 2)
        it.endings.deliver(Deliver(0, 0, (sample("a", 1), sample("a", 0))))
        assert not it.batches, "within the event"
        it.settle()
        assert it.batches == [[made[1], made[0]]]
        assert len(it.book) == 0
        it.book.add_group("a", made.__getitem__)

    run(scene)


def test_a_group_fails_with_the_last_error_in_it_whichever_sample_had_it() -> None:
    def scene(it: Book) -> None:
        it.group("a", 2)
        it.book.note_error(dispatch("a", 1), RuntimeError("first"))
        it.book.note_error(dispatch("a", 1), RuntimeError("boom"))
        it.endings.discard(ends("a", 0))
        it.endings.discard(ends("a", 1))
        it.settle()
        assert it.failed == [("a", "boom")]
        assert len(it.book) == 0

    run(scene)


@pytest.mark.parametrize(
    ("reason", "heard"),
    [
        ("failed", ("failed", "boom")),
        ("withdrawn", ("withdrawn", "boom")),
        ("oversized", ("failed", "prompt + max_tokens are more tokens than any instance takes")),
    ],
)
def test_a_client_hears_why(reason: str, heard: tuple[str, str]) -> None:
    def scene(it: Book) -> None:
        client = Client()
        it.book.add("r", TokenPayload([1], {}, responder=client))
        assert "r" in it.book
        it.book.note_error(Dispatch("r", 1, "i0", 1, 9, 0), RuntimeError("boom"))
        it.endings.discard(Discard("r", 0, reason, ends=True))
        it.settle()
        assert client.heard == [heard]
        assert "r" not in it.book

    run(scene)


def test_failed_answer_is_reported_to_the_client() -> None:
    def scene(it: Book) -> None:
        class Clumsy(Client):
            def answer(self, sample: DeliveredSample) -> None:
                raise RequestRejected("it cannot be put together")

        client = Clumsy()
        it.book.add("r", TokenPayload([1], {}, responder=client))
        it.endings.answer(Answer(DeliveredSample("r", "r", 0, 1, 0, (), 0, "stop")))
        it.settle()
        assert client.heard == [("failed", "it cannot be put together")]

    run(scene)


def test_non_final_discard_reaches_only_the_transcript() -> None:
    def scene(it: Book) -> None:
        (made,) = it.group("a", 1)
        made.transcript.append(1, 1, Piece([5], None))
        made.transcript.append(2, 1, Piece([6], None))
        it.endings.discard(Discard("a/0", 1, "stale", attempt=1, group="a"))
        assert made.response_ids == [6]
        it.endings.discard(Discard("a/0", 1, "stale", group="a"))
        assert made.response_ids == []
        it.settle()
        assert not it.failed
        assert len(it.book) == 1

    run(scene)


def test_breakdown_reaches_every_waiter() -> None:
    def scene(it: Book) -> None:
        client = Client()
        it.group("a", 1)
        it.book.add("r", TokenPayload([1], {}, responder=client))
        it.endings.fail_all(RuntimeError("boom"))
        it.settle()
        assert client.heard == [("failed", "boom")]
        assert it.failed == [("a", "boom")]

    run(scene)


def test_a_group_that_is_filtered_has_not_failed() -> None:
    filtered: list[str] = []

    def scene(it: Book) -> None:
        it.endings.on_group_filtered = filtered.append
        it.group("a", 2)
        it.endings.discard(ends("a", 0, "filtered"))
        it.endings.discard(ends("a", 1, "filtered"))
        it.settle()
        assert filtered == ["a"]
        assert not it.failed
        assert not len(it.book)

    run(scene)


def test_a_group_that_cannot_be_judged_fails_with_the_reason() -> None:
    def scene(it: Book) -> None:
        it.group("a", 1)
        it.book.note_group_error("a", ValueError("no reward"))
        it.book.note_group_error("gone", ValueError("nobody asks"))
        it.endings.discard(ends("a", 0))
        it.settle()
        assert it.failed == [("a", "no reward")]

    run(scene)


def test_payload_of_a_finished_sample_is_created_once() -> None:
    made: list[int] = []

    def restored(index: int) -> TokenPayload:
        made.append(index)
        return TokenPayload([1], {})

    def scene(it: Book) -> None:
        it.book.add_group("a", restored)
        payload = it.book.payload_of(sample("a", 0))
        assert it.book.payload_of(sample("a", 0)) is payload
        it.endings.deliver(Deliver(0, 0, (sample("a", 0), sample("a", 1))))
        it.settle()
        assert it.batches[0][0] is payload
        assert made == [0, 1]

    run(scene)
