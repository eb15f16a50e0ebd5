"""The open instances: the list and the heap agree with a search through all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.core.model.model import Instance
from rollout_sched.core.state.fleet import OpenInstances


def by_tokens(instance: Instance) -> int:
    return instance.tokens


def instances(count: int) -> list[Instance]:
    return [Instance(f"i{n}", n, 8, 100, 0) for n in range(count)]


def change(ranked: OpenInstances, instance: Instance, tokens: int) -> None:
    instance.tokens = tokens
    instance.heap_version += 1
    ranked.put(instance)


def test_none_is_open() -> None:
    assert OpenInstances(by_tokens).least() is None


def test_who_is_removed_leaves_no_hole() -> None:
    ranked = OpenInstances(by_tokens)
    i0, i1, i2 = here = instances(3)
    for instance in here:
        ranked.put(instance)
    ranked.remove(i0)
    assert ranked.open == [i2, i1]
    assert [i.open_index for i in here] == [-1, 1, 0]
    assert ranked.least() is i1, "it joined before i2"
    ranked.remove(i1)
    ranked.remove(i2)
    assert ranked.open == []
    assert ranked.least() is None


def test_who_was_removed_may_come_back() -> None:
    ranked = OpenInstances(by_tokens)
    (i0,) = instances(1)
    ranked.put(i0)
    ranked.remove(i0)
    ranked.put(i0)
    assert ranked.least() is i0


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 9)), st.booleans()),
        max_size=200,
    )
)
def test_the_least_is_that_of_a_search(changes: list[tuple[int, int | None, bool]]) -> None:
    """Each gets another load, or is removed (None); sometimes somebody asks."""
    ranked = OpenInstances(by_tokens)
    everybody = instances(6)
    for number, tokens, asks in changes:
        instance = everybody[number]
        if tokens is not None:
            change(ranked, instance, tokens)
        elif instance.open_index >= 0:
            instance.heap_version += 1
            ranked.remove(instance)
        for index, one in enumerate(ranked.open):
            assert one.open_index == index
        if asks:
            expected = min(ranked.open, key=lambda i: (i.tokens, i.serial), default=None)
            assert ranked.least() is expected
