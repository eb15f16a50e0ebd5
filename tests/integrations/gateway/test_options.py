"""What `serve` does where it is told nothing."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.integrations.gateway.data_plane.reply import Limits
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.live.settings import RunOptions


def test_a_run_is_as_anywhere_else() -> None:
    options, run = Options(policy="dplb", instances=[]), RunOptions()
    for field in msgspec.structs.fields(RunOptions):
        assert getattr(options, field.name) == getattr(run, field.name)


def test_limits_are_those_of_the_data_plane() -> None:
    options = Options(policy="dplb", instances=[])
    assert (options.max_requests, options.max_bodies) == (Limits().requests, Limits().body_bytes)
    assert options.max_body <= options.max_bodies


def test_two_gateways_share_nothing() -> None:
    one, two = (Options(policy="dplb", instances=[]) for _ in range(2))
    assert one.live is not two.live
    assert one.allow_instances is not two.allow_instances


def test_it_must_be_told_what_to_serve() -> None:
    with pytest.raises(TypeError):
        Options(instances=[])  # type: ignore[call-arg]
