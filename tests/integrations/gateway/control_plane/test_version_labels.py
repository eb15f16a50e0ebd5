"""Which version a trainer's weights are: the one it names, or the next."""

from __future__ import annotations

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.trainer_updates import (
    VersionLabels,
    json_object,
)
from rollout_sched.integrations.gateway.control_plane.weight_protocol import Conflict

A, B = "http://a:1", "http://b:1"


@pytest.mark.parametrize("body", [b"[]", b"{", b'"7"', b"\xff", b"[" * 100_000])
def test_a_body_is_an_object(body: bytes) -> None:
    with pytest.raises(CallerError, match="not a JSON object"):
        json_object(body)


def test_no_body_is_an_empty_one() -> None:
    assert json_object(b"") == {}


async def test_a_version_label_is_read_from_the_body(house) -> None:
    labels = VersionLabels(house.driver)
    assert labels.version_in(b"{}", "new_version") is None
    assert labels.version_in(b'{"new_version": "3"}', "new_version") == 3
    with pytest.raises(CallerError, match=r'new_version: .* such as "1"'):
        labels.version_in(b'{"new_version": "step-3"}', "new_version")
    labels.publish(5, [house.driver.supervisors[A]])
    with pytest.raises(Conflict, match="new_version is 4, but version 5"):
        labels.version_in(b'{"new_version": "4"}', "new_version")
