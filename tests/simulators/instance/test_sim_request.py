"""What a simulated instance refuses to take."""

from __future__ import annotations

import math

import pytest

from rollout_sched.simulators.instance.sim_request import SimRequest
from tests.simulators.instance.by_hand import instance, request


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (request(1, context=0), "context_tokens"),
        (request(1, new=0), "new_tokens"),
        (request(1, max_new_tokens=0), "max_new_tokens"),
        (request(1, shared_tokens=11), "shared_tokens"),
        (request(1, known_tokens=11), "known_tokens"),
        (request(1, context=128), "raise max_model_len"),
        (
            request(1, context=60, new=30),
            "23 blocks of 4, but the instance has 20; raise",
        ),
    ],
)
def test_a_request_that_can_never_run_is_refused(wrong: SimRequest, says: str) -> None:
    one = instance(kv_blocks=20, max_model_len=128)
    with pytest.raises(ValueError, match=says):
        one.submit(wrong, 0.0)
    assert one.next_at() == math.inf


def test_an_unknown_pause_mode_is_refused() -> None:
    one = instance()
    with pytest.raises(ValueError, match="keep, abort or wait, got 'drain'"):
        one.pause(0.0, "drain", clear_cache=False)  # type: ignore[arg-type]
