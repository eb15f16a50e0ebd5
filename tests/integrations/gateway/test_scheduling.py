"""The data plane's port to who schedules: the driver has it, and a front's way to one elsewhere."""

from __future__ import annotations

import inspect

import pytest

from rollout_sched.integrations.gateway.data_plane.scheduling import Scheduling
from rollout_sched.link.front_calls import FrontCalls
from rollout_sched.live.driver import Driver


@pytest.mark.parametrize("who", [Driver, FrontCalls])
@pytest.mark.parametrize("name", ["max_model_len", "submit", "withdraw"])
def test_both_are_asked_alike(who: type, name: str) -> None:
    asked = inspect.signature(getattr(Scheduling, name))
    theirs = inspect.signature(getattr(who, name))
    assert theirs == asked
