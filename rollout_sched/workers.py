"""Worker processes: each is set up once, then answers one question at a time.

They are processes of our own because a process can be stopped during an answer when the time is
over; an executor's cannot.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Annotated, Any, Generic, Self, TypeVar

import msgspec

from rollout_sched.core.errors import RolloutError

log = logging.getLogger(__name__)

Question = TypeVar("Question")
Answer = TypeVar("Answer")

#: How many processes a command may start.
Jobs = Annotated[int, msgspec.Meta(ge=1, le=1024)]

#: Seconds between two checks of the time left.
_POLL_S = 0.5


class WorkerDied(RolloutError, RuntimeError):
    """A worker process ended unexpectedly."""


def _unlimited() -> float:
    return math.inf


class WorkerPool(Generic[Question, Answer]):
    """A number of processes that answer questions; a context manager that ends them.

    `answer` (sent to each process once), questions and answers are pickled. Only the parent handles
    Ctrl-C.
    """

    def __init__(self, answer: Callable[[Question], Answer], jobs: int) -> None:
        self._answer = answer
        self._jobs = jobs
        # Spawn, because a fork may copy a held lock, such as that of a progress bar's thread.
        self._context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, Any] = {}
        self._stopped: set[int] = set()  # process ids

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End all processes at once."""
        for wire in list(self._processes):
            self._end(wire)

    def answers(
        self, questions: Sequence[Question], left_s: Callable[[], float] = _unlimited
    ) -> Iterator[Answer]:
        """The answers in the order of the questions, however the processes are scheduled. Ends and
        raises as `finished` does."""
        answered: dict[int, Answer] = {}
        told = 0
        for number, answer in self.finished(questions, left_s):
            answered[number] = answer
            while told in answered:
                yield answered.pop(told)
                told += 1

    def finished(
        self, questions: Sequence[Question], left_s: Callable[[], float] = _unlimited
    ) -> Iterator[tuple[int, Answer]]:
        """The number of each question with its answer, as they come.

        Ends early when `left_s()` is not positive; answers in progress are lost then. Raises what
        an answer raised, and WorkerDied.
        """
        asked: dict[Connection, int] = {}
        number = 0
        self._start(min(self._jobs, len(questions)))
        idle = list(self._processes)
        try:
            while (asked or number < len(questions)) and left_s() > 0:
                while idle and number < len(questions):
                    wire = idle.pop()
                    wire.send(questions[number])
                    asked[wire] = number
                    number += 1
                for ready in wait(list(asked), min(_POLL_S, max(0.0, left_s()))):
                    assert isinstance(ready, Connection)
                    answer = self._receive(ready)
                    idle.append(ready)
                    yield asked.pop(ready), answer
                self._warn_of_stopped()
        finally:
            for wire in asked:
                self._end(wire)

    def _start(self, jobs: int) -> None:
        while len(self._processes) < jobs:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(self._answer, theirs), daemon=True)
            process.start()
            theirs.close()  # so that each side notices when the other one ends
            self._processes[ours] = process

    def _end(self, wire: Connection) -> None:
        process = self._processes.pop(wire, None)
        if process is not None:
            wire.close()
            process.kill()
            process.join()

    def _warn_of_stopped(self) -> None:
        """A process that was stopped by a signal looks like one that computes for long."""
        stopped = {process.pid for process in self._processes.values() if _is_stopped(process.pid)}
        for pid in sorted(stopped - self._stopped):
            log.warning("worker process %d is stopped; `kill -CONT %d` lets it go on", pid, pid)
        self._stopped = stopped

    def _receive(self, wire: Connection) -> Answer:
        try:
            answer, error = wire.recv()
        except EOFError:
            raise WorkerDied(
                "a worker process ended unexpectedly, probably because memory ran out; use fewer "
                "--jobs"
            ) from None
        if error is not None:
            raise error
        found: Answer = answer
        return found


def _is_stopped(child: int) -> bool:
    if not hasattr(os, "waitid"):  # as on macOS
        return False
    try:
        return os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended
        return False


def _work(answer: Callable[[Any], Any], wire: Connection) -> None:
    """The loop of a worker process, until its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        while True:
            question = wire.recv()
            try:
                wire.send((answer(question), None))
            except Exception as error:
                wire.send((None, error))
    except (EOFError, BrokenPipeError):
        return
