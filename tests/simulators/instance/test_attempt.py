"""What an instance keeps of an attempt: version spans, and the queue it waits in."""

from __future__ import annotations

from rollout_sched.simulators.instance.kv_blocks import KvBlocks
from rollout_sched.simulators.instance.model import SimRequest
from rollout_sched.simulators.instance.scheduler import SimAttempt, SimWaitingQueue


def make(number: int, *, arrival: int = 0, priority: int = 0) -> SimAttempt:
    request = SimRequest(number, 10, 5, 5, "prompt", 4, number, priority=priority)
    blocks = KvBlocks(8, True)
    shared, own = blocks.chain(("p", number)), blocks.chain(("o", number))
    return SimAttempt(request, 15, "stop", arrival, shared, own, 0)


def drain(queue: SimWaitingQueue) -> list[int]:
    numbers = []
    while queue.size:
        numbers.append(queue.first().number)
        queue.pop()
    return numbers


def test_spans_follow_the_versions_that_made_the_tokens():
    attempt = make(1)
    attempt.close_span(12, version=3)
    attempt.close_span(12, version=4)
    attempt.close_span(13, version=3)
    attempt.close_span(15, version=5)
    assert attempt.spans == ((3, 3), (5, 2))


def test_first_come_first_served_with_the_preempted_in_front():
    queue = SimWaitingQueue(priority=False)
    queue.push(make(1, arrival=1))
    queue.push(make(2, arrival=2))
    queue.push(make(3, arrival=0), front=True)
    assert drain(queue) == [3, 1, 2]


def test_by_priority_then_arrival():
    queue = SimWaitingQueue(priority=True)
    queue.push(make(1, arrival=1, priority=5))
    queue.push(make(2, arrival=2, priority=0))
    queue.push(make(3, arrival=0, priority=5), front=True)
    assert drain(queue) == [2, 3, 1]


def test_one_that_was_aborted_is_passed_over():
    queue = SimWaitingQueue(priority=False)
    gone = make(1)
    queue.push(gone)
    queue.push(make(2))
    queue.discard(gone)
    assert drain(queue) == [2]
