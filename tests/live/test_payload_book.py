"""The payloads of what is here, and the last errors."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.errors import CallerError
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.live.requests.payloads import PayloadBook
from rollout_sched.live.requests.token_payload import TokenPayload


def dispatch(group: str, index: int) -> Dispatch:
    return Dispatch(f"{group}/{index}", index + 1, "i0", 1, 9, 0, group=group, index=index)


def sample(group: str, index: int) -> DeliveredSample:
    return DeliveredSample(f"{group}/{index}", group, index, 1, 0, (), 0, "stop")


def made(index: int) -> TokenPayload:
    return TokenPayload([index], {})


def with_group(name: str) -> PayloadBook:
    book = PayloadBook()
    book.add_group(name, made)
    return book


def test_a_payload_is_made_once() -> None:
    book = with_group("a")
    payload = book.of(dispatch("a", 0))
    assert book.of(sample("a", 0)) is payload
    assert book.of_sample("a", 0, "a/0") is payload
    assert book.get("a/0") is payload
    assert book.of_group("a") == ["a/0"]
    assert len(book) == 1


def test_a_group_is_here_once() -> None:
    book = with_group("a")
    with pytest.raises(CallerError, match="already here"):
        book.add_group("a", made)
    assert book.has_group("a")
    book.forget_group("a")
    assert not book.has_group("a")
    book.add_group("a", made)


def test_what_is_taken_is_here_no_longer() -> None:
    book = with_group("a")
    payload = book.of(dispatch("a", 0))
    assert book.take(sample("a", 0)) is payload
    assert "a/0" not in book
    assert book.take(sample("a", 1)) is not payload
    assert not len(book)


def test_the_last_error_is_told_once() -> None:
    book = with_group("a")
    book.note_error(dispatch("a", 0), RuntimeError("first"))
    book.note_error(dispatch("a", 1), RuntimeError("last"))
    assert str(book.forget_group("a")) == "last"
    assert book.forget_group("a") is None
    book.add("r", made(0))
    book.note_error(Dispatch("r", 1, "i0", 1, 9, 0), RuntimeError("boom"))
    assert str(book.forget("r")) == "boom"
    assert book.forget("r") is None


def test_an_error_of_what_is_over_is_not_kept() -> None:
    """As of an attempt that nobody wanted any more when it failed."""
    book = with_group("a")
    book.release("a", ["a/0"])
    book.note_error(dispatch("a", 0), RuntimeError("late"))
    book.note_group_error("a", RuntimeError("late"))
    book.note_error(Dispatch("gone", 1, "i0", 1, 9, 0), RuntimeError("late"))
    assert book.forget("gone") is None
    assert book.forget_group("a") is None


def test_who_takes_all_leaves_nothing() -> None:
    book = with_group("a")
    payload = book.of(dispatch("a", 0))
    assert book.take_all() == ([payload], ["a"])
    assert book.take_all() == ([], [])
