"""What a simulated instance refuses to take."""

from __future__ import annotations

import math

import pytest

from rollout_sched.simulators.instance.model import SimRequest, last_token
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


@pytest.mark.parametrize(
    ("new", "most", "ends"),
    [
        (5, 9, (15, "stop")),
        (9, 9, (19, "stop")),
        (9, 5, (15, "length")),
        (200, 200, (128, "length")),
    ],
)
def test_where_a_request_ends(new: int, most: int, ends: tuple[int, str]) -> None:
    one = instance(kv_blocks=50, max_model_len=128)
    asked = request(1, context=10, new=new, max_new_tokens=most)
    assert last_token(asked, one.spec) == ends
