"""Worker processes: answers in order, an end when the time is over, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial

import pytest

from rollout_sched.simulators.tune.evaluation import WorkerDied, WorkerPool


def forever() -> float:
    return 60.0


def slower_for_less(number: int) -> int:
    time.sleep(0.2 / (1 + number))
    return 10 * number


def scaled(factor: int, number: int) -> int:
    return factor * number


def whose(number: int) -> int:
    return os.getpid()


def sleeps(number: int) -> int:
    time.sleep(number)
    return number


def dies(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def interrupts_itself(number: int) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return number


def test_answers_come_in_the_order_of_the_questions() -> None:
    with WorkerPool(slower_for_less, 2) as workers:
        assert list(workers.answers([0, 1, 2, 3], forever)) == [0, 10, 20, 30]
        assert list(workers.answers([5], forever)) == [50]
        assert list(workers.answers([], forever)) == []
    assert multiprocessing.active_children() == []


def test_they_are_other_processes_and_stay() -> None:
    with WorkerPool(whose, 1) as workers:
        first = list(workers.answers([1, 2], forever))
        again = list(workers.answers([3], forever))
    assert len({*first, *again}) == 1
    assert os.getpid() not in first


def test_what_answers_may_hold_data() -> None:
    with WorkerPool(partial(scaled, 3), 1) as workers:
        assert list(workers.answers([2], forever)) == [6]


def test_when_the_time_is_over_nothing_is_waited_for() -> None:
    with WorkerPool(sleeps, 2) as workers:
        list(workers.answers([0, 0], forever))  # they have started
        began = time.monotonic()
        answers = list(workers.answers([0, 60], lambda: began + 1.0 - time.monotonic()))
        assert answers == [0]
        assert time.monotonic() - began < 5.0
        assert list(workers.answers([0], forever)) == [0]
    assert multiprocessing.active_children() == []


def test_a_worker_that_dies_is_an_error_and_not_a_standstill() -> None:
    with WorkerPool(dies, 1) as workers, pytest.raises(WorkerDied, match="--jobs"):
        list(workers.answers([1], forever))


def test_an_interrupt_is_for_the_parent_alone() -> None:
    with WorkerPool(interrupts_itself, 1) as workers:
        assert list(workers.answers([7], forever)) == [7]


def test_a_consumer_that_stops_leaves_nothing_running() -> None:
    with WorkerPool(sleeps, 2) as workers:
        answers = workers.answers([0, 60, 60], forever)
        assert next(answers) == 0
        answers.close()
        assert list(workers.answers([0], forever)) == [0]
    assert multiprocessing.active_children() == []
