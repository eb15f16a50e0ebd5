"""What all routes work on."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.gateway import (
    NoSuchInstance,
    id_of,
)
from tests.integrations.gateway.gateway_fixture import House

A, B = "http://a:1", "http://b:1"


def test_an_id_can_stand_in_a_path_and_is_always_the_same() -> None:
    assert id_of(A) == id_of(A) == "6bc4ad48"
    assert id_of(A) != id_of(B)


async def test_an_instance_goes_by_its_url_and_by_its_id(house, first, second) -> None:
    gateway = house.service.gateway
    for name in (A, f"{A}/", id_of(A)):
        assert gateway.supervisor(name).name == A
    with pytest.raises(NoSuchInstance, match=f"{A}, {B}"):
        gateway.supervisor("http://c:1")
    with pytest.raises(CallerError, match="printable"):
        gateway.supervisor("http://a\n")


async def test_a_gateway_without_instances_has_none() -> None:
    async with House() as house:
        assert not house.service.gateway.healthy
        with pytest.raises(NoSuchInstance, match="known instances: none"):
            house.service.gateway.supervisor(A)


async def test_the_state_tells_of_calls_too(house) -> None:
    house.instances[A].stream = asyncio.Queue()
    body = {"prompt": [1], "max_tokens": 4}
    calling = asyncio.ensure_future(house.session.post("/v1/completions", json=body))
    while not house.instances[A].asked:
        await asyncio.sleep(0.001)
    calls = house.service.gateway.state()["calls"]
    assert (calls["open"], calls["refused"]) == (1, 0)
    assert calls["open_bytes"] > 0
    calling.cancel()
    house.instances[A].stream.put_nowait(None)
