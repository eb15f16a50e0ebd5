"""Interruption: what each setting promises about running requests."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.policies.interruption import NoInterruption, Partial
from tests.helpers import make_request


def test_never_drains_and_keeps_nothing() -> None:
    policy = NoInterruption()
    assert policy.at_update == "drain"
    assert not policy.keeps_partial
    assert not policy.keeps_kv
    assert policy.limit(make_request()) is None


@pytest.mark.parametrize(("kv", "kept"), [("retain", True), ("recompute", False)])
def test_partial_keeps_tokens_always_and_kv_on_request(kv: Any, kept: bool) -> None:
    policy = Partial(kv=kv)
    assert policy.keeps_partial
    assert policy.keeps_kv is kept
    assert policy.at_update == "in_place"
    assert policy.at_update == "in_place"


@pytest.mark.parametrize(("segment", "limit"), [(0, None), (1, 1), (8192, 8192)])
def test_a_segment_bounds_an_attempt(segment: int, limit: int | None) -> None:
    assert Partial(segment_tokens=segment).limit(make_request(made=500)) == limit


@pytest.mark.parametrize(
    ("segment_tokens", "segment", "waits"),
    [(0, "budget", False), (8, "budget", True), (8, "chunk", False)],
)
def test_only_a_budget_waits_for_the_next_round(
    segment_tokens: int, segment: Any, waits: bool
) -> None:
    assert Partial(segment_tokens=segment_tokens, segment=segment).budgeted is waits
    assert not NoInterruption().budgeted
