"""The gateway's port to an instance, which the real client has and the tests' doubles imitate."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from rollout_sched.integrations.gateway.data_plane.call import Upstream, UpstreamCall
from rollout_sched.integrations.vllm.http_instance import HttpInstance
from tests.integrations.gateway.scripted import Instance
from tests.integrations.gateway.test_call import Nobody

VALUES = {
    "order_id": "run-1",
    "engine_id": "cmpl-run-1-0",
    "path": "/v1/completions",
    "header_lines": b"",
    "body": b"{}",
    "receiver": Nobody(),
}


def real() -> HttpInstance:
    return HttpInstance("http://127.0.0.1:1", api_key="k")


def test_the_client_has_all_of_it() -> None:
    async def scene() -> None:
        client: Upstream = real()
        assert client.name == "http://127.0.0.1:1"
        assert client.request_headers == [(b"authorization", b"Bearer k")]
        assert client.labelled is False
        assert callable(client.pool.send)

    asyncio.run(scene())


@pytest.mark.parametrize("make", [real, Instance])
def test_a_call_is_passed_on_as_the_port_says_and_can_be_held_back_and_stopped(make: Any) -> None:
    assert list(inspect.signature(Upstream.pass_on).parameters) == ["self", *VALUES]

    async def scene() -> None:
        call: UpstreamCall = make().pass_on(**VALUES)
        call.pause()
        call.resume()
        call.cancel()

    asyncio.run(scene())
