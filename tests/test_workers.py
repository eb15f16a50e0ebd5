"""Workers answer in order, are as many as asked for, and leave nothing running."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
import time
from functools import partial

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.workers import WorkerDied, WorkerPool


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


def stops_itself(number: int) -> int:
    os.kill(os.getpid(), signal.SIGSTOP)
    return number


def interrupts_itself(number: int) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return number


def test_answers_come_in_the_order_of_the_questions() -> None:
    with WorkerPool(slower_for_less, 2) as workers:
        assert list(workers.answers([0, 1, 2, 3])) == [0, 10, 20, 30]
        assert list(workers.answers([5])) == [50]
        assert list(workers.answers([])) == []
    assert multiprocessing.active_children() == []


def test_workers_are_lasting_processes() -> None:
    with WorkerPool(whose, 1) as workers:
        first = list(workers.answers([1, 2]))
        again = list(workers.answers([3]))
    assert len({*first, *again}) == 1
    assert os.getpid() not in first


def test_functions_of_workers_may_hold_data() -> None:
    with WorkerPool(partial(scaled, 3), 1) as workers:
        assert list(workers.answers([2])) == [6]


def test_an_expired_budget_waits_for_no_worker() -> None:
    with WorkerPool(sleeps, 2) as workers:
        list(workers.answers([0, 0]))  # they have started
        began = time.monotonic()
        answers = list(workers.answers([0, 60], lambda: began + 1.0 - time.monotonic()))
        assert answers == [0]
        assert time.monotonic() - began < 5.0
        assert list(workers.answers([0])) == [0]
    assert multiprocessing.active_children() == []


def test_a_worker_that_is_stopped_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    looks = 0

    def left_s() -> float:
        nonlocal looks
        told = re.findall(r"worker process (\d+) is stopped", caplog.text)
        looks += len(told)
        if looks == 3:
            os.kill(int(told[0]), signal.SIGCONT)
        return math.inf

    with WorkerPool(stops_itself, 1) as workers:
        assert list(workers.answers([7], left_s)) == [7]
    assert caplog.text.count("is stopped") == 1


def test_a_worker_that_dies_is_an_error_and_not_a_standstill() -> None:
    with WorkerPool(dies, 1) as workers, pytest.raises(WorkerDied, match="--jobs"):
        list(workers.answers([1]))


def test_an_interrupt_is_for_the_parent_alone() -> None:
    with WorkerPool(interrupts_itself, 1) as workers:
        assert list(workers.answers([7])) == [7]


def test_a_consumer_that_stops_leaves_nothing_running() -> None:
    with WorkerPool(sleeps, 2) as workers:
        answers = workers.answers([0, 60, 60])
        assert next(answers) == 0
        answers.close()
        assert list(workers.answers([0])) == [0]
    assert multiprocessing.active_children() == []


def refuses(number: int) -> int:
    raise CallerError(f"{number} is less than nothing")


def test_a_workers_exception_is_raised_unchanged() -> None:
    with WorkerPool(refuses, 1) as workers, pytest.raises(CallerError, match="-1 is less"):
        list(workers.answers([-1]))


def test_each_answer_has_the_number_of_its_question() -> None:
    with WorkerPool(slower_for_less, 2) as workers:
        assert dict(workers.finished([0, 1, 2])) == {0: 0, 1: 10, 2: 20}
