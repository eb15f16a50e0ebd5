"""The waiting queue: least key first, equal keys in order of serial."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sched.core.waiting import WaitingQueue
from tests.core.told import make_request


def fill(*keys: object) -> WaitingQueue:
    queue = WaitingQueue()
    for serial, key in enumerate(keys):
        queue.add(make_request(f"a/{serial}", serial=serial), key)
    return queue


def order(queue: WaitingQueue) -> list[str]:
    return [request.id for request in queue]


def test_the_least_key_goes_first() -> None:
    assert order(fill(3, 1, 2)) == ["a/1", "a/2", "a/0"]
    assert fill(3, 1, 2).first().id == "a/1"


def test_equal_keys_go_by_serial_not_by_arrival() -> None:
    queue = WaitingQueue()
    for serial in (5, 2, 8):
        queue.add(make_request(f"a/{serial}", serial=serial), 0)
    assert order(queue) == ["a/2", "a/5", "a/8"]


def test_what_is_popped_was_first() -> None:
    queue = fill(3, 1, 2)
    assert queue.first() is not None
    queue.pop_first()
    assert order(queue) == ["a/2", "a/0"]


def test_one_in_the_middle_can_leave() -> None:
    queue = fill(0, 0, 0)
    _, middle, _ = queue
    queue.remove(middle)
    assert middle not in queue
    assert order(queue) == ["a/0", "a/2"]
    assert len(queue) == 2


def test_a_new_key_moves_a_request() -> None:
    queue = fill(1, 2, 3)
    last = list(queue)[-1]
    queue.rerank(last, 0)
    assert order(queue) == ["a/2", "a/0", "a/1"]
    queue.rerank(last, 2)
    assert order(queue) == ["a/0", "a/1", "a/2"]


def test_the_same_key_moves_nothing() -> None:
    queue = fill(1, 1)
    first = queue.first()
    rank = first.rank
    queue.rerank(first, 1)
    assert first.rank is rank
    assert order(queue) == ["a/0", "a/1"]


def test_one_that_waits_twice_keeps_its_place_by_serial() -> None:
    queue = fill(0, 0)
    first = queue.first()
    queue.pop_first()
    queue.add(first, 0)
    assert order(queue) == ["a/0", "a/1"]


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "pop", "remove", "rerank"]), st.integers(0, 3), st.integers(0, 9)
    ),
    max_size=40,
)


@settings(deadline=None)
@given(steps)
def test_order_against_a_sorted_list(plan: list[tuple[str, int, int]]) -> None:
    queue = WaitingQueue()
    keys: dict[str, tuple[int, int]] = {}
    serial = 0
    for verb, key, which in plan:
        expected = sorted(keys, key=lambda name: keys[name])
        if verb == "add":
            queue.add(make_request(f"a/{serial}", serial=serial), key)
            keys[f"a/{serial}"] = (key, serial)
            serial += 1
        elif not keys:
            continue
        elif verb == "pop":
            queue.pop_first()
            del keys[expected[0]]
        else:
            chosen = list(queue)[which % len(keys)]
            if verb == "remove":
                queue.remove(chosen)
                del keys[chosen.id]
            else:
                queue.rerank(chosen, key)
                keys[chosen.id] = (key, keys[chosen.id][1])
        assert order(queue) == sorted(keys, key=lambda name: keys[name])
        assert len(queue) == len(keys)
