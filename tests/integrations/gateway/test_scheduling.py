"""The data plane's port to who schedules: the driver has it, and a front's way to one elsewhere."""

from __future__ import annotations

import inspect

import pytest

from rollout_sched.integrations.gateway.data_plane.reply import Scheduling
from rollout_sched.link.front import FrontCalls
from rollout_sched.live.driver import Driver


@pytest.mark.parametrize("who", [Driver, FrontCalls])
@pytest.mark.parametrize("name", ["max_model_len", "submit", "withdraw"])
def test_both_are_asked_alike(who: type, name: str) -> None:
    assert asked_for(who, name) == asked_for(Scheduling, name)


def asked_for(who: type, name: str) -> list[tuple[str, object]]:
    """Parameters and their defaults; the compiled build has not their types."""
    parameters = inspect.signature(getattr(who, name)).parameters.values()
    return [(parameter.name, parameter.default) for parameter in parameters]
