"""What a front takes of its deployment's options; the actor itself is in tests/ray."""

from __future__ import annotations

from pathlib import Path

from rollout_sched.integrations.gateway.front_service import FrontOptions
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.ray.fronts import front_options_of


def test_of_the_options_those_that_both_have_at_its_node() -> None:
    options = Options(
        policy="dplb", host="the scheduler's", port=9, max_requests=7, api_key_file=Path("keys")
    )
    assert front_options_of(options, "10.0.0.7") == FrontOptions(
        host="10.0.0.7", port=9, max_requests=7, api_key_file=Path("keys"), grace_s=options.grace_s
    )
