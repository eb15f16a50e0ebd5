"""Which trace an instance is told of."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.vllm.orders import no_trace, renamed

OURS = b"traceparent: 00-ours\r\n"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (b"a: 1\r\n", b"a: 1\r\n" + OURS),
        (b"Traceparent: 00-theirs\r\na: 1\r\ntracestate: x=1\r\n", b"a: 1\r\n" + OURS),
        (b"x-traceparent: 1\r\n", b"x-traceparent: 1\r\n" + OURS),
        (b"", OURS),
    ],
)
def test_ours_takes_the_place_of_the_client_s(lines: bytes, told: bytes) -> None:
    assert renamed(lines, OURS) == told


def test_without_one_of_ours_the_client_s_stays() -> None:
    lines = b"traceparent: 00-theirs\r\n"
    assert renamed(lines, no_trace("order-1")) == lines
