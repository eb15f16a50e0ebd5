"""`rollout-sched top` reads what a gateway says."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.top import GatewaySource
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.top.test_screen import shown


@pytest.mark.real_time
async def test_a_gateway_s_own_state_is_a_screen() -> None:
    away = Upstream("http://b:1")
    away.dead = True
    async with House(Upstream("http://a:1"), away) as house:
        document = await asyncio.to_thread(GatewaySource(house.service.url, "").ask)
    text = shown(document)
    assert [one.status for one in document.instances] == ["serving", "away"]
    assert "a:1" in text
    assert "step 1: " in text
    assert document.policy == "round_robin_sync"
