from __future__ import annotations

import pytest

from rollout_sched.simulators.instance.sim_instance import SimInstance
from tests.simulators.instance.by_hand import Make, instance
from tests.simulators.instance.reference import ReferenceInstance


@pytest.fixture(params=[SimInstance, ReferenceInstance], ids=["jumping", "stepping"])
def make(request: pytest.FixtureRequest) -> Make:
    return lambda **settings: instance(request.param, **settings)
