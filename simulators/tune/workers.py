"""Worker processes: each is set up once, then answers one question at a time.

They are separate processes because a process can be stopped during an answer when the time is over;
an executor's workers cannot.
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

#: Seconds between two checks of the time left.
_LOOK_S = 0.5


class WorkerDied(RolloutError, RuntimeError):
    """A worker process ended unexpectedly."""


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

    def __enter__(self) -> WorkerPool[Question, Answer]:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def answers(
        self, questions: Sequence[Question], left_s: Callable[[], float]
    ) -> Iterator[Answer]:
        """The answers in the order of the questions, however the processes are scheduled.

        Ends early when `left_s()` is not positive; answers in progress are lost then. Raises
        WorkerDied.
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
        """End all processes at once."""
        for wire in list(self._processes):
            self._end(wire)

    def _start(self, jobs: int) -> None:
        while len(self._processes) < jobs:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(self._answer, theirs), daemon=True)
            process.start()
            theirs.close()  # so that each side notices when the other one ends
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
                "a worker process ended during an evaluation, probably because memory ran out; "
                "use fewer --jobs"
            ) from None
        return answer


def _work(answer: Callable[[Any], Any], wire: Connection) -> None:
    """The loop of a worker process, until its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        while True:
            wire.send(answer(wire.recv()))
    except (EOFError, BrokenPipeError):
        return
