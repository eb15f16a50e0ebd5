"""Worker processes: each gets once what it needs, then answers one question at a time.

They are processes of their own, so that one in the midst of an answer can be stopped when the
time is over; an executor's cannot.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from rollout_sched.core.errors import RolloutError

Question = TypeVar("Question")
Answer = TypeVar("Answer")

#: So often the time that is left is looked at, in seconds.
_LOOK_S = 0.5


class WorkerDied(RolloutError, RuntimeError):
    """A worker process ended by itself."""


class WorkerPool(Generic[Question, Answer]):
    """So many processes that answer questions; a context manager that ends them.

    `answer`, which is sent to each once, all questions and all answers are pickled. Interrupts from
    the keyboard are for the parent alone.
    """

    def __init__(self, answer: Callable[[Question], Answer], jobs: int) -> None:
        self._answer = answer
        self._jobs = jobs
        # Not forked: a thread of the parent, such as a progress bar's, may hold a lock.
        self._context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, Any] = {}

    def __enter__(self) -> WorkerPool[Question, Answer]:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def answers(
        self, questions: Sequence[Question], left_s: Callable[[], float]
    ) -> Iterator[Answer]:
        """The answers in the order of the questions, however the processes are scheduled.

        Ends early when `left_s()` says that no time is left; what was being answered then is lost.
        Raises WorkerDied.
        """
        answered: dict[int, Answer] = {}
        asked: dict[Connection, int] = {}
        told, number = 0, 0
        self._start(min(self._jobs, len(questions)))
        idle = list(self._processes)
        try:
            while told < len(questions) and left_s() > 0:
                while idle and number < len(questions):
                    wire = idle.pop()
                    wire.send(questions[number])
                    asked[wire] = number
                    number += 1
                for ready in wait(list(asked), min(_LOOK_S, max(0.0, left_s()))):
                    assert isinstance(ready, Connection)
                    answered[asked[ready]] = self._receive(ready)
                    del asked[ready]
                    idle.append(ready)
                while told in answered:
                    yield answered.pop(told)
                    told += 1
        finally:
            for wire in asked:
                self._end(wire)

    def stop(self) -> None:
        """End all processes, whatever they are doing."""
        for wire in list(self._processes):
            self._end(wire)

    def _start(self, jobs: int) -> None:
        while len(self._processes) < jobs:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(self._answer, theirs), daemon=True)
            process.start()
            theirs.close()  # so that both sides notice when the other is gone
            self._processes[ours] = process

    def _end(self, wire: Connection) -> None:
        process = self._processes.pop(wire)
        wire.close()
        process.kill()
        process.join()

    def _receive(self, wire: Connection) -> Answer:
        try:
            answer: Answer = wire.recv()
        except EOFError:
            raise WorkerDied(
                "a worker process ended in the midst of an evaluation, as the system does when "
                "memory is short; give fewer --jobs"
            ) from None
        return answer


def _work(answer: Callable[[Any], Any], wire: Connection) -> None:
    """What a worker process does, until its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        while True:
            wire.send(answer(wire.recv()))
    except (EOFError, BrokenPipeError):
        return
