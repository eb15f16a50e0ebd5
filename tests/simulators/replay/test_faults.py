"""Which attempts fail, and what befalls which instance when."""

from __future__ import annotations

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.faults import (
    Failing,
    Failures,
    Faults,
    Joins,
    Leaving,
    Lost,
    SchedulerRestarts,
    Slow,
    ToolsFailing,
)


def sent(attempt: int, instance: int = 0) -> Dispatch:
    return Dispatch("g/0", attempt, f"instance-{instance}", 10, 100, 0, group="g")


class TestFailures:
    def test_a_share_of_them_the_same_whenever_asked(self) -> None:
        fault = Failing(at_s=0.0, share=0.25)
        failing = [n for n in range(1, 2001) if Failures([fault]).failure_of(sent(n), 1.0)]
        assert 400 < len(failing) < 600
        assert failing == [n for n in range(1, 2001) if Failures([fault]).failure_of(sent(n), 2.0)]
        other = Failures([Failing(at_s=0.0, share=0.25, seed=1)])
        assert failing != [n for n in range(1, 2001) if other.failure_of(sent(n), 1.0)]

    def test_two_faults_draw_apart(self) -> None:
        alike = [Failing(at_s=0.0, share=0.5)] * 2
        failing = sum(Failures(alike).failure_of(sent(n), 1.0) is not None for n in range(1, 2001))
        assert 1400 < failing < 1600

    def test_only_within_its_time(self) -> None:
        failures = Failures([Failing(at_s=5.0, for_s=2.0)])
        assert [bool(failures.failure_of(sent(1), now)) for now in (4.9, 5.0, 6.9, 7.0)] == [
            0,
            1,
            1,
            0,
        ]
        assert Failures([Failing(at_s=5.0)]).failure_of(sent(1), 1e6)

    def test_only_on_its_instance(self) -> None:
        failures = Failures([Lost(at_s=0.0, instance=0), Failing(at_s=0.0, instance=1)])
        assert not failures.failure_of(sent(1, 0), 1.0)
        assert failures.failure_of(sent(1, 1), 1.0)


def test_a_share_of_the_tools() -> None:
    failures = Failures([ToolsFailing(at_s=5.0, for_s=2.0, share=0.5)])
    assert 400 < sum(failures.of_tool(n, 6.0) for n in range(1000)) < 600
    assert not any(failures.of_tool(n, now) for n in range(1000) for now in (4.9, 7.0))
    assert not failures.failure_of(sent(1), 6.0)


class Book:
    """A fleet that writes down what befalls it."""

    def __init__(self) -> None:
        self.queue = EventQueue()
        self.entries: list[tuple[float, str, str, float]] = []

    def join(self, name: str) -> None:
        self.entries.append((self.queue.now, "join", name, 0.0))

    def lose(self, name: str, returns_after_s: float = 0.0) -> None:
        self.entries.append((self.queue.now, "lose", name, returns_after_s))

    def leave(self, name: str, returns_after_s: float = 0.0) -> None:
        self.entries.append((self.queue.now, "leave", name, returns_after_s))

    def slow(self, name: str) -> None:
        self.entries.append((self.queue.now, "slow", name, 0.0))

    def restart(self) -> None:
        self.entries.append((self.queue.now, "restart", "scheduler", 0.0))


def test_each_when_its_time_has_come() -> None:
    book = Book()
    listed = [
        Leaving(at_s=7.0, instance=2, returns_after_s=3.0),
        Lost(at_s=5.0, instance=1),
        Joins(at_s=6.0, instance=0),
        SchedulerRestarts(at_s=6.5),
        Slow(at_s=5.5, for_s=2.0, instance=3),
        Slow(at_s=8.0, instance=3),
        Failing(at_s=1.0),
        ToolsFailing(at_s=1.0),
    ]
    faults = Faults(listed, book.queue, book, book.restart)
    assert faults.absent == {"instance-0"}
    faults.start()
    while len(book.queue):
        book.queue.step()
    assert book.entries == [
        (5.0, "lose", "instance-1", 0.0),
        (5.5, "slow", "instance-3", 0.0),
        (6.0, "join", "instance-0", 0.0),
        (6.5, "restart", "scheduler", 0.0),
        (7.0, "leave", "instance-2", 3.0),
        (7.5, "slow", "instance-3", 0.0),
        (8.0, "slow", "instance-3", 0.0),
    ]
