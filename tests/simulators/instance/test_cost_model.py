"""The cost model's constants are checked."""

from __future__ import annotations

import pytest

from rollout_sched.simulators.instance.model import CostModel


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"token_s": -1.0}, "token_s"),
        ({"context_s": float("nan")}, "context_s"),
        ({"exponent": 0.5}, "exponent"),
        ({"step_s": 0.0, "weights_s": 0.0}, "cannot advance"),
    ],
)
def test_nonsense_is_refused(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CostModel(**{"step_s": 1.0, "weights_s": 1.0, "token_s": 1.0, **wrong})
