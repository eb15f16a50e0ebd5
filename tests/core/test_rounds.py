"""What rounds begin with and come to survives JSON."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.core.model.records import DeliveredGroup, Launch


@pytest.mark.parametrize("what", [Launch(3, 1, 1.5), DeliveredGroup(10, (4, 7))])
def test_it_survives_json(what: Launch | DeliveredGroup) -> None:
    assert msgspec.json.decode(msgspec.json.encode(what), type=type(what)) == what
