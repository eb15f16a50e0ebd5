"""Calls in several processes: all are made, in order, and what one raises is heard."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.simulators.replay.runs import call_each


def power(base: int, exponent: int) -> int:
    if exponent < 0:
        raise CallerError(f"{exponent} is less than nothing")
    return int(base**exponent)


def test_results_come_in_the_order_of_the_arguments() -> None:
    done: dict[int, int] = {}
    assert call_each(power, (2,), [(n,) for n in range(6)], 2, done.__setitem__) == [
        1,
        2,
        4,
        8,
        16,
        32,
    ]
    assert done == {n: 2**n for n in range(6)}


def test_what_one_raises_is_raised_as_it_was() -> None:
    with pytest.raises(CallerError, match="-1 is less than nothing"):
        call_each(power, (2,), [(3,), (-1,), (2,)], 2, lambda number, result: None)
