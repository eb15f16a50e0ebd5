"""The book: nothing is measured twice, and what is in it is a prefix of what was asked for."""

from __future__ import annotations

import math

import pytest

from rollout_sched.simulators.tune.evaluation import Case, FigureBook, Spent
from tests.simulators.tune.bench import Oracle, candidate, faster_with_more_prompts

ONE, TWO = (
    candidate(batching="sync", over_prompts=1.0),
    candidate(batching="sync", over_prompts=2.0),
)
CASES = (Case(4, 1), Case(4, 2))


def forever() -> float:
    return 1.0


def open_book(oracle: Oracle, evaluations: int | None = None) -> FigureBook:
    return FigureBook(lambda tasks: oracle.answers(tasks, forever), evaluations=evaluations)


def test_case_by_case_and_nothing_twice() -> None:
    oracle = Oracle(faster_with_more_prompts)
    book = open_book(oracle)
    book.measure([ONE, TWO, ONE], CASES)
    assert [(task.table, task.case) for task in oracle.tasks] == [
        (one.table, case) for case in CASES for one in (ONE, TWO)
    ]
    book.measure([TWO, ONE], CASES)
    assert len(oracle.tasks) == len(book) == 4
    assert ONE in book
    assert candidate(batching="one_step_off") not in book
    assert book.speed_up(TWO, ONE, CASES).mean == pytest.approx(2.0)


def test_so_many_evaluations_and_no_more() -> None:
    oracle = Oracle(faster_with_more_prompts)
    book = open_book(oracle, evaluations=3)
    with pytest.raises(Spent):
        book.measure([ONE, TWO], CASES)
    assert len(book) == 3
    assert book.knows(ONE, CASES)
    assert not book.knows(TWO, CASES)
    with pytest.raises(Spent):
        book.measure([TWO], CASES)
    assert len(oracle.tasks) == 3


def test_just_enough_is_not_too_few() -> None:
    book = open_book(Oracle(faster_with_more_prompts), evaluations=4)
    book.measure([ONE, TWO], CASES)
    assert len(book) == 4


def test_what_came_before_an_interruption_stays() -> None:
    book = open_book(Oracle(faster_with_more_prompts, stop_after=3))
    with pytest.raises(KeyboardInterrupt):
        book.measure([ONE, TWO], CASES)
    assert len(book) == 3
    assert book.of(ONE, CASES)[0].tokens_per_s == 200.0


def test_answers_that_end_early_are_the_end() -> None:
    oracle = Oracle(faster_with_more_prompts)
    book = FigureBook(lambda tasks: oracle.answers(tasks, lambda: 2.0 - oracle.now))
    with pytest.raises(Spent):
        book.measure([ONE, TWO], CASES)
    assert len(book) == 2


def test_the_reference_comes_first_and_says_when_to_give_up() -> None:
    oracle = Oracle(faster_with_more_prompts)
    book = FigureBook(lambda tasks: oracle.answers(tasks, forever), ONE)
    book.measure([TWO, ONE], CASES)
    assert [(task.table, task.case.seed) for task in oracle.tasks] == [
        (ONE.table, 1),
        (ONE.table, 2),
        (TWO.table, 1),
        (TWO.table, 2),
    ]
    assert [task.give_up_s for task in oracle.tasks] == [math.inf, math.inf, 20.0, 20.0]
