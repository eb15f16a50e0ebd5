"""Errors: whose fault it is can be told from the type."""

from __future__ import annotations

import pytest

from rollout_sched.core import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.CallerError, ValueError),
        (errors.PolicyError, RuntimeError),
        (errors.IllegalMove, RuntimeError),
    ],
)
def test_each_blame_has_a_type_under_one_root(
    error: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(error, errors.RolloutError)
    assert issubclass(error, builtin)


def test_no_blame_includes_another() -> None:
    kinds = [errors.CallerError, errors.PolicyError, errors.IllegalMove]
    assert not any(issubclass(a, b) for a in kinds for b in kinds if a is not b)
