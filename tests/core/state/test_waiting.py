"""The waiting queue: least key first, equal keys in order of serial."""

from __future__ import annotations

import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sched.core.model.model import RequestState
from rollout_sched.core.state.waiting import ReplayBuffer, WaitingQueue
from tests.core.told import make_group, make_request


def fill(*keys: object) -> WaitingQueue:
    queue = WaitingQueue()
    for serial, key in enumerate(keys):
        queue.add(make_request(f"a/{serial}", serial=serial), key)
    return queue


def order(queue: WaitingQueue) -> list[str]:
    return [request.id for request in queue]


def test_keys_may_become_of_another_kind() -> None:
    queue = fill(3, 1, 2)
    assert queue.first().id == "a/1"
    queue.add(make_request("a/9", serial=9), 0)  # beside those that are sorted
    for request in list(queue):
        queue.rerank(request, (-request.serial, "any"))
    queue.rebuild()
    queue.add(make_request("a/5", serial=5), (-5, "any"))
    assert order(queue) == ["a/9", "a/5", "a/2", "a/1", "a/0"]


def test_the_same_key_moves_nothing() -> None:
    queue = fill(1, 1)
    first = queue.first()
    rank = first.rank
    queue.rerank(first, 1)
    assert first.rank is rank
    assert order(queue) == ["a/0", "a/1"]


def test_moved_requests_leave_no_garbage() -> None:
    queue = fill(*range(100))
    request = list(queue)[50]
    for key in range(1_000):
        queue.rerank(request, key % 97)
        queue.first()
    assert len(queue._sorted) + len(queue._heap) <= 64 + 4 * 100


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "pop", "remove", "rerank", "aside", "recall"]),
        st.integers(0, 3),
        st.integers(0, 39),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(st.integers(0, 30), steps)
def test_order_against_a_sorted_list(launched: int, plan: list[tuple[str, int, int]]) -> None:
    """Many that come together, and then a few that come, move and leave."""
    queue = fill(*[serial % 4 for serial in range(launched)])
    requests = {request.id: request for request in queue}
    keys = {request.id: (request.serial % 4, request.serial) for request in queue}
    aside: set[str] = set()
    serial = launched
    for verb, key, which in plan:
        expected = sorted(keys.keys() - aside, key=lambda name: keys[name])
        name = sorted(keys)[which % len(keys)] if keys else ""
        if verb == "add":
            requests[f"a/{serial}"] = make_request(f"a/{serial}", serial=serial)
            queue.add(requests[f"a/{serial}"], key)
            keys[f"a/{serial}"] = (key, serial)
            serial += 1
        elif verb == "recall":
            queue.recall()
            aside.clear()
        elif verb in ("pop", "aside") and expected:
            first = queue.first()
            assert first.id == expected[0]
            if verb == "aside":
                queue.set_aside(first)
                aside.add(first.id)
            else:
                queue.remove(first)
                del keys[first.id]
        elif verb == "remove" and keys:
            queue.remove(requests[name])
            del keys[name]
            aside.discard(name)
        elif verb == "rerank" and keys:
            queue.rerank(requests[name], key)
            keys[name] = (key, keys[name][1])
        expected = sorted(keys.keys() - aside, key=lambda name: keys[name])
        assert (None if queue.first() is None else queue.first().id) == next(iter(expected), None)
        assert len(queue) == len(keys)
    queue.recall()
    assert order(queue) == sorted(keys, key=lambda name: keys[name])


def test_an_empty_queue_keeps_no_requests() -> None:
    queue = fill(1)
    request = queue.first()
    known = sys.getrefcount(request)
    queue.remove(request)
    assert sys.getrefcount(request) == known - 1, "nor its rank"


def test_requests_stay_in_the_order_they_came() -> None:
    buffer = ReplayBuffer()
    for name in ("b/1", "a/0", "b/0"):
        buffer.add(make_request(name))
    assert [request.id for request in buffer] == ["b/1", "a/0", "b/0"]
    assert len(buffer) == 3


def test_requests_of_a_group_are_in_index_order() -> None:
    one, other = make_group("a", requests=3), make_group("b", requests=1)
    buffer = ReplayBuffer()
    one.requests[1].state = RequestState.RUNNING
    for request in (one.requests[2], other.requests[0], one.requests[0]):
        buffer.add(request)
    assert buffer.parked_of(one) == [one.requests[0], one.requests[2]]
    assert buffer.parked_of(other) == [other.requests[0]]
