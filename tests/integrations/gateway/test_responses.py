"""How calls end, counted and, where it is wanted, said."""

from __future__ import annotations

import logging

import pytest

from rollout_sched.integrations.gateway.data_plane.reply import Responses
from tests.integrations.gateway.house import House, Upstream, run


def test_they_are_counted_by_status() -> None:
    responses = Responses()
    for status in (200, 404, 200):
        responses.end(b"GET", b"/", status, responses.begin())
    assert responses.by_status == {200: 2, 404: 1}


def test_the_access_log_leaves_out_what_stands_behind_a_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="rollout_sched.access")

    async def scene() -> None:
        async with House(Upstream(), access_log=True) as house:
            await house.ask("GET", "/version?api_key=secret")
            body = {"model": "tiny", "prompt": "secret", "max_tokens": "many"}
            path = "/v1/completions?key=secret"
            assert (await house.session.post(path, json=body)).status == 400
            await house.ask("GET", "/v1/%0Aforged%20line")

    run(scene())
    told = [record for record in caplog.records if record.name == "rollout_sched.access"]
    lines = [record.getMessage().rpartition(" ")[0].rpartition(" ")[0] for record in told]
    assert lines[:2] == ["GET /version 200", "POST /v1/completions 400"]
    assert "\n" not in lines[2]
    assert "secret" not in caplog.text
    assert told[0].fields["status"] == 200  # type: ignore[attr-defined]


def test_there_is_none_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rollout_sched.access")

    async def scene() -> None:
        async with House(Upstream()) as house:
            await house.ask("GET", "/version")

    run(scene())
    assert not [record for record in caplog.records if record.name == "rollout_sched.access"]
