"""Direct siblings: who teaches whom, and for how long anybody is remembered."""

from __future__ import annotations

from rollout_sched.core.model.model import MOST_SIBLINGS, DirectSiblings, Request, Siblings


def join(book: DirectSiblings, name: str = "p", prompt: int = 3, limit: int = 9) -> Request:
    siblings = book.join(name, prompt, limit)
    request = Request(f"r{id(object())}", siblings, None, siblings.joined - 1, 0, prompt)
    siblings.requests.append(request)
    return request


def test_siblings_have_name_prompt_and_limit_in_common() -> None:
    book = DirectSiblings()
    one = join(book)
    assert join(book).siblings is one.siblings
    for other in (join(book, "q"), join(book, prompt=4), join(book, limit=8)):
        assert other.siblings is not one.siblings
    assert len(book) == 4


def test_each_has_an_index_of_its_own() -> None:
    book = DirectSiblings()
    first = join(book)
    join(book)
    book.leave(first)
    assert join(book).index == 2


def test_nobody_is_remembered_when_the_last_has_left() -> None:
    book = DirectSiblings()
    one, other = join(book), join(book)
    book.leave(one)
    assert len(book) == 1
    book.leave(other)
    assert len(book) == 0


def test_a_name_that_never_rests_begins_anew_now_and_then() -> None:
    book = DirectSiblings()
    kept = [join(book) for _ in range(3 * MOST_SIBLINGS)]
    families: list[Siblings] = []
    for request in kept:
        if request.siblings not in families:
            families.append(request.siblings)
    assert [len(siblings.requests) for siblings in families] == [MOST_SIBLINGS] * 3
    assert len(book) == 1
    for request in kept:
        book.leave(request)
    assert len(book) == 0
