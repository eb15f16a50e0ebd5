"""Ids of requests, of groups with and without slashes in their names."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.request_ids import group_of, parse_request_id, request_id


@pytest.mark.parametrize("group", ["a", "run/epoch 1/a", "/", ""])
def test_id_is_parsed_as_it_was_made(group: str) -> None:
    request = request_id(group, 12)
    assert parse_request_id(request) == (group, 12)
    assert group_of(request) == group


def test_request_of_a_client_has_no_group() -> None:
    assert group_of("run.f0.1") == ""
    with pytest.raises(ValueError, match="invalid literal"):
        parse_request_id("run.f0.1")
