"""The arithmetic of the event jump against a walk over every step and every attempt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.simulators.instance.kv_blocks import KvBlocks
from rollout_sched.simulators.instance.model import SimRequest
from rollout_sched.simulators.instance.scheduler import DecodeBatch, SimAttempt

SIZE = 4


def batch_of(contexts: list[int], step: int) -> tuple[DecodeBatch, list[SimAttempt]]:
    batch, attempts, blocks = DecodeBatch(SIZE), [], KvBlocks(1, True)
    for order, context in enumerate(contexts):
        request = SimRequest(order, context, 50, 50, "p", 0, order)
        chains = blocks.chain(("p", order)), blocks.chain(("o", order))
        attempt = SimAttempt(request, context + 3 + order, "stop", order, *chains, 0)
        attempt.order = order
        batch.join(attempt, step)
        attempts.append(attempt)
    return batch, attempts


def walked_demand(contexts: list[int], steps: int) -> int:
    """Blocks taken one step at a time: a step computes the last token made so far."""
    return sum((context + made - 1) % SIZE == 0 for made in range(steps) for context in contexts)


contexts = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(contexts, st.integers(0, 30), st.integers(0, 30))
def test_demand_is_what_single_steps_take(lengths: list[int], step: int, steps: int):
    batch, attempts = batch_of(lengths, step)
    assert batch.demand(step, steps) == walked_demand(lengths, steps)
    batch.check_invariants(attempts)


@given(contexts, st.integers(0, 30), st.integers(1, 30), st.integers(0, 40))
def test_as_many_steps_fit_as_there_are_blocks(lengths, step, steps, free):
    batch, _ = batch_of(lengths, step)
    fit = batch.steps_that_fit(step, steps, free)
    assert 0 <= fit <= steps
    assert walked_demand(lengths, fit) <= free
    if fit < steps:
        assert walked_demand(lengths, fit + 1) > free


def test_contexts_grow_by_one_a_step_and_ends_come_in_order():
    batch, attempts = batch_of([10, 20], step=5)
    assert batch.context(5) == 30
    assert batch.context(8) == 36
    assert batch.next_end() == 5 + 3
    first = batch.ending(8)
    assert first == attempts[:1]
    batch.leave(first[0], 8)
    assert first[0].tokens == 13
    assert batch.next_end() == 5 + 4


def test_books_that_do_not_add_up_are_found():
    batch, attempts = batch_of([10, 20], step=5)
    with pytest.raises(AssertionError, match="miscounted"):
        batch.check_invariants(attempts[:1])
