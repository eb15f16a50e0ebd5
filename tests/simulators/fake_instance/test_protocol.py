"""What is read of a call."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from rollout_sched.simulators.fake_instance.protocol import Refusal, decode, flag, reply


@pytest.mark.parametrize(
    ("query", "meant"), [("", True), ("?x=False", False), ("?x=1", True), ("?x=0", False)]
)
def test_a_flag(query: str, meant: bool) -> None:
    assert flag(make_mocked_request("POST", f"/pause{query}"), "x", True) is meant


def test_what_is_no_flag_is_refused_with_its_name() -> None:
    with pytest.raises(Refusal, match="x must be true or false, got 'perhaps'") as refused:
        flag(make_mocked_request("POST", "/pause?x=perhaps"), "x", True)
    assert (refused.value.status, refused.value.param) == (400, "x")


def test_a_body_of_another_shape_is_the_callers_fault() -> None:
    with pytest.raises(Refusal) as refused:
        decode(b'["x"]', dict[str, int])
    assert refused.value.status == 400


def test_a_reply_is_json() -> None:
    response = reply({"a": 1}, 503)
    assert (response.status, response.content_type, response.body) == (
        503,
        "application/json",
        b'{"a":1}',
    )
